"""The answer: a backend for each phase, what was changed to get there, and every verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.ask.values import OptionValue
from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.common.verdict import Coercion, Verdict
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import LAST_RESORT, Offer
from attnmux.core.choosing.offer.libraries import Libraries, installed_version
from attnmux.core.choosing.tell.choice import disagreements
from attnmux.core.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The backend that serves a phase, with all that is needed to make it."""

    backend: str
    plugin: str
    factory: str | None
    """"module:attribute"; None for a planned backend, which only a question about another machine
    can choose."""
    options: Mapping[str, OptionValue] = field(default_factory=FrozenMapping)
    """Every option of the backend, defaults included."""
    distribution: str = ""
    version: str = ""
    origin: str = ""
    """Who named the backend: user, env or config; empty where nobody did."""

    @property
    def address(self) -> str:
        """`plugin/name`."""
        return f"{self.plugin}/{self.backend}"

    def to_dict(self) -> dict[str, Any]:
        return {**self.identity(), "origin": self.origin}

    def identity(self) -> dict[str, Any]:
        """What is run, whoever asked for it."""
        return {
            "backend": self.backend,
            "plugin": self.plugin,
            "factory": self.factory,
            "options": dict(self.options),
            "distribution": self.distribution,
            "version": self.version,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Choice:
        return cls(**{**data, "options": FrozenMapping(data["options"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRange:
    """Decode steps that another backend serves than the phase's: those of some batch sizes."""

    least: int
    most: int | None
    """None: there is no largest."""
    choice: Choice
    gain: float
    """The share of the time of the phase's backend that it saves at each of the measured sizes at
    least: 0.05 is 5 %."""

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} and more"
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "least": self.least,
            "most": self.most,
            "gain": self.gain,
            "choice": self.choice.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SizeRange:
        return cls(**{**data, "choice": Choice.from_dict(data["choice"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What `solve` decided. It survives JSON unchanged, so that one process decides for all."""

    platform: Platform
    request: Request
    """As resolved: page size and KV dtype are set, coercions applied."""
    page_size: int
    kv_dtype: str
    phases: Mapping[str, Choice]
    """Only the requested phases."""
    decode_sizes: tuple[SizeRange, ...] = ()
    """Batch sizes at which another backend decodes faster by measurements of this machine,
    ascending; at the others, and in every other mode, `phases` says who serves. Of a step that is
    replayed from a graph the captured size counts."""
    coercions: tuple[Coercion, ...] = ()
    candidates: Sequence[Verdict] = ()
    """One for each backend and phase. Read-only; `solve` leaves them to be made when first read."""

    @property
    def choices(self) -> tuple[tuple[str, Choice], ...]:
        """(phase, choice) of all that may run, those of `decode_sizes` behind those of `phases`."""
        return (*self.phases.items(), *(("decode", each.choice) for each in self.decode_sizes))

    @property
    def is_last_resort(self) -> bool:
        """Whether a phase is served by a backend that is not made for the platform (its rank)."""
        winners = {(choice.backend, choice.plugin, phase) for phase, choice in self.phases.items()}
        return any(
            verdict.rank is not None and verdict.rank >= LAST_RESORT
            for verdict in self.candidates
            if (verdict.backend, verdict.plugin, verdict.phase) in winners
        )

    @property
    def hash(self) -> str:
        """SHA-256 over what was decided: two processes that agree on it run the same backends.

        It covers the kind of device, what the request asks for, page size, KV dtype, and each
        phase's backend with its options and its plugin's version, those of `decode_sizes` too; not
        who asked for a value, the product's name, or the losers.
        """
        asked = self.request.to_dict()
        del asked["origins"]
        decided = {
            "platform": [self.platform.vendor, self.platform.arch, self.platform.runtime],
            "request": asked,
            "page_size": self.page_size,
            "kv_dtype": self.kv_dtype,
            "phases": {phase: choice.identity() for phase, choice in self.phases.items()},
        }
        if self.decode_sizes:
            decided["decode_sizes"] = [
                [each.least, each.most, each.choice.identity()] for each in self.decode_sizes
            ]
        text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def check(
        self,
        platform: Platform,
        offers: Iterable[Offer],
        *,
        libraries: Libraries = installed_version,
    ) -> None:
        """Check that what was decided elsewhere holds here: before a rank builds what it loaded.

        platform, offers: this process's own. Raises InvalidInput, with every difference, where
        this process would not come to the same hash, or where a chosen backend does not serve its
        phase here.
        """
        found = tuple(disagreements(self, platform, offers, libraries))
        if found:
            expected = "one that holds in this process too"
            raise InvalidInput("decision", came="; ".join(found), expected=expected)

    def to_dict(self) -> dict[str, Any]:
        return {
            "platform": self.platform.to_dict(),
            "request": self.request.to_dict(),
            "page_size": self.page_size,
            "kv_dtype": self.kv_dtype,
            "hash": self.hash,
            "phases": {phase: choice.to_dict() for phase, choice in self.phases.items()},
            "decode_sizes": [each.to_dict() for each in self.decode_sizes],
            "coercions": [asdict(coercion) for coercion in self.coercions],
            "candidates": [verdict.to_dict() for verdict in self.candidates],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """The inverse of `to_json`.

        Raises InvalidInput for text that is no decision (a refusal's JSON is none), or whose hash
        is not that of its content.
        """
        try:
            data = json.loads(text)
            if data["hash"] is None and not data["phases"]:
                came = "an answer in which nothing was decided"
                raise InvalidInput("decision", came=came, expected="a backend for each phase")
            decision = cls(
                platform=Platform.from_dict(data["platform"]),
                request=Request.from_dict(data["request"]),
                page_size=data["page_size"],
                kv_dtype=data["kv_dtype"],
                phases=FrozenMapping(
                    {phase: Choice.from_dict(choice) for phase, choice in data["phases"].items()}
                ),
                decode_sizes=tuple(map(SizeRange.from_dict, data["decode_sizes"])),
                coercions=tuple(Coercion(**coercion) for coercion in data["coercions"]),
                candidates=tuple(Verdict.from_dict(verdict) for verdict in data["candidates"]),
            )
            stated = data["hash"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, InvalidInput) and error.argument == "decision":
                raise
            came = f"{type(error).__name__}: {error}"
            expected = "the JSON of this version's Decision.to_json"
            raise InvalidInput("decision", came=came, expected=expected) from error
        if stated != decision.hash:
            expected = f"the hash of its content, {decision.hash}"
            came = f"hash {stated}: it was changed since, or written by another version of attnmux"
            raise InvalidInput("decision", came=came, expected=expected)
        return decision

    def summary(self) -> str:
        """One line: which backend serves what, where, and why it won."""
        served: dict[tuple[str, str], list[str]] = {}
        for phase, choice in self.phases.items():
            served.setdefault((choice.backend, choice.plugin), []).append(phase)
        planned = {c.backend: ", planned" for c in self.phases.values() if c.factory is None}
        said = [
            f"{name} ({plugin}{planned.get(name, '')}) serves {_listed(phases)}, "
            f"{self._standing(name, plugin, phases)}"
            for (name, plugin), phases in served.items()
        ]
        said += [
            f"{each.choice.backend} ({each.choice.plugin}) serves decode of {each} requests, "
            f"saving at least {each.gain:.0%} of the time (measured)"
            for each in self.decode_sizes
        ]
        where = self.platform.name or str(self.platform)
        stored = f"page size {self.page_size}, KV in {self.kv_dtype}"
        return f"{'; '.join(said)}; on {where}, {stored}"

    def _standing(self, backend: str, plugin: str, phases: list[str]) -> str:
        """How a winner stood among the candidates of the phase that decided: decode if served."""
        phase = "decode" if "decode" in phases else phases[0]
        fitting = [v for v in self.candidates if v.phase == phase and v.eligible]
        own = [v.rank for v in fitting if (v.backend, v.plugin) == (backend, plugin)]
        if not own:
            return "as decided elsewhere"
        origin = self.phases[phase].origin
        named = f"named by {origin}, " if origin else ""
        moved = any(v.measured for v in fitting if (v.backend, v.plugin) == (backend, plugin))
        rank = f"{named}rank {own[0]}{' (measured)' if moved else ''}"
        if len(fitting) == 1:
            return f"{rank}, the only one that fits"
        better = sum(v.rank < own[0] for v in fitting if v.rank is not None and own[0] is not None)
        place = "the best" if not better else f"behind {better}"
        return f"{rank}, {place} of {len(fitting)} that fit"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
