"""Choosing by measurements: ranks, and decode's backend for each batch size.

Those of this machine count before those that plugins carry; see `evidence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isqrt

from attnmux.core.cards.card import Offer
from attnmux.core.cards.named import read_options
from attnmux.core.choosing.checking import Accuracy, Rank, Ranking, prior_rank
from attnmux.core.choosing.choice import SizeRange, choice_of
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.solver import solve
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.questions import Question
from attnmux.core.facts.request import Request
from attnmux.core.measured.accuracy import by_measurement, notes_on
from attnmux.core.measured.evidence import (
    Evidence,
    Timed,
    Times,
    current_measurements,
    evidence_of,
)
from attnmux.core.measured.measurement import Measurement


def solve_measured(
    request: Request,
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    measurements: Iterable[Measurement],
) -> Decision:
    """`solve` with the ranks of `ranking_by` and measured errors, then `with_batch_sizes`.

    measurements: those of this machine. Figures that the offers' plugins carry count as well.
    The decision notes a backend whose error is more than 3 times that of another that could serve
    the phase, and files of figures that cannot be read. Raises what `solve` raises.
    """
    offers = tuple(offers)
    evidence = evidence_of(measurements, platform, offers, policy)
    if not evidence:
        return solve(request, platform, offers, policy)
    ranking, accuracy = ranking_by(evidence), by_measurement(evidence.own, platform)
    decision = solve(request, platform, offers, policy, ranking=ranking, accuracy=accuracy)
    groups = []
    for group in decision.groups:
        sized = with_batch_sizes(group, offers, policy, evidence)
        notes = (*sized.notes, *notes_on(sized, evidence.own), *evidence.problems)
        groups.append(replace(sized, notes=tuple(dict.fromkeys(notes))))
    return Decision.of_groups(groups, request.other_layers)


def accuracy_by(
    measurements: Iterable[Measurement], platform: Platform, offers: Iterable[Offer]
) -> Accuracy:
    """The accuracy of backends for `Decision.check`: as measured on this machine, and by the card
    if nothing was measured."""
    return by_measurement(current_measurements(measurements, platform, tuple(offers)), platform)


def ranking_by(evidence: Evidence) -> Ranking:
    """The priors' ranks, corrected by the figures that count.

    Among the backends measured for a question, the next place goes to the fastest if it takes less
    than 98 % of the time of the one that the priors favour, else to the latter. A backend that
    passes others takes the best of their ranks. A passed backend comes one rank after it, or keeps
    its own rank if that is later. Two backends with equal priors stay equal within 2 %. Backends
    without measurements keep their ranks.
    """
    if not evidence:
        return prior_rank
    known: dict[tuple[str, Request], Mapping[str, Rank]] = {}

    def ranks_for(question: Question) -> Mapping[str, Rank]:
        """Ranks of the backends that serve the question, at any page size."""
        timed = evidence.timed(question)
        priors = {a: prior_rank(evidence.offers[a], question).value for a in timed.times}
        return {
            address: Rank(rank, measured=True, source=_source(timed, address))
            for address, rank in ranks(priors, timed.times).items()
        }

    def ranking(offer: Offer, question: Question) -> Rank:
        asked = question.phase, question.request
        if asked not in known:
            known[asked] = ranks_for(question)
        return known[asked].get(offer.address) or prior_rank(offer, question)

    return ranking


def _source(timed: Timed, address: str) -> str:
    """Text that says who measured, and how long the backend takes."""
    own = timed.times[address]
    shares = {other: share_of(times, own) for other, times in timed.times.items()}
    fastest = min(shares, key=lambda other: (shares[other], other != address, other))
    if fastest == address:
        return f"{timed.source}; the fastest of {len(shares)}"
    return f"{timed.source}; {1 / shares[fastest]:.2f} times as long as {fastest}"


def ranks(priors: Mapping[str, int], times: Mapping[str, Times]) -> Mapping[str, int]:
    """The measured ranks of backends, from their priors' ranks and their times."""
    left = sorted(priors, key=lambda address: (priors[address], address))
    placed: list[str] = []
    found: dict[str, int] = {}
    while left:
        first = left[0]
        share = {address: share_of(times[address], times[first]) for address in left}
        fastest = min(left, key=lambda address: share[address])
        taken = fastest if share[fastest] < 1 - Measurement.LEAST_GAIN else first
        # The best rank that is left, but after the previous place
        rank = priors[first]
        if placed:
            before = placed[-1]
            faster = share_of(times[before], times[taken]) < 1 - Measurement.LEAST_GAIN
            level = priors[before] == priors[taken] and not faster
            rank = max(rank, found[before] + (not level))
        placed.append(taken)
        found[taken] = rank
        left.remove(taken)
    return found


