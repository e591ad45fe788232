"""What the search is about: the request and its variants, the offers, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.judge.axes import AXES, Question
from attnmux.core.choosing.judge.checking import Ranking
from attnmux.core.choosing.judge.shortcomings import is_served
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.search.problem import CACHED_LEADS, Group, Opposed

OTHERS_VALUES = ("model", "platform", "default")
"""Origins whose values may be coerced without leave: nobody insisted on them."""


NOBODY: frozenset[str] = frozenset()

Questions = Mapping[str, Question]
"""What a request asks, by phase."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Variant:
    """The request with some of the values that may be coerced left unset."""

    dropped: tuple[str, ...]
    request: Request
    questions: Questions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Problem:
    """What stays the same during the search."""

    request: Request
    platform: Platform
    policy: Policy
    offers: tuple[Offer, ...]
    groups: tuple[Group, ...]
    barred: Callable[[Offer], Sequence[Reason]]
    """What keeps an offer out whatever is asked. It may look for libraries, so that it is asked
    last, and of an offer whose clauses fit."""
    ranking: Ranking
    opposed: Opposed

    def questions(self, request: Request, opened: Questions | None = None) -> Questions:
        """What the request asks; `opened`: what it asked before its unset values were set."""
        return {
            phase: Question(
                request=request,
                platform=self.platform,
                phase=phase,
                hypothetical=self.policy.hypothetical,
                opened=None if opened is None else opened[phase],
            )
            for phase in request.phases
        }

    def serves(self, offer: Offer, questions: Questions, phases: Iterable[str]) -> bool:
        """Whether the offer serves all of `phases`."""
        served = all(is_served(offer.card, questions[phase]) for phase in phases)
        return served and not self.barred(offer)

    def opponents(self, offer: Offer, lead: str) -> frozenset[str]:
        """Addresses of the backends that may not serve the other of decode and extend."""
        return self.opposed.get(offer.address, NOBODY) if lead in CACHED_LEADS else NOBODY

    def variants(self) -> tuple[Variant, ...]:
        """The request as it is, then with any one coercible value unset, any two, …"""
        coercible = [
            axis.name
            for axis in AXES
            if axis.droppable
            and getattr(self.request, axis.name)
            and (self.policy.allow_coercion or self.request.origins[axis.name] in OTHERS_VALUES)
        ]
        sets = (
            dropped
            for number in range(len(coercible) + 1)
            for dropped in combinations(coercible, number)
        )
        return tuple(map(self._variant, sets))

    def plain(self) -> Variant:
        """The request as it is."""
        return self._variant(())

    def _variant(self, dropped: tuple[str, ...]) -> Variant:
        unset: dict[str, Any] = dict.fromkeys(dropped)
        request = self.request.replace(**unset) if dropped else self.request
        return Variant(dropped=dropped, request=request, questions=self.questions(request))
