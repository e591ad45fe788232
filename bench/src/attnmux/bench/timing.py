"""How long a step takes on a device, and what the device reaches where nothing is in the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.benchmark import Timer

from attnmux.bench.steps import Step
from attnmux.core.backend import AttentionBackend
from attnmux.core.graph.config import NUM_WARM_UPS
from attnmux.core.graph.devices import DeviceGraphs, GraphStep

Run = Callable[[], object]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes it the device that is waited for."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def median_us(run: Run, seconds: float) -> float:
    """Median microseconds of one run, over `seconds` at least, and as many runs without a wait in
    between as make the wait for the device small."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median * 1e6


def all_layers(backend: AttentionBackend, step: Step) -> Run:
    """Every layer's call, one after the other, eagerly. The step is prepared here, once."""
    backend.init_forward_metadata(step.batch)
    return _in_turn(step.calls(backend))


def all_layers_in_graph(backend: AttentionBackend, step: Step, graphs: DeviceGraphs) -> Run:
    """The same from one graph, which holds the calls alone: what prepares a step, inside of a graph
    or not, is run here, once. Raises GraphUnsupported for a backend that cannot be captured."""
    batch = step.batch
    captured = GraphStep(prepare=lambda: None, forward=_in_turn(step.calls(backend)))
    with torch.inference_mode(False):
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        with graphs.session():
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            backend.init_forward_metadata_in_graph(batch)
            for _ in range(NUM_WARM_UPS):
                graphs.warm_up(captured)
            graph = graphs.capture(captured)
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    return graph.replay


def _in_turn(calls: list[Run]) -> Run:
    def run() -> None:
        for call in calls:
            call()

    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What this device reaches, measured."""

    read_gbs: float
    """GB/s of reading, the better of a sum and a copy (which reads and writes)."""
    matmul_tflops: float
    """TFLOP/s of a square matrix product in the dtype that is timed."""


def ceilings(device: torch.device, dtype: torch.dtype, seconds: float) -> Ceilings:
    """seconds: least time for each figure."""
    with current(device):
        return _ceilings(device, dtype, seconds)


def _ceilings(device: torch.device, dtype: torch.dtype, seconds: float) -> Ceilings:
    nbytes, side = (1 << 27, 1024) if device.type == "cpu" else (1 << 30, 8192)
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * nbytes / median_us(partial(target.copy_, source), seconds)
    read = nbytes / median_us(partial(torch.sum, source), seconds)
    del source, target
    left, right = torch.randn((2, side, side), device=device).to(dtype)
    product = 2 * side**3 / median_us(partial(torch.matmul, left, right), seconds)
    return Ceilings(read_gbs=max(copied, read) / 1e3, matmul_tflops=product / 1e6)
