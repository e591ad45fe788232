"""What a kernel is told at every call of one layer."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from attnmux.core.backend import BackendContext
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import AttnmuxError
from attnmux.core.layer import LayerSpec
from attnmux.triton import serving
from attnmux.triton.latent import LatentMerge
from attnmux.triton.launch import Launches
from attnmux.triton.launch_types import ShareLaunch, TileLaunch
from attnmux.triton.launching import BoundKernel, Launcher
from attnmux.triton.layer_launches import LayerLaunches
from attnmux.triton.operands import (
    KEY_STRIDES,
    STRIDES,
    Keys,
    Results,
    as_bytes,
    has_whole_rows,
    key_strides,
    strides,
    whole_rows,
)
from attnmux.triton.plans import ShareKey, SharePlan, Splitting, TileKey, TilePlan
from attnmux.triton.serving import Asked, kernel_at
from attnmux.triton.shapes import Shape, next_power_of_2
from attnmux.triton.slots import SlotGroup, Slots
from attnmux.triton.step import Step

LOG2_E = math.log2(math.e)

QUERIES = "q", "q_tail", "out", "lse"
"""Tensors that every call brings."""
SHARE_TENSORS = (*QUERIES, "slots", "rows", "lens", "encoder_lens", "mask", "mask_indptr")
TILE_TENSORS = (
    *QUERIES,
    "k",
    "k_tail",
    "v",
    "slots",
    "rows",
    "cached_lens",
    "encoder_lens",
    "encoder_indptr",
    "q_indptr",
    "tile_request",
    "tile_row",
    "mask",
    "mask_indptr",
    "shared_lens",
    "token_pos_in_items",
)
TILE_COUNTS = "batch_size", "num_tokens", "num_tiles"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    shape: Shape
    chosen: LayerLaunches
    slot_group: SlotGroup | None
    """None for a layer whose K and V come with the call alone."""
    keys: Keys | None
    """The pool's memory."""
    scales: tuple[float, float]
    """What K and V of the pool are multiplied by."""
    tiles: TileLaunch
    hiding_tiles: TileLaunch
    """In steps with a custom mask or items."""
    launcher: Launcher = field(default_factory=Launcher)
    _bound: dict[Hashable, BoundKernel] = field(default_factory=dict, init=False)
    _merges: dict[SharePlan, LatentMerge] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        layer: LayerSpec,
        context: BackendContext,
        launcher: Launcher | None = None,
        launches: Launches | None = None,
    ) -> LayerCall:
        """Raises InvalidInput for a layer beyond the kernels' dims."""
        shape, pool, dtype = Shape.of(layer), context.token_to_kv_pool, context.request.dtype
        is_encoders = not layer.is_causal and not layer.is_cross_attention
        is_stored = not is_encoders and layer.layer_id in pool.layer_ids
        group = SlotGroup.of(layer, context) if is_stored else None
        keys = Keys.of(pool, layer) if is_stored else None
        asked = Asked(
            layer=layer,
            shape=shape,
            dtype=torch_dtype(dtype) if dtype else None,
            keys=keys,
            page_size=group.page_size(context) if group else 1,
        )
        chosen = LayerLaunches(
            asked=asked,
            arch=context.platform.arch,
            page_size=pool.page_size,
            launches=launches or Launches(),
        )
        return cls(
            layer=layer,
            shape=shape,
            chosen=chosen,
            slot_group=group,
            keys=keys,
            scales=pool.read_scales(layer.k_scale, layer.v_scale) if is_stored else (1.0, 1.0),
            tiles=chosen.tiles(hides=False),
            hiding_tiles=chosen.tiles(hides=not layer.is_cross_attention),
            launcher=launcher or Launcher(),
        )

    def tile_launch(self, *, hides: bool) -> TileLaunch:
        """hides: in steps with a custom mask or items."""
        return self.hiding_tiles if hides else self.tiles

    def tile_key(self, *, hides: bool) -> TileKey:
        return TileKey(group=self.shape.group, block_m=self.tile_launch(hides=hides).block_m)

    def share_launch(self, queries: int, *, hides: bool = False) -> ShareLaunch:
        return self.chosen.shares(queries, hides=hides and not self.layer.is_cross_attention)

    def share_key(
        self, queries: int, splitting: Splitting | None, *, hides: bool = False
    ) -> ShareKey:
        launch = self.share_launch(queries, hides=hides)
        layer = self.layer
        is_cross = layer.is_cross_attention
        return ShareKey(
            queries=queries,
            is_cross=is_cross,
            window=-1 if is_cross else layer.sliding_window_size,
            chunk=0 if is_cross else layer.attention_chunk_size,
            has_own_table=self.slot_group is not None and self.slot_group.pool_group > 0,
            items=-(-queries * self.shape.group // launch.block_m) * self.shape.kv_heads,
            launch=launch,
            splitting=splitting,
            part_rows=min(launch.block_m, next_power_of_2(queries * self.shape.group)),
            part_width=self.shape.dv,
        )

    def required_group(self) -> SlotGroup:
        """Raises AttnmuxError for a layer that the pool does not store."""
        return _stored(self.slot_group, self.layer)

    def required_keys(self) -> Keys:
        """Raises AttnmuxError for a layer that the pool does not store."""
        return _stored(self.keys, self.layer)

    def attend_shares(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        step: Step,
        slots: Slots,
        plan: SharePlan,
        mask_indptr: torch.Tensor | None,
        results: Results,
    ) -> None:
        """Few new tokens a request, over the pool."""
        key = plan.key
        kernel = serving.SHARES[key.launch.kernel]
        tail = self._tail(q, q_rope)
        if kernel.takes_whole_rows:
            q, tail = whole_rows(q), None if tail is None else whole_rows(tail)
        has_mask = step.mask is not None and not key.is_cross
        has_encoder = slots.begins_with_encoder and not key.is_cross
        variant = (
            plan,
            step.lens_shift,
            slots.page_size,
            slots.rows is None,
            has_encoder,
            has_mask,
            results.lse is None,
        )
        bound = self._bound.get(variant)
        if bound is None:
            bound = self._bound[variant] = self._bind_shares(plan, step, slots, results)
        bound(
            (plan.programs, 1, 1),
            (
                q,
                tail,
                results.out,
                results.lse,
                slots.table,
                slots.rows,
                step.lens,
                step.batch.encoder_lens if has_encoder or key.is_cross else None,
                as_bytes(step.mask) if has_mask else None,
                mask_indptr if has_mask else None,
            ),
            strides(q, tail, results, slots),
            dtypes=q.dtype,
        )
        if kernel.leaves_parts:
            merge = self._merges.get(plan)
            if merge is None:
                merge = LatentMerge(self.launcher, plan, self.shape.group, self.scales[1])
                self._merges[plan] = merge
            merge(step.batch.batch_size, results)

    def attend_tiles(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        in_call: Keys | None,
        step: Step,
        slots: Slots | None,
        plan: TilePlan,
        bounds: dict[str, torch.Tensor],
        results: Results,
    ) -> None:
        """Many new tokens a request, over the pool or over the call's own K and V."""
        if not serving.TILES[self.tile_launch(hides=step.hides).kernel].takes_whole_rows:
            self._launch_tiles(q, q_rope, in_call, step, slots, plan, bounds, results)
            return
        if in_call is not None:
            in_call = in_call.whole(q.dtype)
        out = results.out
        if not has_whole_rows(out):
            results = Results(
                out=torch.empty(out.shape, dtype=out.dtype, device=out.device), lse=results.lse
            )
        self._launch_tiles(whole_rows(q), q_rope, in_call, step, slots, plan, bounds, results)
        if out is not results.out:
            out.copy_(results.out)

    def _launch_tiles(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        in_call: Keys | None,
        step: Step,
        slots: Slots | None,
        plan: TilePlan,
        bounds: dict[str, torch.Tensor],
        results: Results,
    ) -> None:
        batch, is_cross = step.batch, self.layer.is_cross_attention
        keys = self.required_keys() if in_call is None else in_call
        has_mask = step.mask is not None and not is_cross
        items = None if is_cross else batch.multi_item
        has_encoder = slots is not None and slots.begins_with_encoder and not is_cross
        needs_encoder = has_encoder or is_cross
        variant = (
            in_call is None,
            None if slots is None else (slots.page_size, slots.rows is None),
            has_encoder,
            has_mask,
            items is None,
            results.lse is None,
        )
        bound = self._bound.get(variant)
        if bound is None:
            bound = self._bound[variant] = self._bind_tiles(in_call, step, slots, results)
        tail, key_tail = self._tail(q, q_rope), self._tail(keys.k, keys.k_rope)
        bound(
            (self.shape.kv_heads, plan.num_tiles, 1),
            (
                q,
                tail,
                results.out,
                results.lse,
                keys.k,
                key_tail,
                keys.v,
                None if slots is None else slots.table,
                None if slots is None else slots.rows,
                None if in_call is not None else step.lens,
                batch.encoder_lens if needs_encoder else None,
                bounds["encoder"] if is_cross else None,
                bounds["queries"],
                plan.request,
                plan.row,
                as_bytes(step.mask) if has_mask else None,
                bounds["mask"] if has_mask else None,
                None if items is None else items.prefix_lens,
                None if items is None else items.token_pos_in_items,
            ),
            (*strides(q, tail, results, slots), *key_strides(keys, key_tail)),
            (batch.batch_size, q.shape[0], plan.num_tiles),
            (q.dtype, keys.k.dtype, keys.v.dtype),
        )

    def _bind_shares(
        self, plan: SharePlan, step: Step, slots: Slots, results: Results
    ) -> BoundKernel:
        key, launch, keys = plan.key, plan.key.launch, self.required_keys()
        tail = self._tail(keys.k, keys.k_rope)
        has_mask = step.mask is not None and not key.is_cross
        return BoundKernel(
            self.launcher,
            kernel_at(serving.SHARES[launch.kernel].address),
            {
                "k": keys.k,
                "k_tail": tail,
                "v": keys.v,
                **dict(zip(KEY_STRIDES, key_strides(keys, tail), strict=True)),
                "sinks": self.layer.sinks,
                "stops": plan.stops,
                "unit_blocks": plan.unit_blocks,
                "starts": plan.starts,
                "share": plan.share,
                "partial": plan.partial,
                "partial_lse": plan.partial_lse,
                "arrivals": plan.arrivals,
                **self._factors(in_call=False),
                **self._constants(results, has_mask=has_mask),
                "KV_HEADS": self.shape.kv_heads,
                "QUERIES": key.queries,
                "LENS_SHIFT": step.lens_shift,
                "PAGE": slots.page_size,
                "HAS_ENCODER": slots.begins_with_encoder and not key.is_cross,
                "IS_FIXED": key.splitting is not None,
                "BLOCK_M": launch.block_m,
                "BLOCK_N": launch.block_n,
                "PART_ROWS": key.part_rows,
                "PARTS": max(launch.merged_rows // key.part_rows, 1),
                "STAGES": launch.num_stages,
                **launch.more,
            },
            tensors=SHARE_TENSORS,
            numbers=STRIDES,
            options={"num_warps": launch.num_warps, **launch.options},
        )

    def _bind_tiles(
        self, in_call: Keys | None, step: Step, slots: Slots | None, results: Results
    ) -> BoundKernel:
        launch, is_cross = self.tile_launch(hides=step.hides), self.layer.is_cross_attention
        has_encoder = slots is not None and slots.begins_with_encoder
        return BoundKernel(
            self.launcher,
            kernel_at(serving.TILES[launch.kernel].address),
            {
                "sinks": self.layer.sinks,
                **self._factors(in_call=in_call is not None),
                **self._constants(results, has_mask=step.mask is not None and not is_cross),
                "HAS_ITEMS": step.batch.multi_item is not None and not is_cross,
                "PAGE": 1 if slots is None else slots.page_size,
                "IN_CALL": in_call is not None,
                "HAS_ENCODER": has_encoder and not is_cross,
                "BLOCK_M": launch.block_m,
                "BLOCK_N": launch.block_n,
                "STAGES": launch.num_stages,
                **launch.more,
            },
            tensors=TILE_TENSORS,
            numbers=(*STRIDES, *KEY_STRIDES),
            counts=TILE_COUNTS,
            options={"num_warps": launch.num_warps, **launch.options},
        )

    def _tail(self, rows: torch.Tensor, tail: torch.Tensor | None) -> torch.Tensor | None:
        """The columns of Q or K that a power of 2 leaves over."""
        if tail is None and self.shape.real_tail:
            return rows[:, :, self.shape.real_d :]
        return tail

    def _factors(self, *, in_call: bool) -> dict[str, float]:
        k_scale, v_scale = (1.0, 1.0) if in_call else self.scales
        scale, cap = self.layer.scaling * k_scale, self.layer.logit_cap
        return {"scale": scale if cap else scale * LOG2_E, "cap": cap, "v_scale": v_scale}

    def _constants(self, results: Results, *, has_mask: bool) -> dict[str, Any]:
        layer, is_cross = self.layer, self.layer.is_cross_attention
        return {
            **self.shape.constants(),
            "IS_CAUSAL": layer.is_causal and not is_cross and not has_mask,
            "IS_CROSS": is_cross,
            "WINDOW": -1 if is_cross else layer.sliding_window_size,
            "CHUNK": 0 if is_cross else layer.attention_chunk_size,
            "HAS_CAP": layer.logit_cap > 0,
            "HAS_MASK": has_mask,
            "HAS_SINKS": layer.sinks is not None,
            "HAS_LSE": results.lse is not None,
        }


def _stored(value: T | None, layer: LayerSpec) -> T:
    if value is None:
        raise AttnmuxError(
            f"layer {layer.layer_id} is not in the KV pool: call it with its own k and v and "
            "save_kv_cache=False"
        )
    return value
