"""What an adapter adds to the library that it calls: device time in a graph, host time eagerly.

    python -m benchmarks.adapters [--backend fa3] [--only TEXT] [--rounds 21] [--json FILE]
    python -m benchmarks.adapters --dry-run      without a GPU: tiny sizes, emulated libraries

Over scattered pages. In decode K and V are in the pool; in extend both sides get the new tokens'
and store them first. Both sides take turns in one process; a figure is the median of the rounds, a
ratio or a difference the median of the rounds' own. Their answers are compared before.

graph   Layers in one CUDA graph, each with K and V of its own, at least 256 MB in all, so that no
        launch gap and no warm cache enters. Raw: the library's functions, called by hand. Ours:
        `backend.forward`, decode as it is captured. `metadata` is what the step captures besides,
        once for all layers. Bar: ours at most 1.02 times raw.
host    Wall time of one eager call, without waiting for the device. Bar: `backend.forward` at most
        15 us more than the library's own calls. `metadata` is `init_forward_metadata`, once a step;
        `write` is the time to store the call's K and V, which other engines pay too.

Raw is `same calls`: those that an engine makes of the library, with the work that makes its
arguments of the contract's: for FlashMLA's kernels Q in one row where its parts come apart, for
`nsa` slots of places, for fmha_v2 a copy of K and V. Where there is such work, a second row
compares with the `kernel alone`, on arguments that were made before; the bars hold there too.
flashinfer's extend is one call over the call's own K and V, and with a prefix another over the pool
and the merge: a second row compares with `one call` over the pool, and has no bar.

Three adapters make better calls than raw: `fa3` and `fa3_mla` compute one schedule a step, which
raw does in every layer, and `fa3` reads the call's K and V instead of the pool's pages where there
is no prefix; `nsa` looks its slots up in one launch.

A library that is not installed, or that fails, is a row that says so. A device that has failed
once fails all later rows of the process: --backend starts over with one.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import click
import torch
from benchmarks import libraries
from benchmarks.adapter_table import ADAPTERS, ONE, Adapter, Ways
from benchmarks.cases import HOPPER, Case, dry_run_option, json_option, only_option, rounds_option
from benchmarks.emulated import emulated_libraries

from attnmux.core import AttentionBackend, AttnmuxError
from attnmux.testing import find_candidate
from attnmux.testing.bench import (
    Report,
    Step,
    Times,
    device_meter,
    facts,
    graphs_of,
    host_meter,
    in_graph,
    in_turn,
    interleave,
)
from attnmux.testing.bench.timing import CALLS, Run, wait

MAX_RATIO, MAX_HOST_US = 1.02, 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The figures of a backend on a workload, in microseconds of a layer or of a step."""

    backend: str
    workload: str
    raw: str = "-"
    """How the library is called."""
    layers: int = 0
    graph_raw: float | None = None
    graph_ours: float | None = None
    graph_ratio: float | None = None
    graph_metadata: float | None = None
    host_raw: float | None = None
    host_ours: float | None = None
    host_added: float | None = None
    host_metadata: float | None = None
    host_write: float | None = None
    failure: str = ""
    """Why figures are missing."""

    @property
    def bars(self) -> str:
        """ "kept", "MISSED", or "-" without a bar; a missing figure keeps none."""
        if self.raw == ONE:
            return "-"
        if self.graph_ratio is None or self.host_added is None:
            return "MISSED"
        kept = self.graph_ratio <= MAX_RATIO and self.host_added <= MAX_HOST_US
        return "kept" if kept else "MISSED"


FIGURES = tuple(name for name in Row.__dataclass_fields__ if name.startswith(("graph_", "host_")))
COLUMNS = {
    **{"backend": "", "workload": "", "raw": "", "layers": "d"},
    **{"graph: raw": ".1f", "ours": ".1f", "ratio": ".3f", "metadata": ".1f"},
    **{"host: raw": ".1f", "ours ": ".1f", "added": ".1f", "metadata ": ".1f", "write": ".1f"},
    **{"bars": "", "failure": ""},
}


def measure(
    name: str, adapter: Adapter, case: Case, rounds: int, device: torch.device
) -> list[Row]:
    """All figures of a backend on a workload, against each way to call its library; one row with
    the reason where there are none."""
    try:
        step = case.step(device)
        candidate = find_candidate(f"nvidia/{name}", platforms=(HOPPER,))
        backend = candidate.build(step.context(HOPPER))
        ways, ours = call_by_hand(adapter, step), _ours(backend, step)
        backend.init_forward_metadata(step.batch)
        for calls in ways.values():
            _compare(calls, ours, step.q)
        host = _host(backend, ways, ours, step, rounds)
    except Exception as error:  # whatever a library raises is its result here
        return [Row(backend=name, workload=str(case), failure=AttnmuxError.in_brief(error))]
    graph, failure = None, ""
    try:
        graph = _graph(backend, ways, ours, step, rounds)
    except Exception as error:  # a library that cannot be captured has figures of the host
        failure = f"in a graph: {AttnmuxError.in_brief(error)}"
    return [
        Row(
            backend=name,
            workload=str(case),
            raw=way,
            layers=len(ours),
            failure=failure,
            **_figures(way, host, graph, len(ours)),
        )
        for way in ways
    ]


