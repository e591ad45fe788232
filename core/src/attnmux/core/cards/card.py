"""A backend's abilities as data: its card, with clauses, priors and options, and its offer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from attnmux.core.cards.advisory import Advisory
from attnmux.core.cards.clause import ALWAYS, LARGEST, Clause
from attnmux.core.cards.figures import Figures
from attnmux.core.cards.proof import ErrorBound, Verified
from attnmux.core.facts.checks import refusal
from attnmux.core.facts.fields import Check, read_fields
from attnmux.core.facts.frozen import FrozenMapping, Plain, plain, plain_fields
from attnmux.core.facts.libraries import (
    Libraries,
    canonical,
    installed_version,
    parsed_requirement,
    specifiers,
    within,
)
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.questions import Question
from attnmux.core.facts.values import TREE_MASKS, OptionValue, TreeMask

CONTRACTS = ("1.0",)
"""The versions of the contract that this core speaks, the newest last."""

DEFAULT_RANK = 1000
"""The rank if no prior holds."""

MOST_CLAUSES = 1000
"""Clauses of a card, at most. Every question reads each of them."""


UNSOURCED: Mapping[str, str] = FrozenMapping()

NAME = r"[A-Za-z0-9_-]+"
NAME_EXPECTED = "letters, digits, _ and -"
"""The name of a backend or an option: `plugin/name` and `BACKEND.OPTION=VALUE` can be parsed."""


def _check_alternatives(name: str, alternatives: tuple[str, ...]) -> None:
    if not alternatives:
        raise refusal(name, (), "at least one alternative")
    for text in alternatives:
        try:
            parsed_requirement(text)
        except (ValueError, TypeError):
            raise refusal(name, text, "a PEP 508 requirement") from None


def _read_requires(name: str, value: Any) -> tuple[str | tuple[str, ...], ...]:  # noqa: ANN401  # as above
    if not isinstance(value, tuple) or not all(isinstance(item, (str, tuple)) for item in value):
        raise refusal(name, value, "a tuple of str or tuple")
    for item in value:
        _check_alternatives(name, (item,) if isinstance(item, str) else item)
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior(Plain):
    """How well a backend is expected to do before any measurement. Lower ranks win. From
    `LAST_RESORT` on, another way to run the model is better, if it has one.

    Raises InvalidInput for a rank that is no integer, or a `when` that is no clause.
    """

    LAST_RESORT = 900
    """From this rank on, a backend is portable: it serves if no backend made for the hardware
    does."""

    rank: Annotated[
        int, Check(f"an integer of at most {LARGEST}", lambda rank: abs(rank) <= LARGEST)
    ]
    when: Annotated[Clause, Check("a clause, such as when(…)")] = ALWAYS
    source: str
    """Where the expectation comes from."""

    def __post_init__(self) -> None:
        read_fields(self, "prior")


def _as_given(name: str, value: Any) -> Any:  # noqa: ANN401  # any value
    """A value of an option, whose own type is checked."""
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Option(Plain):
    """A setting that a backend's factory receives. It must not change the results, unless its name
    is `fp8_products`: see `BackendCard.has_fp8_products`.

    Raises InvalidInput for a name of other characters than NAME's, for a default or a choice of
    another type or out of bounds, and for bounds of a value that is no number.
    """

    name: str
    type: Annotated[
        type[bool] | type[int] | type[float] | type[str], Check("bool, int, float or str")
    ]
    default: Annotated[OptionValue, _as_given]
    choices: Annotated[tuple[OptionValue, ...], _as_given] = ()
    """Empty: any value of the type within the bounds."""
    least: Annotated[float | None, _as_given] = None
    """The smallest number that it takes; None: any."""
    most: Annotated[float | None, _as_given] = None
    """The largest number that it takes; None: any."""
    summary: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, str(self.name)):
            raise refusal("option, name", self.name, NAME_EXPECTED)
        read_fields(self, f"option {self.name!r}")
        bounds = [bound for bound in (self.least, self.most) if bound is not None]
        if bounds and self.type not in (int, float):
            expected = f"none, since its type is {self.type.__name__}"
            raise refusal(f"option {self.name!r}, bounds", bounds[0], expected)
        for value in (self.default, *self.choices, *bounds):
            if type(value) is not self.type:
                expected = f"values of type {self.type.__name__}"
                raise refusal(f"option {self.name!r}", value, expected)
        if not all(map(self.admits, (self.default, *self.choices))):
            raise refusal(f"option {self.name!r}, default", self.default, self.expected)
        if self.choices and self.default not in self.choices:
            raise refusal(f"option {self.name!r}, default", self.default, "one of its choices")

    def admits(self, value: OptionValue) -> bool:
        """Whether a value of the option's type is one of its choices and within its bounds."""
        if self.choices and value not in self.choices:
            return False
        if isinstance(value, str):
            return True
        above = self.least is None or value >= self.least
        return above and (self.most is None or value <= self.most)

    @property
    def expected(self) -> str:
        """The values that it takes, in words."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        least = "" if self.least is None else f", at least {self.least}"
        most = "" if self.most is None else f", at most {self.most}"
        return f"a value of type {self.type.__name__}{least}{most}"

    def to_dict(self) -> dict[str, Any]:
        return {**plain_fields(self), "type": self.type.__name__}


@dataclass(frozen=True, kw_only=True, slots=True)
class Build(Plain):
    """A backend's kernels as they serve some devices with some libraries.

    Raises InvalidInput for fields of other types and a requirement that cannot be parsed.
    """

    name: str
    features: tuple[str, ...] = ()
    """Names in `Platform.features`, all needed."""
    arch: tuple[str, ...] = ()
    """The architectures that it is for, as `Platform.arch`. Empty: all."""
    requires: tuple[str, ...] = ()
    """PEP 508 requirements, all needed in addition to the card's."""

    def __post_init__(self) -> None:
        read_fields(self, "build")
        if self.requires:
            _check_alternatives("build, requires", self.requires)

    def serves(self, platform: Platform, libraries: Libraries = installed_version) -> bool:
        """Whether the device and the libraries are those that it needs."""
        if self.arch and platform.arch not in self.arch:
            return False
        needed = map(parsed_requirement, self.requires)
        versions = ((libraries(requirement.name), requirement.specifier) for requirement in needed)
        return platform.features.issuperset(self.features) and all(
            version is not None and (not version or within(version, specifier))
            for version, specifier in versions
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Caveat(Plain):
    """A note that `select` and `doctor` print about a backend that runs below its best.

    Raises InvalidInput for fields of other types and a requirement that cannot be parsed.
    """

    text: str
    unless: tuple[str, ...]
    """PEP 508 requirements. The note is dropped if any one of them is met."""
    arch: tuple[str, ...] = ()
    """The architectures that it holds for, as `Platform.arch`. Empty: all."""

    def __post_init__(self) -> None:
        read_fields(self, "caveat")
        _check_alternatives("caveat, unless", self.unless)


def _sources(name: str, value: Any) -> Mapping[str, str]:  # noqa: ANN401  # reads any value
    if not isinstance(value, Mapping):
        raise refusal(name, value, "a mapping from axes to text")
    for axis, source in value.items():
        if axis not in Clause.__slots__ or not isinstance(source, str):
            raise refusal(name, f"{axis}: {source}", "axes of a clause, with text")
    return FrozenMapping(value)


Reference = Annotated[str, Check('"module:attribute"', lambda text: text.count(":") == 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendCard(Plain):
    """A backend, described. Importing a card must import neither torch nor a kernel library.

    Raises InvalidInput for a field of another type (such as a list or a bare string instead of a
    tuple), a name of other characters than NAME's, a version range or a requirement that cannot be
    parsed, a factory, tuner or ahead that is not "module:attribute", and a source of an unknown
    axis.
    """

    TREE_MASKS = TREE_MASKS
    """All forms of a draft tree's mask, for a backend that reads each of them."""

    name: str
    summary: str
    clauses: Annotated[
        tuple[Clause, ...],
        Check(f"a tuple of Clause, at most {MOST_CLAUSES}", lambda some: len(some) <= MOST_CLAUSES),
    ]
    """The backend serves a request that any one of them admits."""
    sources: Annotated[Mapping[str, str], _sources] = UNSOURCED
    """Where the limits come from, by axis: a header, a check, a release note, a measurement."""
    aliases: tuple[str, ...] = ()
    """Other names that a user may give; an alias of several cards means the one that fits."""
    factory: Reference
    """"module:attribute", called as `factory(context, options)`; imported for the winner alone."""
    tuner: Annotated[Reference | None, Check('"module:attribute"')] = None
    """"module:attribute", a tuner that tries the backend's launches (see `Job`); None: it has
    none."""
    ahead: Annotated[Reference | None, Check('"module:attribute"')] = None
    """"module:attribute", called as `ahead(platform)` once the backend is chosen, before weights
    are loaded: it begins what needs no layers, such as a compiler, and returns at once. Importing
    it imports no torch. The factory waits for it, and reports its errors; None: there is none."""
    contract: str = ">=1,<2"
    requires: Annotated[tuple[str | tuple[str, ...], ...], _read_requires] = ()
    """PEP 508 requirements, all needed; an inner tuple lists alternatives, any one suffices."""
    extra: str = ""
    """The extra of the plugin's distribution that installs `requires`."""
    options: tuple[Option, ...] = ()
    priors: tuple[Prior, ...] = ()
    """The first whose conditions hold counts."""
    builds: tuple[Build, ...] = ()
    """The best first: the first whose needs are met serves. Empty: there is but one."""
    caveats: tuple[Caveat, ...] = ()
    companions: tuple[str, ...] = ()
    """Backends for the phases that this one does not serve, if a user names only this one."""
    excludes: tuple[str, ...] = ()
    """Backends (names, aliases or `plugin/name`) that must not serve decode if this one serves
    extend, nor extend if it serves decode. An unknown name excludes nothing."""
    needs_cpu_seq_lens: bool = False
    """Whether the batch must carry `seq_lens_cpu`."""
    tree_masks: Annotated[
        tuple[TreeMask, ...], Check(f"a tuple of one or more of {', '.join(TREE_MASKS)}", bool)
    ] = ("full",)
    """The forms of a draft tree's mask that the backend reads. A step whose mask has another form
    comes with the first of them instead."""
    virtual_requests: bool = False
    """Whether core serves layers with attention chunks for the backend: it gets layers without
    chunks, and the tokens of a request in one chunk as a request of their own. Chunks are whole
    pages."""
    fp8_products: bool = False
    """Whether the kernel rounds Q and the softmax's weights to KV's dtype if that is an 8-bit
    float, for 8-bit matrix units. The conformance suite then tolerates the rounding."""
    error_bounds: tuple[ErrorBound, ...] = ()
    """Errors that the backend's answers stay within, for requests with a `max_error`."""
    verified_on: tuple[Verified, ...] = ()
    """Runs of the conformance suite that it passed, on hardware or on an emulator."""

    def __post_init__(self) -> None:
        owner = f"card {self.name!r}"
        read_fields(self, owner)
        for name in (self.name, *self.aliases):
            if not re.fullmatch(NAME, name):
                raise refusal(f"{owner}, name", name, NAME_EXPECTED)
        try:
            specifiers(self.contract)
        except ValueError:
            expected = "a range such as >=1,<2"
            raise refusal(f"{owner}, contract", self.contract, expected) from None
        options = [option.name for option in self.options]
        if len(set(options)) < len(options):
            raise refusal(f"{owner}, options", options, "each name once")

    def to_dict(self) -> dict[str, Any]:
        return {**plain_fields(self), "requires": plain(self.requirements())}

    def requirements(self) -> tuple[tuple[str, ...], ...]:
        """`requires`, each as a tuple of alternatives."""
        return tuple((item,) if isinstance(item, str) else item for item in self.requires)

    def version_of(self, library: str, libraries: Libraries) -> str | None:
        """The version of a library that the backend uses; None if it uses none.

        Among alternatives, the first installed one within its range counts, else the first
        installed one.
        """
        for alternatives in self.requirements():
            wanted = [parsed_requirement(text) for text in alternatives]
            there = [(one, v) for one in wanted if (v := libraries(one.name)) is not None]
            fitting = [(one, v) for one, v in there if not v or within(v, one.specifier)]
            for one, version in (fitting or there)[:1]:
                if canonical(one.name) == canonical(library):
                    return version
        texts = (text for build in self.builds for text in build.requires)
        names = {canonical(parsed_requirement(text).name) for text in texts}
        return libraries(library) if canonical(library) in names else None

    def build(self, platform: Platform, libraries: Libraries = installed_version) -> str:
        """The name of the build that serves on the platform; empty without any."""
        fitting = (build for build in self.builds if build.serves(platform, libraries))
        return next((build.name for build in fitting), "")

    def serves(self, question: Question) -> bool:
        """Whether one of the clauses meets the question's demands."""
        return any(clause.meets(question.demands) for clause in self.clauses)

    def libraries(self) -> frozenset[str]:
        """The distributions of `requires`, all alternatives."""
        texts = (text for alternatives in self.requirements() for text in alternatives)
        return frozenset(parsed_requirement(text).name for text in texts)

    def has_fp8_products(self, options: Mapping[str, OptionValue]) -> bool:
        """Whether `fp8_products` holds with these options: one of that name lets a kernel round
        that does not by itself, unless it is False or "none"."""
        return self.fp8_products or options.get("fp8_products", False) not in (False, "none")

    def complete(self, given: Mapping[str, OptionValue]) -> Mapping[str, OptionValue]:
        """Every option of the card: as given, else its default."""
        return FrozenMapping({option.name: option.default for option in self.options} | dict(given))


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A card and the plugin that offers it."""

    card: BackendCard
    plugin: str
    distribution: str = ""
    version: str = ""
    foreign: frozenset[str] = frozenset()
    """Names and aliases of the card that belong to another distribution's backend: only the address
    means this card."""
    admitted: bool = True
    """Whether the configuration admits the backend."""
    figures: tuple[Figures, ...] = ()
    """The files of figures in the plugin's wheel."""
    advisories: tuple[Advisory, ...] = ()
    """Findings about the libraries that the card requires, whoever brings them."""
    ignored: frozenset[str] = frozenset()
    """Ids of findings that the configuration ignores."""
    address: str = field(init=False, repr=False, compare=False)
    """`plugin/name`: the name that is never ambiguous."""
    names: frozenset[str] = field(init=False, repr=False, compare=False)
    """All that a user may call it: its name and its aliases, each also as `plugin/name`."""
    claims: frozenset[str] = field(init=False, repr=False, compare=False)
    """`names` and those that are foreign. Lists that deny go by these."""

    def __post_init__(self) -> None:
        names = (self.card.name, *self.card.aliases)
        claims = frozenset((*names, *(f"{self.plugin}/{name}" for name in names)))
        object.__setattr__(self, "address", f"{self.plugin}/{self.card.name}")
        object.__setattr__(self, "names", claims - self.foreign)
        object.__setattr__(self, "claims", claims)

    def excludes(self, other: Offer) -> bool:
        """Whether this card says that it does not go with the other backend."""
        return not other.names.isdisjoint(self.card.excludes)

    def versions(self, libraries: Libraries = installed_version) -> Mapping[str, str]:
        """The versions of the plugin and of the card's libraries that are installed."""
        named = sorted(self.card.libraries())
        installed = {name: version for name in named if (version := libraries(name)) is not None}
        return FrozenMapping({**installed, self.distribution or self.plugin: self.version})
