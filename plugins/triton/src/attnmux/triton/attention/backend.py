"""The contract on top of two kernels: one for few and one for many new tokens a request.

Decode and verification take equal shares of all requests' keys; every other step takes its queries
in tiles. Nothing is read back from the device, and a step's metadata is a few launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    AttnmuxError,
    BackendContext,
    ForwardMode,
    GraphUnsupported,
    InvalidInput,
)
from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.attention.layers_attention import LayersAttention
from attnmux.triton.attention.rounding import rounding
from attnmux.triton.attention.share_plans import SplitOptions
from attnmux.triton.attention.slots import SlotTables
from attnmux.triton.attention.step import NO_STEP, RunningSums, TritonStep, fill_trees
from attnmux.triton.attention.step_parts import StepCosts, StepPart, parts_of
from attnmux.triton.attention.write import PoolWriter
from attnmux.triton.launches.bound_kernel import Launcher, overlaps_launches
from attnmux.triton.launches.config_tables import ConfigTables
from attnmux.triton.launches.operands import Results

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch


class TritonBackend(AttentionBackend):
    """MHA, GQA and absorbed MLA on whatever Triton generates code for."""

    def __init__(
        self,
        context: BackendContext,
        options: Mapping[str, object],
        *,
        compute_units: int,
        tables: ConfigTables | None = None,
    ) -> None:
        """compute_units: SMs or CUs of the device, which share decode's keys. tables: launch
        configurations; None for those of this version alone.

        Raises InvalidInput for layers that the kernels do not serve, and for options below 0.
        """
        super().__init__(context, options)
        self._splits = SplitOptions.of(options, deterministic=bool(context.request.deterministic))
        self._max_batch_size = context.max_batch_size
        self.launcher = Launcher(overlaps=overlaps_launches(context.platform))
        """Shared by all launches of this backend."""
        self._layers = {
            spec.layer_id: TritonLayer.of(spec, context, self.launcher, tables)
            for spec in context.layers
        }
        self._attention = LayersAttention(
            self._layers,
            context,
            self._splits,
            compute_units=compute_units,
            launcher=self.launcher,
            rounds=rounding(options, context.request),
        )
        groups = [
            layer.slot_group for layer in self._layers.values() if layer.slot_group is not None
        ]
        self._tables = SlotTables(frozenset(groups), context, self.launcher)
        self._starts_of: dict[int, torch.Tensor] = {}
        """By new tokens a request."""
        self._sums = RunningSums(context.max_batch_size, context.device, self.launcher)
        self._kv_writer = PoolWriter(context.token_to_kv_pool, self.launcher)
        stored = [layer for layer in self._layers.values() if layer.slot_group is not None]
        self._limits = {(layer.window, layer.chunk) for layer in stored}
        """The windows and chunks of the layers that attend over the pool."""
        self._costs = self._costs_of(stored, compute_units)
        """Where mixed steps may be parted."""
        self._step: TritonStep | None = None
        self._parts: tuple[StepPart, ...] = ()
        """Parts of a mixed step that is taken as two."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Note the step's shape; nothing is launched.

        Raises InvalidInput for more requests than the context was made for, and GraphUnsupported
        for the capture of a prompt whose bits would differ from those of an eager step.
        """
        if batch.batch_size > self._max_batch_size:
            raise InvalidInput(
                "batch_size",
                got=batch.batch_size,
                expected=f"at most the context's max_batch_size, {self._max_batch_size}",
            )
        is_idle = batch.forward_mode is ForwardMode.IDLE
        step = None if is_idle else TritonStep.of(batch, in_capture=in_capture)
        if step is not None and step.queries is not None:
            step.indptr["queries"] = self._starts(step.queries)
        elif step is not None and in_capture and self._splits.deterministic and self.widens:
            raise GraphUnsupported(
                "a deterministic prompt over 8-bit keys: its bits would be others than those of an "
                "eager step, which widens the keys; run it eagerly"
            )
        self._step = step
        costs = self._costs
        self._parts = () if step is None or costs is None else parts_of(step, costs)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Plan on the device, at replay for the lengths that the batch then holds."""
        step = self._step
        if step is None:
            return
        self._tables.fill(step)
        for prepared in [part.step for part in self._parts] or [step]:
            self._fill(prepared)

    def _fill(self, step: TritonStep) -> None:
        self._sums.fill(step)
        fill_trees(step, self._limits)
        self._attention.fill(step)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Checks the size alone: plans have room for the context's largest batch from the start."""
        if max_bs > self._max_batch_size:
            raise GraphUnsupported(
                f"graphs of {max_bs} requests with room for {self._max_batch_size}: build the "
                "backend with a larger max_batch_size"
            )

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, over_pool=True)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, over_pool=not call.has_own_kv)

    def _attend(self, call: AttentionCall, *, over_pool: bool) -> torch.Tensor:
        step = self._step
        if step is None:
            raise AttnmuxError(NO_STEP)
        results = Results.of(call)
        if not call.q.shape[0]:
            return results.out
        if not over_pool:
            if self._parts:
                # Tiles of the whole step serve it, and all later calls of the step.
                self._parts = ()
                self._fill(step)
            self._attention(call, step, None, results)
            return results.handed_to(call)
        slots = self._tables.of(self._layers[call.layer.layer_id].required_group())
        for part in self._parts:
            part_slots, part_results = part.slots(slots), part.results(results)
            self._attention(part.call(call), part.step, part_slots, part_results)
        if not self._parts:
            self._attention(call, step, slots, results)
        return results.handed_to(call)

    def _costs_of(self, layers: Sequence[TritonLayer], compute_units: int) -> StepCosts | None:
        """The costs and savings of splitting a mixed step, for the layer with the widest keys. None
        if steps stay whole: in parts, the kernel that serves a request depends on its batch."""
        if self._splits.deterministic or any(layer.shape.is_latent for layer in layers):
            return None
        widest = max(
            layers, key=lambda each: each.shape.kv_heads * sum(each.shape.dims), default=None
        )
        if widest is None:
            return None
        reaches = [max(window + 1, chunk) for window, chunk in self._limits]
        shape, tiles = widest.shape, widest.tiles
        return StepCosts(
            group=shape.group,
            kv_heads=shape.kv_heads,
            columns=sum(shape.dims),
            bits=widest.dispatch.traits.key_bits,
            height=tiles.block_m,
            units=compute_units * tiles.programs_per_unit,
            most_keys=self.context.max_context_len if 0 in reaches else max(reaches),
            widens=self.widens,
        )

    def force_tiles(self, *, short: bool) -> None:
        """Let the prepared step take short or tall tiles if its layers have both, to rehearse
        them."""
        if self._step is not None:
            self._step = replace(self._step, takes_short_tiles=short, tiles={})

    @property
    def widens(self) -> bool:
        """Whether some steps widen the keys of some layer."""
        return self._attention.widens

    def _starts(self, queries: int) -> torch.Tensor:
        """[max_batch_size + 1] int32: the first token of each request of `queries` ones."""
        if queries not in self._starts_of:
            places = torch.arange(self._max_batch_size + 1, dtype=torch.int32)
            self._starts_of[queries] = (places * queries).to(self.context.device)
        return self._starts_of[queries]
