"""Whether ranks have the same libraries, and the tuned launches that they share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from attnmux.core import Offer, Plugins, TunedLaunch
from attnmux.distributed.errors import RanksDiffer
from attnmux.distributed.ranks import RankGroup


def check_same_libraries(
    group: RankGroup, offers: Iterable[Offer], names: Iterable[str] = ()
) -> None:
    """Raise RanksDiffer, on every rank, if the plugins or libraries of two ranks differ.

    names: further distributions, next to those of the offers.
    """
    compared = {"attnmux-core", *names}
    for offer in offers:
        compared |= {offer.distribution, *offer.card.libraries()}
    installed = group.exchange(Plugins.installed(compared))
    every = sorted({name for versions in installed for name in versions})
    differing = [
        name
        for name in every
        if any(versions.get(name) != installed[0].get(name) for versions in installed)
    ]
    if not differing:
        return
    by_rank = [
        ", ".join(f"{name} {_version(versions.get(name))}" for name in differing)
        for versions in installed
    ]
    hint = "install the same distributions on every rank"
    raise RanksDiffer("plugins and libraries", by_rank=by_rank, hint=hint)


def _version(row: Sequence[str] | None) -> str:
    """The version and the beginning of the hash of the installed files."""
    return "not installed" if row is None else f"{row[0]} ({row[1][:8] or 'no hash'})"


def shared_launches(group: RankGroup, launches: Iterable[TunedLaunch]) -> tuple[TunedLaunch, ...]:
    """The launches of rank 0, on every rank, so that all of them run the same kernels."""
    text = group.tell(json.dumps([launch.to_dict() for launch in launches]))
    return tuple(TunedLaunch.from_dict(launch) for launch in json.loads(text))
