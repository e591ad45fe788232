"""Layers of MLA as kernels see them: a row of the cache is a token's latent and its rotary key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core.adapters.aligned_rows import is_aligned
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec, check_features

if TYPE_CHECKING:
    from attnmux.core.context import BackendContext

LATENT_DIM = 512
"""Dim of the latent, which is V too: every kernel for MLA is built for this one."""
ROPE_DIM = 64
"""Dim of the rotary part, which follows the latent in a row."""


def check_latent(layer: LayerSpec) -> None:
    """Raises InvalidInput for a layer that is not plain MLA with 512 dims and 64 of the rope."""
    check_features(layer, kind="mla")
    if (layer.v_head_dim, layer.qk_rope_head_dim) != (LATENT_DIM, ROPE_DIM):
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=f"{layer.v_head_dim} + {layer.qk_rope_head_dim} dims",
            expected=f"mla, {LATENT_DIM} + {ROPE_DIM}",
        )


def latent_pages(layer: LayerSpec, context: BackendContext, page_size: int) -> torch.Tensor:
    """[pages, page_size, 1, 576]: the pool's buffer of the layer, a view.

    page_size: the pool's own, or one that divides it.
    """
    buffer = context.token_to_kv_pool.get_key_buffer(layer.layer_id)
    return buffer.view(-1, page_size, *buffer.shape[1:])


def rotary(q_rope: torch.Tensor | None) -> torch.Tensor:
    """The rotary part of the queries, [T, Hq, 64]. Raises InvalidInput where it is missing."""
    if q_rope is None:
        raise InvalidInput("q_rope", got=None, expected=f"the rotary part [T, Hq, {ROPE_DIM}]")
    return q_rope


def joined(q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor:
    """Queries [T, Hq, 576] for kernels that take both parts as one row.

    Nothing is copied where the parts lie end to end in rows that kernels can load.

    q: [T, Hq, 512]. q_rope: [T, Hq, 64].
    Raises InvalidInput where q_rope is missing.
    """
    q_rope = rotary(q_rope)
    if _are_one_row(q, q_rope):
        return q.as_strided((*q.shape[:2], LATENT_DIM + ROPE_DIM), q.stride())
    return torch.cat([q, q_rope], dim=-1)


def _are_one_row(q: torch.Tensor, q_rope: torch.Tensor) -> bool:
    width = LATENT_DIM + ROPE_DIM
    strides = (q.shape[1] * width, width, 1)
    if q.stride() != strides or q_rope.stride() != strides:
        return False
    # As far apart in their storages as in memory: the storage is the same.
    return (
        q_rope.storage_offset() == q.storage_offset() + LATENT_DIM
        and q_rope.data_ptr() == q.data_ptr() + LATENT_DIM * q.element_size()
        and is_aligned(q)
    )
