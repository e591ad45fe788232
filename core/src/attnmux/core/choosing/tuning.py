"""The ranking that follows from measurements of this machine.

They count only while the device and every library are the same as when they were made, and only for
backends whose answers were checked first.
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
"""The share of the time that a backend must save before it passes one that the priors favour;
a smaller difference is taken for noise."""

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
    """The priors' ranks, changed where measurements of this very machine say otherwise.

    Of the backends that were measured for what is asked, the next place goes to the fastest where
    it takes less than 98 % of the time of the one that the priors favour, else to that one. Who
    passes others takes the best of their ranks; those it passed come one rank behind it, or keep
    their own where that is behind already; two that the priors hold level stay so within 2 %.
    Backends that were not measured keep their ranks, and so their places among the others.

    A measurement counts where its device is `platform`, its versions are those of `libraries`, no
    current measurement of the backend for the same phase and shape has failed conformance, and
    nothing (libraries, `policy`) keeps the backend out. Where the platform is hypothetical, none
    does. Like every rank, a measured one is behind what `policy` names or prefers.
    """
    found = current_measurements(measurements, platform, offers, policy, libraries=libraries)
    return ranking_by(found, offers)


def ranking_by(found: Current, offers: Iterable[Offer]) -> Ranking:
    """As `measured_ranking`, by measurements that count."""
    by_address = {offer.address: offer for offer in offers}
    times = {
        asked: {
            address: {each.workload: each.median_us for each in timed}
            for address, timed in by_backend.items()
        }
        for asked, by_backend in found.items()
    }
    return _Measured(times, by_address) if times else prior_rank


def current_measurements(
    measurements: Iterable[Measurement],
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries = installed_version,
) -> Current:
    """Those that count: see `measured_ranking`."""
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


class _Measured:
    """The ranking, once it is known which measurements count."""

    def __init__(
        self,
        times: Mapping[tuple[str, str], Mapping[str, Times]],
        offers: Mapping[str, Offer],
    ) -> None:
        self._times = times
        self._offers = offers
        self._ranks: dict[tuple[str, Request], Mapping[str, int]] = {}

    def __call__(self, offer: Offer, question: Question) -> Rank:
        asked = question.phase, question.request
        if asked not in self._ranks:
            self._ranks[asked] = self._ranked(question)
        prior = prior_rank(offer, question)
        rank = self._ranks[asked].get(offer.address, prior.value)
        return Rank(rank, measured=rank != prior.value)

    def _ranked(self, question: Question) -> Mapping[str, int]:
        """Ranks of those that serve what is asked, be it at another page size than is tried."""
        timed = self._times.get((question.phase, shape_of(question)), {})
        asked = insisted(question)
        cards = {address: self._offers[address].card for address in timed}
        serving = [a for a, card in cards.items() if admits_any(card, card.clauses, asked)]
        priors = {a: prior_rank(self._offers[a], question).value for a in serving}
        return ranks(priors, timed)


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
        # The best of the priors' ranks that are left, but behind the one before
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
    """The share of the others' time that is taken: the geometric mean over the workloads that both
    were measured for; 1 where there are none."""
    common = times.keys() & others.keys()
    if not common:
        return 1.0
    logs = math.fsum(math.log(times[each]) - math.log(others[each]) for each in common)
    return math.exp(logs / len(common))
