"""Conditions that hold together, one for each axis of choosing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from attnmux.core.cards.conditions import (
    ANY,
    NONE,
    Condition,
    Emulated,
    Excluding,
    Includes,
    OneOf,
    Range,
    Runtimes,
    Versions,
)
from attnmux.core.facts.axes import Demand
from attnmux.core.facts.checks import refusal
from attnmux.core.facts.frozen import Plain
from attnmux.core.facts.values import DTYPES, KINDS, PHASES

LARGEST = 2**31 - 1
"""Of a number in a card: sizes of tensors and kernels' arguments end here."""

Text = Condition
Number = Condition
"""Positive."""
Flag = Condition
Own = Condition
"""Of the axis's own kind alone, see `OWN_KIND`."""

EXPECTED: Mapping[str, str] = {
    "Text": "a condition on texts, such as one_of(…) or ANY",
    "Number": f"a condition on numbers from 1 to {LARGEST}, such as one_of(…) or ANY",
    "Flag": "ANY or NONE",
}

WORDS: Mapping[str, tuple[str, ...]] = {
    "phase": PHASES,
    "kind": KINDS,
    "dtype": DTYPES,
    "kv_dtype": DTYPES,
}
"""Axes whose values are words of a request: no request would match any other word."""

OWN_KIND: Mapping[str, type[Condition]] = {
    "version": Versions,
    "features": Includes,
    "runtime": Runtimes,
    "page_size": Emulated,
}
"""Conditions that limit one axis alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause(Plain):
    """Conditions that hold together, one for each axis (the table is in `facts/axes.py`).

    A clause refuses a request that uses a feature whose field is NONE: features must be declared.
    Axes that only limit (SM version, runtime, head counts) start at ANY.

    Raises InvalidInput for a field that holds no condition, for a condition whose values have the
    wrong type or range for the axis, and for a phase, a kind or a dtype that no request could ask
    for.
    """

    vendor: Text
    phase: Text
    kind: Text
    dtype: Text
    kv_dtype: Text
    page_size: Number
    head_dim: Number

    arch: Text = ANY
    version: Text = ANY
    """Of the architecture, as text: compute capability 9.0, `versions(">=9.0,<10")`."""
    features: Own = ANY
    runtime: Own = ANY
    num_q_heads: Number = ANY
    num_kv_heads: Number = ANY
    group_size: Number = ANY
    """Query heads per KV head."""
    v_head_dim: Number = NONE
    """Asked only where it differs from `head_dim`."""
    kv_lora_rank: Number = NONE
    qk_rope_head_dim: Number = NONE
    spec_topk: Number = NONE
    spec_draft_tokens: Number = ANY
    tree_windows: Flag = NONE
    """Draft trees in layers with windows or attention chunks, which count positions. Asked unless
    the request has masks of the user, under which they count places in the row."""
    sliding_window: Number = NONE
    attention_chunk: Number = NONE
    cross_attention: Flag = NONE
    sinks: Flag = NONE
    alibi: Flag = NONE
    relative_bias: Flag = NONE
    logit_cap: Number = NONE
    custom_mask: Flag = NONE
    multi_item: Flag = NONE
    deterministic: Flag = NONE
    graph: Flag = NONE
    lse: Flag = NONE
    strided_kv: Flag = NONE

    def __post_init__(self) -> None:
        for name in self.__slots__:
            condition = getattr(self, name)
            if condition is ANY or condition is NONE:
                continue
            if not _limits(name, condition):
                raise refusal(f"clause, {name}", condition, _expected(name))
            words = WORDS.get(name, ())
            unknown = set(condition.examples()).difference(words) if words else ()
            if unknown:
                got = ", ".join(sorted(map(str, unknown)))
                raise refusal(f"clause, {name}", got, f"some of {', '.join(words)}")

    def to_dict(self) -> dict[str, str]:
        """The axes that the clause limits or opens: no limit that admits anything, and no feature
        that admits nothing."""
        return {
            axis.name: str(condition)
            for axis in fields(self)
            if (condition := getattr(self, axis.name)) is not NONE
            and not (condition is ANY and axis.default is ANY)
        }


def _limits(axis: str, condition: object) -> bool:
    """Whether the condition can limit the axis: its kind, and the type and range of its values."""
    kind = Clause.__annotations__[axis]
    if type(condition) is Range:
        ends = (condition.step, condition.most or LARGEST)
        return (
            kind == "Number"
            and all(type(end) is int and 0 < end <= LARGEST for end in ends)
            and type(condition.least) is int
            and 0 <= condition.least <= LARGEST
        )
    if type(condition) is OneOf or type(condition) is Excluding:
        return all(_is_value(kind, value) for value in condition.values)
    if type(condition) is Emulated and not _limits(axis, condition.native):
        return False
    return type(condition) is OWN_KIND.get(axis)


def _is_value(kind: str, value: object) -> bool:
    if kind == "Text":
        return isinstance(value, str) and value != ""
    if kind == "Number":
        return type(value) in (int, float) and 0 < value <= LARGEST  # type: ignore[operator]  # a number
    return kind == "Flag" and isinstance(value, bool)


def _expected(axis: str) -> str:
    """The conditions that can limit an axis, for the error."""
    kind = Clause.__annotations__[axis]
    if kind == "Own":
        return f"ANY, NONE or {OWN_KIND[axis].__name__.lower()}(…)"
    return EXPECTED[kind]


def when(**conditions: Condition) -> Clause:
    """A clause of the given conditions alone, for priors."""
    everything = dict.fromkeys(Clause.__slots__, ANY)
    return Clause(**{**everything, **conditions})


ALWAYS = when()


def failing(clause: Clause, demands: Iterable[Demand]) -> list[Demand]:
    """The demands that `clause` does not meet."""
    return [
        (axis, value)
        for axis, value in demands
        if (condition := getattr(clause, axis.name)) is not ANY and not condition.admits(value)
    ]


def meets(clause: Clause, demands: Iterable[Demand]) -> bool:
    """Whether the clause meets all of the demands."""
    for axis, value in demands:
        condition = getattr(clause, axis.name)
        if condition is not ANY and not condition.admits(value):
            return False
    return True
