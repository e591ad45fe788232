"""Checks of a plugin's distribution: metadata, hooks, cards, figures and advisories."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from attnmux.core import InvalidInput, Offer, Plugins, Policy
from attnmux.core.verbs import Shipped, standing

CORE = "attnmux-core"
GROUP = "attnmux"
UPPER = ("<", "<=", "==", "~=")
OK, ADVICE, PROBLEM = "ok", "advice", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    verdict: str
    """OK, ADVICE or PROBLEM."""
    text: str


def validate(distribution: Distribution) -> list[Finding]:
    """The outcomes of all checks, in their order. The plugin is imported in this process."""
    before = "torch" in sys.modules
    name = distribution.metadata["Name"]
    plugins = Plugins.load(allow=(name,))
    imports_torch = "torch" in sys.modules and not before
    offers = tuple(each for each in plugins.offers() if _is_own(each, name))
    found: list[Finding] = []
    for check, outcomes in (
        ("name", _name(name)),
        ("entry point", _entry_points(distribution)),
        ("loading", _loading(plugins, imports_torch=imports_torch)),
        ("bounds", _bounds(distribution, offers)),
        ("contract", _contract(offers)),
        ("cards", _cards(offers, distribution)),
        ("figures", _figures(plugins)),
        ("advisories", _advisories(plugins)),
    ):
        told = [Finding(check, verdict, text) for verdict, text in outcomes if verdict != OK]
        found += told or [Finding(check, OK, "; ".join(t for _, t in outcomes))]
    return found


Outcomes = Sequence[tuple[str, str]]


def _listed(check: Callable[..., Iterator[tuple[str, str]]]) -> Callable[..., Outcomes]:
    return lambda *args, **kwargs: [*check(*args, **kwargs)]


def _is_own(offer: Offer, name: str) -> bool:
    return canonicalize_name(offer.distribution) == canonicalize_name(name)


@_listed
def _name(name: str) -> Iterator[tuple[str, str]]:
    if not re.fullmatch(r"attnmux-[a-z0-9-]+", canonicalize_name(name)):
        yield ADVICE, f"{name}: the convention is attnmux-VENDOR"
    yield OK, name


@_listed
def _entry_points(distribution: Distribution) -> Iterator[tuple[str, str]]:
    points = distribution.entry_points.select(group=GROUP)
    if not points:
        yield PROBLEM, f"no entry point in the group {GROUP!r}: no plugin is found"
    for point in points:
        yield OK, f"{point.name} = {point.value}"


@_listed
def _loading(plugins: Plugins, *, imports_torch: bool) -> Iterator[tuple[str, str]]:
    for failure in plugins.failures:
        yield PROBLEM, str(failure)
    if not plugins.loaded and not plugins.failures:
        yield PROBLEM, "no plugin is loaded: it has none, or the configuration leaves it out"
    if imports_torch:
        yield PROBLEM, "importing the plugin imports torch, which every command would wait for"
    yield OK, "imports no torch"


@_listed
def _bounds(distribution: Distribution, offers: Sequence[Offer]) -> Iterator[tuple[str, str]]:
    required = [Requirement(text) for text in distribution.requires or ()]
    core = [one for one in required if canonicalize_name(one.name) == CORE]
    if not core:
        yield PROBLEM, f"it does not require {CORE}"
    for one in core:
        if not any(end.operator in (">=", "~=", "==") for end in one.specifier):
            yield PROBLEM, f"{one}: expected a lower bound, such as ~=0.1.0"
    cards = (text for each in offers for some in each.card.requirements() for text in some)
    for one in dict.fromkeys([*required, *map(Requirement, cards)]):
        own = canonicalize_name(one.name).startswith("attnmux")
        ends = [str(end) for end in one.specifier if end.operator in UPPER]
        if ends and not own:
            yield ADVICE, f"{one.name}{','.join(ends)}: bound it only for a fault that is known"
    yield OK, ", ".join(map(str, core))


@_listed
def _contract(offers: Sequence[Offer]) -> Iterator[tuple[str, str]]:
    for offer in offers:
        for reason in standing(offer, Policy(), lambda name: ""):
            if reason.code == "CONTRACT":
                yield PROBLEM, f"{offer.card.name}: {reason}"
    yield OK, ", ".join(sorted({offer.card.contract for offer in offers})) or "no card"


@_listed
def _cards(offers: Sequence[Offer], distribution: Distribution) -> Iterator[tuple[str, str]]:
    extras = {
        canonicalize_name(each) for each in distribution.metadata.get_all("Provides-Extra", [])
    }
    for offer in offers:
        card = offer.card
        for reference in filter(None, (card.factory, card.tuner, card.ahead)):
            if not _exists(reference.partition(":")[0]):
                yield PROBLEM, f"{card.name}: no module {reference.partition(':')[0]}"
        if card.extra and canonicalize_name(card.extra) not in extras:
            yield PROBLEM, f"{card.name}: the distribution has no extra {card.extra!r}"
        if not card.clauses:
            yield PROBLEM, f"{card.name}: no clause, so that it serves nothing"
        if not card.priors:
            yield (
                ADVICE,
                f"{card.name}: without a prior it ranks last",
            )
        if not card.sources:
            yield ADVICE, f"{card.name}: none of its limits has a source"
    yield OK, ", ".join(offer.card.name for offer in offers) or "none"


def _exists(module: str) -> bool:
    """Whether the module is there; its packages are imported, it is not."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@_listed
def _figures(plugins: Plugins) -> Iterator[tuple[str, str]]:
    files = [each.file for plugin in plugins.loaded for each in plugin.figures]
    for file in files:
        try:
            Shipped.read(Path(file))
        except InvalidInput as error:
            yield PROBLEM, str(error)
    yield OK, f"{len(files)} files"


@_listed
def _advisories(plugins: Plugins) -> Iterator[tuple[str, str]]:
    """A file that is none keeps the plugin from loading."""
    yield OK, f"{len(plugins.advisories())} findings"


def as_requirement(text: str) -> str:
    """The canonical name of a distribution. Raises InvalidInput for other text."""
    try:
        return canonicalize_name(Requirement(text).name)
    except InvalidRequirement:
        raise InvalidInput("DIST", got=repr(text), expected="a distribution's name") from None
