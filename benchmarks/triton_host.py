"""Host time of the Triton backend: what an eager step waits for before its kernels run.

    python -m benchmarks.triton_host [--rounds 21] [--only WORKLOAD] [--profile] [--json FILE]
    python -m benchmarks.triton_host --dry-run      without a GPU: launches go nowhere

Wall time of one call, without waiting for the device: `metadata` is `init_forward_metadata`, once a
step (bar: 40 us); `attend` is `forward_decode` or `forward_extend`, `write` is `save_kv`, and
`forward` is both and the contract's checks, once a layer each. `unbound` is `attend` launched as
Triton does it. `flashinfer plan` is what that
library does once a step for the same batch, where it is installed. `build` is how long the backend
took to make, its kernels compiled or found on disk; `first` is the first call of `attend`.
"""

from __future__ import annotations

import cProfile
import importlib.util
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import triton
from benchmarks.adapter_setups import Setup, make_setup
from benchmarks.adapter_workloads import DTYPE, KV_HEADS, Q_HEADS, Workload
from benchmarks.setups import DIM
from benchmarks.timing import Call, host_times
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from attnmux.core.call import AttentionCall
from attnmux.triton.backend import TritonBackend
from attnmux.triton.factory import triton as made

MAX_METADATA_US = 40.0
WORKLOADS = (
    *(Workload(batch_size=size, keys=2048) for size in (1, 64, 256)),
    *(Workload(batch_size=size, keys=2048, new=64) for size in (1, 64, 256)),
)
TINY = (Workload(batch_size=2, keys=32), Workload(batch_size=2, keys=32, new=4))


class NowhereDriver:
    """Stands in for a device: kernels are compiled for SM90, and their launches do nothing."""

    utils: Any = None

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # what a tensor of the CPU says

    def get_current_stream(self, index: int) -> int:
        return 0

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, *given: object) -> tuple[object, int, int, int, int]:
        return object(), 0, 0, 0, 1024

    def launcher_cls(self, *given: object) -> Callable[..., None]:
        return _nowhere


def _nowhere(*given: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Medians in microseconds; seconds and microseconds of the first time."""

    workload: str
    metadata: float
    attend: float
    unbound: float
    write: float
    forward: float
    flashinfer_plan: float | None
    build_s: float
    first: float


def measure(setup: Setup, rounds: int, *, dry_run: bool) -> Row:
    device, batch, q = setup.q.device, setup.batch, setup.q
    began = time.perf_counter()
    backend = (
        TritonBackend(setup.context, {}, compute_units=132) if dry_run else made(setup.context, {})
    )
    built = time.perf_counter() - began
    is_decode = setup.workload.new == 1
    attend = backend.forward_decode if is_decode else backend.forward_extend
    layers, new = setup.context.layers, setup.new_kv()
    backend.init_forward_metadata(batch)
    began = time.perf_counter()
    calls = [AttentionCall(q, *kv, layer) for layer, kv in zip(layers, new, strict=True)]
    attend(calls[0], batch)
    first = time.perf_counter() - began
    sides: dict[str, Sequence[Call]] = {
        "metadata": [partial(backend.init_forward_metadata, batch)],
        "attend": [partial(attend, call, batch) for call in calls],
        "unbound": [partial(_unbound, partial(attend, call, batch)) for call in calls],
        "write": [
            partial(backend.save_kv, *kv, layer, batch)
            for layer, kv in zip(layers, new, strict=True)
        ],
        "forward": [
            partial(backend.forward, q, *kv, layer, batch)
            for layer, kv in zip(layers, new, strict=True)
        ],
    }
    plan = None if dry_run else flashinfer_plan(setup)
    if plan is not None:
        sides["flashinfer plan"] = [plan]
    for calls in sides.values():
        for call in calls:
            call()
    medians = {
        name: statistics.median(times) for name, times in host_times(sides, rounds, device).items()
    }
    return Row(
        workload=str(setup.workload),
        **{name: medians[name] for name in ("metadata", "attend", "unbound", "write", "forward")},
        flashinfer_plan=medians.get("flashinfer plan"),
        build_s=built,
        first=first * 1e6,
    )


def _unbound(call: Call) -> None:
    """A launch that somebody watches goes Triton's own way."""
    hook = triton.knobs.runtime.launch_exit_hook
    hook.add(_nowhere)
    call()
    hook.remove(_nowhere)


def flashinfer_plan(setup: Setup) -> Call | None:
    """Its planning of the same step; None where it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    flashinfer: Any = importlib.import_module("flashinfer")
    workload, device = setup.workload, setup.q.device
    size, page = workload.batch_size, workload.page_size
    indptr = torch.arange(size + 1, dtype=torch.int32) * setup.pages.shape[1]
    indices = setup.pages.flatten()
    last = torch.full((size,), (workload.keys - 1) % page + 1, dtype=torch.int32)
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    given = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    heads = Q_HEADS, KV_HEADS, DIM, page
    if workload.new == 1:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        return partial(decode.plan, indptr, indices, last, *heads, **given)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
    bounds = torch.arange(size + 1, dtype=torch.int32) * workload.new
    return partial(prefill.plan, bounds, indptr, indices, last, *heads, causal=True, **given)


def profile(setup: Setup, *, dry_run: bool) -> None:
    """Where the time of a step goes, by function."""
    context, batch, q = setup.context, setup.batch, setup.q
    backend = TritonBackend(context, {}, compute_units=132) if dry_run else made(context, {})
    new = setup.new_kv()

    def step() -> None:
        backend.init_forward_metadata(batch)
        for layer, kv in zip(context.layers, new, strict=True):
            backend.forward(q, *kv, layer, batch)

    step()
    with cProfile.Profile() as found:
        for _ in range(50):
            step()
    pstats.Stats(found).sort_stats("tottime").print_stats(25)


@click.command()
@click.option("--rounds", default=21, show_default=True, help="Rounds of each workload.")
@click.option("--only", default="", help="Run the workloads whose name contains this.")
@click.option("--profile", "profiled", is_flag=True, help="Say where the time goes instead.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here too.")
@click.option("--dry-run", is_flag=True, help="Tiny sizes on the CPU: launches go nowhere.")
def main(rounds: int, only: str, profiled: bool, path: Path | None, dry_run: bool) -> None:
    """Print the figures as a Markdown table."""
    torch.manual_seed(0)
    device = torch.device("cpu" if dry_run else "cuda")
    if dry_run:
        driver.set_active(NowhereDriver())
    named = "no device" if dry_run else torch.cuda.get_device_name()
    click.echo(f"{named}, torch {torch.__version__}, triton {triton.__version__};")
    click.echo(f"{Q_HEADS}/{KV_HEADS} heads x {DIM}, bfloat16; medians of {rounds} rounds, us.\n")
    names = [name for name in Row.__dataclass_fields__ if name != "workload"]
    click.echo(f"| workload | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|")
    rows = []
    for workload in TINY if dry_run else WORKLOADS:
        if only not in str(workload):
            continue
        setup = make_setup(workload, device)
        if profiled:
            profile(setup, dry_run=dry_run)
            continue
        figures = asdict(measure(setup, rounds, dry_run=dry_run))
        said = ("-" if figures[name] is None else f"{figures[name]:.1f}" for name in names)
        click.echo(f"| {workload} | {' | '.join(said)} |")
        rows.append(figures)
    if path is not None:
        path.write_text(json.dumps({"device": named, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
