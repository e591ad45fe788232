"""Models in which the other requests of a step matter once one of them is long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from attnmux.core import InvalidInput

RESCALING = ("dynamic", "longrope")
"""Types whose frequencies depend on the largest position in the row, here that of any request."""


def check_context(config: PreTrainedConfig, max_context_len: int) -> None:
    """Refuse a context in which one request would change what the others see.

    Raises InvalidInput naming the longest context that is safe.
    """
    limit = independent_len(config)
    if limit is not None and max_context_len > limit:
        raise InvalidInput(
            "context",
            got=f"{max_context_len} tokens",
            expected=f"at most {limit}: beyond it the model scales rotary embeddings or queries "
            "or hides keys by the longest request or row of a step, and requests would not be "
            "independent",
        )


def independent_len(config: PreTrainedConfig) -> int | None:
    """Up to this number of tokens, a token sees the same in all steps; None for no limit.

    Doge hides keys where there are more than its `keep_window_size`.
    """
    text = config.get_text_config(decoder=True)
    limits = [
        rope.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or text.max_position_embeddings
        for rope in _ropes(getattr(text, "rope_parameters", None) or {})
        if rope.get("rope_type") in RESCALING
    ]
    limits += [fixed_row_len(config), getattr(text, "keep_window_size", None)]
    return min((limit for limit in limits if limit is not None), default=None)


def fixed_row_len(config: PreTrainedConfig) -> int | None:
    """Up to this number of tokens in a step's row, a token's place does not matter; None for no
    limit.

    Llama 4 scales queries by log1p(floor((place + 1) / floor_scale)). Without a cache it takes the
    place in the row. `independent_len` keeps positions below the limit as well.
    """
    text = config.get_text_config(decoder=True)
    if not getattr(text, "attn_temperature_tuning", False):
        return None
    return int(text.floor_scale) - 1


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One, or one for each type of layer."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (rope for rope in parameters.values() if isinstance(rope, Mapping))
