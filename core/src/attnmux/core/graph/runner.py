"""Captures a model's step for many batch sizes and replays the graph that fits a batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.op import ForwardContext
from attnmux.core.contract.spec import SpecInput
from attnmux.core.facts.errors import GraphUnsupported, InvalidInput
from attnmux.core.graph.buffers import FixedBuffers
from attnmux.core.graph.config import (
    NO_INPUTS,
    NO_MODEL_INPUTS,
    Forward,
    GraphConfig,
    ModelInput,
    Progress,
    padded_size,
    show_progress,
)
from attnmux.core.graph.devices import CapturedGraph, CapturingRanks, DeviceGraphs, GraphStep
from attnmux.core.graph.outputs import FixedOutputs


class _Captured(NamedTuple):
    """A graph with its batch."""

    graph: CapturedGraph
    batch: ForwardBatch


class GraphRunner:
    """Runs a model's step from device graphs.

    It owns the tensors that the graphs read. `replay` copies a batch there, pads it to a captured
    size, has the backend prepare its metadata outside of the graph, and launches the graph, which
    holds the in-graph half of the preparation and the model's call.

    One runner serves steps of one mode. DRAFT_EXTEND steps have the same number of new tokens for
    every request; they run as TARGET_VERIFY ones of chains, which backends hold in graphs. A
    backend may have several runners, such as one for decoding and one for verification; with the
    same `devices` they share its memory pool.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        forward: Forward,
        config: GraphConfig,
        *,
        devices: DeviceGraphs,
        inputs: Mapping[str, ModelInput] = NO_MODEL_INPUTS,
        progress: Progress = show_progress,
        ranks: CapturingRanks | None = None,
    ) -> None:
        """forward: called with the padded batch and inputs, inside `ForwardContext.enter`.

        inputs: the model's inputs that are not in the batch, by name. progress: shown on rank 0
        only.
        ranks: those whose collectives the step holds.
        Raises GraphUnsupported for a context in debug mode, whose checks synchronise.
        """
        if backend.context.debug:
            raise GraphUnsupported(
                "the context is in debug mode, whose checks synchronise with the device: run "
                "eagerly, or make the BackendContext with debug=False"
            )
        self.config = config
        self._extends = config.forward_mode.is_draft_extend()
        held = replace(config, forward_mode=ForwardMode.TARGET_VERIFY) if self._extends else config
        self._backend = backend = backend.select(held.forward_mode)
        self._forward = forward
        self._devices = devices
        self._progress = progress
        self._ranks = ranks or CapturingRanks()
        self._buffers = FixedBuffers(
            held,
            inputs,
            seq_len_fill=backend.get_cuda_graph_seq_len_fill_value(),
            max_context_len=backend.context.max_context_len,
            device=backend.context.device,
        )
        self._outputs = FixedOutputs()
        self._captured: dict[int, _Captured] = {}
        self._sizes: tuple[int, ...] = ()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Captured sizes, ascending."""
        return self._sizes

    @property
    def memory_bytes(self) -> Mapping[int, int]:
        """Bytes that each graph took when it was captured, by batch size. Graphs share a pool, so
        the first and largest takes most of it."""
        return {size: self._captured[size].graph.nbytes for size in self.batch_sizes}

    def capture(
        self, batch: ForwardBatch | None = None, inputs: Mapping[str, torch.Tensor] = NO_INPUTS
    ) -> None:
        """Capture every size, from large to small.

        batch: fills the buffers during the capture, in sizes that it fits. In other sizes all rows
        are padding, which writes to slot 0. Graphs of an earlier capture are dropped first.
        Raises GraphUnsupported for a backend that cannot be captured, here or on another of the
        runner's ranks, and RanksDiffer for ranks with other configs; then there are no graphs.
        """
        config = self.config
        sizes = config.batch_sizes[::-1]
        self._captured, self._sizes, self._outputs = {}, (), FixedOutputs()
        captured = {}
        # Tensors made in inference mode could not be written outside of it later
        with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
            stack.enter_context(self._ranks.session(config))
            self._backend.init_cuda_graph_state(config.max_batch_size, config.max_num_tokens)
            stack.enter_context(self._devices.session())
            for size in self._progress(sizes) if self._ranks.rank == 0 else sizes:
                padded, fixed_inputs = self._buffers.views(size)
                self._buffers.clear()
                if batch is not None and batch.batch_size <= size:
                    padded = self._buffers.load(batch, inputs, padded)
                captured[size] = self._capture(padded, fixed_inputs)
        self._buffers.clear()
        self._captured = captured
        self._sizes = tuple(sorted(captured))

    def can_run(self, batch: ForwardBatch, *, size: int | None = None) -> bool:
        """Whether a captured graph serves the batch; size: as in `replay`."""
        return self.size_for(batch, size=size) is not None

    def size_for(self, batch: ForwardBatch, *, size: int | None = None) -> int | None:
        """The smallest captured size that serves the batch, or `size` as in `replay`; None if no
        graph does."""
        try:
            return self._size_of(batch, size)
        except InvalidInput:
            return None

    def replay(
        self,
        batch: ForwardBatch,
        inputs: Mapping[str, torch.Tensor] = NO_INPUTS,
        *,
        size: int | None = None,
    ) -> Any:  # noqa: ANN401  # as the model's call returns it
        """Run a step. Returns the model's result for the batch's own T tokens, which the next
        replay overwrites.

        size: the captured size to replay, if ranks whose graphs hold collectives must replay the
        same one; None: the smallest that holds the batch. In an IDLE step, which needs it, every
        row is padding and `inputs` are not read.
        Raises InvalidInput for a batch that `can_run` refuses, and for tensors whose shapes or
        dtypes differ from the capture's.
        """
        captured = self._captured[self._size_of(batch, size)]
        if batch.forward_mode is ForwardMode.IDLE:
            padded = self._buffers.load_padding(captured.batch)
        else:
            held = _as_verify(batch) if self._extends else batch
            padded = self._buffers.load(held, inputs, captured.batch)
        self._backend.init_forward_metadata_out_graph(padded)
        captured.graph.replay()
        return self._outputs.rows(batch.num_tokens)

    def _capture(self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]) -> _Captured:
        def run_model() -> Any:  # noqa: ANN401  # as the model's call returns it
            with ForwardContext.enter(self._backend, batch):
                return self._outputs.store(self._forward(batch, inputs), batch.num_tokens)

        step = GraphStep(
            prepare=lambda: self._backend.init_forward_metadata_in_graph(batch),
            forward=run_model,
            host_tensors=self._buffers.host_tensors,
        )
        self._backend.init_forward_metadata_out_graph(batch, in_capture=True)
        for _ in range(self._devices.NUM_WARM_UPS):
            self._ranks.meet()
            self._devices.warm_up(step)
        self._ranks.meet()
        graph = self._devices.capture(step)
        return _Captured(graph, batch)

    def _size_of(self, batch: ForwardBatch, size: int | None) -> int:
        """The captured size that serves the batch. Raises InvalidInput if no graph does."""
        config, mode = self.config, batch.forward_mode
        is_idle = mode is ForwardMode.IDLE
        if not is_idle and mode is not config.forward_mode:
            raise InvalidInput("forward_mode", got=mode.name, expected=config.forward_mode.name)
        fitting = self._fitting(batch.batch_size, size, is_idle=is_idle)
        if batch.num_tokens != batch.batch_size * config.tokens_per_request:
            raise InvalidInput(
                "out_cache_loc",
                got=f"{batch.num_tokens} tokens",
                expected=f"{config.tokens_per_request} for each of {batch.batch_size} requests",
            )
        if self._extends and not is_idle:
            _check_even(batch, config.tokens_per_request)
        if not is_idle:
            self._check_other_fields(batch)
        return fitting

    def _fitting(self, count: int, size: int | None, *, is_idle: bool) -> int:
        """The captured size that holds so many requests. Raises InvalidInput without one."""
        sizes = self._sizes
        if is_idle and count:
            raise InvalidInput("batch_size", got=count, expected="0 in an IDLE step")
        if size is None and is_idle:
            expected = "in an IDLE step, the size that the other ranks replay"
            raise InvalidInput("size", got=None, expected=expected)
        if size is not None and (size not in self._captured or size < count):
            expected = f"a captured size that holds {count} requests: {sizes}"
            raise InvalidInput("size", got=size, expected=expected)
        fitting = padded_size(count, sizes) if size is None else size
        if size is None and not self.config.pads and fitting != count:
            fitting = None
        if fitting is None or (count < 1 and not is_idle):
            expected = f"a captured size: {sizes}" if sizes else "capture() before"
            raise InvalidInput("batch_size", got=count, expected=expected)
        return fitting

    def _check_other_fields(self, batch: ForwardBatch) -> None:
        """Raise InvalidInput if the batch's optional fields differ from the captured ones."""
        config, spec, encoder = self.config, batch.spec_info, batch.encoder_out_cache_loc
        has_mask = spec is not None and spec.custom_mask is not None
        for name, got, expected in (
            ("seq_lens_cpu", batch.seq_lens_cpu is not None, config.host_lens or None),
            ("encoder_lens", batch.encoder_lens is not None, config.encoder),
            ("encoder_out_cache_loc", bool(encoder is not None and encoder.numel()), False),
            ("spec_info.custom_mask", has_mask, config.custom_mask),
            ("spec_info.visible", batch.masks_drafts, None if config.visible else False),
            ("multi_item", batch.multi_item is not None, False),
            ("topk_indices", batch.topk_indices is not None, None if config.index_topk else False),
        ):
            if expected is not None and got is not expected:
                raise InvalidInput(
                    name,
                    got="a value" if got else None,
                    expected="a value, as at capture" if expected else "None, as at capture",
                )


