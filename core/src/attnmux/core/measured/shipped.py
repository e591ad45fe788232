"""Figures of a kind of device that a plugin carries: the file's schema, and what of it counts here.

attnmux-testing writes the files: `attnmux bench --ship`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnmux.core.cards.card import Offer
from attnmux.core.cards.figures import Figures, product_of
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.fields import Name, read_fields
from attnmux.core.facts.files import Files
from attnmux.core.facts.frozen import FrozenMapping, Plain
from attnmux.core.facts.libraries import Libraries, specifiers, within
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.records import Device, is_figure
from attnmux.core.facts.request import Request

FORMAT = 1
STEP = re.compile(r"(decode|extend|verify):bs=([1-9][0-9]*),(?:new=([1-9][0-9]*),)?\S+")
"""A workload as attnmux-testing calls it."""
MOST_BYTES = 16_000_000

Microseconds = tuple[float | None, ...]
"""Times of one layer's call, for each of a file's backends in order. None: it has no right answer
there, or does not serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source(Plain):
    """A backend with figures, and what they hold for.

    Raises InvalidInput for fields of other types and ranges that cannot be parsed.
    """

    backend: Name
    """`plugin/name`."""
    versions: Mapping[str, str]
    """Ranges of versions that the figures hold for, by distribution."""
    measured_with: Mapping[str, str]
    """The versions that were installed, by distribution."""
    build: str = ""
    """The card's build that served; empty for a card that has but one."""
    passed: tuple[str, ...] = ()
    """"decode mha bfloat16": what passed the conformance suite before it was timed."""

    def __post_init__(self) -> None:
        read_fields(self, "figures of a backend")
        for name, text in self.versions.items():
            try:
                specifiers(text)
            except ValueError:
                argument = f"figures of {self.backend}, versions of {name}"
                raise InvalidInput(argument, got=repr(text), expected="a range, >=1,<2") from None

    def shortfall(
        self, platform: Platform, offers: Mapping[str, Offer], libraries: Libraries
    ) -> str:
        """Why the figures do not hold here; empty if they do.

        offers: by address. Figures hold for the build of the backend that was timed, with versions
        within their ranges.
        """
        offer = offers.get(self.backend)
        if offer is None:
            return "no plugin here offers it"
        build = offer.card.build(platform, libraries)
        if build != self.build:
            return f"measured with {_built(self.build)}, which {_built(build)} is not"
        installed = {name: libraries(name) for name in self.versions}
        if offer.distribution in installed:
            installed[offer.distribution] = offer.version
        for name, version in installed.items():
            if version is None:
                return f"{name} is not installed"
            # The version "" is new enough, see `assumed`
            if version and not within(version, self.versions[name]):
                return f"measured with {name} {self.versions[name]}, and {version} is installed"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Layers that were timed, and the times. Without a page size, each backend had its own."""

    request: Request
    steps: Mapping[str, Microseconds]
    """By workload."""

    def phases(self) -> frozenset[str]:
        return frozenset(map(phase_of, self.steps))

    @property
    def verified_drafts(self) -> int:
        """New tokens of a request in the steps that verify drafts; 1 without such steps."""
        found = (STEP.fullmatch(step) for step in self.steps if phase_of(step) == "verify")
        return next((int(each[3] or 1) for each in found if each), 1)

    def table(
        self, phase: str, addresses: Sequence[str | None]
    ) -> Mapping[str, Mapping[str, float]]:
        """The times of the phase by backend and workload. addresses: as `Shipped.counting`."""
        found: dict[str, dict[str, float]] = {}
        for step, times in self.steps.items():
            for address, time in zip(addresses, times, strict=True):
                if address is not None and time is not None and phase_of(step) == phase:
                    found.setdefault(address, {})[step] = time
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data; of the request, what is not its default."""
        told, unset = self.request.to_dict(), Request().to_dict()
        stated = {name: told[name] for name in told if told[name] != unset[name]}
        stated.pop("origins", None)
        return {"request": stated, "steps": {step: list(us) for step, us in self.steps.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shape:
        steps = {step: tuple(times) for step, times in data["steps"].items()}
        return cls(request=Request.from_dict(data["request"]), steps=FrozenMapping(steps))

    def __str__(self) -> str:
        asked = self.request
        heads = f"{asked.num_q_heads}/{asked.num_kv_heads} heads of {asked.head_dim}"
        if asked.latent:
            heads = f"MLA of {asked.num_q_heads} heads"
        elif asked.v_head_dim not in (None, asked.head_dim):
            heads = f"{heads}/{asked.v_head_dim}"
        said = [heads, str(asked.dtype)]
        said += [f"KV in {asked.kv_dtype}"] if asked.kv_dtype not in (None, asked.dtype) else []
        said += [f"pages of {asked.page_size}"] if asked.page_size else []
        said += [f"window {asked.sliding_window}"] if asked.sliding_window is not None else []
        said += [f"cap {asked.logit_cap:g}"] if asked.logit_cap else []
        return ", ".join([*said, *(["sinks"] if asked.sinks else [])])


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipped:
    """The content of a file."""

    device: Device
    date: str
    command: str
    sources: tuple[Source, ...]
    shapes: tuple[Shape, ...]

    @classmethod
    def read(cls, file: Path) -> Shipped:
        """Raises InvalidInput, which names the file, for one that cannot be read, another format,
        missing, unknown or mistyped fields, a device that is not the name's, and unknown workloads;
        for times that are not positive or not one for each source."""
        try:
            data = json.loads(Files.read(str(file), MOST_BYTES))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}")
            del data["format"]
            shipped = cls(
                **{
                    **data,
                    "device": Device(**data["device"]),
                    "sources": tuple(map(_source, data["sources"])),
                    "shapes": tuple(map(Shape.from_dict, data["shapes"])),
                }
            )
            problem = next(shipped._problems(Figures.of(file)), "")
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _refused(file, f"{type(error).__name__}: {error}") from error
        except KeyError as error:
            raise _refused(file, f"no {error}") from error
        if problem:
            raise _refused(file, problem)
        return shipped

    def _problems(self, figures: Figures) -> Iterator[str]:
        named = (figures.vendor, figures.arch, figures.product)
        product = product_of(self.device.name, self.device.vendor)
        if (self.device.vendor, self.device.arch, product) != named:
            yield f"figures of {self.device.vendor}:{self.device.arch} {self.device.name}"
        addresses = [source.backend for source in self.sources]
        if len(set(addresses)) < len(addresses):
            yield "a backend twice"
        if not all(isinstance(text, str) for text in (self.date, self.command)):
            yield "a date or a command that is no text"
        for shape in self.shapes:
            for step, times in shape.steps.items():
                if not STEP.fullmatch(step):
                    yield f"{step!r}, which is no workload"
                if len(times) != len(addresses):
                    yield f"{len(times)} times of {step} for {len(addresses)} backends"
                if not all(time is None or is_figure(time) for time in times):
                    yield f"times of {step} that are no positive numbers: {list(times)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            **{"format": FORMAT, "device": self.device.to_dict()},
            **{"date": self.date, "command": self.command},
            "sources": [source.to_dict() for source in self.sources],
            "shapes": [shape.to_dict() for shape in self.shapes],
        }

    def counting(
        self, platform: Platform, offers: Mapping[str, Offer], libraries: Libraries
    ) -> tuple[str | None, ...]:
        """Each source's address if its figures hold here, else None.

        offers: those that may serve, by address.
        """
        return tuple(
            None if source.shortfall(platform, offers, libraries) else source.backend
            for source in self.sources
        )


def _built(build: str) -> str:
    return f"the build {build!r}" if build else "its one build"


@lru_cache(maxsize=16)
def read_once(file: str) -> Shipped:
    """`Shipped.read`, once in a process: a wheel's file does not change. Raises as it does."""
    return Shipped.read(Path(file))


def phase_of(step: str) -> str:
    return step.partition(":")[0]


def batch_size_of(step: str) -> int:
    """Requests of a step."""
    found = STEP.fullmatch(step)
    return int(found[2]) if found else 0


def _source(data: Mapping[str, Any]) -> Source:
    return Source(**{**data, "passed": tuple(data["passed"])})


def _refused(file: Path, got: str) -> InvalidInput:
    expected = f"figures of format {FORMAT}, as `attnmux bench --ship` writes them"
    return InvalidInput(str(file), got=got, expected=expected)
