"""A workload in pools of its own: scattered pages and random values, the same for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    KVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    Platform,
    ReqToTokenPool,
    Request,
    SpecInput,
    TunedLaunch,
    Workspace,
    torch_dtype,
)
from attnmux.testing.bench.shapes import value_bytes
from attnmux.testing.bench.timing import Run
from attnmux.testing.bench.workload import Workload
from attnmux.testing.setup.case import side_by_side

COLD_BYTES, MAX_LAYERS = 256e6, 32
"""Bytes of K and V in all layers together, and layers: several times an accelerator's cache, so
that no layer finds its K and V there."""

COLD_BYTES_CPU, MAX_LAYERS_CPU = 64e6, 6
"""The same for a CPU, whose steps take longer."""

RELATIVE_REACH = 128
"""Reach of the layers' `relative_bias`: T5's max_distance."""

MODES = {
    "decode": ForwardMode.DECODE,
    "extend": ForwardMode.EXTEND,
    "verify": ForwardMode.TARGET_VERIFY,
}
"""By the phase of a workload."""

DRAWN_ROWS = 1 << 16
"""Slots that are filled at once, so that the random numbers need little memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """A workload's inputs for all backends with one page size and KV dtype."""

    workload: Workload
    request: Request
    batch: ForwardBatch
    layers: tuple[LayerSpec, ...]
    table: ReqToTokenPool
    pool: KVPool
    max_context_len: int
    q: torch.Tensor
    """[T, Hq, D], for MLA [T, Hq, rank]."""
    k: torch.Tensor
    """[T, Hkv, D], for MLA [T, 1, rank]."""
    v: torch.Tensor | None
    """[T, Hkv, Dv]; None for MLA."""
    q_rope: torch.Tensor | None
    """[T, Hq, rope] of MLA."""
    k_rope: torch.Tensor | None
    """[T, 1, rope] of MLA."""
    out: torch.Tensor
    """[T, Hq, Dv]: each layer in turn writes its result here."""
    lse: torch.Tensor | None
    """[T, Hq] float32, where the request asks for it."""

    def context(
        self,
        platform: Platform,
        request: Request | None = None,
        launches: tuple[TunedLaunch, ...] = (),
    ) -> BackendContext:
        """A context for one backend, with its own workspace.

        request: the step's by default. launches: as `BackendContext.launches`.
        """
        return BackendContext(
            request=request or self.request,
            platform=platform,
            device=self.pool.device,
            layers=self.layers,
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            workspace=Workspace(self.pool.device),
            max_batch_size=self.workload.num_requests,
            max_context_len=self.max_context_len,
            launches=launches,
        )

    def calls(self, backend: AttentionBackend) -> list[Run]:
        """Each layer's call as a model makes it: it also stores the new tokens' K and V."""
        given = {"q_rope": self.q_rope, "k_rope": self.k_rope, "out": self.out, "lse": self.lse}
        return [
            partial(backend.forward, self.q, self.k, self.v, layer, self.batch, **given)  # type: ignore[arg-type]  # tensors by name
            for layer in self.layers
        ]

    def reset(self) -> None:
        """Spoil the answer of an earlier run."""
        self.out.fill_(torch.nan)

    def calls_in_pool(self, backend: AttentionBackend) -> list[Run]:
        """Each layer's call over K and V that are in the pool already. The result is new."""
        return [
            partial(backend.forward, self.q, None, None, layer, self.batch, q_rope=self.q_rope)
            for layer in self.layers
        ]

    @property
    def slots(self) -> torch.Tensor:
        """[B, keys] int32, each request's slots; 0 after a shorter request's end."""
        return self.table.req_to_token[self.batch.req_pool_indices, : self.workload.keys]

    @property
    def pages(self) -> torch.Tensor:
        """[B, most pages of a request] int32; 0 after a shorter request's end."""
        page = self.pool.page_size
        # A single column may keep the strides of a row otherwise, which kernels refuse
        return (self.slots[:, ::page] // page).clone(memory_format=torch.contiguous_format)

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, views of [pages, page_size, Hkv, D]; the V of MLA is K's latent
        part."""
        page = self.pool.page_size
        buffers = [self.pool.get_kv_buffer(layer.layer_id) for layer in self.layers]
        return [
            (k.view(-1, page, *k.shape[1:]), v.view(-1, page, *v.shape[1:])) for k, v in buffers
        ]


def make_step(
    workload: Workload,
    request: Request,
    device: torch.device,
    *,
    seed: int = 0,
    num_layers: int | None = None,
    max_context_len: int | None = None,
    topk: int = 0,
) -> Step:
    """The workload for the shapes of a decided request, in which page size and KV dtype are set.

    num_layers: as many as it takes to keep caches cold, by default. max_context_len: what the
    engine allows, the longest request by default. topk: keys that each token picks (kind "nsa").
    Raises PoolExhausted where memory does not suffice.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch_dtype(request.dtype or "")
    layers = _layers(workload, request, device, generator, num_layers)
    num_tokens, first = workload.num_tokens, layers[0]
    rope = first.qk_rope_head_dim
    width = first.qk_head_dim - rope

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    # Before the pool, whose size depends on the page size: the inputs are the same for all sizes
    q = draw(num_tokens, first.tp_q_head_num, width + rope)
    k = draw(num_tokens, first.tp_k_head_num, width)
    v = None if rope else draw(num_tokens, first.tp_v_head_num, first.v_head_dim)
    # The parts of MLA's queries share one row, which saves some kernels a copy
    q, q_rope = (q[..., :width], q[..., width:]) if rope else (q, None)
    k_rope = draw(num_tokens, 1, rope) if rope else None

    page = request.page_size or 1
    num_pages = [-(-length // page) for length in workload.lengths]
    pool = _pool(request, sum(num_pages) * page, layers, device)
    for layer in layers:
        _fill(pool, layer, draw)
    order = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(seed)) + 1
    pages = torch.split(order[:, None] * page + torch.arange(page), num_pages)
    slots = [
        rows.flatten()[:length].to(device)
        for rows, length in zip(pages, workload.lengths, strict=True)
    ]
    longest = max_context_len or workload.keys
    table = ReqToTokenPool(workload.num_requests, longest, device)
    rows = num_tokens, first.tp_q_head_num
    return Step(
        workload=workload,
        request=request,
        batch=_batch(workload, table, slots, topk),
        layers=layers,
        table=table,
        pool=pool,
        max_context_len=longest,
        q=q,
        k=k,
        v=v,
        q_rope=q_rope,
        k_rope=k_rope,
        out=torch.empty((*rows, first.v_head_dim), dtype=dtype, device=device),
        lse=torch.empty(rows, dtype=torch.float32, device=device) if request.lse else None,
    )


def cold_layers(nbytes: int, device: torch.device) -> int:
    """Layers enough to keep caches cold, each of which reads `nbytes`."""
    on_cpu = device.type == "cpu"
    cold, most = (COLD_BYTES_CPU, MAX_LAYERS_CPU) if on_cpu else (COLD_BYTES, MAX_LAYERS)
    return min(max(2, math.ceil(cold / nbytes)), most)


def _fill(pool: KVPool, layer: LayerSpec, draw: Callable[..., torch.Tensor]) -> None:
    """Random K and V in every slot of a layer."""
    buffers = pool.get_kv_buffer(layer.layer_id)
    if pool.get_scale_buffers(layer.layer_id) is None:
        for buffer in buffers[:1] if layer.kind == "mla" else buffers:
            for part in torch.split(buffer, DRAWN_ROWS):
                part.copy_(draw(*part.shape).to(part.dtype))
        return
    widths = layer.qk_head_dim, layer.v_head_dim
    for slots in torch.split(torch.arange(pool.num_slots, device=pool.device), DRAWN_ROWS):
        k, v = (draw(len(slots), layer.tp_k_head_num, width) for width in widths)
        pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)


def _layers(
    workload: Workload,
    request: Request,
    device: torch.device,
    generator: torch.Generator,
    count: int | None,
) -> tuple[LayerSpec, ...]:
    """Layers with every feature that the request asks for."""
    if count is None:
        itemsize = value_bytes(torch_dtype(request.kv_dtype or ""))
        count = cold_layers(workload.stored_bytes(request, itemsize), device)
    rank, rope = request.kv_lora_rank or 0, request.qk_rope_head_dim or 0
    heads, dim = request.num_q_heads or 0, request.head_dim or 0
    given: dict[str, Any] = {
        "tp_q_head_num": heads,
        "tp_k_head_num": request.num_kv_heads,
        "tp_v_head_num": request.num_kv_heads,
        "kind": "mla" if request.latent else request.kind,
        "qk_head_dim": rank + rope if request.latent else dim,
        "v_head_dim": rank if request.latent else request.v_head_dim or dim,
        "scaling": dim**-0.5,
        "logit_cap": request.logit_cap or 0.0,
        "sliding_window_size": -1 if request.sliding_window is None else request.sliding_window,
        "attention_chunk_size": request.attention_chunk or 0,
    }
    if request.sinks:
        given["sinks"] = torch.randn(heads, device=device, generator=generator)
    if request.alibi:
        # The slopes of a model with a power of two heads (arXiv:2108.12409)
        given["alibi_slopes"] = torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)
    if request.relative_bias:
        shape = (heads, RELATIVE_REACH + 1)
        given["relative_bias"] = torch.randn(shape, device=device, generator=generator)
    return tuple(LayerSpec(layer_id=number, **given) for number in range(count))


