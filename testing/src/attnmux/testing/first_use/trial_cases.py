"""The suite's cases that a trial runs, chosen by what each shows and not by its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from attnmux.core import Request
from attnmux.testing.cases.case import PHASES, Case, Step
from attnmux.testing.cases.linear import AnyCase
from attnmux.testing.first_use.shaped import FEATURES, cases_in_shape
from attnmux.testing.run.candidate import Candidate

Meaning = Callable[[AnyCase, Sequence[Step]], bool]
"""(a case, its steps of the phase): whether it shows this."""

MOST_PAGES = 8
"""Most pages of a request, so that a page that is missed shows beyond any tolerance."""
LONG = 500
"""Keys that kernels split among thread blocks."""
MANY_STEPS = 5


class TrialCases(NamedTuple):
    """Cases of a trial."""

    needed: tuple[AnyCase, ...]
    """One of each phase, over several pages."""
    others: tuple[AnyCase, ...]
    """Further cases that are worth their time, the phases by turns."""
    missing: tuple[str, ...]
    """Phases for which the suite has no needed case."""


def trial_cases(
    candidate: Candidate, request: Request, phases: Sequence[str], *, page_size: int
) -> TrialCases:
    """The cases that the card admits, in the request's shapes and without other features."""
    needed: list[AnyCase] = []
    others: list[list[AnyCase]] = []
    missing = []
    for phase in phases:
        shaped = cases_in_shape(candidate, request, phase, page_size=page_size, in_graph=False)
        cases = list(candidate.admitted(shaped))
        first = next(_that_show(SEVERAL_PAGES, cases, phase), None)
        if first is None:
            missing.append(phase)
            continue
        needed.append(first)
        others.append([])
        for meaning in (*OTHERS, *(_has(name) for name in FEATURES if getattr(request, name))):
            mine = [first, *others[-1]]
            if next(_that_show([meaning], mine, phase), None) is None:
                others[-1] += list(_that_show([meaning], cases, phase))[:1]
    turns = chain.from_iterable(zip_longest(*others))
    rest = dict.fromkeys(case for case in turns if case is not None and case not in needed)
    return TrialCases(tuple(dict.fromkeys(needed)), tuple(rest), tuple(missing))


def _that_show(
    meanings: Sequence[Meaning], cases: Sequence[AnyCase], phase: str
) -> Iterator[AnyCase]:
    """The cases with the first of the meanings, then those with the next."""
    for meaning in meanings:
        for case in cases:
            encodes = isinstance(case, Case) and case.is_encoder
            if meaning(case, [s for s in case.steps if encodes or PHASES[s.mode] == phase]):
                yield case


def _has_few_pages(case: AnyCase, steps: Sequence[Step]) -> bool:
    """A request has two cached pages or more, of which each is a good part of its keys."""
    return _has_pages(case, steps) and any(
        2 * case.page_size <= cached < total <= MOST_PAGES * case.page_size
        for step in steps
        for cached, total in zip(step.cached, step.lens, strict=True)
    )


def _has_pages(case: AnyCase, steps: Sequence[Step]) -> bool:
    """A request reads a whole cached page and further keys, or the state of earlier tokens. An
    encoder has neither."""
    if isinstance(case, Case):
        if case.is_encoder:
            return any(len(step.lens) > 1 for step in steps)
        if None not in case.windows:
            return False
    return any(
        case.page_size <= cached < total
        for step in steps
        for cached, total in zip(step.cached, step.lens, strict=True)
    )


SEVERAL_PAGES: tuple[Meaning, ...] = (_has_few_pages, _has_pages)
OTHERS: tuple[Meaning, ...] = (
    # Requests of unlike lengths
    lambda _, steps: any(len(set(step.lens)) > 2 for step in steps),
    # Another batch size on the same instance
    lambda _, steps: len({len(step.lens) for step in steps}) > 1,
    # A request that fills its last page
    lambda case, steps: any(t and t % case.page_size == 0 for step in steps for t in step.lens),
    # Tokens with nothing before them
    lambda _, steps: any(cached == 0 for step in steps for cached in step.cached),
    lambda _, steps: any(total >= LONG for step in steps for total in step.lens),
    # Requests that share cached pages
    lambda _, steps: any(step.shared_prefix for step in steps),
    # Many steps on one instance
    lambda case, steps: bool(steps) and len(case.steps) >= MANY_STEPS,
)


def _has(feature: str) -> Meaning:
    return lambda case, steps: bool(steps) and bool(getattr(case.request, feature))
