"""Findings about installed libraries: which questions they refuse, and what helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from attnmux.core.cards.advisory import Advisory
from attnmux.core.cards.card import BackendCard, Offer
from attnmux.core.cards.conditions import Emulated
from attnmux.core.facts.libraries import (
    Libraries,
)
from attnmux.core.facts.questions import Question
from attnmux.core.facts.verdicts import Reason

USUAL_PAGES = (1, 16, 32, 64, 128, 256)
"""Page sizes to try besides those that cards name: a finding may exclude these."""
EFFECTS = {
    "wrong": "gives wrong numbers",
    "fault": "faults",
    "hang": "hangs",
    "slow": "is slow",
}


def findings(offer: Offer, libraries: Libraries) -> tuple[Advisory, ...]:
    """The advisories on the releases that the offer's backend uses."""
    return tuple(
        each
        for each in offer.advisories
        if offer.card.name not in each.unaffected
        and each.affects(offer.card.version_of(each.library, libraries))
    )


def applies(advisory: Advisory, card: BackendCard, question: Question) -> bool:
    """Whether the question falls into the clause. A value that is not asked does not."""
    asked = {axis.name: value for axis, value in question.demands}
    for name in advisory.limits:
        value = asked.get(name)
        if name == "page_size" and isinstance(value, int):
            value = _kernel_page(card, question, value)
        if value is None or not getattr(advisory.clause, name).admits(value):
            return False
    return True


def _kernel_page(card: BackendCard, question: Question, page_size: int) -> int:
    """The page size that the kernel reads: 1, by token, if the card emulates another."""
    serving = (clause for clause in card.clauses if clause.meets(question.demands))
    condition = next((clause.page_size for clause in serving), None)
    emulates = type(condition) is Emulated and not condition.native.admits(page_size)
    return 1 if emulates else page_size


def refusing(offer: Offer, question: Question, found: Iterable[Advisory]) -> tuple[Advisory, ...]:
    """The findings that keep the offer from serving the question."""
    return tuple(
        each
        for each in found
        if each.effect != "slow"
        and each.id not in offer.ignored
        and applies(each, offer.card, question)
    )


def reasons(
    offer: Offer, question: Question, found: Sequence[Advisory], libraries: Libraries
) -> list[Reason]:
    """A reason for each finding that refuses the question; if it leaves the page size open, at each
    size that the card takes."""
    against = refusing(offer, question, found)
    if found and not against and question.request.page_size is None:
        sized = [each for each in _at_pages(offer, question) if offer.card.serves(each)]
        if sized and all(refusing(offer, each, found) for each in sized):
            question = sized[0]
            against = refusing(offer, question, found)
    # Next to other shortcomings, two hints could name two page sizes
    alone = against and offer.card.serves(question)
    page = _page_hint(offer, question, found) if alone else ""
    return [
        Reason(
            code="ADVISORY",
            axis="advisory",
            wanted=f"{each.library} without {each.id}, which {EFFECTS[each.effect]} here: "
            f"{each.source}",
            offered=f"{each.library} {offer.card.version_of(each.library, libraries)}",
            hint=page or each.remedy(offer.card.requirements(), against),
        )
        for each in against
    ]


def _page_hint(offer: Offer, question: Question, found: Sequence[Advisory]) -> str:
    """The nearest page size at which the offer serves the question without a finding."""
    asked = question.request.page_size
    if asked is None:
        return ""
    others = [
        (abs(size - asked), size)
        for other in _at_pages(offer, question)
        if (size := other.request.page_size or 0) != asked
        and offer.card.serves(other)
        and not refusing(offer, other, found)
    ]
    return f"page_size={min(others)[1]}" if others else ""


def _at_pages(offer: Offer, question: Question) -> list[Question]:
    """The question at each page size that the card names, and at the usual ones."""
    named = (size for clause in offer.card.clauses for size in clause.page_size.examples())
    sizes = {*USUAL_PAGES, *(size for size in named if isinstance(size, int))}
    return [
        replace(question, request=question.request.replace(page_size=size), demands=())
        for size in sorted(sizes)
    ]


def notes(offer: Offer, question: Question, found: Iterable[Advisory]) -> Iterator[str]:
    """A line for each finding that a choice rests on: the configuration ignores it, or it only
    makes the backend slow."""
    for each in found:
        ignored = each.id in offer.ignored
        if (ignored or each.effect == "slow") and applies(each, offer.card, question):
            why = " (ignored: ignore_advisories)" if ignored else ""
            effect = EFFECTS[each.effect]
            yield f"{offer.card.name} {effect} here by {each.id}{why}: {each.source}"
