"""Random cases that cover a card's claims by pairs of values. Imports no torch.

A `Point` is one value for each axis. The axes' values come from the card's clauses: every listed
value, both ends of a range, and random values between them; for an axis without a limit, the sizes
of `Axis.samples`. Each case covers as many new pairs of values as a few random drafts
allow, as AETG does
(Cohen et al., IEEE TSE 23(7), 1997).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

from attnmux.core.plugin import Clause
from attnmux.core.verbs import AXES, Question
from attnmux.testing.cases.case import Case
from attnmux.testing.cases.linear import AnyCase
from attnmux.testing.run.candidate import Candidate
from attnmux.testing.sampling.cases import case_of
from attnmux.testing.sampling.levels import Levels, levels_of
from attnmux.testing.sampling.linear import linear_samples
from attnmux.testing.sampling.points import Point, Value, afford, cost, settle

Pair = tuple[str, Value | None, str, Value | None]

FAR = 131_072
FAR_MODES = {4: "decode", 40: "extend"}
"""Positions among the extremes at which a slow case of length `FAR` runs, with its mode."""
DRAFTS, PIN_TRIES = 6, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How many pairs of values the cases had so far, of all pairs that a case can have."""

    covered: int
    total: int

    def __str__(self) -> str:
        if not self.total:
            return "no pairs of values are counted"
        percent = 100 * self.covered // max(self.total, 1)
        return f"{percent} % of {self.total} pairs of values"


@dataclass(kw_only=True, eq=False)
class Sampler:
    """Cases of one candidate. The same seed gives the same cases."""

    candidate: Candidate
    seed: int
    page_sizes: frozenset[int] = frozenset()
    """Use only these page sizes. Empty: all that the card admits."""
    most_cost: float = 1.0
    """Scales `MOST_READ` and `MOST_MULTIPLIED`. Below 1, cases of length `FAR` are left out."""
    _random: Random = field(init=False)
    _levels: list[Levels] = field(init=False)
    _open: dict[Pair, None] = field(init=False)
    """Pairs that no case has had yet, in a fixed order."""
    _covered: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._random, card = Random(self.seed), self.candidate.card
        self._levels = [
            levels
            for clause in card.clauses
            if _fits_machine(clause, self.candidate)
            for levels in levels_of(clause, self._random, self.page_sizes, card.options)
        ]
        self._open = dict.fromkeys(
            pair for levels in self._levels for pair in _pairs_of_levels(levels)
        )

    @property
    def coverage(self) -> Coverage:
        return Coverage(covered=self._covered, total=self._covered + len(self._open))

    def cases(self) -> Iterator[AnyCase]:
        """Yield extremes of all axes in each mode, then all pairs of values, then random points.

        Cases of linear layers are random from the first.
        """
        if not self._levels:
            yield from linear_samples(self.candidate, self.seed, most_cost=self.most_cost)
        number = 0
        for pins in self._goals():
            found = self._case(pins, number)
            if found is not None:
                yield found
                number += 1

    def _goals(self) -> Iterator[Point]:
        """Yield the values that the next case should have."""
        if not self._levels:
            return
        ends = {
            ("mode", mode, name, level)
            for levels in self._levels
            for mode in levels["mode"]
            for name, values in levels.items()
            for level in (values[0], values[-1])
            if name != "mode"
        }
        extremes = [pair for pair in self._open if _in_order(pair) in ends]
        self._random.shuffle(extremes)
        for number, pair in enumerate(extremes):
            if number in FAR_MODES and self.most_cost >= 1:
                yield {"mode": FAR_MODES[number], "length": FAR, "rows": 1, "graph": False}
            if pair in self._open:
                yield {pair[0]: pair[1], pair[2]: pair[3]}
        while self._open:
            pair = self._random.choice(list(self._open))
            yield {pair[0]: pair[1], pair[2]: pair[3]}
        while True:
            yield {}

    def _case(self, pins: Point, number: int) -> Case | None:
        """The admitted draft that has the pinned values and covers the most new pairs.

        None without such a draft: no case can have the pinned pair, and it is no longer counted.
        """
        best: tuple[int, Point, Case] | None = None
        drafts = 0
        for _ in range(PIN_TRIES if pins else 1):
            point = self._draft(pins)
            if point is None:
                continue
            new = sum(pair in self._open for pair in _pairs(point))
            if best is not None and new <= best[0]:
                continue
            case = case_of(point, Random(f"{self.seed} {number}"), number)
            if self.candidate.admits(case):
                best = new, point, case
                drafts += 1
            if drafts == DRAFTS:
                break
        if best is None:
            if len(pins) == 2:
                self._open = {p: None for p in self._open if dict([p[:2], p[2:]]) != pins}
            return None
        for pair in _pairs(best[1]):
            if pair in self._open:
                del self._open[pair]
                self._covered += 1
        return best[2]

    def _draft(self, pins: Point) -> Point | None:
        """A random affordable point of one clause with the pinned values; None if there is none."""
        able = [
            levels
            for levels in self._levels
            if all(
                name in levels and (value in levels[name] or value == FAR)
                for name, value in pins.items()
            )
        ]
        if not able:
            return None
        levels = self._random.choice(able)
        point = {name: self._random.choice(values) for name, values in levels.items()} | pins
        settle(point)
        afford(point, pins, levels, self._random, self.most_cost)
        kept = all(point[name] == value for name, value in pins.items())
        return point if kept and cost(point) <= self.most_cost else None


def _fits_machine(clause: Clause, candidate: Candidate) -> bool:
    question = Question(
        request=Case(name="", steps=()).request, platform=candidate.platform, phase="decode"
    )
    for axis in AXES:
        if axis.of_machine:
            value = axis.wanted(question)
            if value is not None and not axis.condition(clause).admits(value):
                return False
    return True


def _pairs(point: Point) -> list[Pair]:
    return [(a, point[a], b, point[b]) for a, b in combinations(sorted(point), 2)]


def _pairs_of_levels(levels: Levels) -> Iterator[Pair]:
    for a, b in combinations(sorted(levels), 2):
        for one in levels[a]:
            for other in levels[b]:
                yield a, one, b, other


def _in_order(pair: Pair) -> Pair:
    """The pair with its mode first, if it has one."""
    return (*pair[2:], *pair[:2]) if pair[2] == "mode" else pair
