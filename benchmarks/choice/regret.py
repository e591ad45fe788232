"""What choosing costs on random steps: the chosen backend's time over that of the fastest.

Nothing is measured before a choice is made: it follows the figures that plugins carry, else the
priors of cards. Times are kept in a file, so that a run goes on where the one before ended, and the
choices are made when the file is read: with shipped figures and without.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.grid_draws import SPACE, Draw, draws

from attnmux.core import NoBackend, Offer, solve_measured
from attnmux.testing.bench import Report
from attnmux.testing.bench.margins import server_of
from attnmux.testing.bench.spot import Spot, Steps

MAX_MEAN, MAX_P99 = 1.02, 1.10
COLUMNS = {"family": "", "step": "", "shipped": "", "regret": ".3f", "plain": "", "regret ": ".3f"}

Rounds = Mapping[str, Sequence[float]]
"""Microseconds in each round, by address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A step, and what each backend took for it."""

    number: int
    """Of its family's draws."""
    draw: Draw
    rounds: Rounds

    @property
    def steps(self) -> Steps:
        return Steps(self.draw.request, (self.draw.workload,))

    def regret(self, chosen: str) -> float | None:
        """The chosen one's time over the fastest one's; 1 if their rounds overlap. None without a
        time of it."""
        if chosen not in self.rounds:
            return None
        times = {name: median(us) for name, us in self.rounds.items()}
        best = min(times, key=lambda name: times[name])
        if min(self.rounds[chosen]) <= max(self.rounds[best]):
            return 1.0
        return times[chosen] / times[best]


def wanted(seed: int, count: int) -> Iterator[Measured]:
    """`count` steps of each family, a step of each in turn, so that a part is of all families."""
    of_each = {family: list(draws(family, count, seed)) for family in SPACE}
    for number in range(count):
        for found in of_each.values():
            yield Measured(number=number, draw=found[number], rounds={})


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """The file of times: a line of JSON for each step."""

    path: Path
    seed: int

    def read(self) -> dict[tuple[str, int], Rounds]:
        """By family and number. Lines of another seed are left alone, and so is half of a line: a
        run was killed, and the step is timed again."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = {}
        for line in lines:
            with suppress(json.JSONDecodeError):
                data = json.loads(line)
                if data["seed"] == self.seed:
                    found[data["family"], data["number"]] = data["rounds"]
        return found

    def add(self, step: Measured, rounds: Rounds, notes: Sequence[str]) -> None:
        named: dict[str, Any] = {"seed": self.seed, "family": step.draw.family}
        named |= {"number": step.number, "step": str(step.draw)}
        # Text before it may be half of a line. One write: another process may write, too
        line = json.dumps({**named, "rounds": rounds, "notes": notes})
        with self.path.open("a") as file:
            file.write(f"\n{line}\n")


def measure(
    spot: Spot,
    times: Times,
    steps: Sequence[Measured],
    minutes: float,
    jobs: int,
    share: tuple[int, int] = (0, 1),
) -> int:
    """Time the steps that have no times yet until the minutes are over. Returns how many.

    share: which of how many equal parts, each of all families. Raises BackendFailed for a backend
    that made the device unusable; its step is left behind.
    """
    end, known = time.monotonic() + 60 * minutes, times.read()
    left = [
        each
        for each in steps
        if (each.draw.family, each.number) not in known and each.number % share[1] == share[0]
    ]
    done = 0
    for each in spot.compiled(left, jobs, end):
        if time.monotonic() > end:
            break
        rows = spot.rows(each.draw.workload, spot.entrants(each.steps))
        notes = [f"{row.backend}: {row.status}: {row.why}" for row in rows if row.why]
        times.add(each, {row.backend: row.rounds_us for row in rows if row.rounds_us}, notes)
        spot.check_device(rows)
        done += 1
    return done


def chosen_for(spot: Spot, step: Measured, *, shipped: bool) -> str:
    """The backend that an engine gets for the step, which asks for graphs as bridges do: one of
    those that are timed."""
    timed = frozenset(spot.names)
    offers: Sequence[Offer] = [each for each in spot.offers if not timed or each.names & timed]
    if not shipped:
        offers = [replace(each, figures=()) for each in offers]
    request = step.draw.request
    for asked in (request.replace(origin="model", graph=True), request):
        try:
            decision = solve_measured(asked, spot.platform, offers, spot.policy, measurements=())
        except NoBackend:
            continue
        return server_of(decision, step.draw.workload)
    return "-"


def tell(report: Report, spot: Spot, times: Times, steps: Sequence[Measured]) -> bool:
    """A row for each measured step, then the regret of each family and of all. Returns whether the
    bars are kept with shipped figures."""
    known = times.read()
    regrets: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    missing = 0
    for step in steps:
        rounds = known.get((step.draw.family, step.number))
        if not rounds:
            missing += 1
            continue
        timed = replace(step, rounds=rounds)
        row: list[str | float | None] = []
        for shipped in (True, False):
            chosen = chosen_for(spot, step, shipped=shipped)
            regret = timed.regret(chosen)
            row += [chosen, regret]
            # A backend without a right answer is as bad as none
            of_family = regrets[shipped].setdefault(step.draw.family, [])
            of_family.append(float("inf") if regret is None else regret)
        report.add(step.draw.family, str(step.draw), *row)
    everything, plain = (
        [each for found in regrets[shipped].values() for each in found] for shipped in (True, False)
    )
    report.note(
        "\n| family | steps | shipped figures: mean, 99 %, worst | without |\n|---|--:|---|---|"
    )
    for family, found in {**regrets[True], "all": everything}.items():
        without = regrets[False].get(family, plain)
        report.note(f"| {family} | {len(found)} | {summary(found)} | {summary(without)} |")
    report.save(regret={"shipped": regrets[True], "plain": regrets[False]})
    kept = bool(everything) and is_kept(everything)
    bars = f"bars: mean {MAX_MEAN}, 99th percentile {MAX_P99}: {'kept' if kept else 'MISSED'}"
    report.note(f"with shipped figures: {summary(everything)}; {missing} without times; {bars}")
    return kept


def percentile(found: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ranked = sorted(found)
    return ranked[max(0, -(-len(ranked) * round(share * 1000) // 1000) - 1)]


def is_kept(found: Sequence[float]) -> bool:
    return fmean(found) <= MAX_MEAN and percentile(found, 0.99) <= MAX_P99


def summary(found: Sequence[float]) -> str:
    if not found:
        return "no step"
    return f"{fmean(found):.4f}, {percentile(found, 0.99):.3f}, {max(found):.3f}"
