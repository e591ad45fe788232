"""Choosing by measurements of this machine: ranks, and decode's backend for each batch size.

A measurement counts only with the device and the library versions that it was made with, and only
for a backend that passed its conformance check first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isqrt

from attnmux.core.cards.card import Offer
from attnmux.core.cards.named import read_options
from attnmux.core.choosing.checking import Accuracy, Rank, Ranking, prior_rank, standing
from attnmux.core.choosing.choice import SizeRange, choice_of
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.shortcomings import admits_any
from attnmux.core.choosing.solver import solve
from attnmux.core.facts.libraries import Libraries, assumed, installed_version
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.questions import Question
from attnmux.core.facts.records import Device, latest
from attnmux.core.facts.request import Request
from attnmux.core.measured.accuracy import Current, by_measurement, notes_on
from attnmux.core.measured.measurement import Measurement, insisted

Times = Mapping[str, float]
"""Medians in microseconds by workload."""


def solve_measured(
    request: Request,
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    measurements: Iterable[Measurement],
) -> Decision:
    """`solve` with the ranks of `ranking_by` and measured errors, then `with_batch_sizes`.

    The decision notes a backend whose error is more than 3 times that of another that could serve
    the phase. Raises what `solve` raises.
    """
    offers = tuple(offers)
    found = current_measurements(measurements, platform, offers, policy)
    ranking, accuracy = ranking_by(found, offers), by_measurement(found, platform)
    decision = solve(request, platform, offers, policy, ranking=ranking, accuracy=accuracy)
    if not found:
        return decision
    groups = []
    for group in decision.groups:
        sized = with_batch_sizes(group, offers, policy, found)
        groups.append(
            replace(sized, notes=tuple(dict.fromkeys((*sized.notes, *notes_on(sized, found)))))
        )
    return Decision.of_groups(groups, request.other_layers)


def accuracy_by(
    measurements: Iterable[Measurement], platform: Platform, offers: Iterable[Offer]
) -> Accuracy:
    """The accuracy of backends for `Decision.check`: as measured on this machine, and by the card
    where nothing was measured."""
    return by_measurement(current_measurements(measurements, platform, tuple(offers)), platform)


def ranking_by(found: Current, offers: Iterable[Offer]) -> Ranking:
    """The priors' ranks, corrected by the measurements that count.

    Among the backends measured for a question, the next place goes to the fastest if it takes less
    than 98 % of the time of the one that the priors favour, else to the latter. A backend that
    passes others takes the best of their ranks. A passed backend comes one rank after it, or keeps
    its own rank if that is later. Two backends with equal priors stay equal within 2 %. Backends
    without measurements keep their ranks.
    """
    if not found:
        return prior_rank
    source = "measured on this machine"
    by_address = {offer.address: offer for offer in offers}
    known: dict[tuple[str, Request], Mapping[str, int]] = {}

    def ranks_for(question: Question) -> Mapping[str, int]:
        """Ranks of the backends that serve the question, at any page size."""
        timed = {
            address: {each.workload: each.median_us for each in measured}
            for address, measured in found.get(
                (question.phase, Measurement.shape_of(question)), {}
            ).items()
        }
        asked = insisted(question)
        cards = {address: by_address[address].card for address in timed}
        serving = [a for a, card in cards.items() if admits_any(card.clauses, asked)]
        return ranks({a: prior_rank(by_address[a], question).value for a in serving}, timed)

    def ranking(offer: Offer, question: Question) -> Rank:
        asked = question.phase, question.request
        if asked not in known:
            known[asked] = ranks_for(question)
        prior = prior_rank(offer, question)
        rank = known[asked].get(offer.address, prior.value)
        return prior if rank == prior.value else Rank(rank, measured=True, source=source)

    return ranking


def current_measurements(
    measurements: Iterable[Measurement],
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries = installed_version,
) -> Current:
    """The measurements that count.

    Their device is `platform` and their versions are those of `libraries`. No current measurement
    of the backend for the same phase and shape failed conformance, and neither libraries nor
    `policy` bar the backend. On a platform elsewhere none counts.
    """
    policy = policy or Policy()
    device = Device.of(platform)
    here = [each for each in measurements if each.device == device]
    if not platform.is_here or not here:
        return {}
    known = assumed(policy.without, libraries, platform.is_here)
    by_address = {offer.address: offer for offer in offers}
    current: dict[tuple[str, str], dict[str, list[Measurement]]] = {}
    for address in sorted({each.backend for each in here} & by_address.keys()):
        offer = by_address[address]
        if standing(offer, policy, known):
            continue
        versions = offer.versions(known)
        own = (each for each in here if each.backend == address and each.versions == versions)
        for each in latest(own):
            found = current.setdefault((each.phase, each.shape), {})
            found.setdefault(address, []).append(each)
    return {
        asked: {
            address: timed
            for address, timed in found.items()
            if all(each.conformant for each in timed)
        }
        for asked, found in current.items()
    }


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
    """`times` as a share of `others`: the geometric mean over the workloads that both have; 1 where
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
    found: Current,
) -> Decision:
    """The decision, with backends that decode some batch sizes faster than the phase's backend.

    A rival must be eligible for decode as decided (page size, KV dtype, the other phases'
    backends), and the policy must not prefer the phase's own backend to it. At each batch size
    that was measured for both, the fastest backend serves if it saves more than 2 %. A size in
    between goes with the measured size that is nearer as a ratio, a larger one with the last. A
    named backend decodes all sizes.
    """
    policy = policy or Policy()
    if not found or "decode" not in decision.phases or policy.named_for("decode") is not None:
        return decision
    question = Question(request=decision.request, platform=decision.platform, phase="decode")
    times = _by_size(found.get(("decode", Measurement.shape_of(question)), {}))
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


def _by_size(found: Mapping[str, Sequence[Measurement]]) -> Mapping[int, Mapping[str, Times]]:
    """Medians by batch size and backend."""
    times: dict[int, dict[str, dict[str, float]]] = {}
    for address, timed in found.items():
        for each in timed:
            if each.batch_size is not None:
                of_size = times.setdefault(each.batch_size, {})
                of_size.setdefault(address, {})[each.workload] = each.median_us
    return times


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
