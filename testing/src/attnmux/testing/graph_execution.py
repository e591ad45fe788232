"""Running the steps of a case from device graphs, which another batch was captured with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.graph.config import GraphConfig, ModelInput
from attnmux.core.graph.devices import DeviceGraphs, device_graphs
from attnmux.core.graph.runner import GraphRunner
from attnmux.core.graph.sizes import graph_batch_sizes, padded_size
from attnmux.testing.builders import LayerInput, PreparedStep, prepare_step
from attnmux.testing.cases import Case, Step
from attnmux.testing.comparison import Disagreement
from attnmux.testing.execution import EagerExecution, Execution, LayerOutput, call_layer
from attnmux.testing.recording import RecordingGraphs
from attnmux.testing.world import World


class GraphExecution(Execution):
    """Replays the steps that graphs serve, and runs the others on the same backend.

    Each mode has its graphs, captured one mode after the other with shorter requests, other pages
    and other values than the steps have, in the sizes that the default ones pad the steps to.
    """

    def __init__(self, world: World, backend: AttentionBackend, *, host_lens: bool) -> None:
        super().__init__(world, backend, host_lens=host_lens)
        self._eager = EagerExecution(world, backend, host_lens=host_lens)
        device = world.context.device
        devices = RecordingGraphs() if device.type == "cpu" else device_graphs(device)
        captured: dict[ForwardMode, list[Step]] = {}
        for step in world.case.steps:
            if step.can_be_captured and _rows(step) <= _most_rows(world.case):
                captured.setdefault(step.mode, []).append(step)
        self._graphs = {
            mode: _Graphs(world, backend, steps, devices, host_lens=host_lens)
            for mode, steps in captured.items()
        }

    @property
    def pads(self) -> bool:
        return True

    def run(self, step: PreparedStep) -> list[LayerOutput]:
        graphs = self._graphs.get(step.batch.forward_mode)
        if graphs is None or step.batch.batch_size > _most_rows(self.world.case):
            return self._eager.run(step)
        return graphs.run(step)


class _Graphs:
    """The graphs of the steps of one mode."""

    def __init__(
        self,
        world: World,
        backend: AttentionBackend,
        steps: Sequence[Step],
        devices: DeviceGraphs,
        *,
        host_lens: bool,
    ) -> None:
        serving = backend.select(steps[0].mode)
        sample = prepare_step(
            world,
            steps[0].halved(),
            seq_len_fill=serving.get_cuda_graph_seq_len_fill_value(),
            host_lens=host_lens,
        )
        self._model = _Model(world, backend, sample.inputs)
        self._runner = GraphRunner(
            backend,
            self._model.forward,
            _config(world.case, steps, sample.batch, host_lens=host_lens),
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
        size = padded_size(step.batch.batch_size, self._runner.batch_sizes)
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
    """The layers that are captured. Apart from the graphs, which hold it: what a case took is freed
    as the case ends, and not when cycles are looked for."""

    def __init__(
        self, world: World, backend: AttentionBackend, layers: Sequence[LayerInput]
    ) -> None:
        self._world, self._backend, self._layers = world, backend, layers
        self.outputs: dict[int, list[LayerOutput]] = {}
        """What each graph writes, by its number of requests."""

    def forward(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The model: its layers, each on what it is given."""
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
    """Requests of the step, those of padding included."""
    return len(step.lens) + step.padding


def _most_rows(case: Case) -> int:
    """Of a step that has a graph."""
    return case.max_graph_batch_size or max(map(_rows, case.steps))


def _config(
    case: Case, steps: Sequence[Step], batch: ForwardBatch, *, host_lens: bool
) -> GraphConfig:
    usual = graph_batch_sizes(pool_size=1024)
    sizes = {padded_size(_rows(step), usual) for step in steps}
    is_verify = batch.forward_mode.is_target_verify()
    return GraphConfig(
        batch_sizes=tuple(sorted(size for size in sizes if size)),
        forward_mode=batch.forward_mode,
        tokens_per_request=batch.num_tokens // batch.batch_size,
        host_lens=host_lens,
        encoder=case.cross_attention,
        spec_topk=case.spec_topk or 1,
        custom_mask=is_verify and case.custom_mask,
        index_topk=case.index_topk,
    )


def _tensors(given: LayerInput) -> list[str]:
    """Names of the layer's inputs that are there."""
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
