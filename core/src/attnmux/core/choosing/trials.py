"""Trying out the launches of a backend: what a tuner is given, what it tells, and what wins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.measured.launches import CHECKED, Value
from attnmux.core.choosing.measured.tuning import LEAST_GAIN
from attnmux.core.errors import InvalidInput

if TYPE_CHECKING:
    from attnmux.core.choosing.ask.request import Request
    from attnmux.core.choosing.machine.platform import Platform
    from attnmux.core.choosing.measured.launches import TunedLaunch


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to tune for."""

    request: Request
    """As decided: page size and KV dtype are set."""
    platform: Platform
    device: str
    """torch's word: "cuda:0"."""
    options: Mapping[str, object]
    """Of the backend, complete."""
    launches: tuple[TunedLaunch, ...] = ()
    """As `BackendContext.launches`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One launch that was tried for a subject.

    Raises InvalidInput for a subject, values or a time that no `TunedLaunch` could hold.
    """

    subject: Mapping[str, Value]
    """What is launched, and for which shapes, in the backend's words."""
    values: Mapping[str, Value]
    """How."""
    median_us: float | None
    """None where it could not be run, or its result was wrong."""
    error: str = ""
    is_current: bool = False
    """Whether it is what the backend launches today."""

    def __post_init__(self) -> None:
        timed = () if self.median_us is None else ("median_us",)
        for name in ("subject", "values", *timed):
            expected, holds = CHECKED[name]
            if not holds(getattr(self, name)):
                came = repr(getattr(self, name))
                raise InvalidInput(f"trial, {name}", came=came, expected=expected)
        for name in ("subject", "values"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        plain = {name: dict(getattr(self, name)) for name in ("subject", "values")}
        return {**asdict(self), **plain}


Tuner = Callable[[Job], Iterator[Trial]]
"""What a card names: told one by one, so that progress can be shown."""


def by_subject(trials: Iterable[Trial]) -> dict[Mapping[str, Value], list[Trial]]:
    """In the order of their coming."""
    found: dict[Mapping[str, Value], list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.subject, []).append(trial)
    return found


def winner(trials: Iterable[Trial]) -> Trial | None:
    """The trial of one subject that should replace today's launch.

    None where nothing saves more than `LEAST_GAIN` of its time.
    """
    timed = [(trial.median_us, trial) for trial in trials if trial.median_us is not None]
    if not timed:
        return None
    fastest, best = min(timed, key=lambda pair: pair[0])
    limits = (time * (1 - LEAST_GAIN) for time, trial in timed if trial.is_current)
    return None if best.is_current or any(fastest >= limit for limit in limits) else best
