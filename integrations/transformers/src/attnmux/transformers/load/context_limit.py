"""Models in which the other requests of a step matter once one of them is long."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers import PreTrainedConfig

from attnmux.core import InvalidInput

RESCALING = ("dynamic", "longrope")
"""Types whose frequencies depend on the largest position in the row, here that of any request."""


def check_context(config: PreTrainedConfig, max_context_len: int) -> None:
    """Refuse a context in which one request would change what the others see.

    Raises InvalidInput naming the longest context that is safe.
    """
    limit = longest_len(config)
    if limit is not None and max_context_len > limit:
        raise InvalidInput(
            "context",
            got=f"{max_context_len} tokens",
            expected=f"at most {limit}: beyond it the model scales rotary embeddings or hides keys "
            "by the longest request of a step, and requests would not be independent",
        )


def longest_len(config: PreTrainedConfig) -> int | None:
    """The longest context that is served, by `with_long_factors` if it has to be; None for no
    limit.

    Doge hides keys if there are more than its `keep_window_size`.
    """
    text = config.get_text_config(decoder=True)
    limits = [_switch(text, rope) for rope in _ropes(text) if rope.get("rope_type") == "dynamic"]
    if (kept := getattr(text, "keep_window_size", None)) is not None:
        limits.append(int(kept))
    return min(limits, default=None)


def longrope_switch(config: PreTrainedConfig) -> int | None:
    """Tokens of the longest row that the model rotates by the short factors of its longrope."""
    text = config.get_text_config(decoder=True)
    ropes = [rope for rope in _ropes(text) if rope.get("rope_type") == "longrope"]
    differing = [rope for rope in ropes if rope.get("short_factor") != rope.get("long_factor")]
    return min((_switch(text, rope) for rope in differing), default=None)


def with_long_factors(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config with the long factors of longrope for rows of any length, by which requests are
    independent. Requests no longer than `longrope_switch` then differ from a row of their own."""
    changed = deepcopy(config)
    for rope in _ropes(changed.get_text_config(decoder=True)):
        if rope.get("rope_type") == "longrope":
            rope["short_factor"] = rope["long_factor"]
    return changed


def _switch(text: PreTrainedConfig, rope: Mapping[str, Any]) -> int:
    stated = rope.get("original_max_position_embeddings")
    original = getattr(text, "original_max_position_embeddings", None)
    return int(stated or original or text.max_position_embeddings)


def _ropes(text: PreTrainedConfig) -> list[dict[str, Any]]:
    """One, or one for each type of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [rope for rope in parameters.values() if isinstance(rope, dict)]
