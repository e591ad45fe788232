"""Runs the conformance suite in a request's shapes, for a bounded time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from attnmux.core import TunedLaunch
from attnmux.testing import Candidate, cases_in_shape, run_case
from attnmux.testing.bench.entrants import Entrant


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """How a backend did in one phase."""

    backend: str
    """`plugin/name`."""
    phase: str
    passed: int
    cases: int
    """Cases that apply, those that were not run for lack of time included."""
    failure: str = ""
    """The first failure, which ends the check."""

    @property
    def conformant(self) -> bool:
        return self.passed > 0 and not self.failure


def check_conformance(
    entrant: Entrant, device: str, seconds: float, launches: tuple[TunedLaunch, ...] = ()
) -> Check:
    """Run the cases in the suite's order until one fails or `seconds` are over, but at least one.

    device: a torch device, as in "cuda:1". launches: as `BackendContext.launches`.
    """
    candidate = Candidate(
        card=entrant.offer.card,
        plugin=entrant.offer.plugin,
        platform=entrant.decision.platform,
        device=device,
        options=entrant.choice.options,
        launches=launches,
    )
    decision = entrant.decision
    cases = tuple(
        cases_in_shape(
            candidate,
            decision.request,
            entrant.phase,
            page_size=decision.page_size,
            in_graph=entrant.in_graph,
        )
    )
    passed, end = 0, time.monotonic() + seconds
    failure = "" if cases else "no case of the suite applies to this request"
    for case in cases:
        outcome = run_case(candidate, case)
        passed += outcome.status == "passed"
        if outcome.status == "failed":
            failure = f"{case.name}: {outcome.message}"
        if failure or time.monotonic() > end:
            break
    return Check(
        backend=entrant.offer.address,
        phase=entrant.phase,
        passed=passed,
        cases=len(cases),
        failure=failure or ("" if passed else "every case that was run was refused"),
    )
