"""Layers of MLA as the kernels see them: a row of the cache is a token's latent and rotary key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.rows import is_aligned

RANK = 512
"""Dim of the latent, which is V too: the one that every kernel for MLA is built for."""
ROPE = 64
"""Dim of the rotary part beside it."""


def check_latent(layer: LayerSpec) -> None:
    """Raises InvalidInput for a layer that is not MLA with a latent of 512 and 64 beside it."""
    if layer.kind != "mla" or (layer.v_head_dim, layer.qk_rope_head_dim) != (RANK, ROPE):
        raise InvalidInput(
            f"layer {layer.layer_id}",
            came=f"{layer.kind}, {layer.v_head_dim} + {layer.qk_rope_head_dim} dims",
            expected=f"mla, {RANK} + {ROPE}",
        )


def check_plain(layer: LayerSpec) -> None:
    """Raises InvalidInput for a layer that is more than scaled, causal softmax attention."""
    extras = {
        "is_causal False": not layer.is_causal,
        "is_cross_attention": layer.is_cross_attention,
        f"logit_cap {layer.logit_cap}": layer.logit_cap > 0,
        f"sliding_window_size {layer.sliding_window_size}": layer.sliding_window_size >= 0,
        f"attention_chunk_size {layer.attention_chunk_size}": layer.attention_chunk_size > 0,
        "sinks": layer.sinks is not None,
    }
    came = [name for name, is_set in extras.items() if is_set]
    if came:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            came=" and ".join(came),
            expected="causal self-attention without cap, window, chunks and sinks",
        )


def latent_layers(context: BackendContext) -> tuple[LayerSpec, ...]:
    """The context's layers over a latent, at least one.

    The others are those that the expanded prefill calls, which decoding never does.
    Raises InvalidInput where there is none, and for dims that no kernel is built for.
    """
    layers = tuple(layer for layer in context.layers if layer.kind == "mla")
    if not layers:
        kinds = sorted({layer.kind for layer in context.layers})
        raise InvalidInput("layers", came=f"those of {kinds}", expected="one of mla or more")
    for layer in layers:
        check_latent(layer)
    return layers


def latent_pages(layer: LayerSpec, context: BackendContext, page_size: int) -> torch.Tensor:
    """[pages, page_size, 1, 576]: the pool's buffer of the layer, a view.

    page_size: the pool's own, or one that divides it.
    """
    buffer = context.token_to_kv_pool.get_key_buffer(layer.layer_id)
    return buffer.view(-1, page_size, *buffer.shape[1:])


def rotary(q_rope: torch.Tensor | None) -> torch.Tensor:
    """The rotary part of the queries, [T, Hq, 64]. Raises InvalidInput where it is missing."""
    if q_rope is None:
        raise InvalidInput("q_rope", came=None, expected=f"the rotary part [T, Hq, {ROPE}]")
    return q_rope


def joined(q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor:
    """[T, Hq, 576]: queries of kernels that take both parts as one row. Nothing is copied where
    they are the parts of one, end to end.

    q: [T, Hq, 512]. q_rope: [T, Hq, 64].
    Raises InvalidInput where q_rope is missing.
    """
    q_rope = rotary(q_rope)
    if _are_one_row(q, q_rope):
        return q.as_strided((*q.shape[:2], RANK + ROPE), q.stride())
    return torch.cat([q, q_rope], dim=-1)


def _are_one_row(q: torch.Tensor, q_rope: torch.Tensor) -> bool:
    """Whether the rotary part lies behind the other in memory, in rows that kernels can load."""
    width = RANK + ROPE
    strides = (q.shape[1] * width, width, 1)
    if q.stride() != strides or q_rope.stride() != strides:
        return False
    # As far apart in their storages as in memory: the storage is the same.
    return (
        q_rope.storage_offset() == q.storage_offset() + RANK
        and q_rope.data_ptr() == q.data_ptr() + RANK * q.element_size()
        and is_aligned(q)
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyLens:
    """Keys a request, for kernels that must not be given a request without any."""

    at_least_one: torch.Tensor
    """[B] int32. Tables are padded with the reserved page, which may be read: the key that a
    request without any is said to have lies there."""
    is_empty: torch.Tensor
    """[B] bool: requests whose result is to be replaced."""

    @classmethod
    def buffers(cls, max_batch_size: int, device: torch.device) -> KeyLens:
        """What graphs of up to max_batch_size requests are captured with."""
        return cls(
            at_least_one=torch.ones(max_batch_size, dtype=torch.int32, device=device),
            is_empty=torch.zeros(max_batch_size, dtype=torch.bool, device=device),
        )

    @classmethod
    def of(cls, lens: torch.Tensor, buffers: KeyLens | None = None) -> KeyLens:
        """From lens [B] int32, in the front of the buffers where they are given."""
        if buffers is None:
            return cls(at_least_one=lens.clamp(min=1), is_empty=lens == 0)
        size = len(lens)
        return cls(
            at_least_one=torch.clamp(lens, min=1, out=buffers.at_least_one[:size]),
            is_empty=torch.eq(lens, 0, out=buffers.is_empty[:size]),
        )

    def replace(self, rows: torch.Tensor, value: float) -> None:
        """Write `value` to the rows [B, …] of requests without keys, whatever they hold."""
        rows.masked_fill_(self.is_empty.view(-1, *[1] * (rows.dim() - 1)), value)
