"""How each candidate of a decision fared, as it is told to people.

A verdict says whether a backend serves what was asked. An outcome says what that came to once page
size and KV dtype were decided: a backend that fits alone may not fit there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.common.verdict import Reason, Verdict
from attnmux.core.choosing.judge.axes import Question, admits
from attnmux.core.choosing.judge.shortcomings import shortcomings
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.named import means
from attnmux.core.choosing.search.problem import CACHED_LEADS, FOLLOWERS, opposed
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.choosing.tell.outcomes import Outcome, joined, told_of


def outcomes(decision: Decision, offers: Iterable[Offer], policy: Policy) -> tuple[Outcome, ...]:
    """The chosen backends first, then those that fit by rank, then the others.

    `offers` and `policy` are those that the decision was made with; of a candidate whose card is
    not among them, no more than its verdict is told.
    """
    account = _Account(decision, offers, policy)
    return joined(account.outcome(verdict) for verdict in decision.candidates)


def outcomes_of_refusal(
    request: Request, candidates: Sequence[Verdict], offers: Iterable[Offer], policy: Policy
) -> tuple[Outcome, ...]:
    """The same where nothing was decided: what stood against each candidate, the named first."""
    cards = _by_key(offers)
    served = {verdict.phase for verdict in candidates if verdict.verdict != "rejected"}
    unserved = [phase for phase in request.phases if phase not in served]
    found = []
    for verdict in candidates:
        named = policy.named_for(_together(request, verdict.phase)[0])
        why = ""
        if verdict.verdict != "rejected":
            blocked = f"nothing serves {', '.join(unserved)}" if unserved else "others do not"
            why = f"fits, but {named[1]} was named" if named else f"fits, but {blocked}"
        offer = cards.get((verdict.plugin, verdict.backend))
        found.append(told_of(verdict, offer, verdict.verdict, why, verdict.reasons))

    def is_named(outcome: Outcome) -> bool:
        offer = cards.get((outcome.plugin, outcome.backend))
        names = (policy.named_for(_together(request, phase)[0]) for phase in outcome.phases)
        return offer is not None and any(named and means(named[1], offer) for named in names)

    return tuple(sorted(joined(found), key=lambda outcome: not is_named(outcome)))


class _Account:
    """A decision, and what a card answers at the point that was decided."""

    def __init__(self, decision: Decision, offers: Iterable[Offer], policy: Policy) -> None:
        self.decision = decision
        self.policy = policy
        self.cards = _by_key(offers)
        self.opposed = opposed(tuple(self.cards.values()))
        self.verdicts = {(v.plugin, v.backend, v.phase): v for v in decision.candidates}
        self.questions = {
            phase: Question(
                request=decision.request,
                platform=decision.platform,
                phase=phase,
                hypothetical=policy.hypothetical,
            )
            for phase in decision.phases
        }

    def outcome(self, verdict: Verdict) -> Outcome:
        offer = self.cards.get((verdict.plugin, verdict.backend))
        choice = self.decision.phases[verdict.phase]
        if (choice.plugin, choice.backend) == (verdict.plugin, verdict.backend):
            chosen = told_of(verdict, offer, "chosen", self._why_chosen(verdict))
            return replace(chosen, source=self._source(verdict, offer))
        if verdict.verdict == "rejected":
            return told_of(verdict, offer, "rejected", "", verdict.reasons)
        if verdict.eligible:
            return told_of(verdict, offer, "fits", self._why_behind(verdict))
        phase, reasons = self._obstacle(verdict, offer)
        if verdict.verdict == "coerced":
            return told_of(verdict, offer, "coerced", "not as asked", reasons)
        where = self._point(reasons)
        serving = "" if phase == verdict.phase else f" for {phase}"
        why = f"fits alone, but not{serving} {where}"
        return told_of(verdict, offer, "elsewhere", why, reasons)

    def _obstacle(self, verdict: Verdict, offer: Offer | None) -> tuple[str, list[Reason]]:
        """The phase in which the card fails at the decided point, and why: its own phase first,
        then those that one backend has to serve along with it."""
        together = _together(self.decision.request, verdict.phase)[1]
        for phase in (verdict.phase, *together):
            reasons = [] if offer is None else shortcomings(offer.card, self.questions[phase])
            if reasons:
                return phase, reasons
        return verdict.phase, [] if offer is None else self._excluded(verdict, offer)

    def _excluded(self, verdict: Verdict, offer: Offer) -> list[Reason]:
        """Where the card must not serve one of decode and extend beside the other's winner."""
        lead = _together(self.decision.request, verdict.phase)[0]
        opponents = self.opposed.get(offer.address, ()) if lead in CACHED_LEADS else ()
        for phase, choice in self.decision.phases.items() if opponents else ():
            other = _together(self.decision.request, phase)[0]
            beside = f"{choice.plugin}/{choice.backend}"
            if other in CACHED_LEADS and other != lead and beside in opponents:
                wanted = f"a backend for {lead} beside {choice.backend} for {other}"
                offered = f"{verdict.backend}, which never shares a KV cache with it"
                return [Reason(code="EXCLUDED", axis="backend", wanted=wanted, offered=offered)]
        return []

    def _point(self, reasons: Sequence[Reason]) -> str:
        axes = {reason.axis for reason in reasons}
        decided = {
            "page_size": f"page size {self.decision.page_size}",
            "kv_dtype": f"KV in {self.decision.kv_dtype}",
        }
        said = [text for axis, text in decided.items() if axis in axes]
        return f"at the decided {' and '.join(said)}" if said else "with what was decided"

    def _why_chosen(self, verdict: Verdict) -> str:
        lead = _together(self.decision.request, verdict.phase)[0]
        missing = self._stood_in_for(lead)
        if missing is not None:
            return f"stands in for {missing}, which does not serve {lead}"
        named = self.policy.named_for(lead)
        if named is not None:
            field, name = named
            return f"named by {self.policy.origins.get(field, 'user')}: {field}={name}"
        rivals = [
            other
            for other in self.decision.candidates
            if other.phase == verdict.phase and other.eligible
        ]
        alone = sum(
            other.phase == verdict.phase and other.verdict == "fits"
            for other in self.decision.candidates
        )
        stored = f"page size {self.decision.page_size}, KV in {self.decision.kv_dtype}"
        where = f" with {stored}" if alone > len(rivals) else ""
        if len(rivals) == 1:
            return f"the only one that fits{where}"
        field = f"{len(rivals)} that fit{where}"
        others = [other for other in rivals if other is not verdict]
        if self._preference(verdict) < min(map(self._preference, others), default=0):
            return f"preferred, of {field}"
        return f"best rank of {field}"

    def _why_behind(self, verdict: Verdict) -> str:
        lead = _together(self.decision.request, verdict.phase)[0]
        choice = self.decision.phases[verdict.phase]
        missing = self._stood_in_for(lead)
        if missing is not None:
            return f"fits, but {choice.backend} stands in for {missing}"
        if self.policy.named_for(lead) is not None:
            return f"fits, but {choice.backend} was named"
        winner = self._leading(self.verdicts[choice.plugin, choice.backend, verdict.phase])
        own = self._leading(verdict)
        if self._preference(winner) < self._preference(own):
            return f"fits, but {choice.backend} is preferred"
        if own.rank == winner.rank:
            return f"fits, level with {choice.backend}: fewer backends win, then names"
        return f"fits, behind {choice.backend} in rank"

    def _stood_in_for(self, lead: str) -> str | None:
        """The named backend whose companion serves the phase."""
        field = f"backend for {lead}"
        old = (change.old for change in self.decision.coercions if change.field == field)
        return next(old, None)

    def _leading(self, verdict: Verdict) -> Verdict:
        """The backend's verdict in the phase whose rank counts for the verdict's phase."""
        first = _together(self.decision.request, verdict.phase)[1][0]
        return self.verdicts[verdict.plugin, verdict.backend, first]

    def _preference(self, verdict: Verdict) -> int:
        offer = self.cards.get((verdict.plugin, verdict.backend))
        aliases = () if offer is None else offer.card.aliases
        names = (verdict.backend, f"{verdict.plugin}/{verdict.backend}", *aliases)
        prefer = self.policy.prefer
        return min((prefer.index(name) for name in names if name in prefer), default=len(prefer))

    def _source(self, verdict: Verdict, offer: Offer | None) -> str:
        """Of the prior that the rank is taken from, or the measurements; else empty."""
        if verdict.measured:
            return "measured on this machine"
        priors = () if offer is None else offer.card.priors
        question = self.questions[verdict.phase]
        held = next((prior for prior in priors if admits(prior.when, question)), None)
        return held.source if held is not None and held.rank == verdict.rank else ""


def _by_key(offers: Iterable[Offer]) -> Mapping[tuple[str, str], Offer]:
    return {(offer.plugin, offer.card.name): offer for offer in offers}


def _together(request: Request, phase: str) -> tuple[str, tuple[str, ...]]:
    """(the phase that leads `phase`, the requested phases that one backend serves with it)."""
    leader = "decode" if request.speculative_attention_mode == "decode" else "extend"
    lead = leader if phase in FOLLOWERS else phase
    alike = {lead, *(FOLLOWERS if lead == leader else ())}
    return lead, tuple(each for each in request.phases if each in alike)
