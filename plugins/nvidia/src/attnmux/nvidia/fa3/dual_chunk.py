"""Dual chunk attention: a call of FlashAttention 3 for each of a token's three queries, merged.

Q is [T, Hq, 3 * D]. A token meets the keys of its own chunk, causally, with the first D, those of
the chunk before with the second, and all before that with the third. The model rotates K and the
queries, and scales them by their places.

LSE comes as [B, Hq, Tq] or [Hq, T] and is a natural logarithm; causality counts from the end of the
keys, where a piece's queries end too; a piece without keys has output 0 and LSE -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import GraphUnsupported, InvalidInput, torch_dtype
from attnmux.core.plugin import KernelLibrary, Keys, LibraryBackend, Pieces, Rows, rehearse
from attnmux.nvidia.fa3.dual_chunk_regions import (
    ChunkGroup,
    Regions,
    fixed_regions,
    regions_in_call,
    regions_in_pool,
)
from attnmux.nvidia.fa3.layers import FA3Kernels
from attnmux.nvidia.fa3.providers import providers_of

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

PLAIN = {
    "sliding_window_size": -1,
    "attention_chunk_size": 0,
    "logit_cap": 0.0,
    "sinks": None,
    "is_causal": True,
    "is_cross_attention": False,
}
"""The value of each feature without it: a layer with dual chunks has no other feature."""

Buffers = dict[ChunkGroup, tuple[Keys, ...]]
"""The keys of each query, fixed tensors that graphs replay with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DualChunkKernels:
    """Functions of FlashAttention 3."""

    flash_attn_with_kvcache: Callable[..., Any]
    """Attention over a paged cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DualChunkLayer:
    """Where the keys of a layer are; None for a layer that the pool does not store."""

    group: ChunkGroup | None = None
    kv: tuple[torch.Tensor, torch.Tensor] | None = None
    """[pages, page, Hkv, D], the pool's memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DualChunkStep:
    """A step. `fill_step` fills its dictionaries."""

    longest: int
    """The most keys of a request."""
    buffers: Buffers
    """Empty for an eager step."""
    in_pool: dict[ChunkGroup, Regions] = field(default_factory=dict)
    in_call: dict[int, Regions] = field(default_factory=dict)
    """By the chunks' length, made when the first such layer is called."""


