"""At which page sizes and KV dtypes all phases are served, of all that could be asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, lcm
from typing import TypeVar

from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.ask.values import DTYPES
from attnmux.core.choosing.judge.axes import Demand
from attnmux.core.choosing.judge.shortcomings import admits_any
from attnmux.core.choosing.offer.card import Clause, Offer
from attnmux.core.choosing.offer.conditions import Condition, Excluding, Range
from attnmux.core.choosing.search.points import Candidate
from attnmux.core.choosing.search.problem import Problem, Questions, Variant

V = TypeVar("V")

FALLBACK_PAGE_SIZE = 1
FALLBACK_KV_DTYPE = "bfloat16"
"""Where neither the request nor the winner has a preference."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opening:
    """A page size and a KV dtype at which every group is served."""

    request: Request
    """Resolved: page size and KV dtype are set."""
    questions: Questions
    fitting: tuple[tuple[Offer, ...], ...]
    """For each group, the offers that serve it here."""


def openings(
    problem: Problem, variant: Variant, candidates: Sequence[Sequence[Candidate]]
) -> Iterator[Opening]:
    """Where all groups are served: if any page size and KV dtype is such a place, one of these is.

    `candidates` are those of the variant, for each group.
    """
    if not all(candidates):
        return
    clauses = [
        clause
        for group in candidates
        for candidate in group
        for admitted in candidate.clauses
        for clause in admitted
    ]
    opened = variant.questions
    for page_size in _page_sizes(variant.request, clauses):
        for kv_dtype in _kv_dtypes(variant.request, clauses):
            resolved = _resolved(variant.request, page_size, kv_dtype)
            questions = problem.questions(resolved, opened)
            # Setting a value can only add demands: no clause that was ruled out comes back
            added = {
                phase: question.demands[len(opened[phase].demands) :]
                for phase, question in questions.items()
            }
            fitting = tuple(
                tuple(
                    candidate.offer
                    for candidate in found
                    if _fits(candidate, [added[phase] for phase in group.phases])
                )
                for group, found in zip(problem.groups, candidates, strict=True)
            )
            if all(fitting):
                yield Opening(resolved, questions, fitting)


def _fits(candidate: Candidate, added: Sequence[Sequence[Demand]]) -> bool:
    """Whether the candidate meets what its phases ask beyond the variant."""
    for demands, clauses in zip(added, candidate.clauses, strict=True):
        if demands and not admits_any(candidate.offer.card, clauses, demands):
            return False
    return True


def _page_sizes(request: Request, clauses: Sequence[Clause]) -> list[int]:
    """Enough sizes that, if any size serves all groups, one of these does."""
    if request.page_size is not None:
        return [request.page_size]
    return sorted(joint_examples(clause.page_size for clause in clauses))


def _kv_dtypes(request: Request, clauses: Sequence[Clause]) -> list[str]:
    """The request's, else that of the model; where both are unset, any that a candidate stores."""
    given = request.kv_dtype or request.dtype
    if given is not None:
        return [given]
    conditions = {clause.kv_dtype for clause in clauses}
    examples = {str(name) for condition in conditions for name in condition.examples()}
    return sorted(examples.union(until_spared((FALLBACK_KV_DTYPE, *DTYPES), conditions)))


def _resolved(request: Request, page_size: int, kv_dtype: str) -> Request:
    decided = {"page_size": page_size, "kv_dtype": kv_dtype}
    unset = {name: value for name, value in decided.items() if getattr(request, name) is None}
    return request.replace(origin="default", **unset) if unset else request


def joint_examples(conditions: Iterable[Condition]) -> set[int]:
    """Numbers such that, if any number meets one condition of each of several backends, one of
    these does: 1, every example, and the multiples common to any of the steps."""
    known = set(conditions)
    ranges = [condition for condition in known if isinstance(condition, Range)]
    steps = {1}
    for condition in ranges:
        steps |= {lcm(step, condition.step) for step in steps}
    examples = {
        value for condition in known for value in condition.examples() if isinstance(value, int)
    }
    starts = {max(condition.least, 1) for condition in ranges} | {1}
    firsts = {(ceil(start / step) * step, step) for start in starts for step in steps}
    return examples.union(*(until_spared(count(first, step), known) for first, step in firsts))


def until_spared(values: Iterable[V], conditions: Iterable[Condition]) -> Iterator[V]:
    """The values up to the first that none of the conditions excludes: whichever of them have to
    hold, one of these is excluded by none."""
    left_out = {
        value
        for condition in conditions
        if isinstance(condition, Excluding)
        for value in condition.values
    }
    for value in values:
        yield value
        if value not in left_out:
            return
