"""Where the rows of keys are that a call attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.flashinfer_mla.settings import WIDENED, Settings
from attnmux.nvidia.latent import RANK, latent_pages
from attnmux.nvidia.rows import aligned

Latents = tuple[torch.Tensor, torch.Tensor]
"""Latent parts [pages, page_size, 512] and rotary parts [pages, page_size, 64]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PoolRows:
    """A layer's rows in the pool."""

    as_they_lie: Latents
    words: torch.Tensor | None
    """[slots, row bytes / 8] int64: rows to be widened. A copy moves words, since it knows no 8-bit
    floats. None where kernels read the pool itself."""
    dtype: torch.dtype
    power: float
    """The power of 2 in the layer's scale, which widened rows are multiplied by: 16 bits hold the
    result exactly."""
    rest: float
    """The rest of the scale, from 1 to 2, by which rows would be rounded. It multiplies queries and
    output instead: plans fix the scale of logits, and one a layer would be a plan a layer."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext, settings: Settings) -> PoolRows:
        pool = context.token_to_kv_pool
        pages = latent_pages(layer, context, settings.page_size).squeeze(2)
        scale, _ = pool.read_scales(layer.k_scale, layer.v_scale)
        power = 2.0 ** math.floor(math.log2(scale))
        rows = pool.get_key_buffer(layer.layer_id).squeeze(1)
        return cls(
            as_they_lie=split(pages),
            words=rows.view(torch.int64) if settings.widens else None,
            dtype=settings.dtype,
            power=power,
            rest=scale / power,
        )

    def read(self, slots: torch.Tensor) -> Latents:
        """The pool's pages, or copies of the rows at `slots` as pages of one token.

        slots: [keys] int32, read where rows are widened.
        """
        if self.words is None:
            return self.as_they_lie
        rows = self.words.index_select(0, slots).view(WIDENED).to(self.dtype)
        if self.power != 1:
            rows *= self.power
        return split(rows.unsqueeze(1))


def split(pages: torch.Tensor) -> Latents:
    """Both parts of rows [pages, page_size, 576]."""
    return pages[..., :RANK], pages[..., RANK:]


def of_call(k: torch.Tensor, k_rope: torch.Tensor | None, dtype: torch.dtype) -> Latents:
    """The call's own keys as pages of one token.

    k: [T, 1, 512]. k_rope: [T, 1, 64].
    Raises InvalidInput where they are not of the dtype of Q.
    """
    if k_rope is None or k.dtype != dtype or k_rope.dtype != dtype:
        came = f"{k.dtype} and {None if k_rope is None else k_rope.dtype}"
        raise InvalidInput("k", came=came, expected=f"k and k_rope of {dtype}, as q is")
    return aligned(k), aligned(k_rope)
