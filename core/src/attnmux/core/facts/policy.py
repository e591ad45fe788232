"""The backends that the asker names, allows, forbids or prefers."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from attnmux.core.facts.checks import refusal
from attnmux.core.facts.errors import BackendFailed
from attnmux.core.facts.fields import Check, read_fields
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


Backend = Annotated[str | None, Check("a backend's name, or None")]


def _names(name: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401  # reads any value
    is_several = isinstance(value, Collection) and not isinstance(value, str)
    if not is_several or not all(isinstance(item, str) for item in value):
        raise refusal(name, value, "several names, as a tuple of them")
    return tuple(value)


def _distributions(name: str, value: Any) -> frozenset[str]:  # noqa: ANN401  # as above
    return frozenset(_names(name, value))


def _origins(name: str, value: Any) -> Mapping[str, str]:  # noqa: ANN401  # reads any value
    if not isinstance(value, Mapping):
        raise refusal(name, value, "a mapping")
    for named, origin in value.items():
        if named not in NAMING or origin not in ("user", *SOURCES):
            expected = f"{', '.join(NAMING)}, each by user, {' or '.join(SOURCES)}"
            raise refusal(name, f"{named}={origin}", expected)
    return FrozenMapping(value)


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

    backend: Backend = None
    """For extend and decode, unless the next two name others."""
    prefill_backend: Backend = None
    decode_backend: Backend = None
    mm_backend: Backend = None
    """For the encoder of a multimodal model."""
    linear_backend: Backend = None
    """For the layers without softmax attention, of whatever kind."""
    options: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=FrozenMapping)
    """By backend; text is read as the option's type."""
    allow: Annotated[tuple[str, ...] | None, _names] = None
    """The only backends to consider; None: all. A name in this list and the next two means every
    backend that has it as its name or an alias."""
    deny: Annotated[tuple[str, ...], _names] = ()
    prefer: Annotated[tuple[str, ...], _names] = ()
    """Backends that win over every rank if they fit; the first wins over the next."""
    allow_coercion: bool = False
    """Whether values that a user, the environment or a config file set may be changed."""
    without: Annotated[frozenset[str], _distributions] = frozenset()
    """Distributions that count as not installed."""
    failed: Mapping[str, BackendFailed] = field(default_factory=FrozenMapping)
    """By `plugin/name`: backends that this process tried and could not make."""
    origins: Annotated[Mapping[str, str], _origins] = field(default_factory=FrozenMapping)
    """Source of each named backend, by field; "user" if absent."""

    def __post_init__(self) -> None:
        read_fields(self, "policy")

    def named_for(self, phase: str) -> tuple[str, str] | None:
        """(the field, the backend's name) that the asker gave for a leading phase, or for
        "linear" layers."""
        for field_name in FIELDS[phase]:
            backend: str | None = getattr(self, field_name)
            if backend is not None:
                return field_name, backend
        return None

    def origin_of(self, phase: str) -> str:
        """Source of the name for a leading phase: user, env or config; empty without a name."""
        naming = self.named_for(phase)
        return "" if naming is None else self.origins.get(naming[0], "user")

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
