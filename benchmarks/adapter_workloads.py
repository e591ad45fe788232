"""What `adapters.py` measures: steps of requests that are all alike, in pools of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.backend import BackendContext
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.request import Request
from attnmux.core.kv import MHATokenToKVPool, PagedAllocator, ReqToTokenPool
from attnmux.core.layer import LayerSpec
from attnmux.core.workspace import Workspace

Q_HEADS, KV_HEADS, DIM, DTYPE = 32, 8, 128, torch.bfloat16
COLD_BYTES = 256e6
"""Several times what a GPU's cache holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of a step, all alike: keys of each, of which `new` are queries."""

    batch_size: int
    keys: int
    new: int = 1
    page_size: int = 16
    max_context_len: int = 0
    """What the engine allows, as wide as page tables in graphs are; 0: no more than `keys`."""

    def __str__(self) -> str:
        kind = "decode" if self.new == 1 else f"extend {self.new}"
        room = f" of {self.max_context_len}" if self.max_context_len else ""
        return f"{kind} bs {self.batch_size}, ctx {self.keys}{room}, page {self.page_size}"

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch_size * self.keys * KV_HEADS * DIM * DTYPE.itemsize


WORKLOADS = (
    Workload(batch_size=1, keys=4096),
    Workload(batch_size=16, keys=4096),
    Workload(batch_size=64, keys=4096),
    Workload(batch_size=16, keys=4096, page_size=1),
    Workload(batch_size=1, keys=4096, max_context_len=131072),
    Workload(batch_size=16, keys=4096, max_context_len=131072),
    Workload(batch_size=1, keys=4096, new=4096),
    Workload(batch_size=4, keys=8704, new=512),
)
TINY = (
    Workload(batch_size=2, keys=20),
    Workload(batch_size=2, keys=20, max_context_len=64),
    Workload(batch_size=2, keys=20, new=5, page_size=4),
    Workload(batch_size=2, keys=20, new=20),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setup:
    """A workload in pools of its own."""

    workload: Workload
    context: BackendContext
    batch: ForwardBatch
    q: torch.Tensor
    pages: torch.Tensor
    """[B, pages of a request] int32."""

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, [pages, page, Hkv, D]."""
        pool, page = self.context.token_to_kv_pool, self.workload.page_size
        shape = (-1, page, KV_HEADS, DIM)
        return [
            (keys.view(shape), values.view(shape))
            for keys, values in map(pool.get_kv_buffer, pool.layer_ids)
        ]

    def new_kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of the new tokens in each layer, [T, Hkv, D], as the pool holds them."""
        pool, loc = self.context.token_to_kv_pool, self.batch.out_cache_loc
        return [
            (keys[loc], values[loc]) for keys, values in map(pool.get_kv_buffer, pool.layer_ids)
        ]

    def write(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the new tokens' K and V."""
        context = self.context
        context.token_to_kv_pool.set_kv_buffer(
            context.layer(layer_id), self.batch.out_cache_loc, k, v, None, None
        )


def make_setup(workload: Workload, device: torch.device) -> Setup:
    """Requests on pages in random order, in as many layers as a cold cache needs."""
    page, batch_size = workload.page_size, workload.batch_size
    layers = max(2, -(-int(COLD_BYTES) // workload.kv_bytes)) if device.type == "cuda" else 2
    per_request = -(-workload.keys // page)
    size = batch_size * per_request * page
    longest = workload.max_context_len or workload.keys
    pool = MHATokenToKVPool(
        size=size,
        page_size=page,
        dtype=DTYPE,
        layer_ids=range(layers),
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        device=device,
    )
    for layer_id in pool.layer_ids:
        for buffer in pool.get_kv_buffer(layer_id):
            buffer.normal_()
    context = BackendContext(
        request=Request(
            kind="mha",
            num_q_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
            kv_dtype="bfloat16",
            page_size=page,
            phases=("extend", "decode"),
        ),
        platform=Platform.parse("nvidia:sm90,cuda=13.0"),
        device=device,
        layers=tuple(map(_layer, range(layers))),
        req_to_token_pool=ReqToTokenPool(batch_size, longest, device),
        token_to_kv_pool=pool,
        workspace=Workspace(device),
        max_batch_size=batch_size,
        max_context_len=longest,
    )
    slots = PagedAllocator(size, page, device).alloc(size).view(-1, page)
    slots = slots[torch.randperm(len(slots), device=device)].view(batch_size, -1)
    return Setup(
        workload=workload,
        context=context,
        batch=_batch(workload, context, slots[:, : workload.keys]),
        q=torch.randn(batch_size * workload.new, Q_HEADS, DIM, device=device).to(DTYPE),
        pages=(slots[:, ::page] // page).int().contiguous(),
    )


def _layer(layer_id: int) -> LayerSpec:
    return LayerSpec(
        layer_id=layer_id,
        tp_q_head_num=Q_HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=DIM**-0.5,
    )


def _batch(workload: Workload, context: BackendContext, slots: torch.Tensor) -> ForwardBatch:
    """slots: [B, keys] int64, of each request's tokens."""
    table, new = context.req_to_token_pool, workload.new
    rows = torch.tensor(table.alloc(workload.batch_size), device=slots.device)
    lens = torch.full((workload.batch_size,), workload.keys, dtype=torch.int32, device=slots.device)
    table.write(rows, torch.zeros_like(lens), lens, slots.flatten())
    news = torch.full_like(lens, new)
    places = torch.arange(workload.keys - new, workload.keys, device=slots.device)
    extends: dict[str, Any] = {}
    if new > 1:
        extends = {
            "extend_seq_lens": news,
            "extend_seq_lens_cpu": news.cpu(),
            "extend_prefix_lens": lens - news,
            "extend_prefix_lens_cpu": (lens - news).cpu(),
            "extend_num_tokens": new * workload.batch_size,
        }
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND,
        batch_size=workload.batch_size,
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        seq_lens_sum=workload.keys * workload.batch_size,
        out_cache_loc=slots[:, -new:].flatten(),
        positions=places.repeat(workload.batch_size),
        **extends,
    )
