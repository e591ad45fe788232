"""Rotary embeddings that change with the longest request of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from attnmux.core.errors import InvalidInput

RESCALING = ("dynamic", "longrope")
"""Types whose frequencies depend on the largest position in the row, here that of any request."""


def check_rotary(config: PreTrainedConfig, max_context_len: int) -> None:
    """Refuse a context in which one request would change the positions of the others.

    Raises InvalidInput naming the longest context that is safe.
    """
    limit = fixed_rotary_len(config)
    if limit is not None and max_context_len > limit:
        raise InvalidInput(
            "context",
            came=f"{max_context_len} tokens",
            expected=f"at most {limit}: beyond it the model's rotary embedding is rescaled by the "
            "longest request of a step, and requests would not be independent",
        )


def fixed_rotary_len(config: PreTrainedConfig) -> int | None:
    """Tokens up to which every position means the same in all steps; None for any number."""
    text = config.get_text_config(decoder=True)
    limits = [
        rope.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or text.max_position_embeddings
        for rope in _ropes(getattr(text, "rope_parameters", None) or {})
        if rope.get("rope_type") in RESCALING
    ]
    return min(limits, default=None)


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One, or one for each type of layer."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (rope for rope in parameters.values() if isinstance(rope, Mapping))
