"""The contract on top of two kernels: one for few and one for many new tokens a request.

Decode and verification take equal shares of all requests' keys; every other step takes its queries
in tiles. Nothing is read back from the device, and a step's metadata is a few launches.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from attnmux.triton.bound_kernel import Launcher
from attnmux.triton.config_tables import ConfigTables
from attnmux.triton.layer import TritonLayer
from attnmux.triton.operands import Results
from attnmux.triton.share_plans import ShareKey, SharePlan, SplitOptions
from attnmux.triton.shares import ShareAttention
from attnmux.triton.slots import Slots, SlotTables
from attnmux.triton.step import NO_STEP, RunningSums, TritonStep, fill_trees
from attnmux.triton.step_parts import WIDENED, StepPart, parts_of
from attnmux.triton.tile_plans import Plans, TileKey, TilePlan
from attnmux.triton.tiles import TileAttention
from attnmux.triton.wide_tiles import WideTileAttention, wide_layer
from attnmux.triton.write import PoolWriter

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
        self._units = compute_units
        self._tile_units = 0 if self._splits.deterministic else compute_units
        """How a request's keys are split must not depend on its batch."""
        self._max_batch_size = context.max_batch_size
        self.launcher = Launcher()
        """Shared by all launches of this backend."""
        self._layers = {
            spec.layer_id: TritonLayer.of(spec, context, self.launcher, tables)
            for spec in context.layers
        }
        self._share_attention = {name: ShareAttention(each) for name, each in self._layers.items()}
        self._tile_attention = {name: self._tiles_of(each) for name, each in self._layers.items()}
        self._chain_attention: dict[tuple[int, int], tuple[TileAttention, Plans] | None] = {}
        """By layer and new tokens a request; None for chains that are verified in shares."""
        groups = [each.slot_group for each in self._layers.values() if each.slot_group is not None]
        self._tables = SlotTables(frozenset(groups), context, self.launcher)
        self._stored = [name for name, each in self._layers.items() if each.slot_group is not None]
        """Ids of the layers that attend over the pool."""
        self._shares: dict[ShareKey, SharePlan] = {}
        self._share_plans: dict[tuple[int, int, bool], SharePlan] = {}
        """By layer, new tokens a request, and whether the step hides keys."""
        self._tiles: dict[TileKey, TilePlan] = {}
        """Plans of tiles, which layers with equal keys share."""
        self._tile_plans: dict[tuple[int, bool], Plans] = {}
        """By layer, and whether the step hides keys."""
        self._plans_of_step: dict[tuple[int | None, bool], tuple[SharePlan | TilePlan, ...]] = {}
        """By new tokens a request, None where these differ, and whether the step hides keys."""
        for hides in (False, True):
            for name, layer in self._layers.items():
                self._tile_plans[name, hides] = self._plans_of(layer, hides=hides)
        self._starts_of: dict[int, torch.Tensor] = {}
        """By new tokens a request."""
        self._wide_attention: dict[int, WideTileAttention] = {}
        """Of the layers whose keys may be widened first."""
        self._wide_plans: dict[int, Plans] = {}
        for name, layer in self._layers.items():
            wide = wide_layer(layer)
            if wide is not None:
                self._wide_attention[name] = WideTileAttention(
                    layer,
                    wide,
                    self._tile_units,
                    context.max_context_len,
                    # Which kernel serves a request must not depend on its batch
                    always=self._splits.deterministic,
                )
                self._wide_plans[name] = self._plans_of(wide)
        self._sums = RunningSums(context.max_batch_size, context.device, self.launcher)
        self._kv_writer = PoolWriter(context.token_to_kv_pool, self.launcher)
        stored = [self._layers[name] for name in self._stored]
        self._limits = {(each.window, each.chunk) for each in stored}
        """The windows and chunks of the layers that attend over the pool."""
        self._may_part = not self._splits.deterministic and not any(
            each.shape.is_latent for each in self._layers.values()
        )
        """Whether mixed steps may be two: which kernel serves a request then depends on its
        batch."""
        self._step: TritonStep | None = None
        self._parts: tuple[StepPart, ...] = ()
        """Of a mixed step that is taken as two."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Note the step's shape; nothing is launched.

        Raises InvalidInput for more requests than the context was made for, and GraphUnsupported
        for the capture of a prompt whose bits would be others than those of an eager step.
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
        self._parts = self._parts_of(step) if step is not None and self._may_part else ()

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Plan on the device, at replay for the lengths that the batch then holds."""
        step = self._step
        if step is None:
            return
        self._tables.fill(step)
        for each in [part.step for part in self._parts] or [step]:
            self._fill(each)

    def _fill(self, step: TritonStep) -> None:
        self._sums.fill(step)
        fill_trees(step, self._limits)
        for plan in self._plans(step.queries, hides=step.hides):
            plan.fill(step)

    def _parts_of(self, step: TritonStep) -> tuple[StepPart, ...]:
        layers = [self._layers[name] for name in self._stored]
        if not layers:
            return ()
        limits = [max(each.window + 1, each.chunk) for each in layers]
        return parts_of(
            step,
            max(each.shape.kv_heads * sum(each.shape.dims) for each in layers)
            * (WIDENED if self.widens else 1),
            self.context.max_context_len if 0 in limits else max(limits),
        )

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
        slots = None
        if over_pool:
            slots = self._tables.of(self._layers[call.layer.layer_id].required_group())
        elif self._parts:
            # Tiles of the whole step serve it, and all later calls of the step.
            self._parts = ()
            self._fill(step)
        if slots is None or not self._parts:
            self._attend_step(call, step, slots, results)
        else:
            for part in self._parts:
                part_slots, part_results = part.slots(slots), part.results(results)
                self._attend_step(part.call(call), part.step, part_slots, part_results)
        return results.handed_to(call)

    def _attend_step(
        self, call: AttentionCall, step: TritonStep, slots: Slots | None, results: Results
    ) -> None:
        """Attend over the pool, or over the call's own K and V where slots is None."""
        name = call.layer.layer_id
        if slots is not None and step.queries is not None:
            chains = self._chains(name, step.queries, hides=step.hides)
            if chains is None:
                shares = self._share_plan(name, step.queries, hides=step.hides)
                self._share_attention[name](call, step, shares, slots, results)
            else:
                attention, plans = chains
                attention(call, step, plans, slots, results)
        elif not self._attend_wide(call, step, slots, results):
            tiles = self._tile_plans[name, step.hides]
            self._tile_attention[name](call, step, tiles, slots, results)

    def force_short_tiles(self) -> None:
        """Let the prepared step take short tiles where its layers have them, to rehearse them."""
        if self._step is not None:
            self._step = replace(self._step, takes_short_tiles=True, tiles={})

    @property
    def widens(self) -> bool:
        """Whether some steps widen the keys of some layer."""
        return bool(self._wide_attention)

    def _attend_wide(
        self, call: AttentionCall, step: TritonStep, slots: Slots | None, results: Results
    ) -> bool:
        """Whether the step's keys were widened and attended over."""
        name = call.layer.layer_id
        attention = self._wide_attention.get(name)
        if attention is None or slots is None or step.queries is not None:
            return False
        return attention(call, step, self._wide_plans[name], slots, results)

    def _plans(self, queries: int | None, *, hides: bool) -> tuple[SharePlan | TilePlan, ...]:
        """Each plan of a step's layers once."""
        plans = self._plans_of_step.get((queries, hides))
        if plans is None:
            of_layers: list[SharePlan | TilePlan] = []
            if queries is None:
                of_tiles = [self._tile_plans[name, hides] for name in self._layers]
                for tile_plans in (*of_tiles, *self._wide_plans.values()):
                    of_layers += tile_plans.values()
            else:
                for name in self._stored:
                    chains = self._chains(name, queries, hides=hides)
                    if chains is None:
                        of_layers.append(self._share_plan(name, queries, hides=hides))
                    else:
                        of_layers += chains[1].values()
            plans = self._plans_of_step[queries, hides] = tuple(dict.fromkeys(of_layers))
        return plans

    def _chains(
        self, layer_id: int, queries: int, *, hides: bool
    ) -> tuple[TileAttention, Plans] | None:
        """For a step of `queries` new tokens a request that takes them in tiles."""
        if queries == 1 or hides:
            return None
        key = layer_id, queries
        if key not in self._chain_attention:
            layer, found = self._layers[layer_id], None
            config = layer.dispatch.chains(queries)
            if config is not None:
                layer = replace(layer, tiles=config, short_tiles=None)
                found = self._tiles_of(layer), self._plans_of(layer)
            self._chain_attention[key] = found
        return self._chain_attention[key]

    def _tiles_of(self, layer: TritonLayer) -> TileAttention:
        return TileAttention(layer, self._tile_units, self.context.max_context_len)

    def _plans_of(self, layer: TritonLayer, *, hides: bool = False) -> Plans:
        keys = {
            config.block_m: TileKey(group=layer.shape.group, block_m=config.block_m)
            for config in layer.tile_configs(hides=hides)
        }
        for key in keys.values():
            if key not in self._tiles:
                self._tiles[key] = TilePlan(key, self.context.device, self.launcher)
        return {height: self._tiles[key] for height, key in keys.items()}

    def _starts(self, queries: int) -> torch.Tensor:
        """[max_batch_size + 1] int32: the first token of each request of `queries` ones."""
        if queries not in self._starts_of:
            places = torch.arange(self._max_batch_size + 1, dtype=torch.int32)
            self._starts_of[queries] = (places * queries).to(self.context.device)
        return self._starts_of[queries]

    def _share_plan(self, layer_id: int, queries: int, *, hides: bool) -> SharePlan:
        plan = self._share_plans.get((layer_id, queries, hides))
        if plan is None:
            key = self._share_attention[layer_id].key(queries, self._splits, hides=hides)
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
            self._share_plans[layer_id, queries, hides] = plan
        return plan
