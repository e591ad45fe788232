"""The portable kernels behind the contract: two of them, for few and for many tokens a request.

Decode and verification take the keys of all requests in equal shares; every other step takes its
queries in tiles. Nothing is read from the device, and a step's metadata is one launch or two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import AttnmuxError, GraphUnsupported, InvalidInput
from attnmux.triton.call import LayerCall
from attnmux.triton.launch import Launches
from attnmux.triton.launching import Launcher
from attnmux.triton.operands import Keys, Results
from attnmux.triton.plans import ShareKey, SharePlan, TileKey, TilePlan
from attnmux.triton.share_call import ShareCall
from attnmux.triton.slots import Slots, SlotTables
from attnmux.triton.split_options import SplitOptions
from attnmux.triton.step import Step
from attnmux.triton.sums import RunningSums
from attnmux.triton.tile_call import TileCall
from attnmux.triton.write import KVWriter

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec


class TritonBackend(AttentionBackend):
    """MHA, GQA and absorbed MLA on whatever Triton generates code for."""

    def __init__(
        self,
        context: BackendContext,
        options: Mapping[str, object],
        *,
        compute_units: int,
        launches: Launches | None = None,
    ) -> None:
        """compute_units: SMs or CUs of the device, which decode's keys are shared among. launches:
        the tables, if this machine has entries of its own.

        Raises InvalidInput for layers that the kernels do not serve, and for options below 0.
        """
        super().__init__(context, options)
        self._splits = SplitOptions.of(options, deterministic=bool(context.request.deterministic))
        self._units = compute_units
        self.launcher = Launcher()
        """Of all that this backend launches."""
        self._calls = {
            layer.layer_id: LayerCall.of(layer, context, self.launcher, launches)
            for layer in context.layers
        }
        self._share_calls = {name: ShareCall(call) for name, call in self._calls.items()}
        self._tile_calls = {name: TileCall(call) for name, call in self._calls.items()}
        self._stored = [call for call in self._calls.values() if call.slot_group is not None]
        """Layers that attend over the pool."""
        groups = (call.slot_group for call in self._stored)
        self._tables = SlotTables(
            frozenset(group for group in groups if group), context, self.launcher
        )
        self._shares: dict[ShareKey, SharePlan] = {}
        self._share_of: dict[tuple[int, int, bool], SharePlan] = {}
        """By layer, by new tokens a request, and by whether the step hides keys."""
        self._tiles: dict[TileKey, TilePlan] = {}
        self._tiles_of: dict[bool, tuple[TilePlan, ...]] = {}
        """By whether the step hides keys."""
        for hides in (False, True):
            keys = dict.fromkeys(call.tile_key(hides=hides) for call in self._calls.values())
            for key in keys:
                if key not in self._tiles:
                    self._tiles[key] = TilePlan(key, context.device, self.launcher)
            self._tiles_of[hides] = tuple(self._tiles[key] for key in keys)
        self._sums = RunningSums(context.max_batch_size, context.device, self.launcher)
        self._bounds: dict[str, torch.Tensor] = {}
        self._slots: dict[int, Slots] = {}
        """By layer, of this step."""
        self._writers: dict[tuple[int, bool], KVWriter] = {}
        self._step: Step | None = None
        self._max_batch_size = context.max_batch_size

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Note the step's shape; nothing is launched.

        Raises InvalidInput for more requests than the context was made for.
        """
        if batch.batch_size > self._max_batch_size:
            raise InvalidInput(
                "batch_size",
                came=batch.batch_size,
                expected=f"at most the context's max_batch_size, {self._max_batch_size}",
            )
        self._step = None if batch.forward_mode is ForwardMode.IDLE else Step.of(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Plan on the device: at replay from what the batch then holds."""
        step = self._step
        if step is None:
            return
        self._bounds = self._sums.of(step)
        self._tables.fill(step)
        self._slots.clear()
        if step.queries is None:
            for tiles in self._tiles_of[step.hides]:
                tiles.fill(self._bounds["queries"], batch.batch_size, batch.num_tokens)
            return
        queries, hides = step.queries, step.hides
        plans = (self._share_plan(call, queries, hides=hides) for call in self._stored)
        for shares in dict.fromkeys(plans):
            shares.fill(step)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Plans have room for the context's largest batch from the first."""
        if max_bs > self._max_batch_size:
            raise GraphUnsupported(
                f"graphs of {max_bs} requests with room for {self._max_batch_size}: build the "
                "backend with a larger max_batch_size"
            )

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        """In one launch, and raising what the pool's own methods do."""
        loc = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        second = v if k_rope is None else k_rope
        if loc is None or second is None:
            super().save_kv(k, v, layer, batch, k_rope=k_rope)  # which says what is missing
            return
        key = layer.layer_id, k_rope is not None
        writer = self._writers.get(key)
        if writer is None:
            pool = self.context.token_to_kv_pool
            writer = KVWriter.of(
                pool, layer, loc, k, is_latent=k_rope is not None, launcher=self.launcher
            )
            self._writers[key] = writer
        writer.write(layer, loc, k, second)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call.q, call.q_rope, None, call.layer, batch, call.out, call.lse)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        in_call = None
        if not call.save_kv_cache and call.k is not None:
            in_call = Keys(k=call.k, v=call.k if call.v is None else call.v, k_rope=call.k_rope)
        return self._attend(call.q, call.q_rope, in_call, call.layer, batch, call.out, call.lse)

    def _attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        in_call: Keys | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over the keys of the call where they are given, else over the pool."""
        step = self._step
        if step is None:
            raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
        results = _results(q, layer, out, lse)
        if not q.shape[0]:
            return results.out
        layer_id = layer.layer_id
        call = self._calls[layer_id]
        slots = None
        if in_call is None:
            slots = self._slots.get(layer_id)
            if slots is None:
                slots = self._slots[layer_id] = self._tables.of(call.required_group(), batch)
        if slots is not None and step.queries is not None:
            plan = self._share_plan(call, step.queries, hides=step.hides)
            mask_indptr = self._bounds.get("mask")
            self._share_calls[layer_id](q, q_rope, step, slots, plan, mask_indptr, results)
        else:
            tiles, attend = self._tiles[call.tile_key(hides=step.hides)], self._tile_calls[layer_id]
            attend(q, q_rope, in_call, step, slots, tiles, self._bounds, results)
        if lse is not None and results.lse is not None and results.lse is not lse:
            lse.copy_(results.lse)
        return results.out

    def _share_plan(self, call: LayerCall, queries: int, *, hides: bool) -> SharePlan:
        wanted = call.layer.layer_id, queries, hides
        plan = self._share_of.get(wanted)
        if plan is None:
            launch = call.share_launch(queries, hides=hides)
            key = call.share_key(queries, self._splits.splitting(launch.block_n), hides=hides)
            plan = self._shares.get(key)
            if plan is None:
                plan = self._shares[key] = SharePlan(
                    key,
                    self._max_batch_size,
                    self._units,
                    self.context.device,
                    part_dtype=self._splits.part_dtype(key.splitting, self._dtype),
                    launcher=self.launcher,
                )
            self._share_of[wanted] = plan
        return plan


def _results(
    q: torch.Tensor, layer: LayerSpec, out: torch.Tensor | None, lse: torch.Tensor | None
) -> Results:
    """Where kernels write, which have a token's heads side by side: to the caller's tensors, or to
    others where in those they are not."""
    if out is None or out.stride()[1:] != (layer.v_head_dim, 1):
        out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
    if lse is not None and lse.stride()[1] != 1:
        lse = lse.new_empty(lse.shape)
    return Results(out=out, lse=lse)
