"""How each candidate of a decision fared, in words.

A verdict says whether a backend serves the request. An outcome adds the decision's point of view: a
backend that fits alone may not fit at the page size and KV dtype that were decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from attnmux.core.cards.card import Offer
from attnmux.core.cards.proof import Proven
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.problem import phases_by_lead
from attnmux.core.choosing.verdicts import effort
from attnmux.core.facts.frozen import Plain
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import PHASES
from attnmux.core.facts.verdicts import Reason, Verdict

Standing = Literal["chosen", "fits", "elsewhere", "coerced", "rejected"]
"""`fits`: at the decided page size and KV dtype. `elsewhere`: only at others. `coerced`: only with
another value of the request, which the decision left as it was."""

_ORDER: tuple[Standing, ...] = get_args(Standing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Plain):
    """One backend in the phases in which it fared alike."""

    backend: str
    plugin: str
    phases: tuple[str, ...]
    standing: Standing
    rank: int | None
    why: str = ""
    """In words; empty if the reasons are enough."""
    source: str = ""
    """Where the rank comes from, of a chosen backend or of one that was measured."""
    proof: str = ""
    """The word of `cards/proof.py` for the runs on its card that count for the machine."""
    reasons: tuple[Reason, ...] = ()


def outcomes(decision: Decision, offers: Iterable[Offer], policy: Policy) -> tuple[Outcome, ...]:
    """The chosen backends first, then those that fit by rank, then the others.

    `offers` and `policy` are those that the decision was made with. Without its card among them, a
    candidate's outcome is limited to its verdict.
    """
    account = _Decided(decision, offers, policy)
    return _joined(account.outcome(verdict) for verdict in decision.candidates)


def outcomes_of_refusal(
    request: Request,
    platform: Platform,
    candidates: Sequence[Verdict],
    offers: Iterable[Offer],
    policy: Policy,
) -> tuple[Outcome, ...]:
    """The outcomes without a decision: each candidate's reasons, named backends first."""
    account = _Account(request, platform, offers, policy)
    served = {verdict.phase for verdict in candidates if verdict.verdict != "rejected"}
    unserved = [phase for phase in request.phases if phase not in served]
    blocked = f"nothing serves {', '.join(unserved)}" if unserved else "others do not"
    outcomes = []
    for verdict in candidates:
        named = policy.named_for(account.leads[verdict.phase])
        other = f"{named[1]} was named" if named else blocked
        why = "" if verdict.verdict == "rejected" else f"fits, but {other}"
        outcomes.append(account.told(verdict, verdict.verdict, why, verdict.reasons))

    def is_other(outcome: Outcome) -> bool:
        offer = account.cards.get(f"{outcome.plugin}/{outcome.backend}")
        names = (policy.named_for(account.leads[phase]) for phase in outcome.phases)
        return offer is None or not any(named and named[1] in offer.names for named in names)

    return tuple(sorted(_joined(outcomes), key=is_other))


