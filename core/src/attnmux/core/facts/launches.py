"""A backend's launches (tiles, warps, splits): those tried by its tuner, and those that won.

The backend chooses the words of subjects and values. A tuned launch is used for its own subject on
the same device with the same versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from attnmux.core.facts.fields import Check, read_fields
from attnmux.core.facts.frozen import Plain
from attnmux.core.facts.libraries import Libraries, installed_version
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.records import MICROSECONDS, Device, Microseconds, Record
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import OptionValue

Values = Annotated[Mapping[str, OptionValue], Check("numbers and words by name")]


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedLaunch(Record):
    """The fastest launch that was tried for a subject. Raises InvalidInput as `Record`."""

    noun = "launch"
    listed = "launches"
    keyed_by = ("subject",)

    versions: Annotated[Mapping[str, str], Check("texts by name of distribution", all)]
    subject: Values
    """The kernel, and the shapes that it is launched for."""
    values: Values
    """The launch."""

    @staticmethod
    def current(
        launches: Iterable[TunedLaunch],
        backend: str,
        platform: Platform,
        *,
        libraries: Libraries = installed_version,
    ) -> tuple[TunedLaunch, ...]:
        """The launches of `backend` that were tuned on this device with the versions installed
        now."""
        device = Device.of(platform)
        return tuple(
            launch
            for launch in launches
            if (launch.backend, launch.device) == (backend, device)
            and all(libraries(name) == version for name, version in launch.versions.items())
        )


Measure = Callable[[], tuple[Any, Sequence[float]]]


def alone(measure: Measure, /) -> tuple[Any, tuple[float, ...]]:
    """Measure on a single rank."""
    made, figures = measure()
    return made, tuple(figures)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The task of a tuner: the callable that a card names, which gets a job and yields each `Trial`
    when it is done, so that progress can be shown."""

    request: Request
    """The decided request: page size and KV dtype are set."""
    platform: Platform
    device: str
    """torch's name: "cuda:0"."""
    options: Mapping[str, object]
    """All options of the backend."""
    launches: tuple[TunedLaunch, ...] = ()
    """See `BackendContext.launches`."""
    together: Callable[[Measure], tuple[Any, tuple[float, ...]]] = alone
    """Calls a function on all ranks at the same time, which returns something of its rank, and
    figures, as many on each rank. Returns the former, and for each figure the largest of all ranks.
    Raises on every rank if the function raises on one.
    A tuner that goes on from the fastest launch measures by it, so that all ranks of a group try
    the same launches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial(Plain):
    """One launch that was tried for a subject.

    Raises InvalidInput for a subject, values or a time that a `TunedLaunch` cannot hold.
    """

    subject: Values
    """The kernel and its shapes, in the backend's words."""
    values: Values
    """The launch."""
    median_us: Annotated[Microseconds | None, Check(MICROSECONDS)]
    """None if it failed, or its result was wrong."""
    error: str = ""
    is_current: bool = False
    """Whether the backend uses this launch today."""

    def __post_init__(self) -> None:
        read_fields(self, "trial")
