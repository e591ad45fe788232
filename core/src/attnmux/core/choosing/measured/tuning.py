"""The ranking by measurements of this machine.

A measurement counts only with the device and the library versions that it was made with, and only
for a backend that passed its conformance check first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.judge.axes import Question
from attnmux.core.choosing.judge.checking import Rank, Ranking, prior_rank, standing
from attnmux.core.choosing.judge.shortcomings import admits_any
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.measurement import Measurement, insisted, shape_of, versions_of
from attnmux.core.choosing.measured.records import Device, latest
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.libraries import Libraries, assumed, installed_version

LEAST_GAIN = 0.02
"""The share of the time that a backend must save to pass one that the priors favour. Smaller
differences count as noise."""

Times = Mapping[str, float]
"""Medians in microseconds by workload."""

Current = Mapping[tuple[str, str], Mapping[str, Sequence[Measurement]]]
"""Measurements that count, by (phase, shape) and the backend's address."""


def measured_ranking(
    measurements: Iterable[Measurement],
    platform: Platform,
    offers: Sequence[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries = installed_version,
) -> Ranking:
    """The priors' ranks, corrected by measurements of this machine.

    Among the backends measured for a question, the next place goes to the fastest if it takes less
    than 98 % of the time of the one that the priors favour, else to the latter. A backend that
    passes others takes the best of their ranks. A passed backend comes one rank after it, or keeps
    its own rank if that is later. Two backends with equal priors stay equal within 2 %. Backends
    without measurements keep their ranks.

    A measurement counts if its device is `platform`, its versions are those of `libraries`, no
    current measurement of the backend for the same phase and shape failed conformance, and neither
    libraries nor `policy` bar the backend. On a hypothetical platform none counts. Backends that
    `policy` names or prefers win over any rank.
    """
    found = current_measurements(measurements, platform, offers, policy, libraries=libraries)
    return ranking_by(found, offers)


def ranking_by(found: Current, offers: Iterable[Offer]) -> Ranking:
    """As `measured_ranking`, from the measurements that count."""
    if not found:
        return prior_rank
    by_address = {offer.address: offer for offer in offers}
    known: dict[tuple[str, Request], Mapping[str, int]] = {}

    def ranks_for(question: Question) -> Mapping[str, int]:
        """Ranks of the backends that serve the question, at any page size."""
        timed = {
            address: {each.workload: each.median_us for each in measured}
            for address, measured in found.get((question.phase, shape_of(question)), {}).items()
        }
        asked = insisted(question)
        cards = {address: by_address[address].card for address in timed}
        serving = [a for a, card in cards.items() if admits_any(card, card.clauses, asked)]
        return ranks({a: prior_rank(by_address[a], question).value for a in serving}, timed)

    def ranking(offer: Offer, question: Question) -> Rank:
        asked = question.phase, question.request
        if asked not in known:
            known[asked] = ranks_for(question)
        prior = prior_rank(offer, question)
        rank = known[asked].get(offer.address, prior.value)
        return Rank(rank, measured=rank != prior.value)

    return ranking


def current_measurements(
    measurements: Iterable[Measurement],
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries = installed_version,
) -> Current:
    """The measurements that count: see `measured_ranking`."""
    policy = policy or Policy()
    device = Device.of(platform)
    here = [each for each in measurements if each.device == device]
    if policy.hypothetical or not here:
        return {}
    known = assumed(policy.without, libraries, False)
    by_address = {offer.address: offer for offer in offers}
    current: dict[tuple[str, str], dict[str, list[Measurement]]] = {}
    for address in sorted({each.backend for each in here} & by_address.keys()):
        offer = by_address[address]
        if standing(offer, policy, known):
            continue
        versions = versions_of(offer, known)
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
        taken = fastest if share[fastest] < 1 - LEAST_GAIN else first
        # The best rank that is left, but after the previous place
        rank = priors[first]
        if placed:
            before = placed[-1]
            faster = share_of(times[before], times[taken]) < 1 - LEAST_GAIN
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