def joined_by_first_reason(told: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """A shorter list: phases with the same first reason share an outcome, which has the longest of
    their lists of reasons."""
    return _grouped(told, lambda one: replace(one, phases=(), reasons=one.reasons[:1]))


class _Account:
    """A request's platform, with the cards and the policy that its candidates were judged by."""

    def __init__(
        self, request: Request, platform: Platform, offers: Iterable[Offer], policy: Policy
    ) -> None:
        self.request = request
        self.platform = platform
        self.policy = policy
        self.cards = {offer.address: offer for offer in offers}
        self.groups = phases_by_lead(request)
        self.leads = {phase: lead for lead, phases in self.groups.items() for phase in phases}

    def told(
        self, verdict: Verdict, standing: Standing, why: str, reasons: Sequence[Reason] = ()
    ) -> Outcome:
        offer, proof = self.cards.get(verdict.address), ""
        if offer is not None:
            runs = offer.card.verified_on
            proof = Proven.on(runs, self.platform, (verdict.phase,), self.request.kind).word
        return Outcome(
            backend=verdict.backend,
            plugin=verdict.plugin,
            phases=(verdict.phase,),
            standing=standing,
            rank=verdict.rank,
            why=why,
            proof=proof,
            reasons=tuple(reasons),
        )


class _Decided(_Account):
    """A decision with the cards and the policy that it was made with."""

    def __init__(self, decision: Decision, offers: Iterable[Offer], policy: Policy) -> None:
        super().__init__(decision.request, decision.platform, offers, policy)
        self.decision = decision
        self.verdicts = {(v.address, v.phase): v for v in decision.candidates}

    def outcome(self, verdict: Verdict) -> Outcome:
        if self.decision.phases[verdict.phase].address == verdict.address:
            chosen = self.told(verdict, "chosen", self._why_chosen(verdict))
            return replace(chosen, source=verdict.source)
        if verdict.verdict == "rejected":
            return self.told(verdict, "rejected", "", verdict.reasons)
        obstacle = verdict.obstacle
        if obstacle is None:
            behind = self.told(verdict, "fits", self._why_behind(verdict))
            return replace(behind, source=verdict.source) if verdict.measured else behind
        if verdict.verdict == "coerced":
            return self.told(verdict, "coerced", "not as asked", obstacle.reasons)
        serving = "" if obstacle.phase == verdict.phase else f" for {obstacle.phase}"
        why = f"fits alone, but not{serving} {self._where(obstacle.reasons)}"
        return self.told(verdict, "elsewhere", why, obstacle.reasons)

    def _where(self, reasons: Sequence[Reason]) -> str:
        axes = {reason.axis for reason in reasons}
        decided = {
            "page_size": f"page size {self.decision.page_size}",
            "kv_dtype": f"KV in {self.decision.kv_dtype}",
        }
        texts = [text for axis, text in decided.items() if axis in axes]
        return f"at the decided {' and '.join(texts)}" if texts else "with what was decided"

    def _why_chosen(self, verdict: Verdict) -> str:
        lead = self.leads[verdict.phase]
        missing = self._replaced(lead)
        if missing is not None:
            return f"stands in for {missing}, which does not serve {lead}"
        named = self.policy.named_for(lead)
        if named is not None:
            return f"named by {self.policy.origin_of(lead)}: {named[0]}={named[1]}"
        alike = [other for other in self.decision.candidates if other.phase == verdict.phase]
        rivals = [other for other in alike if other.eligible]
        stored = f"page size {self.decision.page_size}, KV in {self.decision.kv_dtype}"
        alone = sum(other.verdict == "fits" for other in alike)
        where = f" with {stored}" if alone > len(rivals) else ""
        if len(rivals) == 1:
            return f"the only one that fits{where}"
        field = f"{len(rivals)} that fit{where}"
        others = [self._preference(other) for other in rivals if other is not verdict]
        if self._preference(verdict) < min(others, default=0):
            return f"preferred, of {field}"
        return f"best rank of {field}"

    def _why_behind(self, verdict: Verdict) -> str:
        lead = self.leads[verdict.phase]
        choice = self.decision.phases[verdict.phase]
        missing = self._replaced(lead)
        if missing is not None:
            return f"fits, but {choice.backend} stands in for {missing}"
        if self.policy.named_for(lead) is not None:
            return f"fits, but {choice.backend} was named"
        # The rank of the group's first phase counts for all of them
        first = self.groups[lead][0]
        winner = self.verdicts[choice.address, first]
        own = self.verdicts[verdict.address, first]
        if self._preference(winner) < self._preference(own):
            return f"fits, but {choice.backend} is preferred"
        if own.rank == winner.rank:
            return f"fits, level with {choice.backend}: fewer backends win, then names"
        return f"fits, ranked after {choice.backend}"

    def _replaced(self, lead: str) -> str | None:
        """The named backend whose companion serves the phase."""
        field = f"backend for {lead}"
        old = (change.old for change in self.decision.coercions if change.field == field)
        return next(old, None)

    def _preference(self, verdict: Verdict) -> int:
        offer = self.cards.get(verdict.address)
        names = (verdict.backend, verdict.address) if offer is None else offer.names
        return self.policy.preference(names)


def _joined(each: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """One outcome for the phases of a backend that share it, the most useful ones first."""
    return tuple(sorted(_grouped(each, lambda one: replace(one, phases=())), key=_place))


def _grouped(each: Iterable[Outcome], key: Callable[[Outcome], Outcome]) -> tuple[Outcome, ...]:
    """One outcome for all with the same key: that with the most reasons, with the phases of all."""
    groups: dict[Outcome, list[Outcome]] = {}
    for outcome in each:
        groups.setdefault(key(outcome), []).append(outcome)
    outcomes = []
    for alike in groups.values():
        phases = sorted((phase for member in alike for phase in member.phases), key=PHASES.index)
        longest = max(alike, key=lambda one: len(one.reasons))
        outcomes.append(replace(longest, phases=tuple(phases)))
    return tuple(outcomes)


def _place(outcome: Outcome) -> tuple[int, int, int, int, str, str]:
    """Rejected backends that need the smallest change come before other rejected ones."""
    return (
        _ORDER.index(outcome.standing),
        PHASES.index(outcome.phases[0]) if outcome.standing == "chosen" else outcome.rank or 0,
        *effort(outcome.reasons),
        outcome.backend,
        outcome.plugin,
    )
