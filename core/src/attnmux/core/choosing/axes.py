"""The axes of choosing: for each, what a request or a platform asks of a card.

A new axis is a field of `Clause`, a field of `Request` with its reader in `values.py` (or a field
of `Platform`), and a row of `AXES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field

from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Clause
from attnmux.core.choosing.offer.conditions import ANY, Condition, Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a card is asked: a phase of a request on a platform. Unset values ask nothing."""

    request: Request
    platform: Platform
    phase: str
    hypothetical: bool = False
    """Not this machine: a runtime that the platform does not state counts as new enough."""
    demands: tuple[Demand, ...] = field(init=False, repr=False, compare=False)
    """What each axis is asked for, without those that are asked for nothing."""
    opened: InitVar[Question | None] = None
    """The same question before the solver set what was unset: its demands are not worked out again,
    and those that were added come last."""

    def __post_init__(self, opened: Question | None) -> None:
        before = () if opened is None else opened.demands
        demands = list(before)
        for axis in AXES:
            if opened is None or axis.decided:
                value = axis.wanted(self)
                if value is not None and value is not False and (axis, value) not in before:
                    demands.append((axis, value))
        object.__setattr__(self, "demands", tuple(demands))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Axis:
    """One thing that a card can be asked about. Its name is the clause's field."""

    name: str
    wanted: Callable[[Question], Value | None]
    """What the question asks for; None or False where it asks nothing."""
    settable: bool = False
    """The request's field of this name is the asker's to change, so a hint can name it."""
    droppable: bool = False
    """Coercion may unset it: the engine can do without, or takes what the solver decides."""
    decided: bool = False
    """Where the request leaves it unset, the solver sets it."""
    weight: int = 1
    """How far a clause that fails here is from the question, when the nearest is sought."""
    since: str = "1.0"
    """The contract version that introduced the axis."""

    def condition(self, clause: Clause) -> Condition:
        condition: Condition = getattr(clause, self.name)
        return condition

    def reason(self, clause: Clause, wanted: Value, hint: str = "") -> Reason:
        return Reason(
            code=self.name.upper(),
            axis=self.name,
            wanted=_said(wanted),
            offered=str(self.condition(clause)),
            hint=hint,
        )

    def remedy(self, clause: Clause, wanted: Value) -> str:
        """The value that the clause serves and that is nearest to what was wanted."""
        near = self.condition(clause).nearest(wanted)
        return "none" if near is None else str(near)


Demand = tuple[Axis, Value]


def _said(value: Value) -> str:
    if value is True:
        return "yes"
    if isinstance(value, frozenset):
        return " and ".join(sorted(value)) or "none"
    return "unknown" if value == "" else str(value)


PLATFORM = 100
SHAPE = 10

CACHED = frozenset({"extend", "decode", "verify", "draft"})
"""The phases that read the KV cache; the encoder of a multimodal model has none."""


def _cached(field: str) -> Callable[[Question], Value | None]:
    """The request's field, asked in the phases that read the KV cache."""

    def wanted(question: Question) -> Value | None:
        if question.phase not in CACHED:
            return None
        value: Value | None = getattr(question.request, field)
        return value

    return wanted


def _in_phases(field: str, *phases: str) -> Callable[[Question], Value | None]:
    def wanted(question: Question) -> Value | None:
        value: Value | None = getattr(question.request, field)
        return value if question.phase in phases else None

    return wanted


def _drafting(field: str) -> Callable[[Question], Value | None]:
    """The request's field, asked in the phases that may meet drafts: all that read the KV cache but
    extend where decode's backend verifies. Decode may, whoever verifies: drafts are made there."""

    def wanted(question: Question) -> Value | None:
        request = question.request
        if question.phase == "extend" and request.speculative_attention_mode == "decode":
            return None
        value: Value | None = getattr(request, field)
        return value if question.phase in CACHED else None

    return wanted


def _kind(question: Question) -> Value:
    return question.request.kind if question.phase in CACHED else "mha"


def _version(question: Question) -> Value:
    return ".".join(map(str, question.platform.version))


def _runtime(question: Question) -> Value | None:
    runtime = question.platform.runtime
    return None if question.hypothetical and not runtime else runtime


