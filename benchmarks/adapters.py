"""What an adapter adds to the library that it calls: device time in a graph, host time eagerly.

    python -m benchmarks.adapters [--backend fa3] [--only TEXT] [--rounds 21] [--json FILE]
    python -m benchmarks.adapters --dry-run      without a GPU: tiny sizes, emulated libraries

Over scattered pages. In decode K and V are in the pool; in extend both sides are given the new
tokens' and store them first. Both sides run by turns in one process; a figure is the median of the
rounds, a ratio or a difference the median of the rounds' own. What both answer is compared before.

graph   Layers in one CUDA graph, each with K and V of its own, 256 MB in all at least, so that no
        launch gap and no warm cache enters. Raw: the library's functions, called by hand. Ours:
        `backend.forward`, decode as it is captured. `metadata` is what the step captures besides,
        once for all layers. Bar: ours at most 1.02 times raw.
host    Wall time of one eager call, without waiting for the device. Bar: `backend.forward` at most
        15 us more than the library's own calls. `metadata` is `init_forward_metadata`, once a step;
        `write` is what storing the call's K and V takes, which other engines pay too.

Raw is `same calls`: those that the adapter makes, with what makes the library's arguments of the
contract's: for FlashMLA's kernels Q in one row, for `nsa` slots of places, for fmha_v2 a copy of K
and V. Where there is such work, a second row compares with the `kernel alone`, on arguments that
were made before; the bars hold there too. flashinfer's extend is one call over the call's own K and
V, and with a prefix another over the pool and the merge: a second row compares with `one call` over
the pool, which no bar is for.

A library that is not installed, or that fails, is a row that says so. A device that has failed
once fails all later rows of the process: --backend starts over with one.
"""

from __future__ import annotations

import gc
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
from benchmarks.adapter_libraries import ADAPTERS
from benchmarks.adapter_sides import ONE, Adapter
from benchmarks.adapter_workloads import (
    DIM,
    KV_HEADS,
    Q_HEADS,
    Setup,
    Workload,
    make_setup,
)
from benchmarks.timing import Call, graph_times, host_times

from attnmux.core.backend import AttentionBackend
from attnmux.core.errors import in_brief

MAX_RATIO, MAX_HOST_US = 1.02, 15.0
FIGURES = (
    "graph_raw",
    "graph_ours",
    "graph_ratio",
    "graph_metadata",
    "host_raw",
    "host_ours",
    "host_added",
    "host_metadata",
    "host_write",
)


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
        """ "kept", "MISSED", or "-" where there is no bar; a figure that is missing keeps none."""
        if self.raw == ONE:
            return "-"
        if self.graph_ratio is None or self.host_added is None:
            return "MISSED"
        kept = self.graph_ratio <= MAX_RATIO and self.host_added <= MAX_HOST_US
        return "kept" if kept else "MISSED"


def measure(
    name: str, adapter: Adapter, workload: Workload, rounds: int, device: torch.device
) -> list[Row]:
    """All figures of a backend on a workload, against each way to call its library; one row that
    says why where there are none."""
    try:
        setup = make_setup(workload, device)
        kernels = adapter.emulated() if device.type == "cpu" else adapter.installed(setup.context)
        backend = adapter.backend(setup.context, kernels)
        ways, ours = adapter.ways(kernels, setup), _ours(backend, setup)
        backend.init_forward_metadata(setup.batch)
        for calls in ways.values():
            _compare(calls, ours, setup.q)
        host = _host(backend, ways, ours, setup, rounds)
    except Exception as error:  # whatever a library raises is its result here
        return [Row(backend=name, workload=str(workload), failure=in_brief(error))]
    graph: Mapping[str, Sequence[float]] = {}
    failure = ""
    try:
        graph = _graph(backend, ways, ours, setup, rounds)
    except Exception as error:  # a library that cannot be captured has figures of the host
        failure = f"in a graph: {in_brief(error)}"
    return [
        Row(
            backend=name,
            workload=str(workload),
            raw=way,
            layers=len(ours),
            failure=failure,
            **_figures(way, host, graph, len(ours)),
        )
        for way in ways
    ]


def _ours(backend: AttentionBackend, setup: Setup) -> list[Call]:
    work, batch, q, layers = setup.workload, setup.batch, setup.q, setup.context.layers
    if work.is_decode:
        return [
            partial(backend.forward, q, None, None, layer, batch, q_rope=setup.q_rope)
            for layer in layers
        ]
    calls: list[Call] = []
    for (first, second), layer in zip(setup.new_kv(), layers, strict=True):
        new = {"q_rope": setup.q_rope, "k_rope": second} if work.is_latent else {}
        v = None if work.is_latent else second
        calls.append(partial(backend.forward, q, first, v, layer, batch, **new))  # type: ignore[arg-type]  # tensors by name
    return calls


