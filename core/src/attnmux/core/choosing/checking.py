"""One card in one phase: whether it serves the request, how accurately, and the reasons if not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from attnmux.core.cards.card import CONTRACTS, DEFAULT_RANK, BackendCard, Offer
from attnmux.core.cards.clause import ALWAYS
from attnmux.core.choosing.requirements import install_hint, required
from attnmux.core.choosing.shortcomings import shortcomings
from attnmux.core.facts.libraries import Libraries, assumed, within
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.questions import Question
from attnmux.core.facts.request import Request
from attnmux.core.facts.verdicts import Reason, Status, Verdict, without_hints

Accuracy = Callable[[Offer, Request], Sequence[Reason]]
"""The reasons why an offer is not as accurate as the request asks."""

UNPROVEN = "no measured error and no bound on its card (attnmux bench --keep measures it)"


def by_card(offer: Offer, request: Request) -> list[Reason]:
    """`max_error` needs a bound of the card."""
    return [] if request.max_error is None else unbounded(offer.card, request, request.max_error)


def unbounded(card: BackendCard, request: Request, most: float) -> list[Reason]:
    """A reason if the card has no bound of `most` for the request's KV dtype."""
    stored = request.kv_dtype or request.dtype or ""
    bounds = [bound for bound in card.error_bounds if bound.kv_dtype.admits(stored)]
    if any(bound.max_error <= most for bound in bounds):
        return []
    return [too_large(most, " or ".join(map(str, bounds)) or UNPROVEN)]


def too_large(most: float, offered: str) -> Reason:
    wanted = f"an error of {most:g} roundings at most"
    return Reason(code="MAX_ERROR", axis="max_error", wanted=wanted, offered=offered)


class Rank(NamedTuple):
    """A place among the backends that fit."""

    value: int
    """Lower is better."""
    measured: bool = False
    """Whether it follows figures, of this machine or of its kind, and not a prior."""
    source: str = ""
    """Where it comes from."""


Ranking = Callable[[Offer, Question], Rank]
"""The expected rank of a backend that serves a question."""


def prior_rank(offer: Offer, question: Question) -> Rank:
    """The rank of the card's first prior that holds."""
    for prior in offer.card.priors:
        if prior.when is ALWAYS or prior.when.meets(question.demands):
            return Rank(prior.rank, source=prior.source)
    return Rank(DEFAULT_RANK)


def standing(offer: Offer, policy: Policy, libraries: Libraries) -> list[Reason]:
    """The reasons that bar an offer from any request: contract, policy, libraries, …"""
    card = offer.card
    reasons = []

    def bar(code: str, axis: str, wanted: str, offered: str, hint: str = "") -> None:
        reasons.append(Reason(code=code, axis=axis, wanted=wanted, offered=offered, hint=hint))

    if not any(within(version, card.contract) for version in CONTRACTS):
        bar("CONTRACT", "contract", f"one of {', '.join(CONTRACTS)}", card.contract)
    if not offer.admitted or not policy.admits(offer.names, offer.claims):
        bar("DENIED", "policy", "a backend that the configuration allows", card.name)
    failure = policy.failed.get(offer.address)
    if failure is not None:
        hint = failure.hint or install_hint(card, offer.distribution)
        bar("FAILED", "kernels", "kernels that load and compile", failure.reason, hint)
    for library in required(card, libraries, offer.distribution):
        if library.state != "present":
            bar("LIBRARY", "requires", library.wanted, library.offered, library.hint)
    return reasons


def check(
    card: BackendCard,
    phase: str,
    request: Request,
    platform: Platform,
    *,
    policy: Policy | None = None,
    plugin: str = "",
    libraries: Libraries | None = None,
) -> Verdict:
    """Whether `card` alone serves `phase` of `request` on `platform`, with every reason if not.

    An unset page size or KV dtype demands nothing. `libraries` are those of `solve`. The verdict is
    "fits" or "rejected".
    """
    policy = policy or Policy()
    known = assumed(policy.without, libraries, platform.is_here)
    offer = Offer(card=card, plugin=plugin)
    question = Question(request=request, platform=platform, phase=phase)
    reasons = standing(offer, policy, known) + shortcomings(card, question)
    if not all(reason.hint for reason in reasons):
        reasons = without_hints(reasons)
    return verdict(offer, phase, reasons, None if reasons else prior_rank(offer, question))


def verdict(
    offer: Offer,
    phase: str,
    reasons: Sequence[Reason],
    rank: Rank | None,
) -> Verdict:
    """The verdict on an offer: rejected without a rank, coerced with a rank and reasons."""
    fitting: Status = "coerced" if reasons else "fits"
    return Verdict(
        backend=offer.card.name,
        plugin=offer.plugin,
        phase=phase,
        verdict="rejected" if rank is None else fitting,
        rank=None if rank is None else rank.value,
        measured=rank is not None and rank.measured,
        source="" if rank is None else rank.source,
        reasons=tuple(reasons),
    )
