"""The prompts of `attnmux generate` in token ids, and the contexts that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.checkpoint import Checkpoint
from attnmux.transformers.cli_prompts import UserPrompt
from attnmux.transformers.generate import Prompt
from attnmux.transformers.images.files import ImageProcessor
from attnmux.transformers.sampling_params import SamplingParams
from attnmux.transformers.tokenization import encode_prompts

Inputs = dict[str, torch.Tensor]
"""What a processor returns for a prompt with images."""


def read_images(
    checkpoint: Checkpoint, asked: Sequence[UserPrompt], chat: bool
) -> dict[int, Inputs]:
    """The prompts with images, by their index."""
    if not any(one.images for one in asked):
        return {}
    processor = ImageProcessor(checkpoint)
    return {
        index: processor.read(f"prompt {index + 1}", str(one.prompt), one.images, chat=chat)
        for index, one in enumerate(asked)
        if one.images
    }


def encode(
    checkpoint: Checkpoint,
    asked: Sequence[UserPrompt],
    pictured: Mapping[int, Inputs],
    max_new_tokens: int,
    sampling: SamplingParams,
    context: int,
    chat: bool,
) -> list[Prompt]:
    """The prompts in token ids, with what they override of the command's options.

    pictured: from `read_images`. context: tokens of the longest request.
    """
    texts = [one.prompt for one in asked]
    for index, inputs in pictured.items():
        texts[index] = inputs["input_ids"][0].tolist()
    encoded = encode_prompts(checkpoint, texts, max_context_len=context, chat=chat)
    _refuse_placeholders(checkpoint, [ids for at, ids in enumerate(encoded) if at not in pictured])
    each = sampling.for_each(len(asked))
    return [_prompt(*one, max_new_tokens) for one in zip(asked, encoded, each, strict=True)]


def _refuse_placeholders(checkpoint: Checkpoint, encoded: Sequence[Sequence[int]]) -> None:
    """Refuse prompts without images that have placeholders of some."""
    token = getattr(checkpoint.config, "image_token_id", None)
    if any(token in ids for ids in encoded):
        raise InvalidInput(
            "prompts", got="a placeholder of an image", expected="an image for each, by --image"
        )


def _prompt(
    asked: UserPrompt, ids: Sequence[int], sampling: SamplingParams, max_new_tokens: int
) -> Prompt:
    """The prompt in token ids. What it overrides takes the place of the command's options."""
    own = dict(asked.overrides)
    most = own.pop("max_new_tokens", max_new_tokens)
    return Prompt(token_ids=ids, max_new_tokens=most, sampling=replace(sampling, **own))


def most_tokens(wanted: Sequence[Prompt], context: int, max_running: int) -> int:
    """Tokens of the longest prompts that may run at a time, with their answers."""
    lens = sorted(min(len(one.token_ids) + one.max_new_tokens, context) for one in wanted)
    return sum(lens[-max_running:])


def refuse_encoders(checkpoint: Checkpoint) -> None:
    """Raise InvalidInput for an encoder-decoder model."""
    if checkpoint.config.is_encoder_decoder:
        raise InvalidInput(
            "model",
            got=f"{checkpoint.source}, an encoder-decoder model",
            expected="a decoder-only model; an encoder-decoder model runs from Python, with "
            "Engine.add(encoder_states=…)",
        )


def context_of(checkpoint: Checkpoint, wanted: int | None) -> int:
    """Tokens of the longest request. Raises InvalidInput for more than the model's positions."""
    limit = checkpoint.max_context_len
    if wanted is None and limit is None:
        raise InvalidInput(
            "--context", got="nothing", expected="a number, since the model states no limit"
        )
    if wanted is None or limit is None:
        return wanted or limit or 0
    if wanted > limit:
        raise InvalidInput("--context", got=wanted, expected=f"at most the model's limit, {limit}")
    return wanted
