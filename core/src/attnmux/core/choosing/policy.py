"""What the asker insists on or prefers, beside what the request needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnmux.core.choosing.ask.values import OptionValue
from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.named import means
from attnmux.core.errors import BackendFailed, InvalidInput

FIELDS = {
    "extend": ("prefill_backend", "backend"),
    "decode": ("decode_backend", "backend"),
    "encoder": ("mm_backend",),
}
"""Which fields name the backend of a leading phase; the first that is set counts."""

NAMING = tuple(dict.fromkeys(name for fields in FIELDS.values() for name in fields))

SOURCES = {"env": "the environment", "config": "the configuration file"}
"""Origins of a name that who is refused may not remember."""

COLLECTIONS: Mapping[str, Callable[[Iterable[str]], object]] = {
    **dict.fromkeys(("allow", "deny", "prefer"), tuple),
    "without": frozenset,
}
MAPPINGS = ("options", "failed", "origins")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Names of backends may be a card's name, an alias, or `plugin/name`.

    A named backend serves the phases it is named for or nothing does; only an automatic choice
    falls back. What is given in a list or a mapping is copied.

    Raises InvalidInput for a name that is no text, a bare text instead of several, a mapping that
    is none, and an origin that is not one of user, env and config.
    """

    backend: str | None = None
    """For extend and decode, where the next two say nothing."""
    prefill_backend: str | None = None
    decode_backend: str | None = None
    mm_backend: str | None = None
    """For the encoder of a multimodal model."""
    options: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=FrozenMapping)
    """By backend; text is read as the option's type."""
    allow: tuple[str, ...] | None = None
    """The only backends to consider; None: all. A name in this list and the next two means every
    backend that bears it, as its name or an alias."""
    deny: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    """Backends that, where they fit, win over every rank; the first wins over the next."""
    allow_coercion: bool = False
    """Whether values that a user, the environment or a config file set may be changed."""
    hypothetical: bool = False
    """The platform is not this machine: library requirements count as met, planned backends count
    as there, and a runtime that the platform does not state counts as new enough."""
    without: frozenset[str] = frozenset()
    """Distributions that count as not installed."""
    failed: Mapping[str, BackendFailed] = field(default_factory=FrozenMapping)
    """By `plugin/name`: backends that were tried in this process and could not be made."""
    origins: Mapping[str, str] = field(default_factory=FrozenMapping)
    """Who named the backends, by field; "user" where absent."""

    def __post_init__(self) -> None:
        for name in NAMING:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _refusal(name, value, "a backend's name, or None")
        for name, kind in COLLECTIONS.items():
            value = getattr(self, name)
            if value is not None or name != "allow":
                object.__setattr__(self, name, _copied(name, value, kind))
        for name in MAPPINGS:
            object.__setattr__(self, name, _frozen(name, getattr(self, name)))
        for name, values in self.options.items():
            _frozen(f"options of {name}", values)
        for name, origin in self.origins.items():
            if name not in NAMING or origin not in ("user", *SOURCES):
                expected = f"{', '.join(NAMING)}, each by user, {' or '.join(SOURCES)}"
                raise _refusal("origins", f"{name}={origin}", expected)

    def named_for(self, phase: str) -> tuple[str, str] | None:
        """(the field, the backend's name) that the asker gave for a leading phase."""
        for field_name in FIELDS[phase]:
            backend: str | None = getattr(self, field_name)
            if backend is not None:
                return field_name, backend
        return None

    def source_of(self, field_name: str) -> str:
        """Who named a backend, where it was not the user: "backend of the environment"."""
        origin = self.origins.get(field_name, "user")
        return f"{field_name} of {SOURCES[origin]}" if origin in SOURCES else ""

    def admits(self, offer: Offer) -> bool:
        """Whether the backend may be considered at all."""
        allowed = self.allow is None or any(means(name, offer) for name in self.allow)
        return allowed and not any(means(name, offer) for name in self.deny)

    def preference(self, offer: Offer) -> int:
        """The backend's place among the preferred ones, which comes before any rank."""
        for place, name in enumerate(self.prefer):
            if means(name, offer):
                return place
        return len(self.prefer)

    def lists(self) -> Mapping[str, tuple[str, ...]]:
        """The lists of backends, by what they are for."""
        return {"allow": self.allow or (), "deny": self.deny, "prefer": self.prefer}

    def said_by_user(self) -> tuple[str, ...]:
        """The names that the user gave, whether or not a requested phase needs them."""
        given = {name: getattr(self, name) for name in NAMING}
        return tuple(
            backend
            for name, backend in given.items()
            if backend is not None and self.origins.get(name, "user") == "user"
        )


def _copied(name: str, value: Any, kind: Callable[[Iterable[str]], object]) -> object:  # noqa: ANN401  # anything may come
    usable = isinstance(value, Collection) and not isinstance(value, str)
    if not usable or not all(isinstance(item, str) for item in value):
        raise _refusal(name, value, "several names, as a tuple of them")
    return kind(value)


def _frozen(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refusal(name, value, "a mapping")
    return FrozenMapping(value)


def _refusal(field_name: str, came: object, expected: str) -> InvalidInput:
    return InvalidInput(f"policy, {field_name}", came=repr(came), expected=expected)
