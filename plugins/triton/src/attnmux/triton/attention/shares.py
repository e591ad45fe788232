"""Attention of few new tokens a request, over equal shares of all keys.

The kernels are in `kernels/shares.py`, `kernels/hopper/shares.py`, `kernels/hopper/latent.py` and
`kernels/latent_merge.py`; `share_plans.py` plans the shares.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from attnmux.core import AttentionCall
from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.attention.share_plans import ShareKey, SharePlan, SplitOptions
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.launches.bound_kernel import BoundKernel
from attnmux.triton.launches.dispatch import SHARE_KERNELS, kernel_at
from attnmux.triton.launches.operands import (
    KEY_STRIDES,
    OPERANDS,
    STRIDES,
    Results,
    Slots,
    key_strides,
    strides,
    whole_rows,
)
from attnmux.triton.launches.shapes import next_power_of_2

TENSORS = (*OPERANDS, "slots", "rows", "lens", "encoder_lens", "mask", "mask_indptr", "first_keys")
MOST_PARTS = 16
"""Parts that are merged at a time: more would take registers from the loop over keys."""
MOST_TURNS = 8
"""Turns of a merge in one step. Two steps of few turns each take as long as four or five more."""
MERGE = "attnmux.triton.kernels.latent_merge"
MERGE_WARPS = 4


class ShareAttention:
    """A layer's launches of `attend_shares` or of a Hopper kernel for shares."""

    def __init__(self, layer: TritonLayer) -> None:
        self._layer = layer
        self._bound: dict[Hashable, BoundKernel] = {}
        self._merges: dict[SharePlan, LatentMerge] = {}

    def key(self, queries: int, options: SplitOptions, *, hides: bool = False) -> ShareKey:
        """The plan's for steps of `queries` new tokens a request. hides: as `TritonStep.hides`."""
        layer, shape = self._layer, self._layer.shape
        config = layer.share_config(queries, hides=hides)
        return ShareKey(
            queries=queries,
            is_cross=layer.spec.is_cross_attention,
            window=layer.window,
            chunk=layer.chunk,
            has_own_table=layer.slot_group is not None and layer.slot_group.has_own_table,
            items=-(-queries * shape.group // config.block_m) * shape.kv_heads,
            config=config,
            splitting=options.splitting(config.block_n),
            part_rows=min(config.block_m, next_power_of_2(queries * shape.group)),
            part_width=shape.dv,
        )

    def __call__(
        self,
        call: AttentionCall,
        step: TritonStep,
        plan: SharePlan,
        slots: Slots,
        results: Results,
    ) -> None:
        """Attend over the pool."""
        layer, key, q = self._layer, plan.key, call.q
        kernel = SHARE_KERNELS[key.config.kernel]
        tail = layer.tail(q, call.q_rope)
        if kernel.takes_whole_rows:
            q, tail = whole_rows(q), None if tail is None else whole_rows(tail)
        trees = None if key.is_cross else step.trees.get((layer.window, layer.chunk))
        mask = None if key.is_cross else step.mask
        if trees is not None:
            mask = trees.visible
        has_encoder = slots.begins_with_encoder and not key.is_cross
        variant = (
            plan,
            step.lens_shift,
            slots.page_size,
            slots.rows is None,
            has_encoder,
            mask is None,
            trees is None,
            results.lse is None,
        )
        bound = self._bound.get(variant)
        if bound is None:
            bound = self._bind(
                plan, step, slots, results, has_mask=mask is not None, is_tree=trees is not None
            )
            self._bound[variant] = bound
        bound(
            (plan.programs, 1, 1),
            (
                q,
                tail,
                *results,
                slots.table,
                slots.rows,
                step.lens,
                step.batch.encoder_lens if has_encoder or key.is_cross else None,
                None if mask is None else mask.view(torch.uint8),
                None if mask is None else step.indptr.get("mask"),
                None if trees is None else trees.first,
            ),
            strides(q, tail, results, slots),
            dtypes=q.dtype,
        )
        if kernel.leaves_parts:
            merge = self._merges.get(plan)
            if merge is None:
                merge = self._merges[plan] = LatentMerge(layer, plan)
            merge(step.batch.batch_size, results)

    def _bind(
        self,
        plan: SharePlan,
        step: TritonStep,
        slots: Slots,
        results: Results,
        *,
        has_mask: bool,
        is_tree: bool,
    ) -> BoundKernel:
        layer, key, config = self._layer, plan.key, plan.key.config
        keys = layer.required_keys()
        tail = layer.key_tail(keys)
        parts = min(max(config.merged_rows // key.part_rows, 1), MOST_PARTS)
        at_once = MOST_TURNS * parts
        return BoundKernel(
            layer.launcher,
            kernel_at(SHARE_KERNELS[config.kernel].address),
            {
                "k": keys.k,
                "k_tail": tail,
                "v": keys.v,
                "k_scales": keys.k_scales,
                "v_scales": keys.v_scales,
                "FOUR_BITS": layer.widening(keys),
                **dict(zip(KEY_STRIDES, key_strides(keys, tail), strict=True)),
                **plan.buffers,
                **layer.fixed(over_pool=True, has_mask=has_mask, has_lse=results.lse is not None),
                "IS_TREE": is_tree,
                "KV_HEADS": layer.shape.kv_heads,
                "QUERIES": key.queries,
                "LENS_SHIFT": step.lens_shift,
                "PAGE": slots.page_size,
                "HAS_ENCODER": slots.begins_with_encoder and not key.is_cross,
                "IS_FIXED": key.splitting is not None,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "PART_ROWS": key.part_rows,
                "PARTS": parts,
                "MOST_PARTS": at_once if plan.most_parts > at_once else 0,
                "STAGES": config.num_stages,
                **config.constants,
            },
            tensors=TENSORS,
            numbers=STRIDES,
            options={"num_warps": config.num_warps, **config.options},
        )


class LatentMerge:
    """The launches of `merge_latent` for a layer and a plan."""

    def __init__(self, layer: TritonLayer, plan: SharePlan) -> None:
        self._layer, self._plan = layer, plan
        self._of_batches: dict[tuple[int, bool], tuple[BoundKernel, int]] = {}
        self._bound: dict[tuple[bool, tuple[int, ...]], BoundKernel] = {}

    def __call__(self, batch_size: int, results: Results) -> None:
        out, lse = results
        batch = batch_size, lse is None
        plan = self._of_batches.get(batch)
        if plan is None:
            plan = self._of_batches[batch] = self._of(batch_size, has_lse=lse is not None)
        bound, slices = plan
        bound(
            (batch_size * self._plan.key.items, slices, 1),
            results,
            (out.stride()[0], 0 if lse is None else lse.stride()[0]),
        )

    def _of(self, batch_size: int, *, has_lse: bool) -> tuple[BoundKernel, int]:
        """The kernel for a batch, and the slices of an item."""
        layer, plan, key = self._layer, self._plan, self._plan.key
        # The slices decide the order in which parts are added up. Where the batch must not matter,
        # they depend on one request alone.
        items = key.items if key.splitting is not None else batch_size * key.items
        slices, constants = kernel_at(f"{MERGE}:merge_slices")(
            items, key.part_rows, plan.programs // key.config.programs_per_unit
        )
        kind = has_lse, tuple(constants.values())
        if kind not in self._bound:
            self._bound[kind] = BoundKernel(
                layer.launcher,
                kernel_at(f"{MERGE}:merge_latent"),
                {
                    **plan.buffers,
                    "v_scale": layer.scales[1],
                    "GROUP": layer.shape.group,
                    "QUERIES": key.queries,
                    "IS_FIXED": key.splitting is not None,
                    "PART_ROWS": key.part_rows,
                    **constants,
                },
                tensors=("out", "lse"),
                numbers=("out_stride", "lse_stride"),
                # It begins while `attend_latent` ends, and waits for its results.
                options={"num_warps": MERGE_WARPS, "launch_pdl": True},
            )
        return self._bound[kind], slices
