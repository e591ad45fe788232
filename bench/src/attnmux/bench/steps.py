"""A workload in pools of its own: scattered pages, random values, the same for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnmux.bench.workload import Workload
from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.launches import TunedLaunch
from attnmux.core.context import BackendContext
from attnmux.core.dtypes import torch_dtype
from attnmux.core.kv import KVPool, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from attnmux.core.layer import LayerSpec
from attnmux.core.workspace import Workspace

COLD_BYTES, MOST_LAYERS = 256e6, 32
"""KV of all layers together: several times what an accelerator's cache holds, so that a layer finds
none of its own there."""

COLD_BYTES_CPU, MOST_LAYERS_CPU = 64e6, 6
"""The same for a CPU, whose steps take long."""

DRAWN_ROWS = 1 << 16
"""Slots that are filled at once, so that random numbers take no second pool's memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """What every backend of one page size and KV dtype is given."""

    workload: Workload
    batch: ForwardBatch
    layers: tuple[LayerSpec, ...]
    table: ReqToTokenPool
    pool: KVPool
    q: torch.Tensor
    """[T, Hq, D], in MLA the latent part."""
    k: torch.Tensor
    v: torch.Tensor | None
    q_rope: torch.Tensor | None
    k_rope: torch.Tensor | None
    out: torch.Tensor
    """[T, Hq, Dv]: where each layer in turn writes its result."""
    lse: torch.Tensor | None

    def context(
        self, request: Request, platform: Platform, launches: tuple[TunedLaunch, ...] = ()
    ) -> BackendContext:
        """For one backend, with a workspace of its own. launches: as in the context."""
        return BackendContext(
            request=request,
            platform=platform,
            device=self.pool.device,
            layers=self.layers,
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            workspace=Workspace(self.pool.device),
            max_batch_size=self.workload.batch_size,
            max_context_len=self.workload.keys,
            launches=launches,
        )

    def calls(self, backend: AttentionBackend) -> list[Callable[[], object]]:
        """Each layer's call as a model makes it: the new tokens' K and V are written too."""
        given = {"q_rope": self.q_rope, "k_rope": self.k_rope, "out": self.out, "lse": self.lse}
        return [
            partial(backend.forward, self.q, self.k, self.v, layer, self.batch, **given)  # type: ignore[arg-type]  # tensors by name
            for layer in self.layers
        ]


