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

Raw is `same calls`: those that an engine makes of the library, with what makes its arguments of the
contract's: for FlashMLA's kernels Q in one row where its parts come apart, for `nsa` slots of
places, for fmha_v2 a copy of K and V. Where there is such work, a second row compares with the
`kernel alone`, on arguments that were made before; the bars hold there too. flashinfer's extend is
one call over the call's own K and V, and with a prefix another over the pool and the merge: a
second row compares with `one call` over the pool, which no bar is for.

Three adapters make better calls than raw: `fa3` and `fa3_mla` compute one schedule a step, which
raw does in every layer, and `fa3` reads the call's K and V in place of the pool's pages where there
is no prefix; `nsa` looks its slots up in one launch.

A library that is not installed, or that fails, is a row that says so. A device that has failed
once fails all later rows of the process: --backend starts over with one.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.adapter_libraries import ADAPTERS
from benchmarks.adapter_measuring import FIGURES, MAX_HOST_US, MAX_RATIO, Row, measure
from benchmarks.adapter_workloads import KV_HEADS, Q_HEADS
from benchmarks.setups import DIM


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
