"""A backend's abilities as data: its card, with clauses, priors and options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

from attnmux.core.choosing.ask.values import DTYPES, KINDS, PHASES, OptionValue
from attnmux.core.choosing.common.checks import TEXT, Check, check_fields, refusal, tuple_of
from attnmux.core.choosing.common.facts import dataclass, field
from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.offer.accuracy import ErrorBound
from attnmux.core.choosing.offer.conditions import (
    ANY,
    NONE,
    Condition,
    Emulated,
    Excluding,
    Includes,
    OneOf,
    Range,
    Runtimes,
    Versions,
)
from attnmux.core.choosing.offer.libraries import check_range, parsed_requirement
from attnmux.core.choosing.offer.verified import Verified

CONTRACTS = ("1.0",)
"""The versions of the contract that this core speaks, the newest last."""

LAST_RESORT = 900
"""From this rank on, a backend is portable: it serves where nothing made for the hardware does."""

DEFAULT_RANK = 1000
"""The rank where no prior holds."""

MOST_CLAUSES = 1000
"""Of a card. Every question reads each of them."""

Status = Literal["available", "planned"]

TreeMask = Literal["full", "qlen_only", "qlen_only_bitpacking"]
"""A form of a draft tree's mask, by SGLang's name: `SpecInput.custom_mask`, `visible` or
`visible_bits`."""
TREE_MASKS: tuple[TreeMask, ...] = ("qlen_only", "qlen_only_bitpacking", "full")
"""All forms, for a backend that takes each of them through `visible_drafts`."""

UNSOURCED: Mapping[str, str] = FrozenMapping()

NAME = r"[A-Za-z0-9_-]+"
NAME_EXPECTED = "letters, digits, _ and -"
"""Of a backend or an option, so that `plugin/name` and `BACKEND.OPTION=VALUE` can be parsed."""


WORDS: Mapping[str, tuple[str, ...]] = {
    "phase": PHASES,
    "kind": KINDS,
    "dtype": DTYPES,
    "kv_dtype": DTYPES,
}
"""Axes whose values are words of a request: no request would match any other word."""

LARGEST = 2**31 - 1
"""Of a number in a card: sizes of tensors and kernels' arguments end here."""

