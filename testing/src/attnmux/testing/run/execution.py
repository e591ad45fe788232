"""Running the steps of a case, eagerly or from device graphs captured with another batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import torch

from attnmux.core import (
    AttentionBackend,
    DeviceGraphs,
    ForwardBatch,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    ModelInput,
)
from attnmux.core.plugin import CapturedGraph, GraphStep
from attnmux.testing.cases.case import Case, Step
from attnmux.testing.graphs.recording import RecordingGraphs
from attnmux.testing.run.comparison import Disagreement
from attnmux.testing.setup.case import CaseSetup
from attnmux.testing.setup.prepared import LayerInput, PreparedStep, prepare_step

LARGE = 256, 512
"""Batch sizes of graphs beyond the default ones."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerOutput:
    """The results of one layer's call."""

    out: torch.Tensor
    lse: torch.Tensor | None
    num_defined_rows: int
    """Rows that must be finite."""


class Execution(ABC):
    """Runs the steps of one case on one backend."""

    def __init__(self, setup: CaseSetup, backend: AttentionBackend, *, host_lens: bool) -> None:
        """Made before the first step is prepared. host_lens: batches have host mirrors."""
        self.setup = setup
        self.backend = backend

    @property
    def pads(self) -> bool:
        """Whether rows of no request may be added to a step."""
        return False

    @abstractmethod
    def run(self, step: PreparedStep) -> list[LayerOutput]:
        """Prepare the step's metadata and call every layer."""


class EagerExecution(Execution):
    """Calls the backend directly."""

    def run(self, step: PreparedStep) -> list[LayerOutput]:
        self.backend.init_forward_metadata(step.batch)
        outputs = []
        for index, given in enumerate(step.inputs):
            outputs.append(
                call_layer(
                    self.setup, self.backend, given, step.batch, step.num_request_tokens, index
                )
            )
            _check_picks(given, step.batch)
        return outputs


def _check_picks(given: LayerInput, batch: ForwardBatch) -> None:
    wrote, picks = given.topk_indices, batch.topk_indices
    if wrote is not None and picks is not None and not torch.equal(wrote, picks):
        raise Disagreement(
            f"layer {given.layer.layer_id}: topk_indices was written, and a backend only reads it"
        )


def call_layer(
    setup: CaseSetup,
    backend: AttentionBackend,
    given: LayerInput,
    batch: ForwardBatch,
    num_request_tokens: int,
    index: int,
) -> LayerOutput:
    """Write the indexer's picks, then call the layer. Every other layer gets an `out`.

    num_request_tokens: rows that belong to requests; a kernel may leave those after them alone.
    """
    layer, with_lse = given.layer, setup.case.lse
    if given.topk_indices is not None and batch.topk_indices is not None:
        batch.topk_indices.copy_(given.topk_indices)
    shape = (*given.q.shape[:2], layer.v_head_dim)
    out, lse, num_defined_rows = None, None, num_request_tokens
    if index % 2 == 0:
        out = given.q.new_full(shape, torch.nan)
        out[num_request_tokens:] = 0
        num_defined_rows = len(out)
    if with_lse:
        lse = torch.full(shape[:2], torch.nan, dtype=torch.float32, device=given.q.device)
    result = backend.forward(
        given.q,
        given.k,
        given.v,
        layer,
        batch,
        setup.case.save_kv_cache,
        q_rope=given.q_rope,
        k_rope=given.k_rope,
        out=out,
        lse=lse,
    )
    if out is not None and result.data_ptr() != out.data_ptr():
        raise Disagreement(f"layer {layer.layer_id}: the returned tensor is not the given out")
    return LayerOutput(out=result, lse=lse, num_defined_rows=num_defined_rows)


class GraphExecution(Execution):
    """Replays the steps that graphs serve, and runs the others on the same backend.

    Each mode and number of drafts has its own graphs, captured one after the other. The captured
    batch has shorter requests, other pages and other values than the steps. Sizes are the default
    ones that the steps are padded to, or `LARGE`.
    """

    def __init__(self, setup: CaseSetup, backend: AttentionBackend, *, host_lens: bool) -> None:
        super().__init__(setup, backend, host_lens=host_lens)
        self._eager = EagerExecution(setup, backend, host_lens=host_lens)
        devices = (setup.graphs or _graphs_of)(setup.context.device)
        captured: dict[tuple[ForwardMode, int], list[Step]] = {}
        for step in setup.case.steps:
            if step.can_be_captured and step.lens and _rows(step) <= _most_rows(setup.case):
                captured.setdefault((step.mode, step.new[0]), []).append(step)
        self._graphs = {
            served: _Graphs(setup, backend, steps, devices, host_lens=host_lens)
            for served, steps in captured.items()
        }

    @property
    def pads(self) -> bool:
        return True

    def run(self, step: PreparedStep) -> list[LayerOutput]:
        batch = step.batch
        each = batch.num_tokens // max(batch.batch_size, 1)
        graphs = self._graphs.get((batch.forward_mode, each))
        if graphs is None or batch.batch_size > _most_rows(self.setup.case):
            return self._eager.run(step)
        return graphs.run(step)


