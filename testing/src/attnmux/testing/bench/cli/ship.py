"""`attnmux bench --ship`: the file of figures that a plugin carries for this kind of device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from attnmux.core import InvalidInput
from attnmux.core.verbs import Run, writing
from attnmux.testing.bench.cli.bench_run import find_place
from attnmux.testing.bench.cli.progress import Bar
from attnmux.testing.bench.shipping import Shipping
from attnmux.testing.bench.spot import Spot

SECONDS, CHECK_SECONDS = 0.06, 1.0
"""Defaults: many shapes are timed, and every device of the kind is like this one."""


def ship(
    run: Run,
    path: Path,
    *,
    names: tuple[str, ...],
    platform: str | None,
    device: str,
    seconds: float | None,
    check_seconds: float | None,
    minutes: float,
    share: tuple[int, int],
    jobs: int,
) -> dict[str, Any]:
    """Measure until the time is over or everything is measured. Returns what was done.

    Raises InvalidInput for ranks, for a device without a product's name and for a file of other
    versions.
    """
    settings = run.settings()
    place = find_place(run, settings, platform, device)
    if place.ranks is not None:
        raise InvalidInput("--ship", got="several ranks", expected="one process")
    spot = Spot(
        platform=place.platform,
        device=place.device,
        offers=place.offers,
        policy=settings.policy(),
        names=names,
        seconds=SECONDS if seconds is None else seconds,
        check_seconds=CHECK_SECONDS if check_seconds is None else check_seconds,
    )
    shipping = Shipping.open(spot, path, " ".join(["attnmux", *sys.argv[1:]]), share)
    left = sum(len(task.workloads) for task in shipping.todo())
    bar = Bar()
    with writing(shipping.file, otherwise="name another folder as --ship"):
        steps = bar.track(shipping.run(minutes, jobs), "checking", left)
        done = sum(1 for _ in steps)
    return {
        "file": str(shipping.file),
        "backends": list(shipping.sources),
        "measured": done,
        "left": left - done,
        "bytes": shipping.file.stat().st_size if shipping.file.exists() else 0,
        "notes": list(dict.fromkeys(shipping.notes)),
    }


def tell(told: dict[str, Any]) -> None:
    """Print what was done, for people."""
    for note in told["notes"]:
        print(note)
    print(
        f"{told['measured']} steps of {', '.join(told['backends']) or 'no backend'}; "
        f"{told['left']} are left: the same command goes on with them"
        if told["left"]
        else f"{told['measured']} steps of {', '.join(told['backends'])}; none is left"
    )
    print(f"{told['file']}, {told['bytes']} bytes: put it into the plugin's folder of figures")
