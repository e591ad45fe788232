"""The words and layers of a request, and how its fields are read from text or Python values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

from attnmux.core.facts.checks import UNSET, read_flag
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.fields import Positive, read_fields
from attnmux.core.facts.frozen import Plain

ATTENTION_KINDS = ("mha", "mla", "nsa", "dual_chunk")
LinearKind = Literal["gdn", "kda", "mamba1", "mamba2", "lightning", "conv"]
LINEAR_KINDS: tuple[LinearKind, ...] = get_args(LinearKind)
KINDS = (*ATTENTION_KINDS, *LINEAR_KINDS)
PHASES = ("extend", "decode", "verify", "draft", "encoder")
DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_e4m3fnuz",
    "fp4_e2m1",
)
"""fp8_e4m3fnuz is the e4m3 of AMD's CDNA3, where the bits of fp8_e4m3 are half the number."""

ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "fp4": "fp4_e2m1",
}
"""Other names of dtypes."""

OptionValue = bool | int | float | str
"""A value of a backend's option."""

Value = str | int | float | bool | frozenset[str]
"""A value of an axis."""

TreeMask = Literal["full", "qlen_only", "qlen_only_bitpacking"]
"""A form of a draft tree's mask, by SGLang's name: `SpecInput.custom_mask`, `visible` or
`visible_bits`."""
TREE_MASKS: tuple[TreeMask, ...] = ("qlen_only", "qlen_only_bitpacking", "full")
"""All forms, for a backend that takes each of them through `visible_drafts`."""


def canonical_dtype(name: str, argument: str = "dtype") -> str:
    """The canonical name of a dtype or of its alias; a leading "torch." is allowed.

    Raises InvalidInput, naming `argument`, for any other name.
    """
    if name in DTYPES:  # the search reads its own values again and again
        return name
    lowered = name.strip().lower().removeprefix("torch.")
    dtype = ALIASES.get(lowered, lowered)
    if dtype not in DTYPES:
        expected = f"one of {', '.join(DTYPES)} (aliases: {', '.join(ALIASES)})"
        raise InvalidInput(argument, got=repr(name), expected=expected)
    return dtype


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in UNSET)


def _number(kind: type[int] | type[float], expected: str, name: str, value: Any) -> Any:  # noqa: ANN401  # reads any value
    """A positive number; None if it is unset or 0."""
    if type(value) is kind and 0 < value < float("inf"):
        return value
    if _is_unset(value):
        return None
    usable = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    try:
        number = kind(value) if usable else None
    except (ValueError, OverflowError):
        number = None
    is_cut = not isinstance(value, str) and number != value
    if number is None or is_cut or not 0 <= number < float("inf"):
        raise InvalidInput(name, got=repr(value), expected=expected)
    return number or None


_positive = partial(_number, int, "a positive integer, or none")


def _window(name: str, value: Any) -> int | None:  # noqa: ANN401  # reads any value
    """Like `_positive`; the contract also writes -1 for no window."""
    if value in (-1, "-1") or value is False:
        return None
    if value in (0, "0"):
        expected = "w >= 1 (keys before the query that it sees), or none"
        raise InvalidInput(name, got=repr(value), expected=expected)
    window: int | None = _positive(name, value)
    return window


def _flag(name: str, value: Any) -> bool:  # noqa: ANN401  # reads any value
    return value is not None and read_flag(name, value if isinstance(value, bool) else str(value))


def _dtype(name: str, value: Any) -> str | None:  # noqa: ANN401  # reads any value
    return None if _is_unset(value) else canonical_dtype(str(value), name)


def _word(allowed: tuple[str, ...], name: str, value: Any) -> str:  # noqa: ANN401  # reads any value
    word = str(value).strip().lower()
    if word not in allowed:
        expected = f"one of {', '.join(allowed)}" if len(allowed) > 1 else f"{allowed[0]}, or none"
        raise InvalidInput(name, got=repr(value), expected=expected)
    return word


def _sparse(name: str, value: Any) -> str | None:  # noqa: ANN401  # reads any value
    return None if _is_unset(value) else _word(("quest",), name, value)


