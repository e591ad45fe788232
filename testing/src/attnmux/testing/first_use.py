"""A handful of the suite's cases on a chosen backend that never passed, before its first use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

from attnmux.core import BackendFailed, Decision, Measurement, Offer, TunedLaunch
from attnmux.core.choosing.find.store import Store
from attnmux.core.choosing.measured.unverified import Unverified, unverified
from attnmux.core.choosing.offer.libraries import distributions
from attnmux.testing.candidate import Candidate
from attnmux.testing.children import Trial, run_in_children
from attnmux.testing.kept_run import digest
from attnmux.testing.linear_cases import AnyCase
from attnmux.testing.shaped import cases_in_shape

CASES = 4
"""Of each phase, from the first to the last of those in the request's shapes."""
SECONDS = 30.0
"""After which no further case begins."""
TIMEOUT = 180.0
"""Seconds of a case, in which a kernel may be compiled."""


class FirstUse:
    """Called with each decision before its backends are made."""

    def __init__(
        self,
        offers: Sequence[Offer],
        measurements: Sequence[Measurement],
        *,
        device: str,
        cache: Path | None,
        say: Callable[[str], object],
        launches: tuple[TunedLaunch, ...] = (),
    ) -> None:
        """device: torch's name. cache: a folder for the names of those that passed; None keeps
        none. say: told, in a sentence, what is about to take seconds."""
        self._offers, self._measurements = offers, measurements
        self._device, self._launches, self._say = device, launches, say
        self._store = Store.of(cache, "first-use")

    def __call__(self, decision: Decision) -> None:
        """Run cases on each backend that `unverified` finds, in child processes.

        Raises BackendFailed for one that fails a case, ends the process or takes too long, so that
        an automatic choice goes on to the next candidate.
        """
        for found in unverified(decision, self._offers, self._measurements):
            key = _key(found, decision)
            passed = self._store.read()
            if key in passed:
                continue
            self._try(found, decision)
            if not _is_editable(found.offer.distribution):
                self._store.write({**passed, key: found.offer.address})

    def _try(self, found: Unverified, decision: Decision) -> None:
        address = found.offer.address
        candidate = Candidate(
            card=found.offer.card,
            plugin=found.offer.plugin,
            platform=decision.platform,
            device=self._device,
            options=found.choice.options,
            launches=self._launches,
        )
        cases = _cases(candidate, found, decision)
        self._say(f"{address} was chosen, but {found.reason}: {len(cases)} cases run on it first")
        ran = 0
        for outcome in run_in_children(candidate, _in_time(cases), jobs=1, timeout=TIMEOUT):
            ran += outcome.status == "passed"
            if outcome.status == "failed":
                raise BackendFailed(
                    address,
                    f"case {outcome.case} failed: {outcome.message}",
                    hint=f"see `attnmux verify {address}`; --backend {address} takes it anyway",
                )
        if not ran:
            self._say(f"no case of the suite fits {address} in this model's shapes")


def _cases(candidate: Candidate, found: Unverified, decision: Decision) -> list[AnyCase]:
    in_shape = partial(
        cases_in_shape, candidate, found.request, page_size=decision.page_size, in_graph=False
    )
    by_phase = [_spread(list(in_shape(phase))) for phase in found.phases]
    # By turns, so that each phase has its share of the time
    mixed = [case for turn in zip_longest(*by_phase) for case in turn if case is not None]
    return list(dict.fromkeys(mixed))


def _spread(cases: list[AnyCase]) -> list[AnyCase]:
    """CASES of them, evenly spaced, the first and the last included."""
    if len(cases) <= CASES:
        return cases
    return [cases[round(place * (len(cases) - 1) / (CASES - 1))] for place in range(CASES)]


def _in_time(cases: Iterable[AnyCase]) -> Iterator[Trial]:
    end = time.monotonic() + SECONDS
    for number, case in enumerate(cases):
        if number and time.monotonic() > end:
            return
        yield case, number


def _key(found: Unverified, decision: Decision) -> str:
    """Changes with the files of the plugin and of all that it runs on, and with the shapes."""
    return digest(
        found.offer.card,
        found.offer.distribution,
        found.offer.address,
        found.request.kind,
        found.phases,
        dict(found.choice.options),
        decision.platform.to_dict(),
        decision.request.to_dict(),
        decision.page_size,
    )


def _is_editable(distribution: str) -> bool:
    """Whether its files may change without its RECORD."""
    known = distributions().get(distribution)
    return known is None or b'"editable": true' in known.read("direct_url.json")
