"""The steps that the tuner times: a request's shapes over pages in random order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    KVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
    SpecInput,
    Workspace,
    torch_dtype,
)

if TYPE_CHECKING:
    from attnmux.core import Request
    from attnmux.core.plugin import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests that are all alike, with `keys` keys each; the last `new` of these are queries."""

    batch_size: int
    keys: int
    new: int = 1
    verifies: bool = False
    """Whether the queries are drafts that are verified."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setup:
    """A load, and a pool of one layer that holds its keys."""

    context: BackendContext
    batch: ForwardBatch
    q: torch.Tensor
    q_rope: torch.Tensor | None


def make_setup(job: Job, load: Load) -> Setup:
    """Raises InvalidInput for a request without dims or heads."""
    request, device = job.request, torch.device(job.device)
    layer, page = layer_of(request), request.page_size or 1
    dtype = torch_dtype(request.dtype or "bfloat16")
    size = load.batch_size * -(-load.keys // page) * page
    table = ReqToTokenPool(load.batch_size, load.keys, device)
    context = BackendContext(
        request=request,
        platform=job.platform,
        device=device,
        layers=(layer,),
        req_to_token_pool=table,
        token_to_kv_pool=_pool(layer, request, size, device),
        workspace=Workspace(device),
        max_batch_size=load.batch_size,
        max_context_len=load.keys,
    )
    slots = torch.arange(page, page + size, device=device).view(-1, page)
    slots = slots[torch.randperm(len(slots), device=device)].view(load.batch_size, -1)
    batch = _batch(load, table, slots[:, : load.keys])
    rope = layer.qk_rope_head_dim
    shape = batch.num_tokens, layer.tp_q_head_num
    q = torch.randn(*shape, layer.qk_head_dim - rope, device=device).to(dtype)
    q_rope = torch.randn(*shape, rope, device=device).to(dtype) if rope else None
    return Setup(context=context, batch=batch, q=q, q_rope=q_rope)


def layer_of(request: Request) -> LayerSpec:
    """A plain layer of the request's dims and heads. Raises InvalidInput if they are missing."""
    kv_heads = 1 if request.latent else request.num_kv_heads
    width = request.kv_lora_rank if request.latent else request.head_dim
    rope = (request.qk_rope_head_dim or 0) if request.latent else 0
    if not (request.num_q_heads and kv_heads and width):
        raise InvalidInput(
            "request",
            got=f"num_q_heads {request.num_q_heads}, num_kv_heads {kv_heads}, dim {width}",
            expected="heads and dims to tune for: --model, or num_q_heads=32,num_kv_heads=8,"
            "head_dim=128",
        )
    return LayerSpec(
        layer_id=0,
        tp_q_head_num=request.num_q_heads,
        tp_k_head_num=kv_heads,
        tp_v_head_num=kv_heads,
        qk_head_dim=width + rope,
        v_head_dim=width if request.latent else request.v_head_dim or width,
        scaling=(request.head_dim or width) ** -0.5,
        kind="mla" if request.latent else "mha",
    )


def _pool(layer: LayerSpec, request: Request, size: int, device: torch.device) -> KVPool:
    dtype = torch_dtype(request.kv_dtype or request.dtype or "bfloat16")
    page_size = request.page_size or 1
    pool: KVPool
    if layer.kind == "mla":
        pool = MLATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=dtype,
            layer_ids=[0],
            kv_lora_rank=layer.v_head_dim,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            device=device,
        )
    else:
        pool = MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=dtype,
            layer_ids=[0],
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            device=device,
        )
    for buffer in pool.get_kv_buffer(0)[: 1 if layer.kind == "mla" else 2]:
        buffer.copy_(torch.randn(buffer.shape, dtype=torch.bfloat16, device=device))
    return pool


def _batch(load: Load, table: ReqToTokenPool, slots: torch.Tensor) -> ForwardBatch:
    """slots: [B, keys] int64, of each request's tokens."""
    device, count = table.device, load.batch_size
    rows = torch.tensor(table.alloc(count), device=device)
    lens_cpu = torch.full((count,), load.keys, dtype=torch.int32)
    new_cpu = torch.full_like(lens_cpu, load.new)
    lens, new = lens_cpu.to(device), new_cpu.to(device)
    table.write(rows, torch.zeros_like(lens), lens, slots.flatten())
    places = torch.arange(load.keys - load.new, load.keys, device=device)
    mode, cached = ForwardMode.DECODE, lens_cpu
    more: dict[str, Any] = {}
    if load.new > 1:
        mode = ForwardMode.EXTEND
        more = {
            "extend_seq_lens": new,
            "extend_seq_lens_cpu": new_cpu,
            "extend_prefix_lens": lens - new,
            "extend_prefix_lens_cpu": lens_cpu - new_cpu,
            "extend_num_tokens": count * load.new,
        }
    if load.verifies:
        mode, cached = ForwardMode.TARGET_VERIFY, lens_cpu - new_cpu
        more["spec_info"] = SpecInput(draft_token_num=load.new)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=count,
        req_pool_indices=rows,
        seq_lens=cached.to(device),
        seq_lens_cpu=cached,
        out_cache_loc=slots[:, -load.new :].flatten().contiguous(),
        positions=places.repeat(count),
        **more,
    )
