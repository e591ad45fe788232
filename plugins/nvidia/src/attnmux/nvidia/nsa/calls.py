"""What the library is told at every call of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.latent import RANK, ROPE, check_latent, check_plain, joined, rotary
from attnmux.nvidia.pools import check_bfloat16_or_fp8

WIDTH = RANK + ROPE
"""Of a row of Q and of the cache."""
HEADS = (64, 128)
"""Query heads that the kernels are built for (csrc/api/sparse_prefill.cpp of FlashMLA)."""
TOPK_MULTIPLE = 128
"""Keys a token come in such numbers: two blocks of 64 at a time (`2*B_TOPK` in
csrc/sm90/prefill/sparse/phase1.cuh)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """What no step changes."""

    cache: torch.Tensor
    """[slots, 1, 576], the pool's memory."""
    num_heads: int
    kernel_heads: int
    """As many or more, of HEADS."""
    scale: float
    """What rows of the cache are to be multiplied by: logits and output are; 1 for 16-bit ones."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> LayerCall:
        """Raises InvalidInput for other layers than a latent's, for more heads than the kernels
        take, and for a pool that is neither of bfloat16 nor of e4m3."""
        check_latent(layer)
        check_plain(layer)
        pool = context.token_to_kv_pool
        check_bfloat16_or_fp8(context)
        kernel_heads = next((heads for heads in HEADS if layer.tp_q_head_num <= heads), None)
        if kernel_heads is None:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                came=f"{layer.tp_q_head_num} query heads",
                expected=f"at most {HEADS[-1]}",
            )
        scale, _ = pool.read_scales(layer.k_scale, None)
        return cls(
            cache=pool.get_key_buffer(layer.layer_id),
            num_heads=layer.tp_q_head_num,
            kernel_heads=kernel_heads,
            scale=scale,
        )

    def queries(self, q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor:
        """[T, kernel_heads, 576] bfloat16; heads that no layer has are zeros.

        Raises InvalidInput for queries of another dtype.
        """
        if q.dtype != torch.bfloat16:
            raise InvalidInput("q", came=q.dtype, expected=str(torch.bfloat16))
        if self.kernel_heads == self.num_heads:
            return joined(q, q_rope)
        rows = q.new_zeros(q.shape[0], self.kernel_heads, WIDTH)
        rows[:, : self.num_heads, :RANK] = q
        rows[:, : self.num_heads, RANK:] = rotary(q_rope)
        return rows
