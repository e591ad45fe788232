"""Which layers share a plan, and which keys a plan reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attnmux.core.kv import KVPool
from attnmux.core.layer import LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A stretch of every request's keys. Layers of one view share their indices."""

    layer_id: int
    """A layer whose buffer the indices point into."""
    cross: bool = False
    """The encoder's keys."""
    window: int = -1
    """w: no more keys than the new tokens' windows hold; -1: all."""
    prefix: bool = False
    """Only the tokens before the new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGroup:
    """What flashinfer fixes in a plan. Layers that agree on all of it share one.

    A plan for other head counts than a layer's gives wrong results without an error, and the
    wrappers read scale, cap and window from the plan, so every group has its own.
    """

    view: View
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    logit_cap: float
    is_causal: bool
    """Of new tokens among themselves: not in cross attention, nor in an encoder."""
    has_sinks: bool

    @property
    def window(self) -> int:
        return self.view.window

    @property
    def all_keys(self) -> View:
        """The view without the cut to a window: what a custom mask is laid out for."""
        return replace(self.view, window=-1)

    @property
    def prefix(self) -> View:
        return replace(self.view, prefix=True)


def plan_groups(layers: Sequence[LayerSpec], pool: KVPool) -> dict[int, PlanGroup]:
    """The group of each layer, by layer id."""
    sharing = _sharing(layers, pool)
    return {layer.layer_id: _plan_group(layer, sharing) for layer in layers}


def _plan_group(layer: LayerSpec, sharing: Mapping[int, int]) -> PlanGroup:
    return PlanGroup(
        view=View(
            layer_id=sharing[layer.layer_id],
            cross=layer.is_cross_attention,
            # A window counts back from a token of the same sequence.
            window=-1 if layer.is_cross_attention else layer.sliding_window_size,
        ),
        num_q_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        scaling=layer.scaling,
        logit_cap=layer.logit_cap,
        is_causal=layer.is_causal and not layer.is_cross_attention,
        has_sinks=layer.sinks is not None,
    )


def _sharing(layers: Sequence[LayerSpec], pool: KVPool) -> dict[int, int]:
    """For each layer, the first one whose slots have the same numbers.

    Layers without K and V in the pool, an encoder's, read no slots.
    """
    first: dict[int, int] = {}
    sharing = {}
    for layer in layers:
        layer_id = layer.layer_id
        group = pool.group_of(layer_id) if layer_id in pool.layer_ids else -1
        sharing[layer_id] = first.setdefault(group, layer_id)
    return sharing