def _expanded_only(field: str) -> Callable[[Question], Value | None]:
    """Dims of heads: a latent kind's kernels see the latent, not the heads."""

    def wanted(question: Question) -> Value | None:
        if question.phase not in CACHED or question.request.latent:
            return None
        value: Value | None = getattr(question.request, field)
        return value

    return wanted


def _head_dim(question: Question) -> Value | None:
    if question.phase not in CACHED:
        return question.request.encoder_head_dim
    return _expanded_only("head_dim")(question)


def _v_head_dim(question: Question) -> Value | None:
    value = _expanded_only("v_head_dim")(question)
    return None if value == question.request.head_dim else value


def _group_size(question: Question) -> Value | None:
    q_heads, kv_heads = question.request.num_q_heads, question.request.num_kv_heads
    if question.phase not in CACHED or not q_heads or not kv_heads:
        return None
    return q_heads // kv_heads


AXES: tuple[Axis, ...] = (
    Axis(name="vendor", wanted=lambda q: q.platform.vendor, weight=PLATFORM),
    Axis(name="arch", wanted=lambda q: q.platform.arch, weight=PLATFORM),
    Axis(name="version", wanted=_version, weight=PLATFORM),
    Axis(name="features", wanted=lambda q: q.platform.features, weight=PLATFORM),
    Axis(name="runtime", wanted=_runtime, weight=PLATFORM),
    Axis(name="kind", wanted=_kind, weight=PLATFORM),
    Axis(name="phase", wanted=lambda q: q.phase, weight=PLATFORM),
    Axis(name="num_q_heads", wanted=_cached("num_q_heads"), weight=SHAPE),
    Axis(name="num_kv_heads", wanted=_cached("num_kv_heads"), weight=SHAPE),
    Axis(name="group_size", wanted=_group_size, weight=SHAPE),
    Axis(name="head_dim", wanted=_head_dim, weight=SHAPE),
    Axis(name="v_head_dim", wanted=_v_head_dim, weight=SHAPE),
    Axis(name="kv_lora_rank", wanted=_cached("kv_lora_rank"), weight=SHAPE),
    Axis(name="qk_rope_head_dim", wanted=_cached("qk_rope_head_dim"), weight=SHAPE),
    Axis(name="sliding_window", wanted=_cached("sliding_window"), weight=SHAPE),
    Axis(name="attention_chunk", wanted=_cached("attention_chunk"), weight=SHAPE),
    Axis(name="cross_attention", wanted=_cached("cross_attention"), weight=SHAPE),
    Axis(name="sinks", wanted=_cached("sinks"), weight=SHAPE),
    Axis(name="logit_cap", wanted=_cached("logit_cap"), weight=SHAPE),
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
    Axis(name="custom_mask", wanted=_in_phases("custom_mask", "extend", "verify"), settable=True),
    Axis(name="multi_item", wanted=_in_phases("multi_item", "extend"), settable=True),
    Axis(
        name="chunked_prefix",
        wanted=_in_phases("chunked_prefix", "extend"),
        settable=True,
        droppable=True,
    ),
    Axis(name="deterministic", wanted=lambda q: q.request.deterministic, settable=True),
    Axis(
        name="graph",
        wanted=_in_phases("graph", "decode", "verify", "draft"),
        settable=True,
        droppable=True,
    ),
    Axis(name="lse", wanted=_cached("lse"), settable=True),
)


def asking(questions: Iterable[Question]) -> dict[Demand, list[str]]:
    """What any of the questions asks, in the order of the axes: by demand, the phases."""
    found: dict[Demand, list[str]] = {}
    for question in questions:
        for demand in question.demands:
            found.setdefault(demand, []).append(question.phase)
    return {demand: found[demand] for demand in sorted(found, key=lambda one: AXES.index(one[0]))}


def failing(clause: Clause, demands: Iterable[Demand]) -> list[Demand]:
    """Those of the demands that `clause` does not meet."""
    failed = []
    for demand in demands:
        axis, value = demand
        condition = getattr(clause, axis.name)
        if condition is not ANY and not condition.admits(value):
            failed.append(demand)
    return failed


def admits(clause: Clause, question: Question) -> bool:
    """Whether the clause serves the question."""
    return meets(clause, question.demands)


def meets(clause: Clause, demands: Iterable[Demand]) -> bool:
    """Whether the clause meets all of the demands."""
    for axis, value in demands:
        condition = getattr(clause, axis.name)
        if condition is not ANY and not condition.admits(value):
            return False
    return True
