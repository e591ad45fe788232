"""Layers of MLA as the kernels see them: a row of the cache is a token's latent and rotary key."""

from __future__ import annotations

import torch

from attnmux.core.backend import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec

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


def latent_pages(layer: LayerSpec, context: BackendContext, page_size: int) -> torch.Tensor:
    """[pages, page_size, 1, 576]: the pool's buffer of the layer, a view.

    page_size: the pool's own, or one that divides it.
    """
    buffer = context.token_to_kv_pool.get_key_buffer(layer.layer_id)
    return buffer.view(-1, page_size, *buffer.shape[1:])


def joined(q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor:
    """[T, Hq, 576]: queries of kernels that take both parts as one row.

    q: [T, Hq, 512]. q_rope: [T, Hq, 64].
    Raises InvalidInput where q_rope is missing.
    """
    if q_rope is None:
        raise InvalidInput("q_rope", came=None, expected=f"the rotary part [T, Hq, {ROPE}]")
    return torch.cat([q, q_rope], dim=-1)
