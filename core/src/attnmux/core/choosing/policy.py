"""What the asker insists on or prefers, beside what the request needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attnmux.core.choosing.card import OptionValue
from attnmux.core.choosing.frozen import FrozenMapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Names of backends may be a card's name, an alias, or `plugin/name`.

    A named backend serves the phases it is named for or nothing does; only an automatic choice
    falls back.
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
    """The only backends to consider; None: all."""
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
    origins: Mapping[str, str] = field(default_factory=FrozenMapping)
    """Who named the backends, by field; "user" where absent."""

    def named_for(self, phase: str) -> tuple[str, str] | None:
        """(the field, the backend's name) that the asker gave for a leading phase."""
        fields = {
            "extend": ("prefill_backend", "backend"),
            "decode": ("decode_backend", "backend"),
            "encoder": ("mm_backend",),
        }
        given = {
            "backend": self.backend,
            "prefill_backend": self.prefill_backend,
            "decode_backend": self.decode_backend,
            "mm_backend": self.mm_backend,
        }
        for name in fields[phase]:
            backend = given[name]
            if backend is not None:
                return name, backend
        return None
