"""The backends that the asker names, allows, forbids or prefers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field

from attnmux.core.facts.checks import Check, check_fields, refusal
from attnmux.core.facts.errors import BackendFailed
from attnmux.core.facts.frozen import FrozenMapping
from attnmux.core.facts.values import OptionValue

FIELDS = {
    "extend": ("prefill_backend", "backend"),
    "decode": ("decode_backend", "backend"),
    "encoder": ("mm_backend",),
    "linear": ("linear_backend",),
}
"""Which fields name the backend of a leading phase, or of linear layers; the first that is set
counts."""

NAMING = tuple(dict.fromkeys(name for fields in FIELDS.values() for name in fields))

SOURCES = {"env": "the environment", "config": "the configuration file"}
"""Origins that an error mentions: the user may have forgotten these."""


def _are_names(value: object) -> bool:
    usable = isinstance(value, Collection) and not isinstance(value, str)
    return usable and all(isinstance(item, str) for item in value)  # type: ignore[attr-defined]  # a collection by now


BACKEND = Check("a backend's name, or None", lambda value: value is None or isinstance(value, str))
NAMES = Check("several names, as a tuple of them", _are_names)
MAPPING = Check("a mapping", lambda value: isinstance(value, Mapping))

CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(NAMING, BACKEND),
    "allow": Check(NAMES.expected, lambda value: value is None or _are_names(value)),
    **dict.fromkeys(("deny", "prefer", "without"), NAMES),
    **dict.fromkeys(("options", "failed", "origins"), MAPPING),
}
COPIES: Mapping[str, Callable[..., object]] = {
    **dict.fromkeys(("allow", "deny", "prefer"), tuple),
    "without": frozenset,
    **dict.fromkeys(("options", "failed", "origins"), FrozenMapping),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Names of backends may be a card's name, an alias, or `plugin/name`.

    A named backend serves the phases it is named for, or nothing does; only an automatic choice
    falls back. Lists and mappings are copied.

    Raises InvalidInput for a field of another type, such as one text instead of several names, and
    for an origin that is not one of user, env and config.
    """

    NAMING = NAMING
    """The fields that name a backend."""

    backend: str | None = None
    """For extend and decode, unless the next two name others."""
    prefill_backend: str | None = None
    decode_backend: str | None = None
    mm_backend: str | None = None
    """For the encoder of a multimodal model."""
    linear_backend: str | None = None
    """For the layers without softmax attention, of whatever kind."""
    options: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=FrozenMapping)
    """By backend; text is read as the option's type."""
    allow: tuple[str, ...] | None = None
    """The only backends to consider; None: all. A name in this list and the next two means every
    backend that has it as its name or an alias."""
    deny: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    """Backends that win over every rank where they fit; the first wins over the next."""
    allow_coercion: bool = False
    """Whether values that a user, the environment or a config file set may be changed."""
    without: frozenset[str] = frozenset()
    """Distributions that count as not installed."""
    failed: Mapping[str, BackendFailed] = field(default_factory=FrozenMapping)
    """By `plugin/name`: backends that this process tried and could not make."""
    origins: Mapping[str, str] = field(default_factory=FrozenMapping)
    """Who named the backends, by field; "user" where absent."""

    def __post_init__(self) -> None:
        check_fields("policy", self, CHECKS)
        for name, copy in COPIES.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, copy(value))
        for name, values in self.options.items():
            if not MAPPING.holds(values):
                raise refusal(f"policy, options of {name}", values, MAPPING.expected)
        for name, origin in self.origins.items():
            if name not in NAMING or origin not in ("user", *SOURCES):
                expected = f"{', '.join(NAMING)}, each by user, {' or '.join(SOURCES)}"
                raise refusal("policy, origins", f"{name}={origin}", expected)

    def named_for(self, phase: str) -> tuple[str, str] | None:
        """(the field, the backend's name) that the asker gave for a leading phase, or for
        "linear" layers."""
        for field_name in FIELDS[phase]:
            backend: str | None = getattr(self, field_name)
            if backend is not None:
                return field_name, backend
        return None

    def origin_of(self, phase: str) -> str:
        """Who named the backend of a leading phase: user, env or config; else empty."""
        given = self.named_for(phase)
        return "" if given is None else self.origins.get(given[0], "user")

    def source_of(self, field_name: str) -> str:
        """The source of a name that the user did not give: "backend of the environment"."""
        origin = self.origins.get(field_name, "user")
        return f"{field_name} of {SOURCES[origin]}" if origin in SOURCES else ""

    def admits(self, names: Container[str], claims: Container[str]) -> bool:
        """Whether a backend may be considered at all: one of its `names` is allowed, and none of
        its `claims`, which include names that belong to another backend, is denied."""
        allowed = self.allow is None or any(name in names for name in self.allow)
        return allowed and not any(name in claims for name in self.deny)

    def preference(self, names: Container[str]) -> int:
        """The place of a backend with these names among the preferred ones. It outweighs any rank;
        a lower place wins."""
        for place, name in enumerate(self.prefer):
            if name in names:
                return place
        return len(self.prefer)

    def said_by_user(self) -> tuple[str, ...]:
        """The backends that the user named, whether or not a requested phase needs them."""
        named = [name for name in NAMING if self.origins.get(name, "user") == "user"]
        return tuple(backend for name in named if (backend := getattr(self, name)) is not None)