def _graphs_of(device: torch.device) -> DeviceGraphs:
    return _WarmedOnce() if device.type == "cpu" else DeviceGraphs.of(device)


class _WarmedOnce(RecordingGraphs):
    """Runs each step once before its capture, which runs it again: on a CPU one more run on the
    same values would compile nothing and show nothing."""

    def __init__(self) -> None:
        self._warm: GraphStep | None = None

    def warm_up(self, step: GraphStep) -> None:
        if step is not self._warm:
            super().warm_up(step)
            self._warm = step

    def capture(self, step: GraphStep) -> CapturedGraph:
        self._warm = None
        return super().capture(step)


class _Graphs:
    """The graphs of the steps of one mode, with as many tokens for each request."""

    def __init__(
        self,
        setup: CaseSetup,
        backend: AttentionBackend,
        steps: Sequence[Step],
        devices: DeviceGraphs,
        *,
        host_lens: bool,
    ) -> None:
        serving = backend.select(steps[0].mode)
        sample = prepare_step(
            setup,
            steps[0].halved(),
            seq_len_fill=serving.get_cuda_graph_seq_len_fill_value(),
            host_lens=host_lens,
        )
        self._model = _Model(setup, backend, sample.inputs)
        self._runner = GraphRunner(
            backend,
            self._model.forward,
            _config(setup.case, steps, sample.batch, host_lens=host_lens),
            devices=devices,
            inputs={
                name: ModelInput(dtype=tensor.dtype, trailing=tuple(tensor.shape[1:]))
                for name, tensor in _by_name(sample).items()
            },
            progress=iter,
        )
        self._runner.capture(sample.batch, _by_name(sample))

    def run(self, step: PreparedStep) -> list[LayerOutput]:
        outputs = self._runner.replay(step.batch, _by_name(step))
        num_tokens = step.batch.num_tokens
        size = _holding(step.batch.batch_size, self._runner.batch_sizes)
        for given, whole in zip(step.inputs, self._model.outputs[size or 0], strict=True):
            if not bool(whole.out[num_tokens:].isfinite().all()):
                raise Disagreement(
                    f"layer {given.layer.layer_id}: a padding row of the graph is not finite"
                )
        return [
            LayerOutput(
                out=out.clone(),
                lse=None if lse is None else lse.clone(),
                num_defined_rows=num_tokens,
            )
            for out, lse in outputs
        ]


class _Model:
    """The layers that are captured. It is not part of `_Graphs`, whose graphs refer to it: without
    a reference cycle the memory of a case is freed when the case ends."""

    def __init__(
        self, setup: CaseSetup, backend: AttentionBackend, layers: Sequence[LayerInput]
    ) -> None:
        self._world, self._backend, self._layers = setup, backend, layers
        self.outputs: dict[int, list[LayerOutput]] = {}
        """The outputs of each graph, by its number of requests."""

    def forward(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Call every layer with its inputs."""
        outputs = []
        for index, like in enumerate(self._layers):
            given = replace(
                like,
                **{name: inputs[_name(like, name)] for name in _tensors(like)},  # type: ignore[arg-type]  # fields by name
            )
            outputs.append(
                call_layer(self._world, self._backend, given, batch, batch.num_tokens, index)
            )
        self.outputs[batch.batch_size] = outputs
        return [(output.out, output.lse) for output in outputs]


def _rows(step: Step) -> int:
    """Requests of the step, including padding."""
    return len(step.lens) + step.padding


def _most_rows(case: Case) -> int:
    """The most requests of a step that has a graph."""
    return case.max_graph_batch_size or max(map(_rows, case.steps))


def _holding(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the sizes that holds `count`; None where the largest does not."""
    return min((size for size in sizes if size >= count), default=None)


def _config(
    case: Case, steps: Sequence[Step], batch: ForwardBatch, *, host_lens: bool
) -> GraphConfig:
    usual = *GraphConfig.sizes(pool_size=1024), *LARGE
    sizes = {_holding(_rows(step), usual) for step in steps}
    is_verify = batch.forward_mode.is_target_verify()
    return GraphConfig(
        batch_sizes=tuple(sorted(size for size in sizes if size)),
        forward_mode=batch.forward_mode,
        tokens_per_request=batch.num_tokens // batch.batch_size,
        host_lens=host_lens,
        encoder=case.cross_attention,
        spec_topk=case.spec_topk or 1,
        custom_mask=is_verify and case.custom_mask,
        visible=is_verify and case.has_trees and not case.custom_mask,
        index_topk=case.index_topk,
    )


def _tensors(given: LayerInput) -> list[str]:
    """Names of the layer's inputs that are tensors."""
    return [
        field.name
        for field in fields(given)
        if isinstance(getattr(given, field.name), torch.Tensor)
    ]


def _name(given: LayerInput, name: str) -> str:
    return f"{name} of layer {given.layer.layer_id}"


def _by_name(step: PreparedStep) -> dict[str, torch.Tensor]:
    return {
        _name(given, name): getattr(given, name)
        for given in step.inputs
        for name in _tensors(given)
    }


EXECUTIONS: Mapping[str, type[Execution]] = MappingProxyType(
    {"eager": EagerExecution, "graph": GraphExecution}
)
"""The ways to run a case, by `Case.execution`."""
