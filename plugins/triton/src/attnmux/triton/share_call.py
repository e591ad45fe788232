"""A layer's calls with few new tokens a request, over the pool."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from attnmux.triton import serving
from attnmux.triton.call import LayerCall
from attnmux.triton.latent import LatentMerge
from attnmux.triton.launching import BoundKernel
from attnmux.triton.operands import (
    KEY_STRIDES,
    QUERIES,
    STRIDES,
    Results,
    as_bytes,
    key_strides,
    strides,
    whole_rows,
)
from attnmux.triton.plans import SharePlan
from attnmux.triton.slots import Slots
from attnmux.triton.step import Step

TENSORS = (*QUERIES, "slots", "rows", "lens", "encoder_lens", "mask", "mask_indptr")
MOST_PARTS = 16
"""That are merged at a time: more of them take registers from the loop over keys."""


class ShareCall:
    """Launches `attend_shares`, or what is written for the layer and the device."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self._bound: dict[Hashable, BoundKernel] = {}
        self._merges: dict[SharePlan, LatentMerge] = {}

    def __call__(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        step: Step,
        slots: Slots,
        plan: SharePlan,
        mask_indptr: torch.Tensor | None,
        results: Results,
    ) -> None:
        call, key = self._call, plan.key
        kernel = serving.SHARES[key.launch.kernel]
        tail = call.tail(q, q_rope)
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
            bound = self._bound[variant] = self._bind(plan, step, slots, results)
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
            self._merge(plan, step.batch.batch_size, results)

    def _merge(self, plan: SharePlan, batch_size: int, results: Results) -> None:
        merge = self._merges.get(plan)
        if merge is None:
            call = self._call
            merge = LatentMerge(call.launcher, plan, call.shape.group, call.scales[1])
            self._merges[plan] = merge
        merge(batch_size, results)

    def _bind(self, plan: SharePlan, step: Step, slots: Slots, results: Results) -> BoundKernel:
        call, key, launch = self._call, plan.key, plan.key.launch
        keys = call.required_keys()
        tail = call.tail(keys.k, keys.k_rope)
        has_mask = step.mask is not None and not key.is_cross
        return BoundKernel(
            call.launcher,
            serving.kernel_at(serving.SHARES[launch.kernel].address),
            {
                "k": keys.k,
                "k_tail": tail,
                "v": keys.v,
                **dict(zip(KEY_STRIDES, key_strides(keys, tail), strict=True)),
                "sinks": call.layer.sinks,
                "stops": plan.stops,
                "unit_blocks": plan.unit_blocks,
                "starts": plan.starts,
                "share": plan.share,
                "partial": plan.partial,
                "partial_lse": plan.partial_lse,
                "arrivals": plan.arrivals,
                **call.factors(in_call=False),
                **call.constants(results, has_mask=has_mask),
                "KV_HEADS": call.shape.kv_heads,
                "QUERIES": key.queries,
                "LENS_SHIFT": step.lens_shift,
                "PAGE": slots.page_size,
                "HAS_ENCODER": slots.begins_with_encoder and not key.is_cross,
                "IS_FIXED": key.splitting is not None,
                "BLOCK_M": launch.block_m,
                "BLOCK_N": launch.block_n,
                "PART_ROWS": key.part_rows,
                "PARTS": min(max(launch.merged_rows // key.part_rows, 1), MOST_PARTS),
                "STAGES": launch.num_stages,
                **launch.more,
            },
            tensors=TENSORS,
            numbers=STRIDES,
            options={"num_warps": launch.num_warps, **launch.options},
        )
