"""The steps that `triton_gpu.py` measures, in pools of their own and on scattered pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.triton_workloads import DIM, RANK, ROPE, Workload

from attnmux.core.backend import BackendContext
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.request import Request
from attnmux.core.dtypes import torch_dtype
from attnmux.core.kv import (
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    PagedAllocator,
    ReqToTokenPool,
)
from attnmux.core.layer import LayerSpec
from attnmux.core.workspace import Workspace

MLA_SCALING = 192**-0.5
"""Of the expanded heads, 128 and 64 dims, of DeepSeek-V3."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setup:
    """A workload in pools of its own."""

    workload: Workload
    context: BackendContext
    batch: ForwardBatch
    q: torch.Tensor
    """[T, Hq, D], in MLA the latent part."""
    q_rope: torch.Tensor | None
    pages: torch.Tensor
    """[B, most pages of a request] int32; what a shorter request leaves is 0."""
    page_counts: torch.Tensor
    """[B] int32 on the host."""

    @property
    def scaling(self) -> float:
        return self.context.layers[0].scaling

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, [pages, page, Hkv, D]; in MLA V is a view of K."""
        pool, page = self.context.token_to_kv_pool, self.workload.page_size
        return [
            (_paged(keys, page), _paged(values, page))
            for keys, values in map(pool.get_kv_buffer, pool.layer_ids)
        ]


def _paged(buffer: torch.Tensor, page: int) -> torch.Tensor:
    return buffer.view(-1, page, *buffer.shape[1:])


def make_setup(workload: Workload, platform: Platform, device: torch.device) -> Setup:
    """Random K, V and q, and requests on pages in random order."""
    lens, page = workload.lens, workload.page_size
    counts = torch.tensor([-(-length // page) for length in lens], dtype=torch.int32)
    num_pages, num_layers = int(counts.sum()), workload.layers(device)
    pool = _pool(workload, num_pages * page, num_layers, device)
    context = BackendContext(
        request=_request(workload),
        platform=platform,
        device=device,
        layers=tuple(_layer(workload, layer_id) for layer_id in range(num_layers)),
        req_to_token_pool=ReqToTokenPool(len(lens), max(lens), device),
        token_to_kv_pool=pool,
        workspace=Workspace(device),
        max_batch_size=len(lens),
        max_context_len=max(lens),
    )
    slots = PagedAllocator(num_pages * page, page, device).alloc(num_pages * page).view(-1, page)
    slots = slots[torch.randperm(num_pages, device=device)]
    of_requests = torch.split(slots, counts.tolist())
    pages = torch.nn.utils.rnn.pad_sequence(
        [(rows[:, 0] // page).int() for rows in of_requests], batch_first=True
    )
    tokens = [rows.flatten()[:length] for rows, length in zip(of_requests, lens, strict=True)]
    dtype, num_tokens = torch_dtype(workload.dtype), len(lens) * workload.new
    width = RANK if workload.is_latent else DIM
    shape = num_tokens, workload.q_heads
    q_rope = torch.randn(*shape, ROPE, device=device).to(dtype) if workload.is_latent else None
    return Setup(
        workload=workload,
        context=context,
        batch=_batch(workload, context, tokens),
        q=torch.randn(*shape, width, device=device).to(dtype),
        q_rope=q_rope,
        pages=pages.contiguous(),
        page_counts=counts,
    )


def _pool(workload: Workload, size: int, num_layers: int, device: torch.device) -> KVPool:
    dtype = torch_dtype(workload.kv_dtype)
    given: dict[str, Any] = {
        "size": size,
        "page_size": workload.page_size,
        "dtype": dtype,
        "layer_ids": range(num_layers),
        "device": device,
    }
    pool: KVPool
    if workload.is_latent:
        pool = MLATokenToKVPool(**given, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
        buffers = [pool.get_key_buffer(layer_id) for layer_id in pool.layer_ids]
    else:
        pool = MHATokenToKVPool(**given, num_kv_heads=workload.kv_heads, head_dim=DIM)
        buffers = [each for layer_id in pool.layer_ids for each in pool.get_kv_buffer(layer_id)]
    drawn = torch_dtype(workload.dtype)
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape, dtype=drawn, device=device).to(dtype))
    return pool


def _request(workload: Workload) -> Request:
    given: dict[str, Any] = {
        "num_q_heads": workload.q_heads,
        "num_kv_heads": workload.kv_heads,
        "head_dim": DIM,
        "dtype": workload.dtype,
        "kv_dtype": workload.kv_dtype,
        "page_size": workload.page_size,
    }
    if workload.is_latent:
        given |= {"kind": "mla", "head_dim": 192, "v_head_dim": 128}
        given |= {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
    return Request(**given)


def _layer(workload: Workload, layer_id: int) -> LayerSpec:
    return LayerSpec(
        layer_id=layer_id,
        kind="mla" if workload.is_latent else "mha",
        tp_q_head_num=workload.q_heads,
        tp_k_head_num=workload.kv_heads,
        tp_v_head_num=workload.kv_heads,
        qk_head_dim=RANK + ROPE if workload.is_latent else DIM,
        v_head_dim=RANK if workload.is_latent else DIM,
        scaling=MLA_SCALING if workload.is_latent else DIM**-0.5,
    )


def _batch(workload: Workload, context: BackendContext, tokens: list[torch.Tensor]) -> ForwardBatch:
    """tokens: the slots of each request's, [keys] int64."""
    table, new, device = context.req_to_token_pool, workload.new, context.device
    rows = torch.tensor(table.alloc(len(tokens)), device=device)
    lens = torch.tensor(workload.lens, dtype=torch.int32, device=device)
    table.write(rows, torch.zeros_like(lens), lens, torch.cat(tokens))
    news = torch.full_like(lens, new)
    extends: dict[str, Any] = {}
    if new > 1:
        extends = {
            "extend_seq_lens": news,
            "extend_seq_lens_cpu": news.cpu(),
            "extend_prefix_lens": lens - news,
            "extend_prefix_lens_cpu": (lens - news).cpu(),
            "extend_num_tokens": new * len(tokens),
        }
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND,
        batch_size=len(tokens),
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        seq_lens_sum=sum(workload.lens),
        out_cache_loc=torch.cat([slots[-new:] for slots in tokens]),
        positions=((lens - news)[:, None] + torch.arange(new, device=device)).flatten().long(),
        **extends,
    )
