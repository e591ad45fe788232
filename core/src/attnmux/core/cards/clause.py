"""Conditions that hold together, one for each axis of choosing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

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
from attnmux.core.facts.axes import AXES
from attnmux.core.facts.axis import Axis, Demand
from attnmux.core.facts.checks import refusal
from attnmux.core.facts.fields import read_fields
from attnmux.core.facts.frozen import Plain

LARGEST = 2**31 - 1
"""The largest number in a card: sizes of tensors and kernels' arguments end here."""

EXPECTED: Mapping[str, str] = {
    "words": "a condition on texts, such as one_of(…) or ANY",
    "numbers": f"a condition on numbers from 1 to {LARGEST}, such as one_of(…) or ANY",
    "flag": "ANY or NONE",
}

OWN_KIND: Mapping[str, type[Condition]] = {
    "version": Versions,
    "features": Includes,
    "runtime": Runtimes,
    "page_size": Emulated,
}
"""Conditions that limit one axis alone."""


BY_NAME: Mapping[str, Axis] = {axis.name: axis for axis in AXES}


def _limit(name: str, condition: Any) -> Any:  # noqa: ANN401  # reads any value
    """A condition that can limit the axis of this name."""
    if condition is ANY or condition is NONE:
        return condition
    axis = BY_NAME[name]
    if not _limits(axis, condition):
        raise refusal(name, condition, _expected(axis))
    unknown = set(condition.examples()).difference(axis.words) if axis.words else ()
    if unknown:
        got, expected = ", ".join(sorted(map(str, unknown))), ", ".join(axis.words)
        raise refusal(name, got, f"some of {expected}")
    return condition


def _limits(axis: Axis, condition: object) -> bool:
    """Whether the condition can limit the axis: its kind, and the type and range of its values."""
    if type(condition) is Range:
        ends = (condition.step, condition.most or LARGEST)
        return (
            axis.values == "numbers"
            and all(type(end) is int and 0 < end <= LARGEST for end in ends)
            and type(condition.least) is int
            and 0 <= condition.least <= LARGEST
        )
    if type(condition) is OneOf or type(condition) is Excluding:
        return all(_is_value(axis, value) for value in condition.values)
    if type(condition) is Emulated and not _limits(axis, condition.native):
        return False
    return type(condition) is OWN_KIND.get(axis.name)


def _is_value(axis: Axis, value: object) -> bool:
    if axis.values == "words":
        return isinstance(value, str) and value != ""
    if axis.values == "numbers":
        return type(value) in (int, float) and 0 < value <= LARGEST  # type: ignore[operator]  # a number
    return axis.values == "flag" and isinstance(value, bool)


def _expected(axis: Axis) -> str:
    """The conditions that can limit an axis, for the error."""
    if axis.values == "own":
        return f"ANY, NONE or {OWN_KIND[axis.name].__name__.lower()}(…)"
    return EXPECTED[axis.values]


Limit = Annotated[Condition, _limit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause(Plain):
    """Conditions that hold together, one for each row of `AXES` in `facts/axes.py`.

    A clause refuses a request that uses a feature whose field is NONE: features must be declared.
    Axes that only limit (SM version, runtime, head counts) start at ANY.

    Raises InvalidInput for a field that holds no condition, for a condition whose values have the
    wrong type or range for the axis, and for a phase, a kind or a dtype that no request could ask
    for.
    """

    vendor: Limit
    phase: Limit
    kind: Limit
    dtype: Limit
    kv_dtype: Limit
    page_size: Limit
    head_dim: Limit

    arch: Limit = ANY
    version: Limit = ANY
    """Version of the architecture, as text: compute capability 9.0, `versions(">=9.0,<10")`."""
    features: Limit = ANY
    runtime: Limit = ANY
    num_q_heads: Limit = ANY
    num_kv_heads: Limit = ANY
    group_size: Limit = ANY
    """Query heads per KV head."""
    v_head_dim: Limit = NONE
    """Asked only if it differs from `head_dim`."""
    kv_lora_rank: Limit = NONE
    qk_rope_head_dim: Limit = NONE
    spec_topk: Limit = NONE
    spec_draft_tokens: Limit = ANY
    tree_windows: Limit = NONE
    """Draft trees in layers with windows or attention chunks, which count positions. Asked unless
    the request has masks of the user, under which they count places in the row."""
    sliding_window: Limit = NONE
    attention_chunk: Limit = NONE
    cross_attention: Limit = NONE
    sinks: Limit = NONE
    alibi: Limit = NONE
    relative_bias: Limit = NONE
    logit_cap: Limit = NONE
    custom_mask: Limit = NONE
    multi_item: Limit = NONE
    deterministic: Limit = NONE
    graph: Limit = NONE
    lse: Limit = NONE
    strided_kv: Limit = NONE

    def __post_init__(self) -> None:
        read_fields(self, "clause")

    def to_dict(self) -> dict[str, str]:
        """The axes that the clause limits or opens: no limit that admits anything, and no feature
        that admits nothing."""
        return {
            axis.name: str(condition)
            for axis in fields(self)
            if (condition := getattr(self, axis.name)) is not NONE
            and not (condition is ANY and axis.default is ANY)
        }

    def failing(self, demands: Iterable[Demand]) -> Iterator[Demand]:
        """The demands that the clause does not meet."""
        for axis, value in demands:
            condition = getattr(self, axis.name)
            if condition is not ANY and not condition.admits(value):
                yield axis, value

    def meets(self, demands: Iterable[Demand]) -> bool:
        """Whether the clause meets all of the demands."""
        # The search asks it most: by `failing`, it takes 1.4 times as long
        for axis, value in demands:
            condition = getattr(self, axis.name)
            if condition is not ANY and not condition.admits(value):
                return False
        return True

    @classmethod
    def when(cls, **conditions: Condition) -> Clause:
        """A clause of the given conditions alone, for priors."""
        everything = dict.fromkeys(cls.__slots__, ANY)
        return cls(**{**everything, **conditions})


ALWAYS = Clause.when()
