"""The prompts of `attnmux generate` in token ids, and the contexts that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig

from attnmux.core import InvalidInput
from attnmux.transformers.cli.options import Answering
from attnmux.transformers.cli.prompts import UserPrompt
from attnmux.transformers.engine.generate import Prompt
from attnmux.transformers.load.checkpoint import (
    LOADING,
    Checkpoint,
    auto_classes,
    quiet_transformers,
)
from attnmux.transformers.load.media import ImageProcessor, SoundReader
from attnmux.transformers.load.tokenization import encode_prompts
from attnmux.transformers.requests.sampling_params import SamplingParams
from attnmux.transformers.run.runner import ModelRunner

Inputs = Mapping[str, torch.Tensor]
"""The tensors that an encoder, or a processor of images, makes of a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Prompts in token ids, with the inputs of the model's encoder."""

    prompts: Sequence[Prompt]
    pictured: Mapping[int, Inputs] = field(default_factory=dict)
    """Inputs of the prompts with images, by the prompt's index."""
    sources: Sequence[Inputs] = ()
    """Inputs of an encoder-decoder model's encoder, for each prompt."""
    encoder_len: int = 0
    """The most encoder tokens of one."""

    def read_by(self, runner: ModelRunner) -> list[Prompt]:
        """The prompts with the encoder's results for their images or sources."""
        wanted = [*self.prompts]
        for index, inputs in self.pictured.items():
            wanted[index] = replace(wanted[index], images=runner.read_images(inputs))
        if self.sources:
            states = runner.encode_all(self.sources)
            return [
                replace(prompt, encoder_states=state)
                for prompt, state in zip(wanted, states, strict=True)
            ]
        return wanted


def encode(
    checkpoint: Checkpoint,
    asked: Sequence[UserPrompt],
    answering: Answering,
    sampling: SamplingParams,
    context: int,
) -> Encoded:
    """The prompts in token ids, with their overrides of the command's options.

    context: tokens of the longest request.
    """
    pairs = zip(asked, sampling.for_each(len(asked)), strict=True)
    if checkpoint.config.is_encoder_decoder:
        longest = checkpoint.max_encoder_len or context
        sources = read_sources(checkpoint, asked, longest=longest, chat=answering.chat)
        first = first_tokens(checkpoint, answering.decoder_prompt)
        return Encoded(
            prompts=[_prompt(one, first, params, answering) for one, params in pairs],
            sources=sources,
            encoder_len=longest_source(checkpoint, sources) or longest,
        )
    refuse_encoder_options(checkpoint, asked, answering)
    pictured = _read_images(checkpoint, asked, answering.chat)
    texts = [prompt.prompt for prompt in asked]
    for index, inputs in pictured.items():
        texts[index] = inputs["input_ids"][0].tolist()
    encoded = encode_prompts(checkpoint, texts, max_context_len=context, chat=answering.chat)
    _refuse_placeholders(checkpoint, [ids for at, ids in enumerate(encoded) if at not in pictured])
    prompts = [
        _prompt(one, ids, params, answering)
        for ids, (one, params) in zip(encoded, pairs, strict=True)
    ]
    return Encoded(prompts=prompts, pictured=pictured)


def _read_images(
    checkpoint: Checkpoint, asked: Sequence[UserPrompt], chat: bool
) -> dict[int, Inputs]:
    """The prompts with images, by their index."""
    if not any(prompt.images for prompt in asked):
        return {}
    processor = ImageProcessor(checkpoint)
    return {
        index: processor.read(f"prompt {index + 1}", str(prompt.prompt), prompt.images, chat=chat)
        for index, prompt in enumerate(asked)
        if prompt.images
    }


def _refuse_placeholders(checkpoint: Checkpoint, encoded: Sequence[Sequence[int]]) -> None:
    """Refuse prompts without images that have placeholders of some."""
    token = getattr(checkpoint.config, "image_token_id", None)
    if any(token in ids for ids in encoded):
        raise InvalidInput(
            "prompts", got="a placeholder of an image", expected="an image for each, by --image"
        )


def _prompt(
    asked: UserPrompt, ids: Sequence[int], sampling: SamplingParams, answering: Answering
) -> Prompt:
    """The prompt in token ids. Its own options override those of the command."""
    overrides = dict(asked.overrides)
    most = overrides.pop("max_new_tokens", answering.max_new_tokens)
    return Prompt(token_ids=ids, max_new_tokens=most, sampling=replace(sampling, **overrides))


