"""Reading the values of a request's fields, from text or as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attnmux.core.choosing.ask.values import canonical_dtype
from attnmux.core.errors import InvalidInput

Reader = Callable[[str, Any], Any]
"""(the field's name, what came) → the value; raises InvalidInput."""

UNSET = ("none", "null", "unset", "auto")
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0", *UNSET)


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in UNSET)


def _positive(name: str, value: Any) -> int | None:  # noqa: ANN401  # anything may come
    """A positive number; None where it is unset or 0."""
    if type(value) is int and value > 0:
        return value
    if _is_unset(value):
        return None
    number = _number(name, value, int, "a positive integer, or none")
    return number or None


def _number(name: str, value: Any, kind: type[int] | type[float], expected: str) -> Any:  # noqa: ANN401  # int or float, as asked
    refusal = InvalidInput(name, came=repr(value), expected=expected)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise refusal
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        raise refusal from None
    if (not isinstance(value, str) and number != value) or not 0 <= number < float("inf"):
        raise refusal
    return number


def _window(name: str, value: Any) -> int | None:  # noqa: ANN401  # anything may come
    """As `_positive`, and -1 is the contract's own word for none."""
    if value in (-1, "-1"):
        return None
    if value in (0, "0") and value is not False:
        expected = "w >= 1 (keys before the query that it sees), or none"
        raise InvalidInput(name, came=repr(value), expected=expected)
    return _positive(name, None if value is False else value)


def _cap(name: str, value: Any) -> float | None:  # noqa: ANN401  # anything may come
    if _is_unset(value):
        return None
    number: float = _number(name, value, float, "a positive number, or none")
    return number or None


def _flag(name: str, value: Any) -> bool:  # noqa: ANN401  # anything may come
    if value is None or isinstance(value, bool):
        return bool(value)
    word = str(value).strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise InvalidInput(name, came=repr(value), expected="true or false")


def _dtype(name: str, value: Any) -> str | None:  # noqa: ANN401  # anything may come
    return None if _is_unset(value) else canonical_dtype(str(value), name)


def _one_of(*allowed: str) -> Reader:
    def read(name: str, value: Any) -> str:  # noqa: ANN401  # anything may come
        word = str(value).strip().lower()
        if word not in allowed:
            raise InvalidInput(name, came=repr(value), expected=f"one of {', '.join(allowed)}")
        return word

    return read


KINDS = ("mha", "mla", "nsa", "linear", "dual_chunk")
PHASES = ("extend", "decode", "verify", "draft", "encoder")


def _phases(name: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401  # anything may come
    """In the order of PHASES, each once."""
    given = value.split("+") if isinstance(value, str) else value or ()
    if not isinstance(given, Iterable):
        raise InvalidInput(name, came=repr(value), expected=f"some of {', '.join(PHASES)}")
    read = _one_of(*PHASES)
    asked = {read(name, phase) for phase in given if not _is_unset(phase)}
    return tuple(phase for phase in PHASES if phase in asked)


READERS: Mapping[str, Reader] = {
    "kind": _one_of(*KINDS),
    "num_q_heads": _positive,
    "num_kv_heads": _positive,
    "head_dim": _positive,
    "v_head_dim": _positive,
    "kv_lora_rank": _positive,
    "qk_rope_head_dim": _positive,
    "encoder_head_dim": _positive,
    "dtype": _dtype,
    "kv_dtype": _dtype,
    "page_size": _positive,
    "phases": _phases,
    "spec_topk": _positive,
    "spec_draft_tokens": _positive,
    "speculative_attention_mode": _one_of("prefill", "decode"),
    "sliding_window": _window,
    "attention_chunk": _positive,
    "cross_attention": _flag,
    "sinks": _flag,
    "logit_cap": _cap,
    "custom_mask": _flag,
    "multi_item": _flag,
    "multimodal": _flag,
    "chunked_prefix": _flag,
    "deterministic": _flag,
    "graph": _flag,
    "lse": _flag,
}
