"""One card, one phase: does it serve the request, and if not, why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from attnmux.core.choosing.axes import AXES, Axis, Question, admits, failing
from attnmux.core.choosing.card import CONTRACTS, DEFAULT_RANK, BackendCard, Clause, Offer
from attnmux.core.choosing.conditions import specifiers
from attnmux.core.choosing.libraries import Libraries, assumed, installed_version, missing
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.policy import Policy
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.verdict import Reason, Verdict

Ranking = Callable[[BackendCard, Question], int]
"""How well a card that serves a question is expected to do; lower is better."""


def question_of(
    request: Request, platform: Platform, phase: str, *, hypothetical: bool
) -> Question:
    """What `request` asks in a phase before its unset values are decided."""
    return Question(
        request=request,
        platform=platform,
        phase=phase,
        page_size=request.page_size,
        kv_dtype=request.kv_dtype or request.dtype,
        hypothetical=hypothetical,
    )


def prior_rank(card: BackendCard, question: Question) -> int:
    """The rank of the card's first prior that holds."""
    for prior in card.priors:
        if admits(prior.when, question):
            return prior.rank
    return DEFAULT_RANK


def serving_clause(
    card: BackendCard, question: Question, axes: tuple[Axis, ...] = AXES
) -> Clause | None:
    """The first clause that serves the question."""
    return next((clause for clause in card.clauses if admits(clause, question, axes)), None)


def standing(offer: Offer, policy: Policy, libraries: Libraries) -> list[Reason]:
    """What keeps a card out whatever is asked: contract, status, policy, libraries."""
    card = offer.card
    reasons = []
    if not any(specifiers(card.contract).contains(version) for version in CONTRACTS):
        wanted, offered = f"one of {', '.join(CONTRACTS)}", card.contract
        reasons.append(Reason(code="CONTRACT", axis="contract", wanted=wanted, offered=offered))
    if card.status == "planned" and not policy.hypothetical:
        reasons.append(Reason(code="PLANNED", axis="status", wanted="available", offered="planned"))
    names = {card.name, offer.address, *card.aliases}
    if names.intersection(policy.deny) or (
        policy.allow is not None and not names & set(policy.allow)
    ):
        wanted, offered = "a backend that the configuration allows", card.name
        reasons.append(Reason(code="DENIED", axis="policy", wanted=wanted, offered=offered))
    return reasons + missing(card, libraries, offer.distribution)


def is_served(card: BackendCard, question: Question, axes: tuple[Axis, ...] = AXES) -> bool:
    """Whether `shortcomings` would be empty, without the cost of saying why."""
    if serving_clause(card, question, axes) is None:
        return False
    return not _undeclared_axes(card, question, axes)


def shortcomings(
    card: BackendCard, question: Question, axes: tuple[Axis, ...] = AXES
) -> list[Reason]:
    """Why the card does not serve the question: [] where it does.

    The reasons are those of the clause that comes nearest: fewest conditions that do not hold,
    those of the machine counting more than what the asker can change. Hints are left out where
    following them all would not remove them all.
    """
    undeclared = [
        _undeclared(axis, card, question) for axis in _undeclared_axes(card, question, axes)
    ]
    if serving_clause(card, question, axes) is not None:
        return undeclared
    if not card.clauses:
        return [Reason(code="NO_CLAUSE", axis="clauses", wanted="one that fits", offered="none")]
    failures = [(clause, failing(clause, question, axes)) for clause in card.clauses]
    clause, failed = min(failures, key=lambda pair: sum(axis.weight for axis in pair[1]))
    hold = _hints_hold(clause, failed, question, axes)
    return undeclared + [axis.reason(clause, question, hint=hold) for axis in failed]


def _undeclared_axes(card: BackendCard, question: Question, axes: tuple[Axis, ...]) -> list[Axis]:
    """Axes that are asked about and are younger than every contract the card states."""
    later = [axis for axis in axes if axis.since != CONTRACTS[0] and axis.asked(question)]
    return [axis for axis in later if not specifiers(card.contract).contains(axis.since)]


def _undeclared(axis: Axis, card: BackendCard, question: Question) -> Reason:
    return Reason(
        code="UNDECLARED_FEATURE",
        axis=axis.name,
        wanted=str(axis.wanted(question)),
        offered=f"a contract ({card.contract}) that does not know it",
    )


def _hints_hold(
    clause: Clause, failed: Sequence[Axis], question: Question, axes: tuple[Axis, ...]
) -> bool:
    changes = {axis.name: axis.remedy(clause, question) for axis in failed if axis.settable}
    if not changes:
        return False
    changed = question_of(
        question.request.replace(**changes),
        question.platform,
        question.phase,
        hypothetical=question.hypothetical,
    )
    return not any(axis.settable for axis in failing(clause, changed, axes))


def check(
    card: BackendCard,
    phase: str,
    request: Request,
    platform: Platform,
    *,
    policy: Policy | None = None,
    plugin: str = "",
    libraries: Libraries = installed_version,
    ranking: Ranking = prior_rank,
) -> Verdict:
    """Whether `card` alone serves `phase` of `request` on `platform`, with every reason if not.

    An unset page size or KV dtype asks nothing. The verdict is "fits" or "rejected".
    """
    policy = policy or Policy()
    known = assumed(policy.without, libraries, policy.hypothetical)
    offer = Offer(card=card, plugin=plugin)
    question = question_of(request, platform, phase, hypothetical=policy.hypothetical)
    reasons = standing(offer, policy, known) + shortcomings(card, question)
    return verdict(offer, phase, reasons, None if reasons else ranking(card, question))


def verdict(
    offer: Offer, phase: str, reasons: Sequence[Reason], rank: int | None, *, coerced: bool = False
) -> Verdict:
    """The verdict on an offer: rejected without a rank, coerced where the solver made it fit."""
    fitting: Literal["coerced", "fits"] = "coerced" if coerced else "fits"
    return Verdict(
        backend=offer.card.name,
        plugin=offer.plugin,
        phase=phase,
        verdict="rejected" if rank is None else fitting,
        rank=rank,
        reasons=tuple(reasons),
    )
