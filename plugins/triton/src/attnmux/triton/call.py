"""What kernels are told of a layer, whatever the step and the call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from attnmux.core.context import BackendContext
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import AttnmuxError
from attnmux.core.layer import LayerSpec
from attnmux.triton.launch import Launches
from attnmux.triton.launch_types import ShareLaunch, TileLaunch
from attnmux.triton.launching import Launcher
from attnmux.triton.layer_launches import LayerLaunches
from attnmux.triton.operands import Keys, Results
from attnmux.triton.plans import ShareKey, Splitting, TileKey
from attnmux.triton.serving import Asked
from attnmux.triton.shapes import Shape, next_power_of_2
from attnmux.triton.slots import SlotGroup

LOG2_E = math.log2(math.e)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    shape: Shape
    chosen: LayerLaunches
    slot_group: SlotGroup | None
    """None for a layer whose K and V come with the call alone."""
    keys: Keys | None
    """The pool's memory."""
    scales: tuple[float, float]
    """What K and V of the pool are multiplied by."""
    tiles: TileLaunch
    hiding_tiles: TileLaunch
    """In steps with a custom mask or items."""
    launcher: Launcher = field(default_factory=Launcher)

    @classmethod
    def of(
        cls,
        layer: LayerSpec,
        context: BackendContext,
        launcher: Launcher | None = None,
        launches: Launches | None = None,
    ) -> LayerCall:
        """Raises InvalidInput for a layer beyond the kernels' dims."""
        shape, pool, dtype = Shape.of(layer), context.token_to_kv_pool, context.request.dtype
        is_encoders = not layer.is_causal and not layer.is_cross_attention
        is_stored = not is_encoders and layer.layer_id in pool.layer_ids
        group = SlotGroup.of(layer, context) if is_stored else None
        keys = Keys.of(pool, layer) if is_stored else None
        asked = Asked(
            layer=layer,
            shape=shape,
            dtype=torch_dtype(dtype) if dtype else None,
            keys=keys,
            page_size=group.page_size(context) if group else 1,
        )
        chosen = LayerLaunches(
            asked=asked,
            arch=context.platform.arch,
            page_size=pool.page_size,
            launches=launches or Launches(),
        )
        return cls(
            layer=layer,
            shape=shape,
            chosen=chosen,
            slot_group=group,
            keys=keys,
            scales=pool.read_scales(layer.k_scale, layer.v_scale) if is_stored else (1.0, 1.0),
            tiles=chosen.tiles(hides=False),
            hiding_tiles=chosen.tiles(hides=not layer.is_cross_attention),
            launcher=launcher or Launcher(),
        )

    def tile_launch(self, *, hides: bool) -> TileLaunch:
        """hides: in steps with a custom mask or items."""
        return self.hiding_tiles if hides else self.tiles

    def tile_key(self, *, hides: bool) -> TileKey:
        return TileKey(group=self.shape.group, block_m=self.tile_launch(hides=hides).block_m)

    def share_launch(self, queries: int, *, hides: bool = False) -> ShareLaunch:
        return self.chosen.shares(queries, hides=hides and not self.layer.is_cross_attention)

    def share_key(
        self, queries: int, splitting: Splitting | None, *, hides: bool = False
    ) -> ShareKey:
        launch = self.share_launch(queries, hides=hides)
        layer = self.layer
        is_cross = layer.is_cross_attention
        return ShareKey(
            queries=queries,
            is_cross=is_cross,
            window=-1 if is_cross else layer.sliding_window_size,
            chunk=0 if is_cross else layer.attention_chunk_size,
            has_own_table=self.slot_group is not None and self.slot_group.pool_group > 0,
            items=-(-queries * self.shape.group // launch.block_m) * self.shape.kv_heads,
            launch=launch,
            splitting=splitting,
            part_rows=min(launch.block_m, next_power_of_2(queries * self.shape.group)),
            part_width=self.shape.dv,
        )

    def required_group(self) -> SlotGroup:
        """Raises AttnmuxError for a layer that the pool does not store."""
        return _stored(self.slot_group, self.layer)

    def required_keys(self) -> Keys:
        """Raises AttnmuxError for a layer that the pool does not store."""
        return _stored(self.keys, self.layer)

    def tail(self, rows: torch.Tensor, tail: torch.Tensor | None) -> torch.Tensor | None:
        """The columns of Q or K that a power of 2 leaves over."""
        if tail is None and self.shape.real_tail:
            return rows[:, :, self.shape.real_d :]
        return tail

    def factors(self, *, in_call: bool) -> dict[str, float]:
        k_scale, v_scale = (1.0, 1.0) if in_call else self.scales
        scale, cap = self.layer.scaling * k_scale, self.layer.logit_cap
        return {"scale": scale if cap else scale * LOG2_E, "cap": cap, "v_scale": v_scale}

    def constants(self, results: Results, *, has_mask: bool) -> dict[str, Any]:
        layer, is_cross = self.layer, self.layer.is_cross_attention
        return {
            **self.shape.constants(),
            "IS_CAUSAL": layer.is_causal and not is_cross and not has_mask,
            "IS_CROSS": is_cross,
            "WINDOW": -1 if is_cross else layer.sliding_window_size,
            "CHUNK": 0 if is_cross else layer.attention_chunk_size,
            "HAS_CAP": layer.logit_cap > 0,
            "HAS_MASK": has_mask,
            "HAS_SINKS": layer.sinks is not None,
            "HAS_LSE": results.lse is not None,
        }


def _stored(value: T | None, layer: LayerSpec) -> T:
    if value is None:
        raise AttnmuxError(
            f"layer {layer.layer_id} is not in the KV pool: call it with its own k and v and "
            "save_kv_cache=False"
        )
    return value
