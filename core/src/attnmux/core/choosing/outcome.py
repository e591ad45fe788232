"""What is told of one backend in a decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from attnmux.core.choosing.ask.values import PHASES
from attnmux.core.choosing.common.verdict import Reason, Verdict
from attnmux.core.choosing.offer.card import Offer

Standing = Literal["chosen", "fits", "elsewhere", "coerced", "rejected"]
"""`fits`: at the decided page size and KV dtype. `elsewhere`: at others alone. `coerced`: only if
a value of the request changed that the decision left as it was."""

_ORDER: tuple[Standing, ...] = ("chosen", "fits", "elsewhere", "coerced", "rejected")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One backend in the phases in which it fared alike."""

    backend: str
    plugin: str
    phases: tuple[str, ...]
    standing: Standing
    rank: int | None
    why: str = ""
    """In words; empty where the reasons say it all."""
    source: str = ""
    """Where the rank of a chosen backend comes from."""
    planned: bool = False
    reasons: tuple[Reason, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        reasons = [asdict(reason) for reason in self.reasons]
        return {**asdict(self), "phases": list(self.phases), "reasons": reasons}


def told_of(
    verdict: Verdict,
    offer: Offer | None,
    standing: Standing,
    why: str,
    reasons: Sequence[Reason] = (),
) -> Outcome:
    return Outcome(
        backend=verdict.backend,
        plugin=verdict.plugin,
        phases=(verdict.phase,),
        standing=standing,
        rank=verdict.rank,
        why=why,
        planned=offer is not None and offer.card.status == "planned",
        reasons=tuple(reasons),
    )


def joined_by_first_reason(told: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """The same, shorter: phases that differ only behind the first reason share an outcome, which
    has the most reasons that one of them has."""
    alike: dict[Outcome, list[Outcome]] = {}
    for outcome in told:
        key = replace(outcome, phases=(), reasons=outcome.reasons[:1])
        alike.setdefault(key, []).append(outcome)
    return tuple(
        replace(
            max(group, key=lambda outcome: len(outcome.reasons)),
            phases=_in_order(phase for outcome in group for phase in outcome.phases),
        )
        for group in alike.values()
    )


def joined(each: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """One outcome where a backend's phases share it."""
    phases: dict[Outcome, list[str]] = {}
    for outcome in each:
        phases.setdefault(replace(outcome, phases=()), []).extend(outcome.phases)
    together = (replace(outcome, phases=_in_order(names)) for outcome, names in phases.items())
    return tuple(sorted(together, key=_place))


def _in_order(phases: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(phases, key=PHASES.index))


def _place(outcome: Outcome) -> tuple[int, int, int, int, str, str]:
    """Among those that were rejected, the ones that least would have to change for come first."""
    unfixable = sum(not reason.hint for reason in outcome.reasons)
    return (
        _ORDER.index(outcome.standing),
        PHASES.index(outcome.phases[0]) if outcome.standing == "chosen" else outcome.rank or 0,
        unfixable,
        len(outcome.reasons),
        outcome.backend,
        outcome.plugin,
    )
