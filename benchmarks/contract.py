"""Host cost of the contract: `AttentionBackend.forward` around a backend that does nothing.

    python -m benchmarks.contract [--rounds 201] [--json FILE]

Microseconds of one layer in a decode step, medians of rounds in which the sides take turns; every
figure includes the loop that calls it, which is `an empty call`.

forward         the backend's `forward`: makes the call value, checks it, and attends
forward_decode  the same backend's `forward_decode`, with a call value made before
construction    `AttentionCall(...)` alone. Bar: at most 1 us over an empty call.
check           `check_call` of a call value alone
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import Case, decode, json_option, rounds_option

from attnmux.core import AttentionBackend, AttentionCall, ForwardBatch, Platform
from attnmux.core.contract.arguments import check_call
from attnmux.testing.bench import Report, facts, host_meter, interleave
from attnmux.testing.bench.timing import Run

CPU = torch.device("cpu")
MAX_CONSTRUCTION_US = 1.0
COUNT = 100
"""Calls a turn: so few that most turns end before the scheduler interrupts them."""
CASES = (decode(1, 64), decode(64, 64), decode(1, 64, kind="mla", q_heads=16, page_size=64))
COLUMNS = {
    "workload": "",
    "forward": ".2f",
    "forward_decode": ".2f",
    "added": ".2f",
    "ratio": ".1f",
    "construction": ".2f",
    "check": ".2f",
    "an empty call": ".2f",
    "bar": "",
}


class Nothing(AttentionBackend):
    """Returns the caller's buffer as it is."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        pass

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        assert call.out is not None
        return call.out

    forward_extend = forward_decode


def nothing(*arguments: object) -> None:
    pass


def measure(case: Case, rounds: int, report: Report) -> None:
    step = case.step(CPU)
    backend = Nothing(step.context(Platform.parse("cpu:x86_64")))
    backend.init_forward_metadata(step.batch)
    q, batch, out, dtype = step.q, step.batch, step.out, step.q.dtype
    given = [(q, None, None, layer, False, step.q_rope, None, out, None) for layer in step.layers]
    calls = [AttentionCall(*arguments) for arguments in given]
    forward = [
        partial(backend.forward, q, None, None, layer, batch, q_rope=step.q_rope, out=out)
        for layer in step.layers
    ]
    sides: dict[str, Sequence[Run]] = {
        "forward": forward,
        "forward_decode": [partial(backend.forward_decode, call, batch) for call in calls],
        "construction": [partial(AttentionCall, *arguments) for arguments in given],
        "check": [partial(check_call, call, batch, dtype=dtype) for call in calls],
        "an empty call": [partial(nothing, *arguments) for arguments in given],
    }
    meters = {name: host_meter(runs, CPU, COUNT) for name, runs in sides.items()}
    times = interleave(meters, rounds, warm_up=2)
    kept = times.added("construction", "an empty call") <= MAX_CONSTRUCTION_US
    report.add(
        str(case),
        times.median("forward"),
        times.median("forward_decode"),
        times.added("forward", "forward_decode"),
        times.ratio("forward", "forward_decode"),
        *(times.median(name) for name in ("construction", "check", "an empty call")),
        "kept" if kept else "MISSED",
        missed=not kept,
    )


@click.command()
@rounds_option(201)
@json_option
def main(rounds: int, path: Path | None) -> None:
    """Print the host cost of a layer's call around a backend that does nothing."""
    title = f"us of one layer, medians of {rounds} rounds of {COUNT} calls"
    with Report(COLUMNS, facts(CPU, "attnmux-core", "msgspec"), path, title=title) as report:
        for case in CASES:
            measure(case, rounds, report)


if __name__ == "__main__":
    main()