class DualChunkBackend(LibraryBackend[DualChunkKernels, DualChunkLayer, DualChunkStep, Buffers]):
    """Qwen2.5-1M's attention on Hopper and Ampere GPUs, over all keys."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: DualChunkKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options, kernels)
        groups = (layer.group for layer in self._layers.values() if layer.group is not None)
        self._groups = tuple(dict.fromkeys(groups))

    def prepare_layer(self, layer: LayerSpec) -> DualChunkLayer:
        _check_layer(layer)
        pool, dtype = self.context.token_to_kv_pool, self.context.request.dtype
        if layer.layer_id not in pool.layer_ids:
            return DualChunkLayer()
        if dtype is not None and pool.dtype != torch_dtype(dtype):
            raise InvalidInput(
                "token_to_kv_pool", got=pool.dtype, expected=f"{dtype}, as the queries are"
            )
        group = ChunkGroup.of(layer, self.context)
        kv = self.context.kv_pages(layer, group.keys.page_size)
        return DualChunkLayer(group=group, kv=kv)

    def plan_step(self, batch: ForwardBatch, buffers: Buffers | None) -> DualChunkStep:
        """Without host mirrors, a request counts as long as the longest context."""
        _check_step(batch)
        if buffers is not None and not batch.forward_mode.is_decode():
            raise GraphUnsupported(
                f"{batch.forward_mode.name} steps cannot be captured in a graph: only decode can"
            )
        longest = self.context.max_context_len
        if batch.seq_lens_cpu is not None and buffers is None:
            longest = max(int(batch.seq_lens_cpu.max()), 1) if batch.batch_size else 1
        return DualChunkStep(longest=longest, buffers=buffers or {})

    def fill_step(self, step: DualChunkStep, batch: ForwardBatch) -> None:
        step.in_call.clear()
        pieces = {
            chunk_len: Pieces.of(batch, chunk_len)
            for chunk_len in {group.chunk_len for group in self._groups}
        }
        for group in self._groups:
            step.in_pool[group] = regions_in_pool(
                pieces[group.chunk_len],
                group,
                self.context,
                longest=step.longest,
                fixed=step.buffers.get(group, ()),
            )

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> Buffers:
        return {group: fixed_regions(group, max_bs, self.context) for group in self._groups}

    def attend(
        self,
        call: AttentionCall,
        layer: DualChunkLayer,
        step: DualChunkStep,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        k, v = call.k, call.v
        if k is None or v is None or call.save_kv_cache or batch.forward_mode.is_decode():
            if layer.group is None or layer.kv is None:
                raise call.layer.not_in_pool()
            return self._over(call, *layer.kv, step.in_pool[layer.group])
        call.check_keys_dtype(k, v)
        chunk_len = call.layer.dual_chunk_len
        regions = step.in_call.get(chunk_len)
        if regions is None:
            regions = step.in_call[chunk_len] = regions_in_call(batch, chunk_len)
        return self._over(call, Rows.aligned(k).unsqueeze(1), Rows.aligned(v).unsqueeze(1), regions)

    def _over(
        self, call: AttentionCall, k_cache: torch.Tensor, v_cache: torch.Tensor, regions: Regions
    ) -> torch.Tensor:
        """Over caches [pages, page, Hkv, D]."""
        alone = len(regions.keys) == 1
        out = call.out if alone and call.out is not None and Rows.is_aligned(call.out) else None
        bounds, q, dim = regions.query_bounds, Rows.aligned(call.q), call.layer.qk_head_dim
        arguments: dict[str, Any] = {"softmax_scale": call.layer.scaling, "out": out}
        if bounds is not None:
            arguments |= {"cu_seqlens_q": bounds, "max_seqlen_q": q.shape[0]}
        else:
            q = q.unsqueeze(1)
            arguments["out"] = None if out is None else out.unsqueeze(1)
        outs, lses = [], []
        for number, keys in enumerate(regions.keys):
            result, lse, *_ = self.kernels.flash_attn_with_kvcache(
                q[..., number * dim : (number + 1) * dim],
                k_cache,
                v_cache,
                cache_seqlens=keys.lens,
                page_table=keys.page_table,
                causal=number == 0,
                return_softmax_lse=True,
                **arguments,
            )
            outs.append(result if bounds is not None else result.squeeze(1))
            lses.append(lse.t() if bounds is not None else lse.squeeze(-1))
        merged, merged_lse = (outs[0], lses[0]) if alone else merge(outs, lses)
        if call.lse is not None:
            call.lse.copy_(merged_lse)
        if out is not None:
            return out
        return merged.to(call.q.dtype) if call.out is None else call.out.copy_(merged)


def merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over several sets of keys as attention over all of them.

    Each output weighs as much as its keys' share of the softmax's denominator.

    outs: [T, H, D] of each set. lses: [T, H] float32, natural logarithms, -inf without keys.
    Returns out [T, H, D] and lse [T, H], float32; a row without any keys has out 0 and lse -inf.
    """
    of_sets = torch.stack(tuple(lses))
    lse = of_sets.logsumexp(0)
    # exp(-inf - -inf) is NaN; a row without keys has weights 0.
    weights = (of_sets - lse).exp_().masked_fill_(lse.isneginf(), 0).unsqueeze(-1)
    out = weights[0] * outs[0]
    for weight, of_set in zip(weights[1:], outs[1:], strict=True):
        out.addcmul_(weight, of_set.float())
    return out, lse


def _check_layer(layer: LayerSpec) -> None:
    name = f"layer {layer.layer_id}"
    if layer.kind != "dual_chunk":
        raise InvalidInput(name, got=layer.kind, expected="dual_chunk: three queries a token")
    for feature, plain in PLAIN.items():
        value = getattr(layer, feature)
        if value is not plain and value != plain:
            got = "a tensor" if isinstance(value, torch.Tensor) else value
            raise InvalidInput(name, got=f"{feature} {got}", expected=str(plain))
    if layer.v_head_dim != layer.qk_head_dim:
        raise InvalidInput(
            name, got=f"v_head_dim {layer.v_head_dim}", expected=f"K's {layer.qk_head_dim}"
        )


def _check_step(batch: ForwardBatch) -> None:
    mode = batch.forward_mode
    if mode.is_target_verify() or mode.is_draft_extend() or batch.spec_info is not None:
        raise InvalidInput("forward_mode", got=mode.name, expected="EXTEND, MIXED or DECODE")
    if batch.multi_item is not None:
        raise InvalidInput("multi_item", got="many items", expected="None")
    if batch.encoder_lens is not None:
        raise InvalidInput("encoder_lens", got="an encoder's lengths", expected="None")
    if mode.is_decode():
        batch.queries_each()


def of_fa3(library: FA3Kernels) -> DualChunkKernels:
    """A build's kernels."""
    return DualChunkKernels(flash_attn_with_kvcache=library.flash_attn_with_kvcache)


make = KernelLibrary(
    address="nvidia/dual_chunk_flash_attn",
    backend=DualChunkBackend,
    providers=providers_of(of_fa3),
    trial=rehearse,
)
