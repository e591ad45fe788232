"""The time that a choice loses if it knows less of a step, by a file of figures.

    python -m benchmarks.choice.figures nvidia-sm90-h200.json

`attnmux bench --ship` writes the file. For each step of each shape: the time of one backend for all
steps of which the same is known, over that of the fastest. The backend is the one with the least
geometric mean of times. Nothing is measured.

phase        One backend for all steps of a phase.
batch size   One for each batch size of a phase: what `decode_sizes` of a decision does in decode.

With the batch size known, what is left is what knowing the lengths of contexts and of prompts would
save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean

import click
from benchmarks.choice.regret import summary

from attnmux.core.verbs import Shipped
from attnmux.testing.bench import Workload

KNOWN: dict[str, Callable[[Workload], int]] = {
    "phase": lambda step: 0,
    "batch size": lambda step: step.batch_size,
}


def losses(shipped: Shipped, phase: str, known: Callable[[Workload], int]) -> Iterator[float]:
    """The loss of each step of the phase that two backends serve."""
    for shape in shipped.shapes:
        alike: dict[int, list[dict[int, float]]] = {}
        for step, all_us in shape.steps.items():
            workload = Workload.parse(step)
            times = {place: us for place, us in enumerate(all_us) if us is not None}
            if workload.phase == phase and len(times) > 1:
                alike.setdefault(known(workload), []).append(times)
        for steps in alike.values():
            everywhere = sorted(set.intersection(*map(set, steps)))
            if everywhere:
                means = {at: geometric_mean([us[at] for us in steps]) for at in everywhere}
                best = min(means, key=lambda at: means[at])
                yield from (us[best] / min(us.values()) for us in steps)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Print a line for each phase and what is known."""
    shipped = Shipped.read(file)
    print("| phase | known | steps | loss: mean, 99 %, worst |\n|---|---|--:|---|")
    for phase in ("decode", "extend", "verify"):
        for name, known in KNOWN.items():
            found = list(losses(shipped, phase, known))
            print(f"| {phase} | {name} | {len(found)} | {summary(found)} |")


if __name__ == "__main__":
    main()
