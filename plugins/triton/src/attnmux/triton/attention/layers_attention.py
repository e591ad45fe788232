"""Which launches serve each layer in a step, and the plans that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from attnmux.core import AttentionCall
from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.attention.share_plans import ShareKey, SharePlan, SplitOptions
from attnmux.triton.attention.shares import ShareAttention
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.attention.tile_plans import Plans, TileKey, TilePlan
from attnmux.triton.attention.tiles import TileAttention
from attnmux.triton.attention.wide_tiles import WideTileAttention, wide_layer
from attnmux.triton.launches.bound_kernel import Launcher
from attnmux.triton.launches.dispatch import Rounding
from attnmux.triton.launches.operands import Results, Slots

if TYPE_CHECKING:
    from attnmux.core import BackendContext


class LayersAttention:
    """The layers' launches by layer id, and each plan once."""

    def __init__(
        self,
        layers: Mapping[int, TritonLayer],
        context: BackendContext,
        splits: SplitOptions,
        *,
        compute_units: int,
        launcher: Launcher,
        rounds: Rounding = "none",
    ) -> None:
        """compute_units: SMs or CUs of the device. rounds: what may be rounded to e4m3."""
        self._layers, self._context, self._splits = layers, context, splits
        self._units, self._launcher = compute_units, launcher
        self._tile_units = 0 if splits.deterministic else compute_units
        """How a request's keys are split must not depend on its batch."""
        self._share_attention = {
            name: ShareAttention(attention) for name, attention in layers.items()
        }
        self._tile_attention = {
            name: self._tiles_of(attention) for name, attention in layers.items()
        }
        self._chain_attention: dict[tuple[int, int], tuple[TileAttention, Plans] | None] = {}
        """By layer and new tokens a request; None for chains that are verified in shares."""
        self._shares: dict[ShareKey, SharePlan] = {}
        self._share_plans: dict[tuple[int, int, bool], SharePlan] = {}
        """By layer, new tokens a request, and whether the step hides keys."""
        self._tiles: dict[TileKey, TilePlan] = {}
        """Plans of tiles, which layers with equal keys share."""
        self._tile_plans = {
            (name, hides): self._plans_of(layer, hides=hides)
            for hides in (False, True)
            for name, layer in layers.items()
        }
        """By layer, and whether the step hides keys."""
        self._plans_of_step: dict[tuple[int | None, bool], tuple[SharePlan | TilePlan, ...]] = {}
        """By new tokens a request, None if these differ, and whether the step hides keys."""
        self._wide_attention: dict[int, WideTileAttention] = {}
        """Attention of the layers whose keys may be widened first."""
        self._wide_plans: dict[int, Plans] = {}
        for name, layer in layers.items():
            wide = wide_layer(layer, rounds)
            if wide is not None:
                self._wide_attention[name] = WideTileAttention(
                    layer,
                    wide,
                    self._tile_units,
                    context.max_context_len,
                    # Which kernel serves a request must not depend on its batch
                    always=splits.deterministic,
                )
                self._wide_plans[name] = self._plans_of(wide)

    @property
    def widens(self) -> bool:
        """Whether some steps widen the keys of some layer."""
        return bool(self._wide_attention)

    def fill(self, step: TritonStep) -> None:
        """Plan a step on the device."""
        for plan in self._plans(step.queries, hides=step.hides):
            plan.fill(step)

    def __call__(
        self, call: AttentionCall, step: TritonStep, slots: Slots | None, results: Results
    ) -> None:
        """Attend over the pool, or over the call's own K and V if slots is None."""
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
                for name, layer in self._layers.items():
                    if layer.slot_group is None:
                        continue
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
            layer, chain = self._layers[layer_id], None
            config = layer.dispatch.chains(queries)
            if config is not None:
                layer = replace(layer, tiles=config, short_tiles=None)
                chain = self._tiles_of(layer), self._plans_of(layer)
            self._chain_attention[key] = chain
        return self._chain_attention[key]

    def _tiles_of(self, layer: TritonLayer) -> TileAttention:
        return TileAttention(layer, self._tile_units, self._context.max_context_len)

    def _plans_of(self, layer: TritonLayer, *, hides: bool = False) -> Plans:
        keys = {
            config.block_m: TileKey(group=layer.shape.group, block_m=config.block_m)
            for config in layer.tile_configs(hides=hides)
        }
        for key in keys.values():
            if key not in self._tiles:
                self._tiles[key] = TilePlan(key, self._context.device, self._launcher)
        return {height: self._tiles[key] for height, key in keys.items()}

    def _share_plan(self, layer_id: int, queries: int, *, hides: bool) -> SharePlan:
        plan = self._share_plans.get((layer_id, queries, hides))
        if plan is None:
            traits = self._layers[layer_id].dispatch.traits
            key = self._share_attention[layer_id].key(queries, self._splits, hides=hides)
            plan = self._shares.get(key)
            if plan is None:
                plan = self._shares[key] = SharePlan(
                    key,
                    self._context.max_batch_size,
                    self._units,
                    self._context.device,
                    part_dtype=self._splits.part_dtype(key.splitting, traits.dtype),
                    launcher=self._launcher,
                )
            self._share_plans[layer_id, queries, hides] = plan
        return plan
