"""A verdict on one backend in one phase, and the changes that the solver made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from attnmux.core.facts.frozen import Plain

Status = Literal["fits", "coerced", "rejected"]
Asker = Literal["request", "machine", "rule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason(Plain):
    """Why a backend does not serve a phase: one condition of its card that does not hold."""

    code: str
    """Stable, for programs: "PAGE_SIZE", "LIBRARY", "DENIED", …"""
    axis: str
    wanted: str
    offered: str
    hint: str = ""
    """The smallest change that helps: "page_size=64" for `Request.parse`, or a command line. Either
    all reasons of a verdict have one, or none has. Following them all leads to a decision in which
    the backend serves the phase, if necessary after hints for the other phases."""
    by: Asker = "rule"
    """The owner of the value `wanted`: the request or the machine, to which the card offers
    `offered`; or a rule, such as an allow list, that `offered` breaks."""

    def __str__(self) -> str:
        text = f"{self.axis}: {self._text()}"
        return f"{text} ({self.hint})" if self.hint else text

    def _text(self) -> str:
        if self.by == "machine":
            verb = "has" if self.axis == "features" else "is"
            return f"needs {self.offered}, this {verb} {self.wanted}"
        if self.by == "rule":
            return f"needs {self.wanted}, here: {self.offered}"
        if (self.wanted, self.offered) == ("yes", "none"):
            return "not served"
        return f"asked for {self.wanted}, serves {self.offered}"


def without_hints(reasons: Iterable[Reason]) -> list[Reason]:
    return [replace(reason, hint="") if reason.hint else reason for reason in reasons]


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle(Plain):
    """An obstacle between a backend and its phases as decided, with the decision's page size and KV
    dtype, and with the backends chosen for the other phases."""

    phase: str
    """The first that fails, of those that one backend serves together."""
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Plain):
    """One candidate in one phase. A rejected one has reasons, a fitting one has none."""

    backend: str
    plugin: str
    phase: str
    verdict: Status
    rank: int | None
    """Lower is better; None if rejected."""
    measured: bool = False
    """Whether the rank follows figures, of this machine or of its kind, and not a prior."""
    source: str = ""
    """Where the rank comes from."""
    eligible: bool = False
    """Whether it serves the phase as decided: it is not rejected and has no obstacle."""
    obstacle: Obstacle | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def address(self) -> str:
        """`plugin/name`."""
        return f"{self.plugin}/{self.backend}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coercion(Plain):
    """A value of the request that the solver changed."""

    field: str
    old: str
    new: str
    because: str
    origin: str
    """Source of the old value: user, env, config, model, platform or default."""
