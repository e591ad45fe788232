"""The Triton backend on two releases of Triton: the same steps, one machine.

    python -m benchmarks.releases OLD.json… --against NEW.json…

Each file is what `python -m benchmarks.grid --ours-only --seed N --json FILE` wrote in an
environment of one release. Several files of a side are runs that took turns: a step's time is the
least of them. The ratio is new by old.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import click

from attnmux.testing.bench import Report

MOST = 1.03
"""The largest ratio that a step may have."""
COLUMNS = {"family": "", "step": "", "old us": ".1f", "new us": ".1f", "ratio": ".3f"}
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
Step = tuple[str, str]
"""Its family, and what it is."""


def least(paths: Sequence[Path]) -> dict[Step, float | None]:
    """The least time of each step; None for a step that failed in a run."""
    times: dict[Step, float | None] = {}
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            step, time = (row["family"], row["step"]), row["us"]
            known = times.get(step, time)
            times[step] = None if time is None or known is None else min(known, time)
    return times


@click.command()
@click.argument("old", nargs=-1, required=True, type=FILE)
@click.option("--against", "new", multiple=True, required=True, type=FILE, help="Repeatable.")
def main(old: tuple[Path, ...], new: tuple[Path, ...]) -> None:
    """Print each step's ratio, each family's geometric mean, and the steps above the bar."""
    before, after = least(old), least(new)
    about = json.loads(new[0].read_text(encoding="utf-8"))
    ratios: dict[Step, float] = {}
    with Report(COLUMNS, about, title="us of a layer, the least of each side's runs") as table:
        for step, was in before.items():
            now = after.get(step)
            ratio = None if was is None or now is None else now / was
            if ratio is not None:
                ratios[step] = ratio
            table.add(*step, was, now, ratio, missed=ratio is None or ratio > MOST)
    for family in dict.fromkeys(family for family, _ in ratios):
        some = [ratio for step, ratio in ratios.items() if step[0] == family]
        click.echo(f"{family}: geometric mean {geometric_mean(some):.3f}, worst {max(some):.3f}")
    above = [step for step, ratio in ratios.items() if ratio > MOST]
    click.echo(
        f"{len(above)} of {len(ratios)} steps above {MOST}; without a ratio: "
        f"{len(before) - len(ratios)}"
    )


if __name__ == "__main__":
    main()
