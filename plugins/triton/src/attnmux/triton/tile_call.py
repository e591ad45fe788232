"""A layer's calls with many new tokens a request, over the pool or over their own K and V."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from attnmux.triton import serving
from attnmux.triton.call import LayerCall
from attnmux.triton.launching import BoundKernel
from attnmux.triton.operands import (
    KEY_STRIDES,
    QUERIES,
    STRIDES,
    Keys,
    Results,
    as_bytes,
    has_whole_rows,
    key_strides,
    strides,
    whole_rows,
)
from attnmux.triton.plans import TilePlan
from attnmux.triton.slots import Slots
from attnmux.triton.step import Step

TENSORS = (
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
COUNTS = "batch_size", "num_tokens", "num_tiles"


class TileCall:
    """Launches `attend_tiles`, or what is written for the layer and the device."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self._bound: dict[Hashable, BoundKernel] = {}

    def __call__(
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
        if not serving.TILES[self._call.tile_launch(hides=step.hides).kernel].takes_whole_rows:
            self._launch(q, q_rope, in_call, step, slots, plan, bounds, results)
            return
        if in_call is not None:
            in_call = in_call.whole(q.dtype)
        out = results.out
        if not has_whole_rows(out):
            results = Results(
                out=torch.empty(out.shape, dtype=out.dtype, device=out.device), lse=results.lse
            )
        self._launch(whole_rows(q), q_rope, in_call, step, slots, plan, bounds, results)
        if out is not results.out:
            out.copy_(results.out)

    def _launch(
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
        call, batch = self._call, step.batch
        is_cross = call.layer.is_cross_attention
        keys = call.required_keys() if in_call is None else in_call
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
            bound = self._bound[variant] = self._bind(in_call, step, slots, results)
        tail, key_tail = call.tail(q, q_rope), call.tail(keys.k, keys.k_rope)
        bound(
            (call.shape.kv_heads, plan.num_tiles, 1),
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

    def _bind(
        self, in_call: Keys | None, step: Step, slots: Slots | None, results: Results
    ) -> BoundKernel:
        call, is_cross = self._call, self._call.layer.is_cross_attention
        launch = call.tile_launch(hides=step.hides)
        has_encoder = slots is not None and slots.begins_with_encoder
        return BoundKernel(
            call.launcher,
            serving.kernel_at(serving.TILES[launch.kernel].address),
            {
                "sinks": call.layer.sinks,
                **call.factors(in_call=in_call is not None),
                **call.constants(results, has_mask=step.mask is not None and not is_cross),
                "HAS_ITEMS": step.batch.multi_item is not None and not is_cross,
                "PAGE": 1 if slots is None else slots.page_size,
                "IN_CALL": in_call is not None,
                "HAS_ENCODER": has_encoder and not is_cross,
                "BLOCK_M": launch.block_m,
                "BLOCK_N": launch.block_n,
                "STAGES": launch.num_stages,
                **launch.more,
            },
            tensors=TENSORS,
            numbers=(*STRIDES, *KEY_STRIDES),
            counts=COUNTS,
            options={"num_warps": launch.num_warps, **launch.options},
        )