def _compare(raw: Sequence[Call], ours: Sequence[Call], q: torch.Tensor) -> None:
    """Raises AssertionError, with the largest difference, where a layer's answers differ. The
    output is as wide as Q in every workload."""
    for theirs, mine in zip(raw, ours, strict=True):
        answer: Any = theirs()
        expected = answer[0] if isinstance(answer, tuple) else answer
        torch.testing.assert_close(mine(), expected.view(q.shape), atol=2e-2, rtol=2e-2)


def _host(
    backend: AttentionBackend,
    ways: Mapping[str, Sequence[Call]],
    ours: Sequence[Call],
    setup: Setup,
    rounds: int,
) -> Mapping[str, Sequence[float]]:
    writes: list[Call] = [
        partial(setup.write, layer.layer_id, *kv)
        for layer, kv in zip(setup.context.layers, setup.new_kv(), strict=True)
    ]
    metadata: list[Call] = [partial(backend.init_forward_metadata, setup.batch)]
    sides = {**ways, "ours": ours, "write": writes, "metadata": metadata}
    return host_times(sides, rounds, setup.q.device)


def _graph(
    backend: AttentionBackend,
    ways: Mapping[str, Sequence[Call]],
    ours: Sequence[Call],
    setup: Setup,
    rounds: int,
) -> Mapping[str, Sequence[float]]:
    batch, in_graph = setup.batch, list[Call]()
    if setup.workload.is_decode:
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        in_graph = [partial(backend.init_forward_metadata_in_graph, batch)]
    sides = {**ways, "metadata": in_graph, "ours": ours}
    return graph_times(sides, rounds, setup.q.device)


def _figures(
    way: str,
    host: Mapping[str, Sequence[float]],
    graph: Mapping[str, Sequence[float]],
    layers: int,
) -> dict[str, float]:
    median = statistics.median
    figures = {
        "host_raw": median(host[way]),
        "host_ours": median(host["ours"]),
        "host_added": median(a - b for a, b in zip(host["ours"], host[way], strict=True)),
        "host_metadata": median(host["metadata"]),
        "host_write": median(host["write"]),
    }
    if graph:
        figures |= {
            "graph_raw": median(graph[way]) / layers,
            "graph_ours": median(graph["ours"]) / layers,
            "graph_ratio": median(a / b for a, b in zip(graph["ours"], graph[way], strict=True)),
            "graph_metadata": median(graph["metadata"]),
        }
    return figures


def facts(names: Sequence[str], *, dry_run: bool) -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    libraries = dict.fromkeys(each for name in names for each in ADAPTERS[name].distributions)
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
    cells = [row.backend, row.workload, row.raw, str(row.layers)]
    for name in FIGURES:
        digits = 3 if name == "graph_ratio" else 1
        cells.append("-" if figures[name] is None else f"{figures[name]:.{digits}f}")
    cells.append(row.bars if has_bars else "-")
    said = f"| {' | '.join(cells)} |"
    return f"{said} {row.failure}" if row.failure else said


@click.command()
@click.option(
    "--backend", "names", multiple=True, type=click.Choice([*ADAPTERS]), help="Default: all."
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
    names = names or tuple(ADAPTERS)
    device = torch.device("cpu" if dry_run else "cuda")
    known = facts(names, dry_run=dry_run)
    said = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    click.echo(f"{known['device']}, CUDA {known['cuda']}, {said}; {known['machine']};")
    click.echo(f"bfloat16; dense ones with {Q_HEADS}/{KV_HEADS} heads x {DIM}; ", nl=False)
    click.echo(f"medians of {rounds} rounds, us.\n")
    click.echo(
        "| backend | workload | raw | layers | graph: raw | ours | ratio | metadata "
        "| host: raw | ours | added | metadata | write | bars |\n" + "|---" * 14 + "|"
    )
    rows: list[Row] = []
    for name in names:
        adapter = ADAPTERS[name]
        for workload in adapter.tiny if dry_run else adapter.workloads:
            if only not in str(workload):
                continue
            with torch.no_grad():
                measured = measure(name, adapter, workload, rounds, device)
            gc.collect()
            rows += measured
            for row in measured:
                click.echo(line(row, has_bars=not dry_run))
            if path is not None:
                found = {**known, "rows": [asdict(row) for row in rows]}
                path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