def make_step(workload: Workload, request: Request, device: torch.device, *, seed: int = 0) -> Step:
    """The workload for the shapes of a decided request: page size and KV dtype are set.

    Raises PoolExhausted where memory does not suffice.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch_dtype(request.dtype or "")
    layers = _layers(workload, request, device, generator)
    num_tokens, first = workload.batch_size * workload.new, layers[0]
    rope = first.qk_rope_head_dim
    width = first.qk_head_dim - rope

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    # Before the pool, whose size goes by the pages: the inputs are the same whatever these are
    q = draw(num_tokens, first.tp_q_head_num, width + rope)
    k = draw(num_tokens, first.tp_k_head_num, width)
    v = None if rope else draw(num_tokens, first.tp_v_head_num, first.v_head_dim)
    # MLA's are parts of one row, which spares some kernels a copy.
    q, q_rope = (q[..., :width], q[..., width:]) if rope else (q, None)
    k_rope = draw(num_tokens, 1, rope) if rope else None

    page = request.page_size or 1
    num_pages = workload.batch_size * -(-workload.keys // page)
    pool = _pool(request, num_pages * page, layers, device)
    for layer in layers:
        buffers = pool.get_kv_buffer(layer.layer_id)
        for buffer in buffers[:1] if request.latent else buffers:
            for part in torch.split(buffer, DRAWN_ROWS):
                part.copy_(draw(*part.shape).to(part.dtype))
    table = ReqToTokenPool(workload.batch_size, workload.keys, device)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)) + 1
    slots = order[:, None] * page + torch.arange(page)
    slots = slots.view(workload.batch_size, -1)[:, : workload.keys].to(device)
    rows = num_tokens, first.tp_q_head_num
    return Step(
        workload=workload,
        batch=_batch(workload, table, slots),
        layers=layers,
        table=table,
        pool=pool,
        q=q,
        k=k,
        v=v,
        q_rope=q_rope,
        k_rope=k_rope,
        out=torch.empty((*rows, first.v_head_dim), dtype=dtype, device=device),
        lse=torch.empty(rows, dtype=torch.float32, device=device) if request.lse else None,
    )


def _layers(
    workload: Workload, request: Request, device: torch.device, generator: torch.Generator
) -> tuple[LayerSpec, ...]:
    """As many as a cold cache needs, each with every feature that the request asks for."""
    itemsize = torch_dtype(request.kv_dtype or "").itemsize
    on_cpu = device.type == "cpu"
    cold, most = (COLD_BYTES_CPU, MOST_LAYERS_CPU) if on_cpu else (COLD_BYTES, MOST_LAYERS)
    count = math.ceil(cold / workload.stored_bytes(request, itemsize))
    rank, rope = request.kv_lora_rank or 0, request.qk_rope_head_dim or 0
    heads, dim = request.num_q_heads or 0, request.head_dim or 0
    given: dict[str, Any] = {
        "tp_q_head_num": heads,
        "tp_k_head_num": request.num_kv_heads,
        "tp_v_head_num": request.num_kv_heads,
        "kind": request.kind,
        "qk_head_dim": rank + rope if request.latent else dim,
        "v_head_dim": rank if request.latent else request.v_head_dim or dim,
        "scaling": dim**-0.5,
        "logit_cap": request.logit_cap or 0.0,
        "sliding_window_size": -1 if request.sliding_window is None else request.sliding_window,
        "attention_chunk_size": request.attention_chunk or 0,
    }
    if request.sinks:
        given["sinks"] = torch.randn(heads, device=device, generator=generator)
    numbers = range(min(max(2, count), most))
    return tuple(LayerSpec(layer_id=number, **given) for number in numbers)


def _pool(
    request: Request, size: int, layers: tuple[LayerSpec, ...], device: torch.device
) -> KVPool:
    first = layers[0]
    given: dict[str, Any] = {
        "size": size,
        "page_size": request.page_size,
        "dtype": torch_dtype(request.kv_dtype or ""),
        "layer_ids": [layer.layer_id for layer in layers],
        "device": device,
    }
    if request.latent:
        rope = first.qk_rope_head_dim
        return MLATokenToKVPool(**given, kv_lora_rank=first.v_head_dim, qk_rope_head_dim=rope)
    heads, dims = first.tp_k_head_num, (first.qk_head_dim, first.v_head_dim)
    return MHATokenToKVPool(**given, num_kv_heads=heads, head_dim=dims[0], v_head_dim=dims[1])


def _batch(workload: Workload, table: ReqToTokenPool, slots: torch.Tensor) -> ForwardBatch:
    """slots: [B, keys] int64, of each request's tokens."""
    count, new, device = workload.batch_size, workload.new, slots.device
    rows = torch.tensor(table.alloc(count), device=device)
    lens = torch.full((count,), workload.keys, dtype=torch.int32, device=device)
    table.write(rows, torch.zeros_like(lens), lens, slots.flatten())
    news = torch.full_like(lens, new)
    places = torch.arange(workload.prefix, workload.keys, device=device)
    extends: dict[str, Any] = {}
    if workload.phase == "extend":
        extends = {
            "extend_seq_lens": news,
            "extend_seq_lens_cpu": news.cpu(),
            "extend_prefix_lens": lens - news,
            "extend_prefix_lens_cpu": (lens - news).cpu(),
            "extend_num_tokens": new * count,
        }
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND if extends else ForwardMode.DECODE,
        batch_size=count,
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        seq_lens_sum=workload.keys * count,
        out_cache_loc=slots[:, workload.prefix :].flatten(),
        positions=places.repeat(count),
        **extends,
    )
