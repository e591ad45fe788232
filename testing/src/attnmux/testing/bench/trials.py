"""The trials of a tuner: those of each subject, and the one that wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnmux.core import TunedLaunch
from attnmux.core.plugin import OptionValue, Trial


def by_subject(trials: Iterable[Trial]) -> dict[Mapping[str, OptionValue], list[Trial]]:
    """In the order of the trials."""
    found: dict[Mapping[str, OptionValue], list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.subject, []).append(trial)
    return found


def winner(trials: Iterable[Trial]) -> Trial | None:
    """The trial of one subject that should replace the current launch.

    None where no trial saves more than `TunedLaunch.LEAST_GAIN` of its time.
    """
    timed = [(trial.median_us, trial) for trial in trials if trial.median_us is not None]
    if not timed:
        return None
    fastest, best = min(timed, key=lambda pair: pair[0])
    limits = (time * (1 - TunedLaunch.LEAST_GAIN) for time, trial in timed if trial.is_current)
    return None if best.is_current or any(fastest >= limit for limit in limits) else best
