"""Running the steps of a case of linear layers, eagerly or from device graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch

from attnmux.core import DeviceGraphs, ForwardBatch, ForwardMode
from attnmux.core.plugin import CapturedGraph, GraphStep, LinearAttentionBackend
from attnmux.testing.graphs.recording import RecordingGraphs
from attnmux.testing.setup.linear import LinearInput, LinearSetup, LinearStep, prepare_linear

Outputs: TypeAlias = list[list[torch.Tensor]]
"""Results of each layer: the convolutions', then the recurrence's."""


class LinearExecution(ABC):
    """Runs the steps of one case on one backend."""

    @abstractmethod
    def run(self, step: LinearStep) -> Outputs:
        """Prepare the step's metadata and call every layer."""

    @abstractmethod
    def accept(self, step: LinearStep, counts: torch.Tensor) -> None:
        """Give the requests of a step that verified drafts the states after `counts` [B] int32 of
        them."""


def call_layer(backend: LinearAttentionBackend, given: LinearInput, batch: ForwardBatch) -> list:  # type: ignore[type-arg]  # as Outputs
    layer = given.layer
    outputs = [
        backend.convolve(x, weight, layer, batch, bias=bias, silu=given.silu, index=index)
        for index, (x, weight, bias) in enumerate(given.convs)
    ]
    if layer.has_state:
        qkv = given.q, given.k, given.v
        outputs.append(backend.forward(*qkv, layer, batch, g=given.g, beta=given.beta))
    return outputs


class EagerLinear(LinearExecution):
    """Calls the backend directly."""

    def __init__(self, setup: LinearSetup, backend: LinearAttentionBackend) -> None:
        self._states, self._backend = setup.states, backend

    def run(self, step: LinearStep) -> Outputs:
        self._backend.init_forward_metadata(step.batch)
        return [call_layer(self._backend, given, step.batch) for given in step.inputs]

    def accept(self, step: LinearStep, counts: torch.Tensor) -> None:
        self._states.accept(step.batch.req_pool_indices, counts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Captured:
    """A step, its graph, and that which accepts its drafts."""

    step: LinearStep
    graph: CapturedGraph
    accept: CapturedGraph | None
    """None for a step without drafts."""


class LinearGraphs(LinearExecution):
    """Each mode and batch size has a graph, captured with shorter requests and other values."""

    def __init__(
        self, setup: LinearSetup, backend: LinearAttentionBackend, *, host_lens: bool
    ) -> None:
        self._backend, self._states, device = backend, setup.states, setup.context.device
        self._devices = RecordingGraphs() if device.type == "cpu" else DeviceGraphs.of(device)
        steps = setup.case.steps
        rows = [len(step.lens) + step.padding for step in steps]
        tokens = [each * max(step.new, default=1) for each, step in zip(rows, steps, strict=True)]
        backend.init_cuda_graph_state(max(rows), max(tokens))
        self._counts = torch.zeros(max(rows), dtype=torch.int32, device=device)
        self._captured: dict[tuple[ForwardMode, int, int], _Captured] = {}
        with self._devices.session():
            for lengths in steps:
                fixed = prepare_linear(setup, lengths.halved(), host_lens=host_lens)
                if _shape(fixed.batch) not in self._captured:
                    self._captured[_shape(fixed.batch)] = self._capture(fixed)

    def _capture(self, fixed: LinearStep) -> _Captured:
        backend, batch, accept = self._backend, fixed.batch, None
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        graph = self._graph(
            lambda: backend.init_forward_metadata_in_graph(batch),
            lambda: [call_layer(backend, given, batch) for given in fixed.inputs],
        )
        if batch.forward_mode.is_target_verify():
            counts = self._counts[: batch.batch_size]
            accept = self._graph(
                lambda: None, lambda: self._states.accept(batch.req_pool_indices, counts)
            )
        return _Captured(step=fixed, graph=graph, accept=accept)

    def _graph(self, prepare: Callable[[], None], forward: Callable[[], object]) -> CapturedGraph:
        step = GraphStep(prepare=prepare, forward=forward)
        self._devices.warm_up(step)
        return self._devices.capture(step)

    def run(self, step: LinearStep) -> Outputs:
        captured = self._captured[_shape(step.batch)]
        fixed = captured.step
        for name in (field.name for field in fields(fixed.batch)):
            held, value = getattr(fixed.batch, name), getattr(step.batch, name)
            if isinstance(held, torch.Tensor):
                held.copy_(value)
        for ours, theirs in zip(fixed.inputs, step.inputs, strict=True):
            for held, value in zip(ours.tensors(), theirs.tensors(), strict=True):
                held.copy_(value)
            for (_, weight, bias), (_, other, more) in zip(ours.convs, theirs.convs, strict=True):
                weight.copy_(other)
                if bias is not None and more is not None:
                    bias.copy_(more)
        self._backend.init_forward_metadata_out_graph(fixed.batch)
        captured.graph.replay()
        return [[part.clone() for part in outputs] for outputs in captured.graph.outputs]

    def accept(self, step: LinearStep, counts: torch.Tensor) -> None:
        graph = self._captured[_shape(step.batch)].accept
        if graph is None:
            raise RuntimeError("the step verifies no drafts")
        self._counts[: len(counts)].copy_(counts)
        graph.replay()


def _shape(batch: ForwardBatch) -> tuple[ForwardMode, int, int]:
    return batch.forward_mode, batch.batch_size, batch.num_tokens
