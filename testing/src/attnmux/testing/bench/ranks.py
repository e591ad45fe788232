"""Measurements of several ranks together.

A step of several ranks waits for the slowest of them, so that a choice goes by the largest of the
ranks' medians.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from attnmux.core import AttnmuxError, BackendFailed, InvalidInput, Offer, TunedLaunch
from attnmux.core.plugin import Trial

if TYPE_CHECKING:
    from attnmux.distributed import RankGroup

SECONDS = 600.0
"""How long a rank waits for others that measure, which may compile."""

T = TypeVar("T")


class Together:
    """Calls a function on all ranks at the same time: here of a single process."""

    def __call__(
        self, measure: Callable[[], tuple[T, Sequence[float]]], /
    ) -> tuple[T, tuple[float, ...]]:
        """measure: returns something of this rank, and figures, as many on each rank.

        Returns the former, and for each figure the largest of all ranks. Raises on every rank if
        `measure` raises on one.
        """
        made, figures = measure()
        return made, tuple(figures)


def joined(device_type: str, device: str) -> RankGroup | None:
    """The ranks that a launcher started; None in a process that none started.

    device: named by the user. Raises InvalidInput for one, since each rank has its own, and without
    attnmux-distributed; RankFailed if the others do not arrive in time.
    """
    from torch.distributed import is_torchelastic_launched  # noqa: PLC0415  # torch, on demand

    if not is_torchelastic_launched():
        return None
    if device:
        raise InvalidInput("--device", got=repr(device), expected="nothing: each rank has one")
    try:
        from attnmux.distributed import RankGroup  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("attnmux"):
            raise
        expected = "attnmux-distributed: pip install 'attnmux-testing[ranks]'"
        raise InvalidInput("ranks", got=f"no module {error.name}", expected=expected) from error
    return RankGroup.start(device_type, seconds=SECONDS)


def shared_launches(
    group: RankGroup, offers: Sequence[Offer], launches: tuple[TunedLaunch, ...]
) -> tuple[TunedLaunch, ...]:
    """Rank 0's launches, with which every rank begins. Raises RanksDiffer if the ranks have other
    plugins or libraries."""
    from attnmux import distributed  # noqa: PLC0415  # an extra

    distributed.check_same_libraries(group, offers)
    return distributed.shared_launches(group, launches)


class TogetherOnRanks(Together):
    """`Together` of a group: all ranks begin at the same time, and wait for each other."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def __call__(
        self, measure: Callable[[], tuple[T, Sequence[float]]], /
    ) -> tuple[T, tuple[float, ...]]:
        """Raises BackendFailed on all ranks for a backend that failed on one; any other error on
        its rank, and AttnmuxError with it on the others."""
        made, failure = None, None
        said: dict[str, Any] = {"kind": "figures"}
        try:
            made, figures = measure()
            said["figures"] = list(figures)
        except Exception as error:  # libraries, compilers and devices raise anything
            failure = error
            backend = isinstance(error, BackendFailed)
            said["address"] = error.address if isinstance(error, BackendFailed) else ""
            said["error"] = error.reason if backend else AttnmuxError.in_brief(error)  # type: ignore[attr-defined]  # of BackendFailed
        found = _exchanged(self._group, said)
        failed = {rank: each for rank, each in enumerate(found) if "error" in each}
        if failure is not None:
            raise failure
        if failed:
            rank, each = next(iter(failed.items()))
            reason = f"on rank {rank}: {each['error']}"
            raise (
                BackendFailed(each["address"], reason) if each["address"] else AttnmuxError(reason)
            )
        columns = zip(*(each["figures"] for each in found), strict=True)
        return cast("T", made), tuple(map(max, columns))


def together_on(group: RankGroup | None) -> Together:
    """How the ranks of a group measure; without one, how a single process does."""
    return Together() if group is None else TogetherOnRanks(group)


def shared_trials(group: RankGroup, tuner: str, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """A tuner's trials with the times of the slowest rank; one that failed on a rank has failed.

    Raises RanksDiffer where the ranks have tried other launches.
    """
    mine = [each.to_dict() for each in trials]
    ranks = [each["trials"] for each in _exchanged(group, {"kind": "trials", "trials": mine})]
    tried = [
        json.dumps([[each["subject"], each["values"]] for each in one], sort_keys=True)
        for one in ranks
    ]
    if len(set(tried)) > 1:
        by_rank = [
            f"{len(one)} launches, {text[:200]}" for one, text in zip(ranks, tried, strict=True)
        ]
        hint = "a tuner that looks at times takes those of Job.together"
        from attnmux.distributed import RanksDiffer  # noqa: PLC0415  # torch

        raise RanksDiffer(f"the launches that {tuner} tried", by_rank=by_rank, hint=hint)
    return tuple(
        _slowest(trial, others)
        for trial, others in zip(trials, zip(*ranks, strict=True), strict=True)
    )


def _slowest(trial: Trial, ranks: Sequence[dict[str, Any]]) -> Trial:
    """The trial as it was on the slowest rank."""
    for rank, each in enumerate(ranks):
        if each["median_us"] is None:
            said = trial.error if trial.median_us is None else f"on rank {rank}: {each['error']}"
            return replace(trial, median_us=None, error=said)
    return replace(trial, median_us=max(each["median_us"] for each in ranks))


def _exchanged(group: RankGroup, said: dict[str, Any]) -> list[dict[str, Any]]:
    """The values of all ranks. Raises RanksDiffer if one measures and another has finished."""
    found = group.exchange(said)
    kinds = [each["kind"] for each in found]
    if len(set(kinds)) > 1:
        from attnmux.distributed import RanksDiffer  # noqa: PLC0415  # torch

        raise RanksDiffer("what the ranks measure", by_rank=kinds)
    return found
