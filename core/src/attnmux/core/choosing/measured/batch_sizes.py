"""Different backends for decode steps of different batch sizes, by measurements of this machine.

The fastest backend can depend on the batch size, and graphs are captured for a few sizes anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isqrt

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.judge.axes import Question
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.measurement import Measurement, shape_of
from attnmux.core.choosing.measured.tuning import (
    LEAST_GAIN,
    Current,
    Times,
    current_measurements,
    ranking_by,
    share_of,
)
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.libraries import Libraries, installed_version
from attnmux.core.choosing.offer.named import read_options
from attnmux.core.choosing.solver import solve
from attnmux.core.choosing.tell.choice import SizeRange, choice_of
from attnmux.core.choosing.tell.decision import Decision


def solve_measured(
    request: Request,
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    measurements: Iterable[Measurement],
    libraries: Libraries = installed_version,
) -> Decision:
    """`solve` with the ranks that follow from measurements, then `with_batch_sizes`.

    Raises what `solve` raises.
    """
    offers, measurements = tuple(offers), tuple(measurements)
    if not measurements:
        return solve(request, platform, offers, policy, libraries=libraries)
    found = current_measurements(measurements, platform, offers, policy, libraries=libraries)
    ranking = ranking_by(found, offers)
    decision = solve(request, platform, offers, policy, libraries=libraries, ranking=ranking)
    return with_batch_sizes(decision, offers, policy, found, libraries=libraries)


def with_batch_sizes(
    decision: Decision,
    offers: Sequence[Offer],
    policy: Policy | None,
    found: Current,
    *,
    libraries: Libraries = installed_version,
) -> Decision:
    """The decision, with backends that decode some batch sizes faster than the phase's backend.

    A rival must be eligible for decode as decided (page size, KV dtype, the other phases'
    backends), and the policy must not prefer the phase's own backend to it. At each batch size
    that was measured for both, the fastest backend serves if it saves more than 2 %. A size in
    between goes with the measured size that is nearer as a ratio, a larger one with the last. A
    named backend decodes all sizes.
    """
    policy = policy or Policy()
    if "decode" not in decision.phases or policy.named_for("decode") is not None:
        return decision
    question = Question(request=decision.request, platform=decision.platform, phase="decode")
    times = _by_size(found.get(("decode", shape_of(question)), {}))
    usual = decision.phases["decode"].address
    sizes = [size for size, timed in sorted(times.items()) if usual in timed]
    if len(sizes) < 2:
        return decision
    rivals = _rivals(decision, offers, policy, usual)
    best = [_best(times[size], usual, rivals) for size in sizes]
    given = read_options(policy.options, offers, libraries)
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
    return (fastest, shares[fastest]) if shares.get(fastest, 1) < 1 - LEAST_GAIN else (usual, 1.0)


def _between(sizes: Sequence[int], place: int) -> int:
    """The largest size that goes with the measured size before `place`; 0 before the first."""
    return isqrt(sizes[place - 1] * sizes[place]) if place else 0
