"""A case by its name: what all lists of cases make theirs with."""

from __future__ import annotations

from attnmux.testing.cases import Case, Step


def case_of(
    name: str, page_size: int, *steps: Step, max_context_len: int = 0, **settings: object
) -> Case:
    """A case; a single step is followed by a variation of it, so that stale metadata shows."""
    max_context_len = max_context_len or longest(page_size)
    if len(steps) == 1:
        steps = (*steps, steps[0].varied(max_context_len))
    return Case(
        name=f"{name}-page{page_size}",
        steps=steps,
        page_size=page_size,
        max_context_len=max_context_len,
        **settings,  # type: ignore[arg-type]  # fields of Case by name
    )


def longest(page_size: int) -> int:
    """The usual `max_context_len`: room for a few pages."""
    return max(256, 5 * page_size)