def _phases(name: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401  # reads any value
    """In the order of PHASES, each once."""
    if isinstance(value, tuple) and value == tuple(phase for phase in PHASES if phase in value):
        return value
    phases = value.split("+") if isinstance(value, str) else value or ()
    if not isinstance(phases, Iterable):
        raise InvalidInput(name, got=repr(value), expected=f"some of {', '.join(PHASES)}")
    known = {_word(PHASES, name, phase) for phase in phases if not _is_unset(phase)}
    return tuple(phase for phase in PHASES if phase in known)


def _layers(name: str, value: Any) -> tuple[tuple[str, int], ...]:  # noqa: ANN401  # reads any value
    """From "mamba:36+conv:2", a mapping or pairs."""
    counts = value
    if isinstance(value, str):
        counts = [part.split(":") for part in value.split("+") if not _is_unset(part)]
    try:
        pairs = counts.items() if isinstance(counts, Mapping) else counts or ()
        return tuple(sorted((str(kind), _positive(name, count) or 1) for kind, count in pairs))
    except (TypeError, ValueError):
        raise InvalidInput(name, got=repr(value), expected="KIND:COUNT+KIND:COUNT") from None


Count = Annotated[int | None, _positive]
Measure = Annotated[float | None, partial(_number, float, "a positive number, or none")]
Window = Annotated[int | None, _window]
Flag = Annotated[bool, _flag]
Dtype = Annotated[str | None, _dtype]
Kind = Annotated[str, partial(_word, KINDS)]
Mode = Annotated[str, partial(_word, ("prefill", "decode"))]
Sparse = Annotated[str | None, _sparse]
Phases = Annotated[tuple[str, ...], _phases]
Layers = Annotated[tuple[tuple[str, int], ...], _layers]
"""The types of a request's fields, which are also read from text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup(Plain):
    """A number of layers that are alike. The other fields are those of a `Request`."""

    layers: Positive
    """How many there are."""
    num_q_heads: Count = None
    num_kv_heads: Count = None
    head_dim: Count = None
    v_head_dim: Count = None
    sliding_window: Window = None
    attention_chunk: Count = None
    sinks: Flag = False
    logit_cap: Measure = None
    kv_dtype: Dtype = None
    """None: as the request's. Another makes a group of layers whose shape may be the same."""

    def __post_init__(self) -> None:
        read_fields(self)

    def __str__(self) -> str:
        return f"{self.layers} layer{'s' * (self.layers > 1)} with {shape_said(self)}"

    def needs(self) -> dict[str, Any]:
        """The fields of a request for these layers, without those that stay the request's."""
        values = {name: getattr(self, name) for name in NEEDS}
        return values if self.kv_dtype is None else {**values, "kv_dtype": self.kv_dtype}


def shape_said(one: Any) -> str:  # noqa: ANN401  # a group or a request
    """Heads, dims, window and own KV dtype of layers, in words."""
    dims = one.head_dim if one.v_head_dim is None else f"{one.head_dim}/{one.v_head_dim}"
    window = "" if one.sliding_window is None else f" and a window of {one.sliding_window}"
    stored = "" if one.kv_dtype is None else f", KV in {one.kv_dtype}"
    return f"{one.num_q_heads}/{one.num_kv_heads} heads of {dims}{window}{stored}"


NEEDS = tuple(name for name in LayerGroup.__slots__ if name not in ("layers", "kv_dtype"))


def read_groups(name: str, value: Any) -> tuple[LayerGroup, ...]:  # noqa: ANN401  # reads any value
    """Groups, or their `to_dict`. Raises InvalidInput for anything else, such as text."""
    try:
        items: Iterable[Any] = () if value in (None, "") else value
        return tuple(
            item if isinstance(item, LayerGroup) else LayerGroup(**_mapping(item)) for item in items
        )
    except (TypeError, InvalidInput) as error:
        if isinstance(error, InvalidInput) and error.argument != "layers":
            raise
        expected = "groups of layers, as `request_from_model` reads them from a config.json"
        raise InvalidInput(name, got=repr(value), expected=expected) from None


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("a group is a mapping")
    return value


Groups = Annotated[tuple[LayerGroup, ...], read_groups]
