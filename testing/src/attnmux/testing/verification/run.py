"""One run of the suite on a candidate: fixed cases, then sampled ones, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any

from attnmux.core import FrozenMapping
from attnmux.core.plugin import installed_version
from attnmux.testing.cases.linear import AnyCase
from attnmux.testing.run.candidate import Candidate, Outcome
from attnmux.testing.run.children import Trial, run_in_children
from attnmux.testing.sampling.card_limits import outside_points, try_point
from attnmux.testing.sampling.sampler import Sampler
from attnmux.testing.verification.kept_run import KeptRun

QUICK = 30.0
"""Seconds for sampled cases in a quick run."""


@dataclass(kw_only=True, eq=False)
class Plan:
    """The fixed cases, then sampled ones until the budget is spent."""

    fixed: Sequence[AnyCase]
    sampled: Iterator[AnyCase]
    is_wanted: Callable[[AnyCase], bool] = lambda case: True
    """Whether a sampled case is wanted."""
    budget: float
    """Seconds for sampled cases."""
    seed: int
    kept: KeptRun | None = None
    drawn: int = field(default=0, init=False)
    """Sampled cases so far."""
    resumed: list[Outcome] = field(default_factory=list, init=False)
    """Outcomes of the cases that passed in the run that this one continues."""

    def trials(self) -> Iterator[Trial]:
        """The cases that are left to run."""
        for case in self._cases():
            if self.kept is not None and self.kept.has(case):
                self.resumed.append(self.kept.passed[case.name, case.execution])
            else:
                yield case, self.seed

    def _cases(self) -> Iterator[AnyCase]:
        yield from self.fixed
        end = time.monotonic() + self.budget
        # An unlimited source that is not asked once the time is over
        while time.monotonic() < end and (drawn := next(self.sampled, None)) is not None:
            if self.is_wanted(drawn):
                self.drawn += 1
                yield drawn


def run_trials(candidate: Candidate, plan: Plan, *, jobs: int, timeout: float) -> Iterator[Outcome]:
    """The outcomes, from child processes unless `jobs` is 0."""
    if jobs:
        return run_in_children(candidate, plan.trials(), jobs=jobs, timeout=timeout)
    from attnmux.testing.run.runner import run_case  # noqa: PLC0415  # torch, after the name is known

    return (run_case(candidate, case, seed=seed) for case, seed in plan.trials())


def stopping(outcomes: Iterable[Outcome], *, fail_fast: bool) -> Iterator[Outcome]:
    """The outcomes; with `fail_fast`, none after the first failure."""
    for outcome in outcomes:
        yield outcome
        if fail_fast and outcome.status == "failed":
            return


def limits_of(candidate: Candidate) -> list[Outcome]:
    """The selector's answers just beyond each limit of the card."""
    return [try_point(candidate, point) for point in outside_points(candidate)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """A finished run."""

    candidate: Candidate
    distribution: str
    """The plugin's; empty for a backend that no plugin offers."""
    outcomes: tuple[Outcome, ...]
    limits: tuple[Outcome, ...]
    seed: int
    is_complete: bool
    """Whether every case that the card admits ran."""
    sampled: int
    pairs: int
    pairs_covered: int
    resumed: int = 0

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def has_failed(self) -> bool:
        return any(outcome.status == "failed" for outcome in (*self.outcomes, *self.limits))

    @property
    def max_error(self) -> float:
        return max((outcome.max_error for outcome in self.outcomes), default=0.0)

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the plugin and of everything that it ran on."""
        names = {
            self.distribution,
            *self.candidate.card.libraries(),
            "attnmux-core",
            "attnmux-testing",
            "torch",
            "triton",
        } - {""}
        found = {name: installed_version(name) for name in sorted(names)}
        return FrozenMapping({name: each for name, each in found.items() if each is not None})

    def to_dict(self) -> dict[str, Any]:
        candidate = self.candidate
        return {
            "backend": candidate.card.name,
            "plugin": candidate.plugin,
            "platform": candidate.platform.to_dict(),
            "device": candidate.device,
            "versions": dict(self.versions),
            "seed": self.seed,
            "complete": self.is_complete,
            "resumed": self.resumed,
            **{status: self.count(status) for status in ("passed", "failed", "refused")},
            "sampled": self.sampled,
            "pairs": self.pairs,
            "pairs_covered": self.pairs_covered,
            "max_error": self.max_error,
            "cases": [outcome.to_dict() for outcome in self.outcomes],
            "limits": [outcome.to_dict() for outcome in self.limits],
        }


def verify_quickly(
    candidate: Candidate, distribution: str, *, budget: float, jobs: int, timeout: float
) -> Verification:
    """Sampled cases alone, for `budget` seconds."""
    seed = SystemRandom().randrange(1 << 31)
    sampler = Sampler(candidate=candidate, seed=seed)
    plan = Plan(fixed=(), sampled=sampler.cases(), budget=budget, seed=seed)
    outcomes = tuple(run_trials(candidate, plan, jobs=jobs, timeout=timeout))
    return Verification(
        candidate=candidate,
        distribution=distribution,
        outcomes=outcomes,
        limits=tuple(limits_of(candidate)),
        seed=seed,
        is_complete=False,
        sampled=plan.drawn,
        pairs=sampler.coverage.total,
        pairs_covered=sampler.coverage.covered,
    )
