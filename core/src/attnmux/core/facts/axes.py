"""The axes of choosing: how each value of a request or a platform meets a field of a clause.

A new axis is a field of `Clause`, a field of `Request` (or of `Platform`), and a row of `AXES`.
`values.py` reads a field by its type, or by its name where the type does not say enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from attnmux.core.facts.platform import Platform
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import Value
from attnmux.core.facts.verdicts import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One phase of a request on a platform. Unset values demand nothing."""

    request: Request
    platform: Platform
    phase: str
    hypothetical: bool = False
    """The platform is not this machine: a runtime that it does not state counts as new enough."""
    demands: tuple[Demand, ...] = field(default=(), repr=False, compare=False)
    """The values that the question demands, each with its axis. Those given are of the same
    question before the solver set its open values; those that the solver adds come last."""

    def __post_init__(self) -> None:
        before = self.demands
        demands = list(before)
        for axis in DECIDED if before else AXES:
            value = axis.wanted(self)
            if value is not None and value is not False and (axis, value) not in before:
                demands.append((axis, value))
        object.__setattr__(self, "demands", tuple(demands))


class Limit(Protocol):
    """A card's condition on one axis."""

    def admits(self, value: Value) -> bool: ...

    def nearest(self, value: Value) -> Value | None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Axis:
    """A value that a card may limit. Its name is the clause's field."""

    name: str
    wanted: Callable[[Question], Value | None]
    """The value that the question demands; None or False for no demand."""
    settable: bool = False
    """Whether a hint may suggest another value for the request's field of this name."""
    droppable: bool = False
    """Whether coercion may unset it: the engine works without it or with the solver's value."""
    decided: bool = False
    """Whether the solver sets it where the request does not."""
    weight: int = 1
    """The distance that a failure adds when the nearest clause is sought."""

    @property
    def of_platform(self) -> bool:
        """Whether a machine or the kind of attention decides it."""
        return self.weight == PLATFORM

    def condition(self, clause: object) -> Limit:
        """The condition of a `Clause` on this axis."""
        condition: Limit = getattr(clause, self.name)
        return condition

    def reason(self, clause: object, wanted: Value, hint: str = "") -> Reason:
        return Reason(
            code=self.name.upper(),
            axis=self.name,
            wanted=_said(wanted),
            offered=str(self.condition(clause)),
            hint=hint,
        )

    def remedy(self, clause: object, wanted: Value) -> str:
        """The value nearest to `wanted` that the clause serves."""
        near = self.condition(clause).nearest(wanted)
        return "none" if near is None else str(near)


Demand = tuple[Axis, Value]

Questions = Mapping[str, Question]
"""The questions of a request, by phase."""


def _said(value: Value) -> str:
    if value is True:
        return "yes"
    if isinstance(value, frozenset):
        return " and ".join(sorted(value)) or "none"
    return "unknown" if value == "" else str(value)


PLATFORM = 100
SHAPE = 10

CACHED = frozenset({"extend", "decode", "verify", "draft"})
"""The phases that read the KV cache; a multimodal model's encoder does not."""


def _cached(field: str) -> Callable[[Question], Value | None]:
    """The request's field, demanded in the phases that read the KV cache."""
    return _in_phases(field, *CACHED)


def _in_phases(field: str, *phases: str) -> Callable[[Question], Value | None]:
    def wanted(question: Question) -> Value | None:
        value: Value | None = getattr(question.request, field)
        return value if question.phase in phases else None

    return wanted


def _drafting(field: str) -> Callable[[Question], Value | None]:
    """The request's field, demanded in the phases that may see drafts: all that read the KV cache,
    except extend where decode's backend verifies. Decode always may, as it makes the drafts."""
    cached = _cached(field)

    def wanted(question: Question) -> Value | None:
        mode = question.request.speculative_attention_mode
        return None if question.phase == "extend" and mode == "decode" else cached(question)

    return wanted


def _tree_windows(question: Question) -> Value | None:
    request = question.request
    limited = request.sliding_window is not None or request.attention_chunk is not None
    verifies = question.phase == "verify"
    asked = verifies and limited and request.has_trees and not request.custom_mask
    return True if asked else None


