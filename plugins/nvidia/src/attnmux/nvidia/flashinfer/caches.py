"""The pool's memory as the kernels want it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnmux.core.kv import KVPool
from attnmux.core.layer import LayerSpec

MASKED_LOGIT = 5e4
"""`math::inf` in math.cuh: the kernels give a hidden key minus this for Q * K, before any scale."""

LEAST_HIDDEN = 100.0
"""How far below 0 a hidden key's logit has to lie when the scales are in it: e**-100 is nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cache:
    """A layer's part of the pool."""

    kv: tuple[torch.Tensor, torch.Tensor]
    """K and V, [pages, page_size, Hkv, D]."""
    k_scale: float | None
    v_scale: float | None
    """None for 1: the library then leaves out a product."""
    q_factor: float | None
    """A power of 2 that Q is multiplied by, of which `k_scale` makes up for; None for 1."""
    of_sinks: tuple[torch.Tensor, float] | tuple[()]
    """[Hq] float32 and the whole scale of the logits, for kernels with sinks; else nothing."""

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Q as the kernels are given it."""
        return q if self.q_factor is None else q * self.q_factor


def layer_cache(layer: LayerSpec, pool: KVPool, page_size: int) -> Cache:
    """The layer's buffers in pages of the kernels' size.

    Scales are numbers: the library would read a tensor on the host.
    """
    keys, values = (
        buffer.view(-1, page_size, *buffer.shape[1:])
        for buffer in pool.get_kv_buffer(layer.layer_id)
    )
    k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
    q_factor = _q_factor(layer.scaling * k_scale)
    k_scale /= q_factor
    return Cache(
        kv=(keys, values),
        k_scale=None if k_scale == 1 else k_scale,
        v_scale=None if v_scale == 1 else v_scale,
        q_factor=None if q_factor == 1 else q_factor,
        of_sinks=() if layer.sinks is None else (layer.sinks.contiguous(), layer.scaling * k_scale),
    )


def _q_factor(scale: float) -> float:
    """The largest power of 2 up to 1 that keeps hidden keys hidden under a scale of the logits.

    K that was divided by a small scale makes Q * K large: with e5m2, whose largest value is 57344,
    a visible key's product falls below a hidden key's. A smaller Q makes it small again, exactly.
    """
    hidden = scale * MASKED_LOGIT
    return 1.0 if hidden >= LEAST_HIDDEN else 2.0 ** math.floor(math.log2(hidden / LEAST_HIDDEN))
