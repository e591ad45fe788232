"""What a backend can do, as data: cards, their clauses and their priors."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from packaging.requirements import InvalidRequirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from attnmux.core.choosing.ask.values import DTYPES, KINDS, PHASES
from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.offer.conditions import ANY, NONE, Condition
from attnmux.core.choosing.offer.libraries import parsed_requirement
from attnmux.core.choosing.offer.verified import Verified
from attnmux.core.errors import InvalidInput

CONTRACTS = ("1.0",)
"""The versions of the contract that this core speaks, the newest last."""

LAST_RESORT = 900
"""Ranks from here on are of backends that serve what nothing made for the hardware does."""

DEFAULT_RANK = 1000
"""Of a backend that no prior speaks of."""

OptionValue = bool | int | float | str

Status = Literal["available", "planned"]

UNSOURCED: Mapping[str, str] = FrozenMapping()

NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Of a backend or an option: `plugin/name` and `BACKEND.OPTION=VALUE` must be readable."""


WORDS: Mapping[str, tuple[str, ...]] = {
    "phase": PHASES,
    "kind": KINDS,
    "dtype": DTYPES,
    "kv_dtype": DTYPES,
}
"""Axes whose values are words of a request: another word would never be asked about."""


def _refusal(what: str, came: object, expected: str) -> InvalidInput:
    return InvalidInput(what, came=reprlib.repr(came), expected=expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """One AND of conditions, one field an axis (the table is in `axes.py`).

    An axis that a request asks about and the clause leaves at NONE is refused. Axes that only
    limit what is served (SM version, runtime, head counts) start at ANY; what is served at all
    must be said.

    Raises InvalidInput for a field that holds no condition, and for a phase, a kind or a dtype that
    no request could ask for.
    """

    vendor: Condition
    phase: Condition
    kind: Condition
    dtype: Condition
    kv_dtype: Condition
    page_size: Condition
    head_dim: Condition

    arch: Condition = ANY
    version: Condition = ANY
    """Of the architecture, as text: compute capability 9.0, `versions(">=9.0,<10")`."""
    features: Condition = ANY
    runtime: Condition = ANY
    num_q_heads: Condition = ANY
    num_kv_heads: Condition = ANY
    group_size: Condition = ANY
    """Query heads per KV head."""
    v_head_dim: Condition = NONE
    """Asked only where it differs from `head_dim`."""
    kv_lora_rank: Condition = NONE
    qk_rope_head_dim: Condition = NONE
    spec_topk: Condition = NONE
    spec_draft_tokens: Condition = ANY
    sliding_window: Condition = NONE
    attention_chunk: Condition = NONE
    cross_attention: Condition = NONE
    sinks: Condition = NONE
    logit_cap: Condition = NONE
    custom_mask: Condition = NONE
    multi_item: Condition = NONE
    chunked_prefix: Condition = NONE
    deterministic: Condition = NONE
    graph: Condition = NONE
    lse: Condition = NONE

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        # Few types, many values: asking an abstract class about each is dear at a cold start
        if not all(issubclass(kind, Condition) for kind in set(map(type, values.values()))):
            for name, value in values.items():
                if not isinstance(value, Condition):
                    expected = "a condition, such as one_of(…) or ANY"
                    raise _refusal(f"clause, {name}", value, expected)
        for name, words in WORDS.items():
            unknown = set(getattr(self, name).examples()).difference(words)
            if unknown:
                came = ", ".join(sorted(map(str, unknown)))
                raise _refusal(f"clause, {name}", came, f"some of {', '.join(words)}")


def when(**conditions: Condition) -> Clause:
    """A clause that holds wherever the given conditions do: for priors."""
    everything = dict.fromkeys(Clause.__dataclass_fields__, ANY)
    return Clause(**{**everything, **conditions})


ALWAYS = when()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """How well a backend is expected to do before anybody measured. Lower ranks win; those from
    `LAST_RESORT` on also lose to another way to run the model, where it has one.

    Raises InvalidInput for a rank that is no integer, or a `when` that is no clause.
    """

    rank: int
    when: Clause = ALWAYS
    source: str
    """Where the expectation comes from."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int):
            raise _refusal("prior, rank", self.rank, "an integer")
        if not isinstance(self.when, Clause):
            raise _refusal("prior, when", self.when, "a clause, such as when(…)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A setting of one backend, handed to its constructor. It must not change what is computed.

    Raises InvalidInput for a name that cannot be typed, and for a default or a choice that is not
    of the type.
    """

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    default: OptionValue
    choices: tuple[OptionValue, ...] = ()
    """Empty: any value of the type."""
    summary: str = ""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise _refusal("option, name", self.name, "letters, digits, _ and -")
        if self.type not in get_args(OptionValue):
            raise _refusal(f"option {self.name!r}, type", self.type, "bool, int, float or str")
        for value in (self.default, *self.choices):
            if type(value) is not self.type:
                expected = f"values of type {self.type.__name__}"
                raise _refusal(f"option {self.name!r}", value, expected)
        if self.choices and self.default not in self.choices:
            raise _refusal(f"option {self.name!r}, default", self.default, "one of its choices")


HELD: Mapping[str, tuple[type, ...]] = {
    "clauses": (Clause,),
    "aliases": (str,),
    "requires": (str, tuple),
    "options": (Option,),
    "priors": (Prior,),
    "companions": (str,),
    "excludes": (str,),
    "verified_on": (Verified,),
}
"""What the tuples of a card hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendCard:
    """A backend's entry: importing it must import neither torch nor a kernel library.

    Raises InvalidInput for a field of another type (a list or a bare string instead of a tuple
    too), for a name that cannot be typed, a version range or a requirement that cannot be read, a
    factory or tuner that is not "module:attribute", a source of what is no axis, and an available
    card without a factory.
    """

    name: str
    summary: str
    clauses: tuple[Clause, ...]
    """The backend serves what any one of them admits."""
    sources: Mapping[str, str] = UNSOURCED
    """Where the limits come from, by axis: a header, a check, a release note, a measurement."""
    aliases: tuple[str, ...] = ()
    """Other names that a user may give; a name shared by several cards means whichever fits."""
    factory: str | None = None
    """"module:attribute", called as `factory(context, options)`; imported for the winner alone."""
    tuner: str | None = None
    """"module:attribute", a `Tuner` that tries out the backend's launches; None: it has none."""
    status: Status = "available"
    """A planned card can be asked about for another machine, and never runs."""
    contract: str = ">=1,<2"
    requires: tuple[str | tuple[str, ...], ...] = ()
    """PEP 508 requirements, all needed; an inner tuple lists alternatives, any one suffices."""
    extra: str = ""
    """The extra of the plugin's distribution that brings `requires`."""
    options: tuple[Option, ...] = ()
    priors: tuple[Prior, ...] = ()
    """The first whose conditions hold counts."""
    companions: tuple[str, ...] = ()
    """Backends that serve the phases which this one does not, when a user names this one alone."""
    excludes: tuple[str, ...] = ()
    """Backends (names, aliases or `plugin/name`) that must not serve decode where this one serves
    extend, nor extend where it serves decode. A name that nobody offers excludes nothing."""
    needs_cpu_seq_lens: bool = False
    """Whether the batch must carry `seq_lens_cpu`."""
    fp8_products: bool = False
    """Whether Q and the softmax's weights are rounded to KV's dtype where that is an 8-bit float,
    as 8-bit matrix units want. The conformance suite allows such a backend the rounding."""
    verified_on: tuple[Verified, ...] = ()
    """What passed the conformance suite: hardware, or an emulator of the vendor's functions."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_names()
        try:
            SpecifierSet(self.contract)
        except InvalidSpecifier:
            raise self._refusal("contract", self.contract, "a range such as >=1,<2") from None
        for alternatives in self.requirements():
            if not alternatives:
                raise self._refusal("requires", (), "at least one alternative")
            for text in alternatives:
                try:
                    parsed_requirement(text)
                except (InvalidRequirement, TypeError):
                    raise self._refusal("requires", text, "a PEP 508 requirement") from None
        if self.status not in get_args(Status):
            raise self._refusal("status", self.status, f"one of {', '.join(get_args(Status))}")
        for field in ("factory", "tuner"):
            named = getattr(self, field)
            if named is not None and (not isinstance(named, str) or named.count(":") != 1):
                raise self._refusal(field, named, '"module:attribute"')
        if self.factory is None and self.status == "available":
            raise self._refusal("factory", None, 'one, unless the status is "planned"')

    def _check_types(self) -> None:
        for field in ("name", "summary", "contract", "extra"):
            if not isinstance(getattr(self, field), str):
                raise self._refusal(field, getattr(self, field), "text")
        for field, kinds in HELD.items():
            value = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(item, kinds) for item in value):
                said = " or ".join(kind.__name__ for kind in kinds)
                raise self._refusal(field, value, f"a tuple of {said}")

    def _check_names(self) -> None:
        for name in (self.name, *self.aliases):
            if not NAME.fullmatch(name):
                raise self._refusal("name", name, "letters, digits, _ and -")
        options = [option.name for option in self.options]
        if len(set(options)) < len(options):
            raise self._refusal("options", options, "each name once")
        if not isinstance(self.sources, Mapping):
            raise self._refusal("sources", self.sources, "a mapping from axes to text")
        for axis, source in self.sources.items():
            if axis not in Clause.__dataclass_fields__ or not isinstance(source, str):
                raise self._refusal("sources", f"{axis}: {source}", "axes of a clause, with text")
        object.__setattr__(self, "sources", FrozenMapping(self.sources))

    def _refusal(self, field: str, came: object, expected: str) -> InvalidInput:
        return _refusal(f"card {self.name!r}, {field}", came, expected)

    def requirements(self) -> tuple[tuple[str, ...], ...]:
        """`requires`, each as a tuple of alternatives."""
        return tuple((item,) if isinstance(item, str) else item for item in self.requires)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A card and who brought it."""

    card: BackendCard
    plugin: str
    distribution: str = ""
    version: str = ""

    @property
    def address(self) -> str:
        """The name that is never ambiguous."""
        return f"{self.plugin}/{self.card.name}"