def most_tokens(
    wanted: Sequence[Prompt], context: int, max_running: int, *, encoder_len: int
) -> int:
    """Tokens of the longest prompts that may run at a time, with their answers and sources."""
    lens = sorted(min(len(prompt.token_ids) + prompt.max_new_tokens, context) for prompt in wanted)
    return sum(encoder_len + length for length in lens[-max_running:])


def context_of(checkpoint: Checkpoint, wanted: int | None) -> int:
    """Tokens of the longest request. Raises InvalidInput for more than the model's positions."""
    limit = checkpoint.max_context_len
    if wanted is None and limit is None:
        raise InvalidInput(
            "--context", got="nothing", expected="a number, since the model states no limit"
        )
    if wanted is None or limit is None:
        return wanted or checkpoint.default_context_len or 0
    if wanted > limit:
        raise InvalidInput("--context", got=wanted, expected=f"at most the model's limit, {limit}")
    return wanted


def read_sources(
    checkpoint: Checkpoint, asked: Sequence[UserPrompt], *, longest: int, chat: bool
) -> list[Inputs]:
    """The encoder's inputs for each prompt: its sound, or its text.

    longest: tokens of the longest text. Raises InvalidInput for sound if the model reads text,
    for text if it reads sound, and for images.
    """
    if any(prompt.images for prompt in asked):
        got = f"{checkpoint.source}, whose encoder is given only texts and sound"
        raise InvalidInput("image", got=got, expected="a decoder that reads images")
    if any(prompt.audio for prompt in asked) or checkpoint.reads_sound:
        reader = SoundReader(checkpoint)
        return [
            reader.read(_sound_of(number, prompt)) for number, prompt in enumerate(asked, start=1)
        ]
    texts = [prompt.prompt for prompt in asked]
    encoded = encode_prompts(checkpoint, texts, max_context_len=longest, chat=chat)
    return [{"input_ids": torch.tensor([ids])} for ids in encoded]


def _sound_of(number: int, asked: UserPrompt) -> str:
    if asked.audio is None:
        got, expected = "text", "--audio FILE in its place: the model reads sound"
        raise InvalidInput(f"prompt {number}", got=got, expected=expected)
    return asked.audio


def longest_source(checkpoint: Checkpoint, sources: Sequence[Inputs]) -> int:
    """The most encoder tokens of a source; 0 if the shapes of the encoder do not tell."""
    if not checkpoint.reads_sound:
        return max(source["input_ids"].shape[1] for source in sources)
    auto: Any = auto_classes(checkpoint.config)[0]
    try:
        with LOADING, quiet_transformers(progress=False), torch.device("meta"):
            encoder = auto.from_config(checkpoint.config).eval().get_encoder()
        return max(_shape_of(encoder, source)[1] for source in sources)
    except Exception:  # the model's code may ask for values, which no shape has
        return 0


@torch.inference_mode()
def _shape_of(encoder: Any, inputs: Inputs) -> torch.Size:  # noqa: ANN401  # a model's own
    shapes = {
        name: tensor.to("meta") for name, tensor in inputs.items() if name != "attention_mask"
    }
    shape: torch.Size = encoder(**shapes).last_hidden_state.shape
    return shape


def refuse_encoder_options(
    checkpoint: Checkpoint, asked: Sequence[UserPrompt], answering: Answering
) -> None:
    """Raise InvalidInput if a decoder gets options of encoder-decoder models."""
    flags = {
        "--audio": any(prompt.audio is not None for prompt in asked),
        "--decoder-prompt": answering.decoder_prompt is not None,
    }
    for option in (option for option, is_given in flags.items() if is_given):
        got = f"{checkpoint.source}, which has only a decoder"
        raise InvalidInput(option, got=got, expected="an encoder-decoder model")


def first_tokens(checkpoint: Checkpoint, begin: str | None) -> list[int]:
    """The token that starts the decoder, and those of `begin`; without it the first one that the
    checkpoint forces. Raises InvalidInput for a checkpoint that names no start."""
    config = _generation_config(checkpoint)
    start = config.decoder_start_token_id
    start = config.bos_token_id if start is None else start
    if not isinstance(start, int):
        expected = "decoder_start_token_id in generation_config.json or config.json"
        raise InvalidInput("model", got=f"{checkpoint.source}, without a start", expected=expected)
    if begin is not None:
        tokenizer = checkpoint.require_tokenizer()
        return [start, *tokenizer(begin, add_special_tokens=False)["input_ids"]]
    forced = config.forced_bos_token_id
    return [start] if forced is None else [start, int(forced)]


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    with quiet_transformers(progress=False):
        try:
            return GenerationConfig.from_pretrained(
                checkpoint.source, revision=checkpoint.revision or "main"
            )
        except OSError:  # it has none
            return GenerationConfig.from_model_config(checkpoint.config)
