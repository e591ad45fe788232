"""What a kernel is told at every call of one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from attnmux.core.backend import BackendContext
from attnmux.core.errors import AttnmuxError
from attnmux.core.kv import KVPool
from attnmux.core.layer import LayerSpec
from attnmux.triton.kernels.shares import attend_shares
from attnmux.triton.kernels.tiles import attend_tiles
from attnmux.triton.launch import TileLaunch, share_launch, tile_launch
from attnmux.triton.plans import ShareKey, SharePlan, Splitting, TileKey, TilePlan
from attnmux.triton.shapes import Shape, next_power_of_2
from attnmux.triton.slots import SlotGroup, Slots
from attnmux.triton.step import Step

LOG2_E = math.log2(math.e)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Results:
    """Where a call's results go."""

    out: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Keys:
    """K and V, of the pool's slots or of the call's tokens."""

    k: torch.Tensor
    """[rows, Hkv, D]."""
    v: torch.Tensor
    """[rows, Hkv, Dv]; a latent layer's is not read."""
    k_rope: torch.Tensor | None = None
    """[rows, 1, rope], where K does not hold it."""

    @classmethod
    def of(cls, pool: KVPool, layer: LayerSpec) -> Keys:
        """What the pool stores of a layer."""
        k, v = pool.get_kv_buffer(layer.layer_id)
        return cls(k=k, v=v)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    shape: Shape
    arch: str
    """As `Platform.arch`."""
    tiles: TileLaunch
    slot_group: SlotGroup | None
    """None for a layer whose K and V come with the call alone."""
    keys: Keys | None
    """The pool's memory."""
    scales: tuple[float, float]
    """What K and V of the pool are multiplied by."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> LayerCall:
        """Raises InvalidInput for a layer beyond the kernels' dims."""
        shape, arch, pool = Shape.of(layer), context.platform.arch, context.token_to_kv_pool
        is_encoders = not layer.is_causal and not layer.is_cross_attention
        is_stored = not is_encoders and layer.layer_id in pool.layer_ids
        return cls(
            layer=layer,
            shape=shape,
            arch=arch,
            tiles=tile_launch(shape, arch),
            slot_group=SlotGroup.of(layer, context) if is_stored else None,
            keys=Keys.of(pool, layer) if is_stored else None,
            scales=pool.read_scales(layer.k_scale, layer.v_scale) if is_stored else (1.0, 1.0),
        )

    @property
    def tile_key(self) -> TileKey:
        return TileKey(group=self.shape.group, block_m=self.tiles.block_m)

    def share_key(self, queries: int, splitting: Splitting | None) -> ShareKey:
        launch = share_launch(self.shape, queries, self.arch)
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
        key, launch = plan.key, plan.key.launch
        has_mask = step.mask is not None and not key.is_cross
        attend_shares[(plan.programs,)](
            *self._queries(q, q_rope),
            *self._keys(self.required_keys()),
            *_outputs(results),
            self.layer.sinks,
            slots.table,
            slots.table.stride(0),
            slots.rows,
            step.lens,
            step.batch.encoder_lens,
            _bytes(step.mask) if has_mask else None,
            mask_indptr if has_mask else None,
            plan.stops,
            plan.unit_blocks,
            plan.starts,
            plan.share,
            plan.partial,
            plan.partial_lse,
            plan.arrivals,
            *self._factors(in_call=False),
            **self._constants(results, has_mask=has_mask),
            KV_HEADS=self.shape.kv_heads,
            QUERIES=key.queries,
            LENS_SHIFT=step.lens_shift,
            PAGE=slots.page_size,
            HAS_ENCODER=slots.begins_with_encoder and not key.is_cross,
            IS_FIXED=key.splitting is not None,
            BLOCK_M=launch.block_m,
            BLOCK_N=launch.block_n,
            PART_ROWS=key.part_rows,
            PARTS=launch.parts,
            STAGES=launch.num_stages,
            num_warps=launch.num_warps,
        )

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
        launch, batch, is_cross = self.tiles, step.batch, self.layer.is_cross_attention
        keys = self.required_keys() if in_call is None else in_call
        has_mask = step.mask is not None and not is_cross
        items = None if is_cross else batch.multi_item
        attend_tiles[(self.shape.kv_heads, plan.num_tiles)](
            *self._queries(q, q_rope),
            *self._keys(keys),
            *_outputs(results),
            self.layer.sinks,
            None if slots is None else slots.table,
            0 if slots is None else slots.table.stride(0),
            None if slots is None else slots.rows,
            step.lens,
            batch.encoder_lens,
            bounds.get("encoder"),
            bounds["queries"],
            plan.request,
            plan.row,
            _bytes(step.mask) if has_mask else None,
            bounds.get("mask") if has_mask else None,
            None if items is None else items.prefix_lens,
            None if items is None else items.token_pos_in_items,
            batch.batch_size,
            q.shape[0],
            plan.num_tiles,
            *self._factors(in_call=in_call is not None),
            **self._constants(results, has_mask=has_mask),
            HAS_ITEMS=items is not None,
            PAGE=1 if slots is None else slots.page_size,
            IN_CALL=in_call is not None,
            HAS_ENCODER=slots is not None and slots.begins_with_encoder and not is_cross,
            BLOCK_M=launch.block_m,
            BLOCK_N=launch.block_n,
            STAGES=launch.num_stages,
            num_warps=launch.num_warps,
        )

    def _queries(self, q: torch.Tensor, q_rope: torch.Tensor | None) -> tuple[object, ...]:
        tail = q_rope
        if tail is None and self.shape.real_tail:
            tail = q[:, :, self.shape.real_d :]
        return *_strided(q), *_strided(tail)

    def _keys(self, keys: Keys) -> tuple[object, ...]:
        k, v, tail = keys.k, keys.v, keys.k_rope
        if tail is None and self.shape.real_tail:
            tail = k[:, :, self.shape.real_d :]
        return *_strided(k), *_strided(tail), *_strided(v)

    def _factors(self, *, in_call: bool) -> tuple[float, float, float]:
        k_scale, v_scale = (1.0, 1.0) if in_call else self.scales
        scale = self.layer.scaling * k_scale
        cap = self.layer.logit_cap
        return scale if cap else scale * LOG2_E, cap, v_scale

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


def _strided(rows: torch.Tensor | None) -> tuple[torch.Tensor | None, int, int]:
    """[T, H, D] with the distances of its tokens and heads."""
    return (None, 0, 0) if rows is None else (rows, rows.stride(0), rows.stride(1))


def _outputs(results: Results) -> tuple[object, ...]:
    lse = results.lse
    return results.out, results.out.stride(0), lse, 0 if lse is None else lse.stride(0)


def _bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.view(torch.uint8)