def call_by_hand(adapter: Adapter, step: Step) -> Ways:
    """The calls of the first package that runs, which is the one that the adapter takes.

    Raises RuntimeError, with each package's reason, where none does.
    """
    reasons = []
    for module in adapter.modules:
        try:
            ways = adapter.ways(import_module(module), step)
            for calls in ways.values():
                calls[0]()
            wait(step.q.device)
            return ways
        except Exception as error:  # not installed, another version, no kernel for this device
            reasons.append(f"{module}: {AttnmuxError.in_brief(error)}")
    raise RuntimeError("; ".join(reasons))


def _ours(backend: AttentionBackend, step: Step) -> list[Run]:
    if step.workload.phase == "decode":
        return step.calls_in_pool(backend)
    calls: list[Run] = []
    for (first, second), layer in zip(libraries.new_kv(step), step.layers, strict=True):
        parts = {} if step.v is not None else {"q_rope": step.q_rope, "k_rope": second}
        v = None if step.v is None else second
        calls.append(partial(backend.forward, step.q, first, v, layer, step.batch, **parts))  # type: ignore[arg-type]  # tensors by name
    return calls


def _compare(raw: Sequence[Run], ours: Sequence[Run], q: torch.Tensor) -> None:
    """Raises AssertionError, with the largest difference, where a layer's answers differ. The
    output is as wide as Q in every workload."""
    for theirs, mine in zip(raw, ours, strict=True):
        expected = libraries.answer(theirs).view(q.shape)
        torch.testing.assert_close(libraries.answer(mine), expected, atol=2e-2, rtol=2e-2)


def _host(
    backend: AttentionBackend, ways: Ways, ours: Sequence[Run], step: Step, rounds: int
) -> Times:
    metadata: list[Run] = [partial(backend.init_forward_metadata, step.batch)]
    sides: dict[str, Sequence[Run]] = {**ways, "ours": ours, "metadata": metadata}
    sides["write"] = libraries.writes(step)
    device = step.q.device
    count = 2 if device.type == "cpu" else CALLS  # emulated calls take long
    return interleave(
        {name: host_meter(calls, device, count) for name, calls in sides.items()}, rounds
    )


def _graph(
    backend: AttentionBackend, ways: Ways, ours: Sequence[Run], step: Step, rounds: int
) -> Times:
    batch, device = step.batch, step.q.device
    sides: dict[str, Sequence[Run]] = {**ways, "ours": ours}
    if step.workload.phase == "decode":
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        sides["metadata"] = [partial(backend.init_forward_metadata_in_graph, batch)]
    graphs, repeats = graphs_of(device), 1 if device.type == "cpu" else 10
    runs = {name: in_graph(in_turn(calls), graphs) for name, calls in sides.items()}
    return interleave(
        {name: device_meter(run, device, repeats) for name, run in runs.items()}, rounds
    )


def _figures(way: str, host: Times, graph: Times | None, layers: int) -> dict[str, float]:
    figures = {
        "host_raw": host.median(way),
        "host_ours": host.median("ours"),
        "host_added": host.added("ours", way),
        "host_metadata": host.median("metadata"),
        "host_write": host.median("write"),
    }
    if graph is not None:
        figures |= {
            "graph_raw": graph.median(way) / layers,
            "graph_ours": graph.median("ours") / layers,
            "graph_ratio": graph.ratio("ours", way),
            "graph_metadata": graph.median("metadata") if "metadata" in graph.us else 0.0,
        }
    return figures


@click.command()
@click.option(
    "--backend", "names", multiple=True, type=click.Choice([*ADAPTERS]), help="Default: all."
)
@only_option
@rounds_option(21)
@json_option
@dry_run_option("Emulated libraries on the CPU")
def main(names: tuple[str, ...], only: str, rounds: int, path: Path | None, dry_run: bool) -> None:
    """Print what each adapter adds to its library, and whether the bars are kept."""
    names = names or tuple(ADAPTERS)
    device = torch.device("cpu" if dry_run else "cuda")
    used = dict.fromkeys(each for name in names for each in ADAPTERS[name].distributions)
    bars = {"graph_ratio": MAX_RATIO, "host_added": MAX_HOST_US}
    about = facts(device, *used, "attnmux-nvidia", emulated=dry_run, bars=bars)
    title = f"bfloat16; dense ones with 32/8 heads x 128; medians of {rounds} rounds, us."
    emulating = emulated_libraries() if dry_run else nullcontext()
    with Report(COLUMNS, about, path, title=title) as report, torch.no_grad(), emulating:
        for name in names:
            adapter = ADAPTERS[name]
            for case in adapter.tiny if dry_run else adapter.cases:
                if only not in str(case):
                    continue
                for row in measure(name, adapter, case, rounds, device):
                    record = asdict(row)
                    cells = [record[each] for each in ("backend", "workload", "raw", "layers")]
                    cells += [record[figure] for figure in FIGURES]
                    bars_kept = "-" if dry_run else row.bars
                    report.add(
                        *cells,
                        bars_kept,
                        row.failure,
                        record=record,
                        missed=bars_kept == "MISSED",
                    )
                gc.collect()


if __name__ == "__main__":
    main()
