"""A handful of the suite's cases on a chosen backend that did not pass here, before its use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attnmux.core import BackendFailed, Decision, Offer, TunedLaunch
from attnmux.core.verbs import Passes, Unverified
from attnmux.testing.first_use.trial_cases import TrialCases, trial_cases
from attnmux.testing.run.candidate import Candidate
from attnmux.testing.run.children import Trial, run_in_children

SECONDS = 30.0
"""After which no case begins that is not needed. The needed cases, in which kernels are compiled,
do not count."""
TIMEOUT = 900.0
"""Seconds of a case. A library may take minutes to compile a kernel."""


class FirstUse:
    """Called with each decision before its backends are made."""

    def __init__(
        self,
        offers: Sequence[Offer],
        *,
        device: str,
        cache: Path | None,
        say: Callable[[str], object],
        launches: tuple[TunedLaunch, ...] = (),
    ) -> None:
        """device: torch's name. cache: a folder for the names of those that passed; None keeps
        none. say: told, in a sentence, what is about to take seconds."""
        self._offers = offers
        self._device, self._launches, self._say = device, launches, say
        self._store = Passes.in_cache(cache)
        self._tried: dict[str, BackendFailed | None] = {}
        """The trials of this process, by key, with the failures."""

    def __call__(self, decision: Decision) -> None:
        """Run cases on each backend that `Unverified.untried` finds, in child processes.

        Raises BackendFailed for one that fails a case, ends the process or takes too long, so that
        an automatic choice goes on to the next candidate. A pass is kept if every case ran. No
        trial runs twice in a process.
        """
        for found in Unverified.untried(decision, self._offers, self._store):
            key = _key(found, decision)
            if key not in self._tried and key not in self._store.read():
                self._tried[key] = self._try(found, decision, key)
            failure = self._tried.get(key)
            if failure is not None:
                raise failure

    def _try(self, found: Unverified, decision: Decision, key: str) -> BackendFailed | None:
        """The failure of a trial, whose pass is kept."""
        try:
            if self._passes(found, decision):
                self._store.write({**self._store.read(), key: found.offer.address})
        except BackendFailed as failure:
            return failure
        return None

    def _passes(self, found: Unverified, decision: Decision) -> bool:
        """Whether all cases of the trial ran and passed."""
        address = found.offer.address
        candidate = Candidate(
            card=found.offer.card,
            plugin=found.offer.plugin,
            platform=decision.platform,
            device=self._device,
            options=found.choice.options,
            launches=self._launches,
        )
        cases = trial_cases(candidate, found.request, found.phases, page_size=decision.page_size)
        count = len(cases.needed) + len(cases.others)
        if cases.missing:
            phases = " and ".join(cases.missing)
            self._say(f"the suite has no case of {phases} for {address} in this model's shapes")
        if not count:
            return False
        self._say(f"{address} was chosen, but {found.reason}: {count} cases run on it first")
        ran = 0
        for outcome in run_in_children(candidate, _in_time(cases), jobs=1, timeout=TIMEOUT):
            ran += outcome.status == "passed"
            if outcome.status == "failed":
                raise BackendFailed(
                    address,
                    f"case {outcome.case} failed: {outcome.message}",
                    hint=f"see `attnmux verify {address}`; --backend {address} takes it anyway",
                )
        if ran < count:
            self._say(f"{ran} of {count} cases ran on {address} in time; the next use tries again")
        return ran == count and not cases.missing


def _in_time(cases: TrialCases) -> Iterator[Trial]:
    """All needed cases, then the others until the time is over."""
    for seed, case in enumerate(cases.needed):
        yield case, seed
    end = time.monotonic() + SECONDS
    for seed, case in enumerate(cases.others, start=len(cases.needed)):
        if time.monotonic() > end:
            return
        yield case, seed


def _key(found: Unverified, decision: Decision) -> str:
    """Names a trial: what is tried, and in which shapes."""
    return Passes.key(
        found.offer,
        decision.platform,
        found.choice.options,
        found.request.kind,
        found.phases,
        decision.request.to_dict(),
        decision.page_size,
    )
