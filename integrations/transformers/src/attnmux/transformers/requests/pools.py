"""The KV pool of a model: layout, size and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core import (
    Decision,
    JoinedKVPool,
    KVPool,
    LayerSpec,
    LinearLayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    torch_dtype,
)
from attnmux.parts import LinearStatePool
from attnmux.transformers.requests.prefixes import (
    WindowPrefixTree,
    WindowSpan,
    WindowStatePrefixTree,
)
from attnmux.transformers.requests.shapes import STORED, by_shape
from attnmux.transformers.requests.slots import (
    PagedAllocator,
    SWAAllocator,
    swa_tokens_in_budget,
    tokens_in_budget,
)

WINDOW_STEP_TOKENS = 2048
"""Prompt tokens of a step for which a window pool has room in addition to the requests' windows."""

WINDOW_SHARE = 16
"""A window pool has room for this part of the full pool's tokens in addition to the requests'
windows: for longer steps, and for windows at the ends of cached prefixes."""

SLOT_MAP_BYTES = 12
"""Bytes that a window pool's map takes for each token of the full pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSizes:
    """Tokens that the KV memory of a model holds, in whole pages."""

    full: int
    """Tokens of all requests together."""
    swa: int | None = None
    """Tokens of `full` in layers with windows or chunks; None if one pool holds all layers."""
    one_pool: int
    """Tokens that one pool for all layers would hold in the same memory."""

    @property
    def gain(self) -> float:
        """How many times as many tokens as in one pool."""
        return self.full / self.one_pool


def span_of(layers: Sequence[LayerSpec]) -> WindowSpan | None:
    """The earlier keys that the layers with windows or chunks need; None without such layers."""
    windowed = [layer for layer in layers if _is_windowed(layer)]
    if not windowed:
        return None
    chunks = {layer.attention_chunk_size for layer in windowed} - {0}
    return WindowSpan(
        sliding_window_size=max(layer.sliding_window_size for layer in windowed),
        attention_chunk_sizes=tuple(sorted(chunks)),
    )


def _is_windowed(layer: LayerSpec) -> bool:
    return layer.sliding_window_size >= 0 or layer.attention_chunk_size > 0


def pool_sizes(
    layers: Sequence[LayerSpec],
    decision: Decision,
    *,
    max_tokens: int | None,
    nbytes: int | None,
    max_batch_size: int,
    window_step_tokens: int | None,
    more_bytes: tuple[int, int] = (0, 0),
) -> PoolSizes:
    """Sizes of the pools for at most `max_tokens` tokens in at most `nbytes` bytes; one of the two
    may be None.

    The window pool holds the windows of `max_batch_size` requests, and in addition
    `window_step_tokens`, or `WINDOW_SHARE` of the full pool if that is more. There is none if
    `window_step_tokens` is None, or if it would be no smaller than the full pool.
    more_bytes: bytes of a token in addition to K and V, in two parts. The second part is kept as
    long as K and V of layers with windows.
    Raises InvalidInput for layers that one pool cannot hold, and PoolExhausted for too few bytes.
    """
    page_size = decision.page_size
    token_bytes = bytes_per_token(layers, decision) + sum(more_bytes)
    limits = [] if max_tokens is None else [max_tokens]
    bounds = limits + ([] if nbytes is None else [tokens_in_budget(nbytes, token_bytes, page_size)])
    sizes = PoolSizes(full=min(bounds), one_pool=min(bounds))
    span = span_of(layers)
    if span is None or window_step_tokens is None or sizes.full <= page_size:
        return sizes
    window_tokens, step_tokens = max_batch_size * span.tokens_each(page_size), window_step_tokens

    def swa_tokens(full: int) -> int:
        tokens = window_tokens + max(full // WINDOW_SHARE, step_tokens)
        return min(-(-tokens // page_size) * page_size, full)

    windowed = [layer for layer in layers if _is_windowed(layer)]
    swa_bytes = bytes_per_token(windowed, decision) + more_bytes[1]
    full_bytes = token_bytes - swa_bytes + SLOT_MAP_BYTES
    if nbytes is not None:
        fitting = swa_tokens_in_budget(
            nbytes, full_bytes, swa_bytes, page_size, swa_tokens=swa_tokens
        )
        limits.append(fitting.full)
    full = min(limits)
    swa, one_pool = swa_tokens(full), sizes.one_pool
    if full == max_tokens:
        taken = (full + page_size) * full_bytes + (swa + page_size) * swa_bytes
        one_pool = tokens_in_budget(taken, token_bytes, page_size)
    if swa >= full or one_pool >= full:
        return sizes
    return PoolSizes(full=full, swa=swa, one_pool=one_pool)


def make_states(
    linear: Sequence[LinearLayerSpec],
    decision: Decision,
    max_batch_size: int,
    kept_states: int,
    device: torch.device,
) -> LinearStatePool | None:
    """The states of a model's linear layers, for so many requests, and those that are kept; None
    without such layers. Each request has room for those after the draft tokens of a step.

    Raises PoolExhausted when memory does not suffice.
    """
    if not linear:
        return None
    dtype = torch_dtype(decision.request.dtype or decision.kv_dtype)
    return LinearStatePool(
        size=max_batch_size,
        layers=linear,
        conv_dtype=dtype,
        device=device,
        kept_size=kept_states,
        draft_tokens=decision.request.spec_draft_tokens or 0,
    )


def make_pools(
    layers: Sequence[LayerSpec],
    decision: Decision,
    sizes: PoolSizes,
    *,
    device: torch.device,
    states: LinearStatePool | None = None,
) -> tuple[KVPool, PagedAllocator, WindowPrefixTree | None]:
    """The pools of these sizes, their allocator, and the prefix tree that window pools need.

    The tree is a `WindowStatePrefixTree` if states are kept. Raises as `make_pool` does.
    """
    span = span_of(layers)
    if sizes.swa is None or span is None:
        pool = make_pool(layers, decision, size=sizes.full, device=device)
        return pool, PagedAllocator(sizes.full, decision.page_size, device), None
    groups: list[KVPool] = []
    for size, windowed in ((sizes.full, False), (sizes.swa, True)):
        own = [layer for layer in layers if _is_windowed(layer) == windowed]
        if own:
            groups.append(make_pool(own, decision, size=size, device=device))
        else:  # a window pool holds all layers, and the full one counts their tokens
            groups.append(_pool_like(layers[0], [], decision, size=size, device=device))
    swa_pool = SWAKVPool(full=groups[0], swa=groups[1])
    allocator = SWAAllocator(swa_pool)
    if states is None or not states.kept_size:
        return swa_pool, allocator, WindowPrefixTree(allocator, span)
    tree = WindowStatePrefixTree(allocator, span, states)
    return swa_pool, allocator, tree


def make_pool(
    layers: Sequence[LayerSpec], decision: Decision, *, size: int, device: torch.device
) -> KVPool:
    """A pool for `size` tokens, in whole pages and the KV dtype of the decision.

    It is an MLA pool for latent layers, else one of K and V; if heads, dims or KV dtype differ,
    it joins a pool for each. Every layer has a buffer of `size` tokens, also in an encoder-decoder
    model, where a layer uses only one kind of token.
    Raises InvalidInput for layers that one pool cannot hold, and PoolExhausted when the memory
    does not suffice.
    """
    pools = [
        _pool_like(
            alike[0], [layer.layer_id for layer in alike], decision, size=size, device=device
        )
        for alike in by_shape(layers, *STORED)
    ]
    return pools[0] if len(pools) == 1 else JoinedKVPool(pools)


def _pool_like(
    first: LayerSpec,
    layer_ids: Sequence[int],
    decision: Decision,
    *,
    size: int,
    device: torch.device,
) -> KVPool:
    """A pool for layers of the shape and the KV dtype of `first`."""
    dtype = torch_dtype(first.kv_dtype or decision.kv_dtype)
    if first.kind == "mla":
        return MLATokenToKVPool(
            size=size,
            page_size=decision.page_size,
            dtype=dtype,
            layer_ids=layer_ids,
            kv_lora_rank=first.v_head_dim,
            qk_rope_head_dim=first.qk_rope_head_dim,
            device=device,
        )
    return MHATokenToKVPool(
        size=size,
        page_size=decision.page_size,
        dtype=dtype,
        layer_ids=layer_ids,
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        v_head_dim=first.v_head_dim,
        device=device,
    )


def bytes_per_token(layers: Sequence[LayerSpec], decision: Decision) -> int:
    """Bytes that one token takes in all layers of `make_pool`'s pool.

    Raises InvalidInput for layers that one pool cannot hold.
    """
    return sum(_shape_bytes(alike, decision) for alike in by_shape(layers, *STORED))


def _shape_bytes(layers: Sequence[LayerSpec], decision: Decision) -> int:
    """Bytes that one token takes in layers of one shape."""
    first = layers[0]
    dtype = torch_dtype(first.kv_dtype or decision.kv_dtype)
    if first.kind == "mla":
        return MLATokenToKVPool.bytes_per_token(
            dtype=dtype,
            num_layers=len(layers),
            kv_lora_rank=first.v_head_dim,
            qk_rope_head_dim=first.qk_rope_head_dim,
        )
    return MHATokenToKVPool.bytes_per_token(
        dtype=dtype,
        num_layers=len(layers),
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        v_head_dim=first.v_head_dim,
    )
