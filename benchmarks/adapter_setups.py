"""The steps of `adapters.py`'s workloads, each in pools of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks.adapter_workloads import DTYPE, KV_HEADS, Workload
from benchmarks.setups import COLD_BYTES, DIM, RANK, ROPE, make_batch, make_layer, paged

from attnmux.core.batch import ForwardBatch
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.context import BackendContext
from attnmux.core.kv import (
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    PagedAllocator,
    ReqToTokenPool,
)
from attnmux.core.workspace import Workspace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setup:
    """A workload in pools of its own."""

    workload: Workload
    context: BackendContext
    batch: ForwardBatch
    q: torch.Tensor
    """[T, Hq, D], of a latent the part without positions, [T, Hq, 512]."""
    q_rope: torch.Tensor | None
    """[T, Hq, 64], of a latent."""
    pages: torch.Tensor
    """[B, pages of a request] int32."""
    slots: torch.Tensor
    """[B, keys] int64: where each request's keys lie."""

    def queries(self) -> torch.Tensor:
        """A latent's Q in whole rows, [T, Hq, 576], a copy."""
        assert self.q_rope is not None
        return torch.cat([self.q, self.q_rope], dim=-1)

    @property
    def scaling(self) -> float:
        return self.context.layers[0].scaling

    def bounds(self) -> torch.Tensor:
        """[B + 1] int32: where each request's queries begin."""
        work, device = self.workload, self.q.device
        end = work.batch_size * work.new + 1
        return torch.arange(0, end, work.new, dtype=torch.int32, device=device)

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, [pages, page, Hkv, D]."""
        pool, page = self.context.token_to_kv_pool, self.workload.page_size
        return [
            (paged(keys, page), paged(values, page))
            for keys, values in map(pool.get_kv_buffer, pool.layer_ids)
        ]

    def latents(self) -> list[torch.Tensor]:
        """The rows of each latent layer, [pages, page, 1, 576]."""
        pool, page = self.context.token_to_kv_pool, self.workload.page_size
        return [paged(pool.get_key_buffer(layer_id), page) for layer_id in pool.layer_ids]

    def new_kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of the new tokens in each layer, [T, Hkv, D], as the pool holds them; of a latent
        its two parts."""
        pool, loc = self.context.token_to_kv_pool, self.batch.out_cache_loc
        if self.workload.is_latent:
            rows = [pool.get_key_buffer(layer_id)[loc] for layer_id in pool.layer_ids]
            return [(row[..., :RANK].contiguous(), row[..., RANK:].contiguous()) for row in rows]
        return [
            (keys[loc], values[loc]) for keys, values in map(pool.get_kv_buffer, pool.layer_ids)
        ]

    def write(self, layer_id: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Store the new tokens' K and V, as `new_kv` gives them."""
        pool, loc, layer = (
            self.context.token_to_kv_pool,
            self.batch.out_cache_loc,
            self.context.layer(layer_id),
        )
        if self.workload.is_latent:
            pool.set_mla_kv_buffer(layer, loc, first, second)
        else:
            pool.set_kv_buffer(layer, loc, first, second, None, None)


def make_setup(workload: Workload, device: torch.device) -> Setup:
    """Requests on pages in random order, in as many layers as a cold cache needs."""
    page, batch_size = workload.page_size, workload.batch_size
    layers = max(2, -(-int(COLD_BYTES) // workload.kv_bytes)) if device.type == "cuda" else 2
    per_request = -(-workload.keys // page)
    size = batch_size * per_request * page
    longest = workload.max_context_len or workload.keys
    pool = _pool(workload, size, layers, device)
    context = BackendContext(
        request=_request(workload),
        platform=Platform.parse("nvidia:sm90,cuda=13.0"),
        device=device,
        layers=tuple(
            make_layer(
                layer_id,
                is_latent=workload.is_latent,
                q_heads=workload.q_heads,
                kv_heads=1 if workload.is_latent else KV_HEADS,
            )
            for layer_id in range(layers)
        ),
        req_to_token_pool=ReqToTokenPool(batch_size, longest, device),
        token_to_kv_pool=pool,
        workspace=Workspace(device),
        max_batch_size=batch_size,
        max_context_len=longest,
    )
    slots = PagedAllocator(size, page, device).alloc(size).view(-1, page)
    slots = slots[torch.randperm(len(slots), device=device)].view(batch_size, -1)
    tokens, heads = batch_size * workload.new, workload.q_heads
    q = torch.randn(tokens, heads, DIM, device=device).to(DTYPE)
    q_rope = None
    if workload.is_latent:
        rows = torch.randn(tokens, heads, RANK + ROPE, device=device).to(DTYPE)
        q, q_rope = rows[..., :RANK], rows[..., RANK:]
        if workload.is_apart:
            q, q_rope = q.contiguous(), q_rope.contiguous()
    return Setup(
        workload=workload,
        context=context,
        batch=_batch(workload, context, slots[:, : workload.keys]),
        q=q,
        q_rope=q_rope,
        pages=(slots[:, ::page] // page).int().contiguous(),
        slots=slots[:, : workload.keys],
    )


def _pool(workload: Workload, size: int, layers: int, device: torch.device) -> KVPool:
    """Random values."""
    given: dict[str, Any] = {
        "size": size,
        "page_size": workload.page_size,
        "dtype": DTYPE,
        "layer_ids": range(layers),
        "device": device,
    }
    if workload.is_latent:
        latent = MLATokenToKVPool(**given, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
        for layer_id in latent.layer_ids:
            latent.get_key_buffer(layer_id).normal_()
        return latent
    pool = MHATokenToKVPool(**given, num_kv_heads=KV_HEADS, head_dim=DIM)
    for layer_id in pool.layer_ids:
        for buffer in pool.get_kv_buffer(layer_id):
            buffer.normal_()
    return pool


def _request(workload: Workload) -> Request:
    shapes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": DIM}
    if workload.is_latent:
        shapes = {"num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128}
        shapes |= {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
    return Request(
        kind=workload.kind,
        num_q_heads=workload.q_heads,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=workload.page_size,
        phases=("extend", "decode"),
        **shapes,
    )


def _batch(workload: Workload, context: BackendContext, slots: torch.Tensor) -> ForwardBatch:
    """slots: [B, keys] int64, of each request's tokens."""
    batch = make_batch(context, slots.unbind(), workload.new)
    return batch if not workload.topk else replace(batch, topk_indices=_picks(workload, batch))


def _picks(workload: Workload, batch: ForwardBatch) -> torch.Tensor:
    """[T, topk] int32: of each token as many places in front of it, its own too, as an indexer
    picks, in any order; each has as many in front of it."""
    places = batch.positions
    scores = torch.rand(len(places), workload.keys, device=places.device)
    columns = torch.arange(workload.keys, device=places.device)
    scores.masked_fill_(columns > places.unsqueeze(1), -1)
    return scores.topk(workload.topk, dim=1).indices.int()