def _check_even(batch: ForwardBatch, num_tokens: int) -> None:
    """Raise InvalidInput unless a DRAFT_EXTEND step has `num_tokens` for each request."""
    counts = batch.extend_seq_lens_cpu
    prefixes = batch.extend_prefix_lens, batch.extend_prefix_lens_cpu
    if counts is None or prefixes[0] is None or prefixes[1] is None:
        expected = "the lengths of new tokens and prefixes, on the host too"
        raise InvalidInput("extend_seq_lens_cpu", got="a step without", expected=expected)
    if bool((counts != num_tokens).any()):
        expected = f"{num_tokens} for each request, as at capture"
        raise InvalidInput("extend_seq_lens", got=counts.tolist(), expected=expected)


def _as_verify(batch: ForwardBatch) -> ForwardBatch:
    """A DRAFT_EXTEND step with as many tokens for every request, as one that verifies chains."""
    prefixes_cpu = batch.extend_prefix_lens_cpu
    assert batch.extend_prefix_lens is not None
    assert prefixes_cpu is not None
    return replace(
        batch,
        forward_mode=ForwardMode.TARGET_VERIFY,
        actual_forward_mode=ForwardMode.DRAFT_EXTEND,
        seq_lens=batch.extend_prefix_lens,
        seq_lens_cpu=prefixes_cpu,
        seq_lens_sum=int(prefixes_cpu.sum()),
        spec_info=SpecInput(draft_token_num=batch.num_tokens // batch.batch_size),
    )