def _kind(question: Question) -> Value:
    return question.request.kind if question.phase in CACHED else "mha"


def _runtime(question: Question) -> Value | None:
    runtime = question.platform.runtime
    return None if question.hypothetical and not runtime else runtime


def _head_dim(question: Question) -> Value | None:
    """Of the heads that the kernel sees: kernels of a latent kind see the latent instead."""
    request = question.request
    if question.phase not in CACHED:
        return request.encoder_head_dim
    return None if request.latent else request.head_dim


def _v_head_dim(question: Question) -> Value | None:
    request = question.request
    same = request.latent or request.v_head_dim == request.head_dim
    return None if same or question.phase not in CACHED else request.v_head_dim


def _group_size(question: Question) -> Value | None:
    q_heads, kv_heads = question.request.num_q_heads, question.request.num_kv_heads
    if question.phase not in CACHED or not q_heads or not kv_heads:
        return None
    return q_heads // kv_heads


def _shapes(*names: str) -> Iterator[Axis]:
    """Axes of the attention's shape, which the model decides."""
    return (Axis(name=name, wanted=_cached(name), weight=SHAPE) for name in names)


AXES: tuple[Axis, ...] = (
    Axis(name="vendor", wanted=lambda q: q.platform.vendor, weight=PLATFORM),
    Axis(name="arch", wanted=lambda q: q.platform.arch, weight=PLATFORM),
    Axis(name="version", wanted=lambda q: ".".join(map(str, q.platform.version)), weight=PLATFORM),
    Axis(name="features", wanted=lambda q: q.platform.features, weight=PLATFORM),
    Axis(name="runtime", wanted=_runtime, weight=PLATFORM),
    Axis(name="kind", wanted=_kind, weight=PLATFORM),
    Axis(name="phase", wanted=lambda q: q.phase, weight=PLATFORM),
    *_shapes("num_q_heads", "num_kv_heads"),
    Axis(name="group_size", wanted=_group_size, weight=SHAPE),
    Axis(name="head_dim", wanted=_head_dim, weight=SHAPE),
    Axis(name="v_head_dim", wanted=_v_head_dim, weight=SHAPE),
    *_shapes("kv_lora_rank", "qk_rope_head_dim", "sliding_window", "attention_chunk"),
    *_shapes("cross_attention", "sinks", "alibi"),
    # An encoder's self attention has it as well
    Axis(name="relative_bias", wanted=lambda q: q.request.relative_bias, weight=SHAPE),
    *_shapes("logit_cap"),
    Axis(name="dtype", wanted=lambda q: q.request.dtype, settable=True),
    Axis(
        name="kv_dtype",
        wanted=lambda q: q.request.kv_dtype or q.request.dtype if q.phase in CACHED else None,
        settable=True,
        decided=True,
    ),
    Axis(
        name="page_size",
        wanted=_cached("page_size"),
        settable=True,
        droppable=True,
        decided=True,
    ),
    Axis(name="spec_topk", wanted=_drafting("spec_topk"), settable=True),
    Axis(name="spec_draft_tokens", wanted=_drafting("spec_draft_tokens"), settable=True),
    Axis(name="tree_windows", wanted=_tree_windows),
    Axis(name="custom_mask", wanted=_in_phases("custom_mask", "extend", "verify"), settable=True),
    Axis(name="multi_item", wanted=_in_phases("multi_item", "extend"), settable=True),
    Axis(name="deterministic", wanted=lambda q: q.request.deterministic, settable=True),
    Axis(
        name="graph",
        wanted=_in_phases("graph", "decode", "verify", "draft"),
        settable=True,
        droppable=True,
    ),
    Axis(name="lse", wanted=_cached("lse"), settable=True),
    Axis(name="strided_kv", wanted=_cached("strided_kv")),
)
DECIDED = tuple(axis for axis in AXES if axis.decided)


def demands_of(questions: Iterable[Question]) -> dict[Demand, list[str]]:
    """The phases that make each demand, in the order of the axes."""
    found: dict[Demand, list[str]] = {}
    for question in questions:
        for demand in question.demands:
            found.setdefault(demand, []).append(question.phase)
    return {demand: found[demand] for demand in sorted(found, key=lambda one: AXES.index(one[0]))}
