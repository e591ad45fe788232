"""Layers as flashinfer plans and reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from attnmux.core import BackendContext, LayerSpec

MASKED_LOGIT = 5e4
"""`math::inf` in math.cuh: the kernels take minus this for a hidden key's Q * K, before scaling."""

LEAST_HIDDEN = 100.0
"""How far below 0 a hidden key's logit has to lie after scaling: e**-100 is nothing."""

MAX_THREADS = 1024
"""Most threads of a CUDA block. `MergeState` in cascade.cuh puts all heads of a token into one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A stretch of every request's keys. Layers of one view share their indices."""

    pool_group: int
    """See `KVPool.group_of`; -1 for layers that the pool does not store, an encoder's."""
    layer_id: int = field(compare=False)
    """One of the layers."""
    cross: bool = False
    """The encoder's keys."""
    window: int = -1
    """w: no more keys than the new tokens' windows hold; -1: all."""
    prefix: bool = False
    """Only the tokens before the new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGroup:
    """The facts that flashinfer fixes in a plan. Layers that agree on all of them share one.

    A plan for other head counts than a layer's gives wrong results without an error, and the
    wrappers read scale, cap and window from the plan, so every group has its own.
    """

    view: View
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    """Scale for a Q that was multiplied by `own_q_factor`."""
    logit_cap: float
    is_causal: bool
    """Whether new tokens see each other causally: not in cross attention, nor in an encoder."""
    has_sinks: bool

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> PlanGroup:
        pool, cross = context.token_to_kv_pool, layer.is_cross_attention
        stored = layer.layer_id in pool.layer_ids
        return cls(
            view=View(
                pool_group=pool.group_of(layer.layer_id) if stored else -1,
                layer_id=layer.layer_id,
                cross=cross,
                # A window counts back from a token of the same sequence.
                window=-1 if cross else layer.sliding_window_size,
            ),
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            scaling=layer.scaling / _q_factor(layer.scaling),
            logit_cap=layer.logit_cap,
            is_causal=layer.is_causal and not cross,
            has_sinks=layer.sinks is not None,
        )

    @property
    def window(self) -> int:
        return self.view.window

    @property
    def group_size(self) -> int:
        """Query heads a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def all_keys(self) -> View:
        """The view without the cut to a window, which custom masks are laid out for."""
        return replace(self.view, window=-1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlashInferLayer:
    """A layer's arguments that no step changes. Scales are numbers: the library would read a
    tensor on the host."""

    group: int
    """Number of its `PlanGroup`."""
    kv: tuple[torch.Tensor, torch.Tensor] | None
    """K and V, [pages, page_size, Hkv, D]; None for a layer that the pool does not store."""
    k_scale: float | None
    v_scale: float | None
    """None for 1: the library then leaves out a product."""
    q_factor: float | None
    """A power of 2 that Q is multiplied by over the pool, see `_q_factor`; None for 1. `k_scale`
    makes up for it."""
    own_q_factor: float | None
    """The same over K of the call, for which the plan's `scaling` makes up."""
    of_sinks: tuple[torch.Tensor, float] | tuple[()]
    """[Hq] float32 and the whole scale of the logits, for kernels with sinks."""
    merged_heads: int
    """Heads of a token that are merged at once."""

    @classmethod
    def of(
        cls, layer: LayerSpec, group: int, context: BackendContext, page_size: int, itemsize: int
    ) -> FlashInferLayer:
        """page_size: of the view that kernels have of the pool. itemsize: bytes of an output."""
        pool, kv = context.token_to_kv_pool, None
        k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
        q_factor, own_factor = _q_factor(layer.scaling * k_scale), _q_factor(layer.scaling)
        whole_scale = layer.scaling * k_scale / q_factor
        k_scale *= own_factor / q_factor
        if layer.layer_id in pool.layer_ids:
            keys, values = pool.get_kv_buffer(layer.layer_id)
            kv = _pages(keys, page_size), _pages(values, page_size)
        return cls(
            group=group,
            kv=kv,
            k_scale=None if k_scale == 1 else k_scale,
            v_scale=None if v_scale == 1 else v_scale,
            q_factor=None if q_factor == 1 else q_factor,
            own_q_factor=None if own_factor == 1 else own_factor,
            of_sinks=() if layer.sinks is None else (layer.sinks.contiguous(), whole_scale),
            merged_heads=merged_heads(layer.tp_q_head_num, layer.v_head_dim, itemsize),
        )


def _pages(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    return rows.view(-1, page_size, *rows.shape[1:])


def _q_factor(scale: float) -> float:
    """The largest power of 2 up to 1 that keeps hidden keys hidden under a scale of the logits.

    K that was divided by a small scale makes Q * K large: with e5m2, whose largest value is 57344,
    a visible key's product falls below a hidden key's. A smaller Q makes it small again, exactly.
    """
    hidden = scale * MASKED_LOGIT
    return 1.0 if hidden >= LEAST_HIDDEN else 2.0 ** math.floor(math.log2(hidden / LEAST_HIDDEN))


def merged_heads(num_heads: int, head_dim: int, itemsize: int) -> int:
    """The most heads that divide num_heads and fit into a block, head_dim / vec threads each."""
    vec = max(16 // itemsize, head_dim // 32)
    most = MAX_THREADS * vec // head_dim
    return max(n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= most)