def _pool(
    request: Request, size: int, layers: tuple[LayerSpec, ...], device: torch.device
) -> KVPool:
    """With `strided_kv`, K and V of a slot's head lie in one row, as in vLLM."""
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
    if request.strided_kv:
        page = given["page_size"]
        return side_by_side(layers, size + page, page, given["dtype"], device)
    return MHATokenToKVPool(**given, num_kv_heads=heads, head_dim=dims[0], v_head_dim=dims[1])


def _batch(
    workload: Workload, table: ReqToTokenPool, slots: list[torch.Tensor], topk: int
) -> ForwardBatch:
    """slots: [length] int64 of each request."""
    count, device = workload.num_requests, slots[0].device
    rows = torch.tensor(table.alloc(count), device=device)
    lens_cpu = torch.tensor(workload.lengths, dtype=torch.int32)
    lens = lens_cpu.to(device)
    table.write(rows, torch.zeros_like(lens), lens, torch.cat(slots))
    new_cpu = torch.tensor(workload.new_lens, dtype=torch.int32)
    new = new_cpu.to(device)
    spans = zip(workload.lengths, workload.new_lens, strict=True)
    positions = torch.cat([torch.arange(length - num, length) for length, num in spans]).to(device)
    mode, cached = MODES[workload.phase], lens_cpu
    if workload.decoding:
        mode = ForwardMode.MIXED
    more: dict[str, Any] = {}
    if mode is not ForwardMode.DECODE:
        more = {
            "extend_seq_lens": new,
            "extend_seq_lens_cpu": new_cpu,
            "extend_prefix_lens": lens - new,
            "extend_prefix_lens_cpu": lens_cpu - new_cpu,
            "extend_num_tokens": workload.num_tokens,
        }
    if mode is ForwardMode.TARGET_VERIFY:
        cached = lens_cpu - new_cpu
        more["spec_info"] = SpecInput(draft_token_num=workload.new)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=count,
        req_pool_indices=rows,
        seq_lens=cached.to(device),
        seq_lens_cpu=cached,
        seq_lens_sum=int(cached.sum()),
        out_cache_loc=torch.cat(
            [each[-num:] for each, num in zip(slots, workload.new_lens, strict=True)]
        ),
        positions=positions,
        topk_indices=_picks(positions, workload.keys, topk) if topk else None,
        **more,
    )


def _picks(positions: torch.Tensor, keys: int, topk: int) -> torch.Tensor:
    """[T, topk] int32: places up to each token's own, as an indexer picks them, in random order.
    Every token has at least `topk` of them."""
    device = positions.device
    generator = torch.Generator(device).manual_seed(topk)
    scores = torch.rand(len(positions), keys, device=device, generator=generator)
    columns = torch.arange(keys, device=device)
    scores.masked_fill_(columns > positions.unsqueeze(1), -1)
    return scores.topk(topk, dim=1).indices.int()
