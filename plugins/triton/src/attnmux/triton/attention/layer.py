"""A layer as the kernels see it: everything that no step and no call changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import knobs

from attnmux.core import AttnmuxError, BackendContext, KVPool, LayerSpec, torch_dtype
from attnmux.triton.attention.slots import SlotGroup
from attnmux.triton.kernels.four_bits import BY_PTX, BY_PTX_OF_SM89, BY_TRITON, FACTOR, VALUES
from attnmux.triton.launches.bound_kernel import Launcher
from attnmux.triton.launches.config_tables import ConfigTables
from attnmux.triton.launches.configs import ShareConfig, TileConfig
from attnmux.triton.launches.dispatch import Dispatch, LayerTraits
from attnmux.triton.launches.operands import Keys
from attnmux.triton.launches.shapes import Shape

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TritonLayer:
    """A layer: its shape, its keys in the pool, and how its kernels are launched."""

    spec: LayerSpec
    shape: Shape
    dispatch: Dispatch
    slot_group: SlotGroup | None
    """None for a layer whose K and V always come with the call."""
    keys: Keys | None
    """The pool's memory; None as `slot_group`."""
    scales: tuple[float, float]
    """Factors of the pool's K and V as the kernels read them."""
    tiles: TileConfig
    hiding_tiles: TileConfig
    """For steps with a custom mask or items."""
    short_tiles: TileConfig | None = None
    """Less tall than `tiles`, for steps that they end earlier."""
    launcher: Launcher = field(default_factory=Launcher)

    @classmethod
    def of(
        cls,
        spec: LayerSpec,
        context: BackendContext,
        launcher: Launcher | None = None,
        tables: ConfigTables | None = None,
    ) -> TritonLayer:
        """Raises InvalidInput for a layer beyond the kernels' dims."""
        shape, pool, dtype = Shape.of(spec), context.token_to_kv_pool, context.request.dtype
        is_encoders = not spec.is_causal and not spec.is_cross_attention
        is_stored = not is_encoders and spec.layer_id in pool.layer_ids
        group = SlotGroup.of(spec, context) if is_stored else None
        keys = Keys.of_pool(pool, spec) if is_stored else None
        traits = LayerTraits(
            layer=spec,
            shape=shape,
            dtype=torch_dtype(dtype) if dtype else None,
            keys=keys,
            page_size=group.page_size(context) if group else 1,
        )
        dispatch = Dispatch(
            traits=traits,
            arch=context.platform.arch,
            page_size=pool.page_size,
            tables=tables or ConfigTables(),
            deterministic=bool(context.request.deterministic),
        )
        return cls(
            spec=spec,
            shape=shape,
            dispatch=dispatch,
            slot_group=group,
            keys=keys,
            scales=_scales(spec, pool, keys) if is_stored else (1.0, 1.0),
            tiles=dispatch.tiles(hides=False),
            short_tiles=dispatch.short_tiles(),
            hiding_tiles=dispatch.tiles(hides=not spec.is_cross_attention),
            launcher=launcher or Launcher(),
        )

    def tile_configs(self, *, hides: bool) -> tuple[TileConfig, ...]:
        """One or two, the tallest last. hides: in steps with a custom mask or items."""
        if hides:
            return (self.hiding_tiles,)
        return (self.tiles,) if self.short_tiles is None else (self.short_tiles, self.tiles)

    def share_config(self, queries: int, *, hides: bool = False) -> ShareConfig:
        return self.dispatch.shares(queries, hides=hides and not self.spec.is_cross_attention)

    def required_group(self) -> SlotGroup:
        """Raises AttnmuxError for a layer that the pool does not store."""
        if self.slot_group is None:
            raise _not_stored(self.spec)
        return self.slot_group

    def required_keys(self) -> Keys:
        """Raises AttnmuxError for a layer that the pool does not store."""
        if self.keys is None:
            raise _not_stored(self.spec)
        return self.keys

    def tail(self, rows: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor | None:
        """The second part of Q or K: the rotary part of MLA, or the columns after a power of 2."""
        if rope is None and self.shape.real_tail:
            return rows[:, :, self.shape.real_d :]
        return rope

    def key_tail(self, keys: Keys) -> torch.Tensor | None:
        """The second part of K."""
        if keys.k_scales is not None and self.shape.real_tail:
            return keys.k[:, :, self.shape.real_d // VALUES.value :]
        return self.tail(keys.k, keys.k_rope)

    def widening(self, keys: Keys) -> int:
        """How the kernels widen K and V of 4 bits; 0 for others."""
        if keys.k_scales is None:
            return 0
        vendor, _, number = self.dispatch.arch.partition("sm")
        if vendor or not number.isdigit() or knobs.runtime.interpret:
            return int(BY_TRITON.value)
        return int((BY_PTX_OF_SM89 if int(number) >= 89 else BY_PTX).value)

    @property
    def window(self) -> int:
        return -1 if self.spec.is_cross_attention else self.spec.sliding_window_size

    @property
    def chunk(self) -> int:
        return 0 if self.spec.is_cross_attention else self.spec.attention_chunk_size

    def fixed(self, *, over_pool: bool, has_mask: bool, has_lse: bool) -> dict[str, Any]:
        """The arguments that only the layer decides, by the attention kernels' names."""
        spec, is_cross = self.spec, self.spec.is_cross_attention
        k_scale, v_scale = self.scales if over_pool else (1.0, 1.0)
        scale, cap = spec.scaling * k_scale, spec.logit_cap
        return {
            "sinks": spec.sinks,
            "alibi_slopes": spec.alibi_slopes,
            "relative_bias": None
            if spec.relative_bias is None
            else spec.relative_bias.contiguous(),
            "scale": scale if cap else scale * LOG2_E,
            "cap": cap,
            "v_scale": v_scale,
            **self.shape.constants(),
            "IS_CAUSAL": spec.is_causal and not is_cross and not has_mask,
            "IS_CROSS": is_cross,
            "WINDOW": self.window,
            "CHUNK": self.chunk,
            "HAS_CAP": spec.logit_cap > 0,
            "HAS_MASK": has_mask,
            "HAS_SINKS": spec.sinks is not None,
            "HAS_ALIBI": spec.alibi_slopes is not None,
            "REACH": -1 if spec.relative_bias is None else spec.relative_reach,
            "HAS_LSE": has_lse,
        }


def _scales(spec: LayerSpec, pool: KVPool, keys: Keys | None) -> tuple[float, float]:
    k_scale, v_scale = pool.read_scales(spec.k_scale, spec.v_scale)
    factor = FACTOR.value if keys is not None and keys.k_scales is not None else 1
    return k_scale * factor, v_scale * factor


def _not_stored(spec: LayerSpec) -> AttnmuxError:
    return AttnmuxError(
        f"layer {spec.layer_id} is not in the KV pool: call it with its own k and v and "
        "save_kv_cache=False"
    )