def share_of(times: Times, others: Times) -> float:
    """`times` as a share of `others`: the geometric mean over the workloads that both have; 1 if
    there are none."""
    common = times.keys() & others.keys()
    if not common:
        return 1.0
    logs = math.fsum(math.log(times[each]) - math.log(others[each]) for each in common)
    return math.exp(logs / len(common))


def with_batch_sizes(
    decision: Decision,
    offers: Sequence[Offer],
    policy: Policy | None,
    evidence: Evidence,
) -> Decision:
    """The decision, with backends that decode some batch sizes faster than the phase's backend.

    A rival must be eligible for decode as decided (page size, KV dtype, the other phases'
    backends), and the policy must not prefer the phase's own backend to it. At each batch size
    that was measured for both, the fastest backend serves if it saves more than 2 %. A size in
    between goes with the measured size that is nearer as a ratio, a larger one with the last. A
    named backend decodes all sizes, and so does that of a deterministic request.
    """
    policy = policy or Policy()
    fixed = policy.named_for("decode") is not None or decision.request.deterministic
    if "decode" not in decision.phases or fixed:
        return decision
    question = Question(request=decision.request, platform=decision.platform, phase="decode")
    timed = evidence.timed(question)
    times = _by_size(timed)
    usual = decision.phases["decode"].address
    sizes = [size for size, timed in sorted(times.items()) if usual in timed]
    if len(sizes) < 2:
        return decision
    rivals = _rivals(decision, offers, policy, usual)
    best = [_best(times[size], usual, rivals) for size in sizes]
    given = read_options(policy.options, offers)
    ranges = []
    for address, places in groupby(range(len(sizes)), key=lambda place: best[place][0]):
        if address == usual:
            continue
        alike = list(places)
        share = max(best[place][1] for place in alike)
        ranges.append(
            SizeRange(
                least=_between(sizes, alike[0]) + 1,
                most=None if alike[-1] + 1 == len(sizes) else _between(sizes, alike[-1] + 1),
                choice=choice_of(rivals[address], given.get(address, {})),
                gain=round(1 - share, 4),
            )
        )
    return replace(decision, decode_sizes=tuple(ranges)) if ranges else decision


def _by_size(timed: Timed) -> Mapping[int, Mapping[str, Times]]:
    """Medians by batch size and backend."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for address, times in timed.times.items():
        for workload, median_us in times.items():
            if size := timed.sizes.get(workload):
                found.setdefault(size, {}).setdefault(address, {})[workload] = median_us
    return found


def _rivals(
    decision: Decision, offers: Sequence[Offer], policy: Policy, usual: str
) -> Mapping[str, Offer]:
    """Backends that could replace `usual` for decode and that the policy prefers no less."""
    by_address = {offer.address: offer for offer in offers}
    least = policy.preference(by_address[usual].names)
    eligible = {
        verdict.address
        for verdict in decision.candidates
        if verdict.phase == "decode" and verdict.eligible
    }
    return {
        address: offer
        for address, offer in by_address.items()
        if address in eligible and address != usual and policy.preference(offer.names) <= least
    }


def _best(times: Mapping[str, Times], usual: str, rivals: Iterable[str]) -> tuple[str, float]:
    """The backend for one size, and its time as a share of the usual one's."""
    shares = {
        address: share_of(times[address], times[usual]) for address in rivals if address in times
    }
    fastest = min(shares, key=lambda address: (shares[address], address), default=usual)
    gains = shares.get(fastest, 1) < 1 - Measurement.LEAST_GAIN
    return (fastest, shares[fastest]) if gains else (usual, 1.0)


def _between(sizes: Sequence[int], place: int) -> int:
    """The largest size that goes with the measured size before `place`; 0 before the first."""
    return isqrt(sizes[place - 1] * sizes[place]) if place else 0
