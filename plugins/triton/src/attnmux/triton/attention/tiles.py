"""Attention of many new tokens a request, in tiles of queries.

The kernels are in `kernels/tiles.py`, `kernels/hopper/tiles.py` and
`kernels/hopper/latent_tiles.py`; `tile_plans.py` has the plan of a step.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from attnmux.core import AttentionCall
from attnmux.triton.attention import splits
from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.attention.tile_heights import takes_short_tiles
from attnmux.triton.attention.tile_plans import Plans
from attnmux.triton.launches.bound_kernel import BoundKernel
from attnmux.triton.launches.configs import TileConfig
from attnmux.triton.launches.dispatch import TILE_KERNELS, kernel_at
from attnmux.triton.launches.operands import (
    KEY_STRIDES,
    OPERANDS,
    STRIDES,
    Keys,
    Results,
    Slots,
    has_whole_rows,
    key_strides,
    strides,
    whole_rows,
)

TENSORS = (
    *OPERANDS,
    "k",
    "k_tail",
    "v",
    "k_scales",
    "v_scales",
    "slots",
    "rows",
    "v_starts",
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


class TileAttention:
    """A layer's launches of `attend_tiles` or of a Hopper kernel for tiles."""

    def __init__(self, layer: TritonLayer, units: int, max_context_len: int) -> None:
        """units: of the device, whose idle ones may share the keys of a tile; 0 if a tile's
        keys stay together."""
        self._layer, self._units, self._max_context_len = layer, units, max_context_len
        shape = layer.shape
        is_cross = layer.spec.is_cross_attention
        self._kind = shape.kv_heads, shape.group, layer.window, layer.chunk, is_cross
        """Layers of one kind have as many tiles and keys in a step."""
        self._merge = splits.SplitMerge(layer)
        self._bound: dict[Hashable, BoundKernel] = {}

    def __call__(
        self,
        call: AttentionCall,
        step: TritonStep,
        plans: Plans,
        slots: Slots | None,
        results: Results,
        keys: Keys | None = None,
    ) -> None:
        """Attend over the pool, or over the call's own K and V if slots is None.

        keys: those that the slots are of; the pool's unless given.
        """
        layer, batch, q, out = self._layer, step.batch, call.q, results.out
        if keys is None:
            keys = layer.required_keys() if slots is not None else Keys.of_call(call)
        config, num_splits = self._choose(step, over_pool=slots is not None)
        plan = plans[config.block_m]
        whole = results
        if num_splits > 1:
            results = self._merge.parts(num_splits, q.shape[0], q.device)
        tail = layer.tail(q, call.q_rope)
        if TILE_KERNELS[config.kernel].takes_whole_rows:
            q, tail = whole_rows(q), None if tail is None else whole_rows(tail)
            if slots is None:
                keys = keys.whole(q.dtype)
            if num_splits == 1 and not has_whole_rows(out):
                fresh = torch.empty(out.shape, dtype=out.dtype, device=out.device)
                results = Results(fresh, results.lse)
        is_cross, indptr = layer.spec.is_cross_attention, step.indptr
        mask = None if is_cross else step.mask
        items = None if is_cross else batch.multi_item
        has_encoder = slots is not None and slots.begins_with_encoder and not is_cross
        variant = (
            config.block_m,
            None if slots is None else (slots.page_size, slots.rows is None),
            has_encoder,
            mask is None,
            items is None,
            results.lse is None,
            num_splits > 1,
        )
        bound = self._bound.get(variant)
        if bound is None:
            bound = self._bound[variant] = self._bind(
                config,
                slots,
                results,
                has_mask=mask is not None,
                has_items=items is not None,
                has_splits=num_splits > 1,
                four_bits=layer.widening(keys),
            )
        key_tail = layer.key_tail(keys)
        bound(
            (layer.shape.kv_heads, plan.num_tiles, num_splits),
            (
                q,
                tail,
                *results,
                keys.k,
                key_tail,
                keys.v,
                keys.k_scales,
                keys.v_scales,
                None if slots is None else slots.table,
                None if slots is None else slots.rows,
                keys.v_starts,
                None if slots is None else step.lens,
                batch.encoder_lens if has_encoder or is_cross else None,
                indptr["encoder"] if is_cross else None,
                indptr["queries"],
                plan.request,
                plan.row,
                None if mask is None else mask.view(torch.uint8),
                None if mask is None else indptr["mask"],
                None if items is None else items.prefix_lens,
                None if items is None else items.token_pos_in_items,
            ),
            (*strides(q, tail, results, slots), *key_strides(keys, key_tail)),
            (batch.batch_size, q.shape[0], plan.num_tiles, num_splits),
            (q.dtype, keys.k.dtype, keys.v.dtype),
        )
        if num_splits > 1:
            self._merge(num_splits, results, whole)
        elif results.out is not out:
            out.copy_(results.out)

    def _choose(self, step: TritonStep, *, over_pool: bool) -> tuple[TileConfig, int]:
        """The configuration for a step, and how many programs share the keys of a tile."""
        configs = self._layer.tile_configs(hides=step.hides)
        short, tall = configs[0], configs[-1]
        key = self._kind, short.block_m, tall.block_m, over_pool
        found = step.tiles.get(key)
        if found is None:
            num_splits = self._fitting(step, tall) if over_pool else 1
            is_short = short is not tall and num_splits == 1 and self._is_faster(step, short, tall)
            found = step.tiles[key] = is_short, num_splits
        is_short, num_splits = found
        return (short if is_short else tall), num_splits

    def _is_faster(self, step: TritonStep, short: TileConfig, tall: TileConfig) -> bool:
        if step.takes_short_tiles is not None:
            return step.takes_short_tiles
        new, lens = step.batch.extend_seq_lens_cpu, step.batch.seq_lens_cpu
        layer = self._layer
        if not self._units or step.in_capture or layer.spec.is_cross_attention:
            return False
        if new is None or lens is None:
            return False
        limits = [reach for reach in (layer.window, layer.chunk) if reach > 0]
        return takes_short_tiles(
            new,
            lens,
            tall=tall.block_m,
            short=short.block_m,
            group=layer.shape.group,
            kv_heads=layer.shape.kv_heads,
            units=self._units,
            is_causal=layer.spec.is_causal,
            most_keys=min(limits, default=None),
        )

    def _fitting(self, step: TritonStep, config: TileConfig) -> int:
        shape, batch, block_m = self._layer.shape, step.batch, config.block_m
        units = self._units * config.programs_per_unit
        rows = batch.num_tokens * shape.group
        # One tile a request at least: steps of many need no lengths to decide
        if max(rows // block_m, batch.batch_size) * shape.kv_heads >= units:
            return 1
        tiles, keys = rows // block_m + batch.batch_size, self._max_context_len
        if step.queries is not None:
            tiles = -(-step.queries * shape.group // block_m) * batch.batch_size
        elif batch.extend_seq_lens_cpu is not None:
            tiles = int((-(-batch.extend_seq_lens_cpu * shape.group // block_m)).sum())
        # A graph is replayed for other lengths than it was captured with
        lens = None if step.in_capture else batch.seq_lens_cpu
        if lens is not None and not self._layer.spec.is_cross_attention:
            keys = int(lens.max())
        if self._layer.window >= 0:
            keys = min(keys, self._layer.window + block_m)
        if self._layer.chunk > 0:
            keys = min(keys, self._layer.chunk)
        return splits.num_splits(tiles * shape.kv_heads, units, keys)

    def _bind(
        self,
        config: TileConfig,
        slots: Slots | None,
        results: Results,
        *,
        has_mask: bool,
        has_items: bool,
        has_splits: bool,
        four_bits: int,
    ) -> BoundKernel:
        layer = self._layer
        has_encoder = slots is not None and slots.begins_with_encoder
        return BoundKernel(
            layer.launcher,
            kernel_at(TILE_KERNELS[config.kernel].address),
            {
                **layer.fixed(
                    over_pool=slots is not None,
                    has_mask=has_mask,
                    has_lse=results.lse is not None,
                ),
                # The merge counts the sinks once
                **({"HAS_SINKS": False} if has_splits else {}),
                "SPLIT_BLOCKS": max(splits.LEAST_KEYS // config.block_n, 1) if has_splits else 0,
                "HAS_ITEMS": has_items,
                "FOUR_BITS": four_bits,
                "PAGE": 1 if slots is None else slots.page_size,
                "IN_CALL": slots is None,
                "HAS_ENCODER": has_encoder and not layer.spec.is_cross_attention,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "STAGES": config.num_stages,
                **config.constants,
            },
            tensors=TENSORS,
            numbers=(*STRIDES, *KEY_STRIDES),
            counts=("batch_size", "num_tokens", "num_tiles", "num_splits"),
            options={"num_warps": config.num_warps, **config.options},
        )
