"""The steps that `triton_gpu.py` measures, in pools of their own and on scattered pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.setups import DIM, RANK, ROPE, make_batch, make_layer, paged
from benchmarks.triton_workloads import Workload

from attnmux.core.batch import ForwardBatch
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.context import BackendContext
from attnmux.core.dtypes import torch_dtype
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
            (paged(keys, page), paged(values, page))
            for keys, values in map(pool.get_kv_buffer, pool.layer_ids)
        ]


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
        layers=tuple(
            make_layer(
                layer_id,
                is_latent=workload.is_latent,
                q_heads=workload.q_heads,
                kv_heads=workload.kv_heads,
            )
            for layer_id in range(num_layers)
        ),
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
        batch=make_batch(context, tokens, workload.new),
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
