"""What an adapter adds to the library that it calls: device time in a graph, host time eagerly.

    python -m benchmarks.adapters [--library fa3] [--only TEXT] [--rounds 21] [--json FILE]
    python -m benchmarks.adapters --dry-run      without a GPU: tiny sizes, emulated libraries

Over scattered pages. In decode K and V are in the pool; in extend both sides are given the new
tokens' and store them first. Both sides run by turns in one process; a figure is the median of the
rounds, a ratio or a difference the median of the rounds' own.

graph   Layers in one CUDA graph, each with K and V of its own, 256 MB in all at least, so that no
        launch gap and no warm cache enters. Raw: the library's functions, called by hand. Ours:
        `backend.forward`, decode as it is captured. `metadata` is what the step captures besides,
        once for all layers. Bar: ours at most 1.02 times raw.
host    Wall time of one eager call, without waiting for the device. Bar: `backend.forward` at most
        15 us more than the library's own calls. `metadata` is `init_forward_metadata`, once a step;
        `write` is what storing the call's K and V takes, which other engines pay too.

Raw is `same calls`: those that the adapter makes, which in flashinfer's extend are one over the
call's own K and V, and with a prefix another over the pool and the merge. There, a second row
compares with `one call` over the pool, which no bar is for.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.adapter_libraries import LIBRARIES, Library, Raw
from benchmarks.adapter_workloads import (
    DIM,
    KV_HEADS,
    Q_HEADS,
    TINY,
    WORKLOADS,
    Setup,
    make_setup,
)
from benchmarks.timing import Call, graph_times, host_times

from attnmux.core.backend import AttentionBackend

MAX_RATIO, MAX_HOST_US = 1.02, 15.0
SAME = "same calls"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The figures of a library on a workload, in microseconds of a layer or of a step."""

    library: str
    workload: str
    raw: str
    layers: int
    graph_raw: float
    graph_ours: float
    graph_ratio: float
    graph_metadata: float
    host_raw: float
    host_ours: float
    host_added: float
    host_metadata: float
    host_write: float

    @property
    def within_bars(self) -> bool:
        return self.graph_ratio <= MAX_RATIO and self.host_added <= MAX_HOST_US


def measure(name: str, library: Library, setup: Setup, rounds: int) -> list[Row]:
    """All figures of a library on a workload, against each way to call it; the outputs are
    compared first."""
    backend, batch, q = library.backend(setup.context), setup.batch, setup.q
    is_decode = setup.workload.new == 1
    ways: dict[str, Raw] = {SAME: library.same_calls}
    if library.fewest_calls is not None and not is_decode:
        ways["one call"] = library.fewest_calls
    raws = {way: make(setup) for way, make in ways.items()}
    ours = _ours(backend, setup)
    backend.init_forward_metadata(batch)
    for raw in raws.values():
        for other, mine in zip(raw, ours, strict=True):
            expected: Any = other()
            torch.testing.assert_close(mine(), expected.view(q.shape), atol=2e-2, rtol=2e-2)

    writes: list[Call] = [
        partial(setup.write, layer.layer_id, *kv)
        for layer, kv in zip(setup.context.layers, setup.new_kv(), strict=True)
    ]
    metadata: list[Call] = [partial(backend.init_forward_metadata, batch)]
    host = host_times(
        {**raws, "ours": ours, "write": writes, "metadata": metadata}, rounds, q.device
    )
    in_graph: list[Call] = []
    if is_decode:
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        in_graph = [partial(backend.init_forward_metadata_in_graph, batch)]
    graph = graph_times({**raws, "metadata": in_graph, "ours": ours}, rounds, q.device)
    return [_row(name, setup, way, host, graph) for way in raws]


def _ours(backend: AttentionBackend, setup: Setup) -> list[Call]:
    batch, q, layers = setup.batch, setup.q, setup.context.layers
    if setup.workload.new == 1:
        return [partial(backend.forward, q, None, None, layer, batch) for layer in layers]
    return [
        partial(backend.forward, q, *kv, layer, batch)
        for kv, layer in zip(setup.new_kv(), layers, strict=True)
    ]


def _row(
    name: str,
    setup: Setup,
    way: str,
    host: Mapping[str, Sequence[float]],
    graph: Mapping[str, Sequence[float]],
) -> Row:
    median, layers = statistics.median, len(setup.context.layers)
    return Row(
        library=name,
        workload=str(setup.workload),
        raw=way,
        layers=layers,
        graph_raw=median(graph[way]) / layers,
        graph_ours=median(graph["ours"]) / layers,
        graph_ratio=median(a / b for a, b in zip(graph["ours"], graph[way], strict=True)),
        graph_metadata=median(graph["metadata"]),
        host_raw=median(host[way]),
        host_ours=median(host["ours"]),
        host_added=median(a - b for a, b in zip(host["ours"], host[way], strict=True)),
        host_metadata=median(host["metadata"]),
        host_write=median(host["write"]),
    )


def facts(names: Sequence[str], *, dry_run: bool) -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    libraries = [LIBRARIES[name](emulated=True).distribution for name in names]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for distribution in (*libraries, "attnmux-nvidia"):
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[distribution] = "not installed"
    return {
        "command": " ".join(["python", *sys.argv]),
        "emulated": dry_run,
        "machine": platform.platform(),
        "device": "cpu" if dry_run else torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "versions": versions,
        "bars": {"graph_ratio": MAX_RATIO, "host_added": MAX_HOST_US},
    }


def line(row: Row, *, has_bars: bool) -> str:
    """The row of the table."""
    figures = asdict(row)
    cells = [str(figures[name]) for name in ("library", "workload", "raw", "layers")]
    for name, figure in figures.items():
        if name.startswith(("graph_", "host_")):
            cells.append(f"{figure:.3f}" if name == "graph_ratio" else f"{figure:.1f}")
    has_bars = has_bars and row.raw == SAME
    cells.append(("kept" if row.within_bars else "MISSED") if has_bars else "-")
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option(
    "--library", "names", multiple=True, type=click.Choice([*LIBRARIES]), help="Default: all."
)
@click.option("--only", default="", help="Run the workloads whose name contains this.")
@click.option("--rounds", default=21, show_default=True, help="Rounds of each workload.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here too.")
@click.option(
    "--dry-run", is_flag=True, help="Emulated libraries on the CPU: figures mean nothing."
)
def main(names: tuple[str, ...], only: str, rounds: int, path: Path | None, dry_run: bool) -> None:
    """Print the figures as a Markdown table, and whether the bars are kept."""
    torch.manual_seed(0)
    names = names or tuple(LIBRARIES)
    device = torch.device("cpu" if dry_run else "cuda")
    known = facts(names, dry_run=dry_run)
    said = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    click.echo(f"{known['device']}, CUDA {known['cuda']}, {said}; {known['machine']};")
    click.echo(f"{Q_HEADS}/{KV_HEADS} heads x {DIM}, bfloat16; medians of {rounds} rounds, us.\n")
    click.echo(
        "| library | workload | raw | layers | graph: raw | ours | ratio | metadata "
        "| host: raw | ours | added | metadata | write | bars |\n" + "|---" * 14 + "|"
    )
    rows: list[Row] = []
    for workload in TINY if dry_run else WORKLOADS:
        if only not in str(workload):
            continue
        for name in names:
            setup = make_setup(workload, device)
            with torch.no_grad():
                measured = measure(name, LIBRARIES[name](emulated=dry_run), setup, rounds)
            rows += measured
            for row in measured:
                click.echo(line(row, has_bars=not dry_run))
    if path is not None:
        path.write_text(json.dumps({**known, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
