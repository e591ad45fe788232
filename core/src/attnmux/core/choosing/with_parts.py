"""The further requests that a request's parts make, and the backends that serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from attnmux.core.choosing.choice import Choice
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.part import Ask, Part
from attnmux.core.choosing.parts import DISPENSABLE, Parts, absence, demanded
from attnmux.core.facts.errors import NoBackend
from attnmux.core.facts.frozen import FrozenMapping
from attnmux.core.facts.policy import NAMING, Policy
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import PHASES
from attnmux.core.facts.verdicts import Coercion

Named = tuple[str, Part]
"""A part with its name."""


def parts_of(
    request: Request, parts: Parts
) -> tuple[Sequence[Named], Sequence[Named], Sequence[str]]:
    """The parts that serve a request always, the inner ones first; those that are tried after a
    refusal; and the names of those that are missing and that it can do without.

    Raises NoBackend, with the line that installs it, for another part that is missing.
    """
    found, missing = [], []
    for name in demanded(request):
        part = parts(name)
        if part is not None and part.wants(request):
            found.append((name, part))
        elif part is None and name in DISPENSABLE:
            missing.append(name)
        elif name not in DISPENSABLE:
            why = absence(name) if part is None else f"the part {name} does not take such a request"
            raise NoBackend(f"nothing serves the request: {why}")
    always = [pair for pair in found if not pair[1].after_refusal]
    return inside_first(always), [pair for pair in found if pair[1].after_refusal], missing


def inside_first(parts: Iterable[Named]) -> list[Named]:
    """The parts in the order in which they are built around each other."""
    return sorted(parts, key=lambda pair: (pair[1].around == "model", pair[1].level, pair[0]))


def left_by(request: Request, parts: Sequence[Named]) -> Request:
    """The request that the main backends have to serve."""
    for _, part in reversed(parts):
        request = part.left(request)
    return request


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How the parts of one request ask."""

    solve: Callable[..., Decision]
    """`(request, policy=)`: the answer to another request on the same machine."""
    policy: Policy
    """The asker's."""
    rank: Callable[[Decision, str], int]
    """The rank of the backend of a phase."""

    def served(
        self, mains: Sequence[Decision], request: Request, left: Request, parts: Sequence[Named]
    ) -> Decision:
        """One decision of those about the groups of what is `left`, with the request as it was
        asked and what serves the parts.

        Raises NoBackend where an ask that is not optional has no answer.
        """
        if not parts:
            return Decision.of_groups(mains, request.other_layers)
        found: list[Decision] = []
        for main, asked, own in zip(mains, request.groups(), left.groups(), strict=True):
            decision = replace(main, request=_restored(main.request, asked, own))
            for name, part in parts:
                if part.around == "layers" and not (name in demanded(asked) and part.wants(asked)):
                    continue
                if part.around == "layers" or not found:
                    decision = self._with_part(decision, main, name, part)
            found.append(decision)
        return Decision.of_groups(found, request.other_layers)

    def _with_part(self, decision: Decision, main: Decision, name: str, part: Part) -> Decision:
        """main: before any part, with the request that was left."""
        served: dict[str, Mapping[str, Choice]] = {}
        changes: list[Coercion] = []
        for title, ask in part.asks(decision.request).items():
            answer, change = self._answer(ask, main)
            if change is not None:
                told = (phase for phase, (other, _) in part.phases.items() if other == title)
                changes.append(replace(change, field=f"backend for {next(told, title)}"))
            if answer is not None:
                served[title] = answer
        phases = dict(decision.phases)
        for phase, (title, of) in part.phases.items():
            if phase in decision.request.phases:
                phases[phase] = (served[title] if title else main.phases)[of]
        return replace(
            decision,
            parts=FrozenMapping({**decision.parts, name: FrozenMapping(served)}),
            phases=FrozenMapping({phase: phases[phase] for phase in PHASES if phase in phases}),
            coercions=(*decision.coercions, *changes),
        )

    def _answer(
        self, ask: Ask, main: Decision
    ) -> tuple[Mapping[str, Choice] | None, Coercion | None]:
        """The backends that answer, and the change where the named one does not."""
        if ask.rivals and ask.rivals not in main.phases:
            return None, None
        given = self.policy.named_for(ask.named_for) if ask.named_for else None
        origin = "" if given is None else self.policy.origins.get(given[0], "user")
        free, change = _unnamed(self.policy), None
        bound = free if given is None else _bound(free, given[1], origin)
        try:
            found = self.solve(ask.request, policy=bound)
        except NoBackend:
            if given is None and ask.is_optional:
                return None, None
            if given is None or not ask.otherwise:
                raise
            found = self.solve(ask.request, policy=free)
            new = next(iter(found.phases.values())).backend
            because = f"{given[1]} {ask.otherwise}"
            change = Coercion(field="", old=given[1], new=new, because=because, origin=origin)
        if ask.rivals and self.rank(found, ask.rivals) > self.rank(main, ask.rivals):
            return None, None
        return found.phases, change


def _unnamed(policy: Policy) -> Policy:
    """The policy for a further backend, which the names of the others do not concern."""
    unset: dict[str, Any] = dict.fromkeys(NAMING)
    return replace(policy, **unset, origins=FrozenMapping())


def _bound(policy: Policy, name: str, origin: str) -> Policy:
    """The policy that names one backend for prompts and for decode, without its companions."""
    names = ("prefill_backend", "decode_backend")
    given: dict[str, Any] = dict.fromkeys(names, name)
    return replace(policy, **given, origins=dict.fromkeys(names, origin))


def _restored(decided: Request, asked: Request, left: Request) -> Request:
    """The decided request with those values of the one that was asked that parts took from it."""
    if asked is left:
        return decided
    names = [each.name for each in fields(asked) if each.name != "origins"]
    changed = [name for name in names if getattr(asked, name) != getattr(left, name)]
    origins = {name: value for name, value in decided.origins.items() if name not in changed}
    origins.update((name, asked.origins[name]) for name in changed if name in asked.origins)
    given: dict[str, Any] = {name: getattr(asked, name) for name in changed}
    return replace(decided, **given, origins=FrozenMapping(origins))
