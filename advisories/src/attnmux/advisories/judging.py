"""Whether a finding concerns a machine and its libraries, and why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from attnmux.core import Offer, Platform, Request
from attnmux.core.plugin import Advisory, BackendCard, Clause, Condition
from attnmux.core.verbs import AXES, Question

Libraries = Callable[[str], "str | None"]
"""A distribution's name → its version, "" if unknown, None if it is not installed."""

APPLIES, UNKNOWN, IGNORED, NOT = "applies", "unknown", "ignored", "does not apply"
VERDICTS = (APPLIES, UNKNOWN, IGNORED, NOT)
"""The gravest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A finding on machines with libraries."""

    advisory: Advisory
    verdict: str
    """One of VERDICTS."""
    why: str
    version: str
    """The library's release; empty if it is unknown or not installed."""
    backends: tuple[str, ...] = ()
    """The backends that it refuses, as `plugin/name`."""
    hint: str = ""
    """The pip lines that help `backends`; empty if one of them has none that is known."""

    def to_dict(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("verdict", "why", "version", "hint")}
        return {**self.advisory.to_dict(), **told, "backends": list(self.backends)}


def judge(
    advisory: Advisory,
    devices: Sequence[Platform],
    libraries: Libraries,
    offers: Sequence[Offer],
    *,
    engine: str = "",
) -> Judgement:
    """The verdict for the calls of attnmux's backends, or for those that an engine makes itself: of
    these nothing is known but the library's release."""
    version = libraries(advisory.library)

    def judged(verdict: str, why: str, **more: Any) -> Judgement:  # noqa: ANN401  # its fields
        return Judgement(advisory=advisory, verdict=verdict, why=why, version=version or "", **more)

    concerned = [device for device in devices if _is_machine(advisory, device)]
    if not concerned:
        return judged(NOT, f"it is about {advisory.machine()}")
    if version is None:
        return judged(NOT, f"{advisory.library} is not installed")
    if version and not advisory.affects(version):
        return judged(NOT, f"{version} is not in {advisory.affected}")
    reached = [] if engine else [*_reached(advisory, concerned, libraries, offers)]
    if not engine and not reached:
        return judged(NOT, _unreached(advisory, offers))
    said = f"{advisory.shape()}: {advisory.summary}"
    if not version:
        affected = advisory.affected or "every release"
        ask = f"--library {advisory.library}==VERSION decides; affected: {affected}"
        return judged(UNKNOWN, f"{ask}; {said}")
    names = tuple(offer.address for offer in reached)
    if any(advisory.id in offer.ignored for offer in offers):
        return judged(IGNORED, f"by ignore_advisories; {said}", backends=names)
    hints = sorted({advisory.remedy(offer.card.requirements()) for offer in reached})
    hint = "; ".join(hints) if all(hints) else ""
    if not reached and advisory.fixed:
        hint = f"pip install '{advisory.library}>={advisory.fixed}'"
    return judged(APPLIES, said, backends=names, hint=hint)


def _is_machine(advisory: Advisory, device: Platform) -> bool:
    asked = Question(request=Request(), platform=device, phase="decode")
    values = {axis.name: value for axis, value in asked.demands if axis.of_machine}
    return all(
        name not in values or _condition(advisory.clause, name).admits(values[name])
        for name in _machine_axes(advisory)
    )


def _machine_axes(advisory: Advisory) -> Iterator[str]:
    return (axis.name for axis in AXES if axis.of_machine and axis.name in advisory.limits)


def _condition(clause: Clause, name: str) -> Condition:
    condition: Condition = getattr(clause, name)
    return condition


def _reached(
    advisory: Advisory, devices: Sequence[Platform], libraries: Libraries, offers: Sequence[Offer]
) -> Iterator[Offer]:
    """The offers that serve a call of the finding with its release."""
    for offer in offers:
        version = offer.card.version_of(advisory.library, libraries)
        is_used = _may_have(offer.card, advisory) if version == "" else advisory.affects(version)
        reaches = is_used and offer.card.name not in advisory.unaffected
        if reaches and any(_serves(offer.card, advisory, device) for device in devices):
            yield offer


def _may_have(card: BackendCard, advisory: Advisory) -> bool:
    """Whether the card takes an affected release, of those at which a range ends."""
    texts = [text for alternatives in card.requirements() for text in alternatives]
    wanted = [one for one in map(Requirement, texts) if advisory.is_about(one.name)]
    ranges = [SpecifierSet(advisory.affected), *(one.specifier for one in wanted)]
    ends = [Version(end.version.removesuffix(".*")) for each in ranges for end in each]
    taken = (all(each.contains(end, prereleases=True) for each in ranges) for end in ends)
    return not ends or any(taken)


def _serves(card: BackendCard, advisory: Advisory, device: Platform) -> bool:
    asked = Question(request=Request(), platform=device, phase="decode")
    machine = [demand for demand in asked.demands if demand[0].of_machine]
    asks = [name for name in advisory.limits if name not in {axis.name for axis, _ in machine}]
    return any(
        clause.meets(machine)
        and all(_overlap(name, _condition(clause, name), advisory) for name in asks)
        for clause in card.clauses
    )


def _overlap(name: str, served: Condition, advisory: Advisory) -> bool:
    """Whether a value that the card serves on an axis is one of the finding's."""
    about = _condition(advisory.clause, name)
    # A kernel that emulates a page size reads by token
    also = [1] if name == "page_size" and served.admits(1) else []
    if str(served).startswith("any ("):
        return any(about.admits(value) for value in (*served.examples(), 1))
    if str(served) == "any":
        return True
    values = [*about.examples(), *served.examples(), *also]
    return any(about.admits(value) and served.admits(value) for value in values)


def _unreached(advisory: Advisory, offers: Sequence[Offer]) -> str:
    """Why no backend makes such a call."""
    using = [offer for offer in offers if advisory in offer.advisories]
    if not using:
        return f"no backend uses {advisory.library}"
    known = [(o.card.name, advisory.unaffected.get(o.card.name, "")) for o in using]
    told = [f"{name}: {why}" for name, why in known if why]
    others = [name for name, why in known if not why]
    if others:
        told.append(f"{', '.join(others)}: not served")
    return "; ".join(told)