TEXTS = (*WORDS, "vendor", "arch", "version")
NUMBERS = (
    *("page_size", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("num_q_heads", "num_kv_heads", "group_size", "spec_topk", "spec_draft_tokens"),
    *("sliding_window", "attention_chunk", "logit_cap"),
)
OWN_KIND: Mapping[str, type[Condition]] = {
    "version": Versions,
    "features": Includes,
    "runtime": Runtimes,
    "page_size": Emulated,
}


def _limits(axis: str, condition: object) -> bool:
    """Whether the condition can limit the axis: its kind, and the type and range of its values."""
    if condition is ANY or condition is NONE:
        return True
    if isinstance(condition, Range):
        ends = (condition.step, condition.most or LARGEST)
        return (
            axis in NUMBERS
            and all(type(end) is int and 0 < end <= LARGEST for end in ends)
            and type(condition.least) is int
            and 0 <= condition.least <= LARGEST
        )
    if isinstance(condition, (OneOf, Excluding)):
        return all(_is_value(axis, value) for value in condition.values)
    if isinstance(condition, Emulated) and not _limits(axis, condition.native):
        return False
    return type(condition) is OWN_KIND.get(axis)


def _is_value(axis: str, value: object) -> bool:
    if axis in TEXTS:
        return isinstance(value, str) and value != ""
    if axis in NUMBERS:
        return type(value) in (int, float) and 0 < value <= LARGEST  # type: ignore[operator]  # a number
    return axis not in OWN_KIND and isinstance(value, bool)


def _expected(axis: str) -> str:
    """The conditions that can limit an axis, for the error."""
    if axis in ("features", "runtime"):
        return f"ANY, NONE or {OWN_KIND[axis].__name__.lower()}(…)"
    values = f"numbers from 1 to {LARGEST}" if axis in NUMBERS else "texts"
    flag = axis not in TEXTS and axis not in NUMBERS
    return "ANY or NONE" if flag else f"a condition on {values}, such as one_of(…) or ANY"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """Conditions that hold together, one for each axis (the table is in `judge/axes.py`).

    A clause refuses a request that uses a feature whose field is NONE: features must be declared.
    Axes that only limit (SM version, runtime, head counts) start at ANY.

    Raises InvalidInput for a field that holds no condition, for a condition whose values have the
    wrong type or range for the axis, and for a phase, a kind or a dtype that no request could ask
    for.
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
    tree_windows: Condition = NONE
    """Draft trees in layers with windows or attention chunks, which count positions. Asked unless
    the request has masks of the user, under which they count places in the row."""
    sliding_window: Condition = NONE
    attention_chunk: Condition = NONE
    cross_attention: Condition = NONE
    sinks: Condition = NONE
    alibi: Condition = NONE
    relative_bias: Condition = NONE
    logit_cap: Condition = NONE
    custom_mask: Condition = NONE
    multi_item: Condition = NONE
    deterministic: Condition = NONE
    graph: Condition = NONE
    lse: Condition = NONE
    strided_kv: Condition = NONE

    def __post_init__(self) -> None:
        for name in self.__slots__:
            condition = getattr(self, name)
            if not _limits(name, condition):
                raise refusal(f"clause, {name}", condition, _expected(name))
        for name, words in WORDS.items():
            unknown = set(getattr(self, name).examples()).difference(words)
            if unknown:
                got = ", ".join(sorted(map(str, unknown)))
                raise refusal(f"clause, {name}", got, f"some of {', '.join(words)}")


def when(**conditions: Condition) -> Clause:
    """A clause of the given conditions alone, for priors."""
    everything = dict.fromkeys(Clause.__slots__, ANY)
    return Clause(**{**everything, **conditions})


ALWAYS = when()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """How well a backend is expected to do before any measurement. Lower ranks win. From
    `LAST_RESORT` on, another way to run the model is better, where it has one.

    Raises InvalidInput for a rank that is no integer, or a `when` that is no clause.
    """

    rank: int
    when: Clause = ALWAYS
    source: str
    """Where the expectation comes from."""

    def __post_init__(self) -> None:
        if type(self.rank) is not int or abs(self.rank) > LARGEST:
            raise refusal("prior, rank", self.rank, f"an integer of at most {LARGEST}")
        if not isinstance(self.source, str):
            raise refusal("prior, source", self.source, "text")
        if not isinstance(self.when, Clause):
            raise refusal("prior, when", self.when, "a clause, such as when(…)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A setting that a backend's factory receives. It must not change the results.

    Raises InvalidInput for a name of other characters than NAME's, and for a default or a choice of
    another type.
    """

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    default: OptionValue
    choices: tuple[OptionValue, ...] = ()
    """Empty: any value of the type."""
    summary: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.name):
            raise refusal("option, name", self.name, NAME_EXPECTED)
        if not isinstance(self.summary, str):
            raise refusal(f"option {self.name!r}, summary", self.summary, "text")
        if self.type not in get_args(OptionValue):
            raise refusal(f"option {self.name!r}, type", self.type, "bool, int, float or str")
        for value in (self.default, *self.choices):
            if type(value) is not self.type:
                expected = f"values of type {self.type.__name__}"
                raise refusal(f"option {self.name!r}", value, expected)
        if self.choices and self.default not in self.choices:
            raise refusal(f"option {self.name!r}, default", self.default, "one of its choices")


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """A backend's kernels as they were built for devices with some features.

    Raises InvalidInput for fields of other types.
    """

    name: str
    features: tuple[str, ...] = ()
    """Of `Platform.features`, all needed."""

    def __post_init__(self) -> None:
        check_fields("build", self, {"name": TEXT, "features": tuple_of(str)})


def _is_reference(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.count(":") == 1)


CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("name", "summary", "contract", "extra"), TEXT),
    "clauses": Check(
        f"a tuple of Clause, at most {MOST_CLAUSES}",
        lambda value: tuple_of(Clause).holds(value) and len(value) <= MOST_CLAUSES,
    ),
    "aliases": tuple_of(str),
    "requires": tuple_of(str, tuple),
    "options": tuple_of(Option),
    "priors": tuple_of(Prior),
    "builds": tuple_of(Build),
    "companions": tuple_of(str),
    "excludes": tuple_of(str),
    "error_bounds": tuple_of(ErrorBound),
    "verified_on": tuple_of(Verified),
    "status": Check(f"one of {', '.join(get_args(Status))}", get_args(Status).__contains__),
    **dict.fromkeys(("factory", "tuner"), Check('"module:attribute"', _is_reference)),
    "tree_masks": Check(
        f"a tuple of one or more of {', '.join(TREE_MASKS)}",
        lambda value: tuple_of(str).holds(value) and bool(value) and set(value) <= {*TREE_MASKS},
    ),
    "sources": Check("a mapping from axes to text", lambda value: isinstance(value, Mapping)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendCard:
    """A backend, described. Importing a card must import neither torch nor a kernel library.

    Raises InvalidInput for a field of another type (such as a list or a bare string instead of a
    tuple), a name of other characters than NAME's, a version range or a requirement that cannot be
    parsed, a factory or tuner that is not "module:attribute", a source of an unknown axis, and an
    available card without a factory.
    """

    name: str
    summary: str
    clauses: tuple[Clause, ...]
    """The backend serves a request that any one of them admits."""
    sources: Mapping[str, str] = UNSOURCED
    """Where the limits come from, by axis: a header, a check, a release note, a measurement."""
    aliases: tuple[str, ...] = ()
    """Other names that a user may give; an alias of several cards means the one that fits."""
    factory: str | None = None
    """"module:attribute", called as `factory(context, options)`; imported for the winner alone."""
    tuner: str | None = None
    """"module:attribute", a `Tuner` that tries the backend's launches; None: it has none."""
    status: Status = "available"
    """A planned backend never runs; only questions about another machine consider it."""
    contract: str = ">=1,<2"
    requires: tuple[str | tuple[str, ...], ...] = ()
    """PEP 508 requirements, all needed; an inner tuple lists alternatives, any one suffices."""
    extra: str = ""
    """The extra of the plugin's distribution that installs `requires`."""
    options: tuple[Option, ...] = ()
    priors: tuple[Prior, ...] = ()
    """The first whose conditions hold counts."""
    builds: tuple[Build, ...] = ()
    """The best first: the first whose features the device has serves. Empty: there is but one."""
    companions: tuple[str, ...] = ()
    """Backends for the phases that this one does not serve, where a user names only this one."""
    excludes: tuple[str, ...] = ()
    """Backends (names, aliases or `plugin/name`) that must not serve decode where this one serves
    extend, nor extend where it serves decode. An unknown name excludes nothing."""
    needs_cpu_seq_lens: bool = False
    """Whether the batch must carry `seq_lens_cpu`."""
    tree_masks: tuple[TreeMask, ...] = ("full",)
    """The forms of a draft tree's mask that the backend reads. A step whose mask has another form
    comes with the first of them instead."""
    virtual_requests: bool = False
    """Whether core serves layers with attention chunks for the backend: it gets layers without
    chunks, and the tokens of a request in one chunk as a request of their own. Chunks are whole
    pages."""
    fp8_products: bool = False
    """Whether the kernel rounds Q and the softmax's weights to KV's dtype where that is an 8-bit
    float, for 8-bit matrix units. The conformance suite then tolerates the rounding."""
    error_bounds: tuple[ErrorBound, ...] = ()
    """Errors that the backend's answers stay within, for requests with a `max_error`."""
    verified_on: tuple[Verified, ...] = ()
    """Runs of the conformance suite that it passed, on hardware or on an emulator."""

    def __post_init__(self) -> None:
        owner = f"card {self.name!r}"
        check_fields(owner, self, CHECKS)
        for name in (self.name, *self.aliases):
            if not re.fullmatch(NAME, name):
                raise refusal(f"{owner}, name", name, NAME_EXPECTED)
        try:
            check_range(self.contract)
        except ValueError:
            expected = "a range such as >=1,<2"
            raise refusal(f"{owner}, contract", self.contract, expected) from None
        for alternatives in self.requirements():
            _check_requirement(f"{owner}, requires", alternatives)
        options = [option.name for option in self.options]
        if len(set(options)) < len(options):
            raise refusal(f"{owner}, options", options, "each name once")
        for axis, source in self.sources.items():
            if axis not in Clause.__slots__ or not isinstance(source, str):
                expected = "axes of a clause, with text"
                raise refusal(f"{owner}, sources", f"{axis}: {source}", expected)
        object.__setattr__(self, "sources", FrozenMapping(self.sources))
        if self.factory is None and self.status == "available":
            raise refusal(f"{owner}, factory", None, 'one, unless the status is "planned"')

    def requirements(self) -> tuple[tuple[str, ...], ...]:
        """`requires`, each as a tuple of alternatives."""
        return tuple((item,) if isinstance(item, str) else item for item in self.requires)

    def libraries(self) -> frozenset[str]:
        """The distributions of `requires`, all alternatives."""
        texts = (text for alternatives in self.requirements() for text in alternatives)
        return frozenset(parsed_requirement(text).name for text in texts)


def _check_requirement(argument: str, alternatives: tuple[str, ...]) -> None:
    if not alternatives:
        raise refusal(argument, (), "at least one alternative")
    for text in alternatives:
        try:
            check_range(parsed_requirement(text).specifier)
        except (ValueError, TypeError):
            raise refusal(argument, text, "a PEP 508 requirement") from None


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
    address: str = field(init=False, repr=False, compare=False)
    """`plugin/name`: the name that is never ambiguous."""
    names: frozenset[str] = field(init=False, repr=False, compare=False)
    """All that a user may call it: its name and its aliases, each also as `plugin/name`."""
    claims: frozenset[str] = field(init=False, repr=False, compare=False)
    """`names` and those that are foreign. Lists that deny go by these."""

    def __post_init__(self) -> None:
        own = (self.card.name, *self.card.aliases)
        claims = frozenset((*own, *(f"{self.plugin}/{name}" for name in own)))
        object.__setattr__(self, "address", f"{self.plugin}/{self.card.name}")
        object.__setattr__(self, "names", claims - self.foreign)
        object.__setattr__(self, "claims", claims)
