"""Host time of the Triton backend: what an eager step waits for before its kernels run.

    python -m benchmarks.triton_host [--rounds 21] [--only WORKLOAD] [--json FILE]
    python -m benchmarks.triton_host --dry-run      without a GPU: launches go nowhere

Wall time of one call, without waiting for the device: `metadata` is `init_forward_metadata`, once a
step (bar: 40 us); `attend` is `forward_decode` or `forward_extend`, `write` is `save_kv`, and
`forward` is both and the contract's checks, once a layer each. `unbound` is `attend` launched as
Triton does it. `flashinfer plan` is what that library does once a step for the same batch, where it
is installed. `build` is the time to make the backend, its kernels compiled or found on disk, and
`first` that of the first call of `attend`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import triton
from benchmarks import libraries, library_flashinfer
from benchmarks.cases import (
    HOPPER,
    decode,
    dry_run_option,
    extend,
    json_option,
    only_option,
    rounds_option,
)
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from attnmux.core import AttentionBackend, AttentionCall
from attnmux.testing import find_candidate
from attnmux.testing.bench import Report, Step, facts, host_meter, in_turn, interleave, wall_meter
from attnmux.testing.bench.timing import Run

MAX_METADATA_US = 40.0
CASES = (
    *(decode(batch_size, 2048) for batch_size in (1, 64, 256)),
    *(extend(batch_size, 64, 1984) for batch_size in (1, 64, 256)),
)
TINY = (decode(2, 32), extend(2, 4, 28))
TIMES = ("metadata", "attend", "unbound", "write", "forward", "flashinfer plan")
COLUMNS = {"workload": "", **dict.fromkeys(TIMES, ".1f"), "build s": ".1f", "first": ".1f"}


class NowhereDriver:
    """A device that does nothing: kernels are compiled for SM90, and their launches are dropped."""

    utils: Any = None

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # as a tensor of the CPU says

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_stream(self, index: int) -> int:
        return 0

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, *given: object) -> tuple[object, int, int, int, int]:
        return object(), 0, 0, 0, 1024

    def launcher_cls(self, *given: object) -> Callable[..., None]:
        return drop


def drop(*given: object) -> None:
    pass


def make_backend(step: Step) -> AttentionBackend:
    candidate = find_candidate("triton/triton", platforms=(HOPPER,))
    return candidate.build(step.context(HOPPER))


def measure(name: str, step: Step, rounds: int, report: Report) -> None:
    device, batch, made = step.q.device, step.batch, list[AttentionBackend]()
    built = wall_meter(lambda: made.append(make_backend(step)), device)() / 1e6
    (backend,) = made
    is_decode = step.workload.phase == "decode"
    attend = backend.forward_decode if is_decode else backend.forward_extend
    layers = list(zip(libraries.new_kv(step), step.layers, strict=True))
    backend.init_forward_metadata(batch)
    calls = [partial(attend, AttentionCall(step.q, *kv, layer), batch) for kv, layer in layers]
    first = wall_meter(calls[0], device)()
    sides: dict[str, Sequence[Run]] = {
        "metadata": [partial(backend.init_forward_metadata, batch)],
        "attend": calls,
        "unbound": [partial(_unbound, call) for call in calls],
        "write": [partial(backend.save_kv, *kv, layer, batch) for kv, layer in layers],
        "forward": [partial(backend.forward, step.q, *kv, layer, batch) for kv, layer in layers],
    }
    if device.type != "cpu" and importlib.util.find_spec("flashinfer") is not None:
        library = importlib.import_module("flashinfer")
        sides["flashinfer plan"] = [library_flashinfer.flashinfer_plan(library, step)]
    for runs in sides.values():
        in_turn(runs)()
    times = interleave({side: host_meter(runs, device) for side, runs in sides.items()}, rounds)
    figures = [times.median(side) if side in sides else None for side in TIMES]
    report.add(name, *figures, built, first, missed=times.median("metadata") > MAX_METADATA_US)


def _unbound(call: Run) -> None:
    """With a hook to tell, a launch goes Triton's own way."""
    hook = triton.knobs.runtime.launch_exit_hook
    hook.add(drop)
    call()
    hook.remove(drop)


@click.command()
@rounds_option(21)
@only_option
@json_option
@dry_run_option("Tiny sizes on the CPU, launches go nowhere")
def main(rounds: int, only: str, path: Path | None, dry_run: bool) -> None:
    """Print the host time of the Triton backend's steps and layers."""
    device = torch.device("cpu" if dry_run else "cuda")
    if dry_run:
        driver.set_active(NowhereDriver())
    cases = [each for each in (TINY if dry_run else CASES) if only in str(each)]
    title = f"32/8 heads x 128, bfloat16; medians of {rounds} rounds, us."
    about = facts(device, "triton", "flashinfer-python")
    with Report(COLUMNS, about, path, title=title) as report, torch.no_grad():
        for case in cases:
            measure(str(case), case.step(device), rounds, report)


if __name__ == "__main__":
    main()
