"""Pools and rows as kernels take them: checks, views, rows that kernels can load, and rows of MLA.

Tokens of Q, K and V may be any distance apart. The libraries load 16 bytes at once without a check,
and after a misaligned load the process cannot use the device any more. A row of MLA's cache is a
token's latent and its rotary key.
"""

from __future__ import annotations

import torch

from attnmux.core.contract.layer import LayerSpec
from attnmux.core.facts.errors import InvalidInput

ALIGNMENT = 16
"""Bytes that the kernels load at once: heads of Q, K, V and output begin at multiples of it."""


class Rows:
    """Rows [T, H, D] of Q, K, V and the output, for kernels that load 16 bytes at once."""

    @staticmethod
    def is_aligned(rows: torch.Tensor) -> bool:
        """Whether the kernels can load or store the rows [T, H, D] where they are."""
        strides = rows.stride(0) | rows.stride(1)  # as aligned as the lesser, for a power of 2
        return rows.data_ptr() % ALIGNMENT == 0 and strides * rows.element_size() % ALIGNMENT == 0

    @staticmethod
    def aligned(rows: torch.Tensor) -> torch.Tensor:
        """The rows [T, H, D], or a copy that the kernels can load."""
        return rows if Rows.is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def is_writable(out: torch.Tensor) -> bool:
        """Whether kernels that want rows end to end can store them in `out`."""
        return out.is_contiguous() and Rows.is_aligned(out)


class LatentRows:
    """Rows of MLA's cache, for kernels of the one shape that they are built for."""

    LATENT_DIM = 512
    """Dim of the latent, which is V too: every kernel for MLA is built for this one."""
    ROPE_DIM = 64
    """Dim of the rotary part, which follows the latent in a row."""

    @staticmethod
    def check(layer: LayerSpec) -> None:
        """Raises InvalidInput for a layer that is not plain MLA of 512 dims and 64 of the rope."""
        layer.check_features(kind="mla")
        if (layer.v_head_dim, layer.qk_rope_head_dim) != (
            LatentRows.LATENT_DIM,
            LatentRows.ROPE_DIM,
        ):
            raise InvalidInput(
                f"layer {layer.layer_id}",
                got=f"{layer.v_head_dim} + {layer.qk_rope_head_dim} dims",
                expected=f"mla, {LatentRows.LATENT_DIM} + {LatentRows.ROPE_DIM}",
            )

    @staticmethod
    def joined(q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor:
        """Queries [T, Hq, 576] for kernels that take both parts as one row.

        Nothing is copied if the parts lie end to end in rows that kernels can load.

        q: [T, Hq, 512]. q_rope: [T, Hq, 64].
        Raises InvalidInput if q_rope is missing.
        """
        if q_rope is None:
            raise InvalidInput(
                "q_rope", got=None, expected=f"the rotary part [T, Hq, {LatentRows.ROPE_DIM}]"
            )
        if _are_one_row(q, q_rope):
            return q.as_strided(
                (*q.shape[:2], LatentRows.LATENT_DIM + LatentRows.ROPE_DIM), q.stride()
            )
        return torch.cat([q, q_rope], dim=-1)


def _are_one_row(q: torch.Tensor, q_rope: torch.Tensor) -> bool:
    width = LatentRows.LATENT_DIM + LatentRows.ROPE_DIM
    strides = (q.shape[1] * width, width, 1)
    if q.stride() != strides or q_rope.stride() != strides:
        return False
    # As far apart in their storages as in memory: the storage is the same.
    return bool(
        q_rope.storage_offset() == q.storage_offset() + LatentRows.LATENT_DIM
        and q_rope.data_ptr() == q.data_ptr() + LatentRows.LATENT_DIM * q.element_size()
        and Rows.is_aligned(q)
    )
