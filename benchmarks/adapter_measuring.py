"""The figures of `adapters.py`: both sides are compared, then timed by turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.adapter_setups import Setup, make_setup
from benchmarks.adapter_sides import ONE, Adapter
from benchmarks.adapter_workloads import Workload
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
        expected = answer if isinstance(answer, torch.Tensor) else answer[0]
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
