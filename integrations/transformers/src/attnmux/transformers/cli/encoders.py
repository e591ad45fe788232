"""What `attnmux generate` hands to an encoder-decoder model: the sources that its encoder reads,
and the tokens that its answers begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from attnmux.core import InvalidInput
from attnmux.transformers.cli.options import Answering
from attnmux.transformers.cli.prompts import UserPrompt
from attnmux.transformers.load.checkpoint import (
    LOADING,
    Checkpoint,
    auto_classes,
    quiet_transformers,
)
from attnmux.transformers.load.sounds import SoundReader
from attnmux.transformers.load.tokenization import encode_prompts

Inputs = Mapping[str, torch.Tensor]
"""What an encoder, or a processor of images, makes of a prompt."""


def read_sources(
    checkpoint: Checkpoint, asked: Sequence[UserPrompt], *, longest: int, chat: bool
) -> list[Inputs]:
    """The encoder's inputs for each prompt: its sound, or its text.

    longest: tokens of the longest text. Raises InvalidInput for sound where the model reads text,
    for text where it reads sound, and for images.
    """
    if any(one.images for one in asked):
        got = f"{checkpoint.source}, whose encoder is given only texts and sound"
        raise InvalidInput("image", got=got, expected="a decoder that reads images")
    if any(one.audio for one in asked) or checkpoint.reads_sound:
        reader = SoundReader(checkpoint)
        return [reader.read(_sound_of(number, one)) for number, one in enumerate(asked, start=1)]
    texts = [one.prompt for one in asked]
    encoded = encode_prompts(checkpoint, texts, max_context_len=longest, chat=chat)
    return [{"input_ids": torch.tensor([ids])} for ids in encoded]


def _sound_of(number: int, asked: UserPrompt) -> str:
    if asked.audio is None:
        got, expected = "text", "--audio FILE in its place: the model reads sound"
        raise InvalidInput(f"prompt {number}", got=got, expected=expected)
    return asked.audio


def longest_source(checkpoint: Checkpoint, sources: Sequence[Inputs]) -> int:
    """The most encoder tokens of a source; 0 where the shapes of the encoder do not tell."""
    if not checkpoint.reads_sound:
        return max(one["input_ids"].shape[1] for one in sources)
    auto: Any = auto_classes(checkpoint.config)[0]
    try:
        with LOADING, quiet_transformers(progress=False), torch.device("meta"):
            encoder = auto.from_config(checkpoint.config).eval().get_encoder()
        return max(_shape_of(encoder, one)[1] for one in sources)
    except Exception:  # the model's code may ask for values, which no shape has
        return 0


@torch.inference_mode()
def _shape_of(encoder: Any, inputs: Inputs) -> torch.Size:  # noqa: ANN401  # a model's own
    given = {name: one.to("meta") for name, one in inputs.items() if name != "attention_mask"}
    shape: torch.Size = encoder(**given).last_hidden_state.shape
    return shape


def refuse_encoder_options(
    checkpoint: Checkpoint, asked: Sequence[UserPrompt], answering: Answering
) -> None:
    """Raise InvalidInput where a decoder is asked for what an encoder-decoder model does."""
    given = {
        "--audio": any(one.audio is not None for one in asked),
        "--decoder-prompt": answering.decoder_prompt is not None,
    }
    for option in (option for option, is_given in given.items() if is_given):
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
