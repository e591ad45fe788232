"""Layers for SGLang's kernels for CPUs with AMX: their arguments, and layers that they do not
serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import KeyGroup, LatentRows

if TYPE_CHECKING:
    from attnmux.core import LayerSpec

DIM_STEP = 32
"""`extend_attention_cpu` transposes 512 bits at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AMXLayer:
    """Arguments that no step changes."""

    sinks: torch.Tensor | None
    """[Hq] bfloat16: the kernels read no other dtype than that of Q."""
    group: KeyGroup | None = None
    """None for a layer that the pool does not store."""
    kv: tuple[torch.Tensor, torch.Tensor] | None = None
    """[slots, Hkv, D], the pool's memory."""


def check_layer(layer: LayerSpec) -> None:
    """Raises InvalidInput for a layer that the kernels do not serve."""
    dims = layer.qk_head_dim, layer.v_head_dim
    unserved = {
        f"kind {layer.kind}": layer.kind not in ("mha", "mla"),
        f"dims {dims[0]} and {dims[1]}": any(dim % DIM_STEP for dim in dims),
        "is_causal=False": not layer.is_causal,
        "is_cross_attention": layer.is_cross_attention,
        "sliding_window_size": layer.sliding_window_size >= 0,
        "attention_chunk_size": layer.attention_chunk_size > 0,
        "logit_cap": layer.logit_cap > 0,
        "sinks over latents": layer.kind == "mla" and layer.sinks is not None,
        f"a rotary part of {layer.qk_rope_head_dim}": layer.kind == "mla"
        and layer.qk_rope_head_dim != LatentRows.ROPE_DIM,
    }
    got = [name for name, is_set in unserved.items() if is_set]
    if got:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=" and ".join(got),
            expected=f"causal attention to all keys, dims that are multiples of {DIM_STEP}",
        )
