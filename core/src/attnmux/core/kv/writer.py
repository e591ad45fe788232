"""The interface of kernels that write to a KV pool in place of its own methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from attnmux.core.layer import LayerSpec


class KVWriter(Protocol):
    """Writes the new tokens' rows to a KV pool."""

    def write(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        *,
        is_latent: bool,
    ) -> None:
        """Write rows to slots loc [T] int64, bit for bit as the pool's own method does.

        first, second: K [T, Hkv, D] and V [T, Hkv, Dv]; of a latent pool the latents [T, 1, rank]
        and the rotary keys [T, 1, rope]. Does not synchronise.
        Raises what the pool's method raises, before anything is written.
        """
