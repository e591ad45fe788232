"""Attention of many new tokens over an 8-bit pool by the kernel for 16 bits.

Every tile of queries would convert the keys that it reads. If many tiles read each key, one
launch converts them all first, into memory that the layer's call takes and gives back. If that
would be too much memory, KV heads are served one part after another.

If queries may be rounded to e4m3, only V is converted, and K is multiplied where it is. If weights
may too, V is turned instead, so that each of its columns has its keys side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnmux.core import AttentionCall
from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.attention.prepared_keys import PreparedKeys
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.attention.tile_plans import Plans
from attnmux.triton.attention.tiles import TileAttention
from attnmux.triton.attention.wide_places import WidePlaces
from attnmux.triton.launches.configs import HOPPER
from attnmux.triton.launches.dispatch import EIGHT_BITS, Rounding
from attnmux.triton.launches.operands import Keys, Results, Slots

WIDE_KERNELS = frozenset({HOPPER})
"""Kernels that serve 16 bits alone, and are faster than the portable one is with 8 bits."""
LEAST_ROWS = 512
"""Rows of queries that have to see a key, on average, for widening to pay. At 3 TB/s and
500 TFLOP/s, to write and read a key again takes as long as a kernel that is 1.7 times as fast saves
on about 360 rows."""
MOST_BYTES = 512 << 20
"""Bytes of 16-bit keys and values at a time, at most, unless those of one KV head are more."""


def wide_layer(layer: TritonLayer, rounds: Rounding = "none") -> TritonLayer | None:
    """The layer as it is with 16-bit keys; None if no faster kernel serves these. rounds: with the
    layer's own keys, if a kernel multiplies them in 8 bits.

    Layers with windows or chunks see few keys: most conversions would be in vain.
    """
    keys = layer.keys
    if keys is None or keys.k.dtype not in EIGHT_BITS or keys.v.dtype not in EIGHT_BITS:
        return None
    if layer.spec.is_cross_attention or layer.window >= 0 or layer.chunk > 0:
        return None
    traits = layer.dispatch.traits
    rounded = replace(layer.dispatch, traits=replace(traits, rounds=rounds))
    widened = replace(layer.dispatch, traits=replace(traits, keys=None, page_size=1), page_size=1)
    for dispatch in (widened,) if rounds == "none" else (rounded, widened):
        tiles = dispatch.tiles(hides=False)
        if tiles.kernel in WIDE_KERNELS:
            short = dispatch.short_tiles()
            return replace(layer, dispatch=dispatch, keys=None, tiles=tiles, short_tiles=short)
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadPart:
    """Some of a layer's KV heads, and the attention of their queries."""

    kv_heads: range
    q_heads: slice | None
    """None for those of all KV heads."""
    tiles: TileAttention


class WideTileAttention:
    """A layer's launches of `widen_keys`, each followed by one over its result."""

    def __init__(
        self,
        layer: TritonLayer,
        wide: TritonLayer,
        units: int,
        max_context_len: int,
        *,
        always: bool = False,
    ) -> None:
        """wide: as `wide_layer` makes it. units, max_context_len: as of `TileAttention`. always:
        whether also keys that few rows see are widened, so that the bits of a request do not
        depend on its batch."""
        self._layer, self._wide = layer, wide
        self._units, self._max_context_len = units, max_context_len
        rounds = wide.dispatch.traits.rounds
        self._in_pieces = rounds == "all"
        self._prepared = PreparedKeys(layer, rounds)
        # V alone is half the work
        self._least_rows = 0 if always else LEAST_ROWS // (1 if rounds == "none" else 2)
        self._parts: dict[int, tuple[HeadPart, ...]] = {}
        """By KV heads of a part."""

    def __call__(
        self,
        call: AttentionCall,
        step: TritonStep,
        plans: Plans,
        slots: Slots,
        results: Results,
    ) -> bool:
        """Whether the step is served. slots: of the pool's keys."""
        places = self._places(step)
        if places is None:
            return False
        for part in self._parts_of(places.total):
            self._attend_part(part, call, step, plans, slots, results, places)
        return True

    def _attend_part(
        self,
        part: HeadPart,
        call: AttentionCall,
        step: TritonStep,
        plans: Plans,
        slots: Slots,
        results: Results,
        places: WidePlaces,
    ) -> None:
        narrow = self._layer.required_keys()
        k, v = narrow.k, narrow.v
        if part.q_heads is not None:
            k, v = (tensor[:, part.kv_heads.start : part.kv_heads.stop] for tensor in (k, v))
            lse = None if results.lse is None else results.lse[:, part.q_heads]
            results = Results(results.out[:, part.q_heads], lse)
            call = AttentionCall(q=call.q[:, part.q_heads], k=None, v=None, layer=call.layer)
        keys, slots = self._prepared(Keys(k, v), step, slots, places, call.q.dtype)
        part.tiles(call, step, plans, slots, results, keys)

    def _parts_of(self, total: int) -> tuple[HeadPart, ...]:
        """The parts of the KV heads for a step of `total` keys. Their results do not depend on
        their number."""
        kv_heads, row_bytes = self._layer.shape.kv_heads, self._prepared.row_bytes
        count = kv_heads
        while count > 1 and (kv_heads % count or total * count * row_bytes > MOST_BYTES):
            count -= 1
        if count not in self._parts:
            self._parts[count] = tuple(
                self._part(range(at, at + count)) for at in range(0, kv_heads, count)
            )
        return self._parts[count]

    def _part(self, kv_heads: range) -> HeadPart:
        layer, q_heads = self._wide, None
        if len(kv_heads) < layer.shape.kv_heads:
            group = layer.shape.group
            q_heads = slice(kv_heads.start * group, kv_heads.stop * group)
            layer = of_heads(layer, len(kv_heads), q_heads)
        tiles = TileAttention(layer, self._units, self._max_context_len)
        return HeadPart(kv_heads=kv_heads, q_heads=q_heads, tiles=tiles)

    def _places(self, step: TritonStep) -> WidePlaces | None:
        """None if the step's keys are better read as they are.

        This is the case in graphs, whose replays may have more keys, and if the host does not know
        the lengths.
        """
        batch = step.batch
        lens, new = batch.seq_lens_cpu, batch.extend_seq_lens_cpu
        if step.in_capture or step.hides or batch.encoder_lens is not None:
            return None
        if lens is None or new is None:
            return None
        shape = self._layer.shape
        key = shape.group, self._least_rows, self._in_pieces
        if key not in step.wide:
            step.wide[key] = None
            if is_worth(lens, new, shape.group, self._least_rows):
                step.wide[key] = WidePlaces.of(batch, lens, in_pieces=self._in_pieces)
        return step.wide[key]


def of_heads(layer: TritonLayer, kv_heads: int, q_heads: slice) -> TritonLayer:
    """A layer of as many KV heads, whose query heads are some of those of `layer`."""
    spec = replace(
        layer.spec,
        tp_q_head_num=q_heads.stop - q_heads.start,
        tp_k_head_num=kv_heads,
        tp_v_head_num=kv_heads,
        sinks=None if layer.spec.sinks is None else layer.spec.sinks[q_heads],
    )
    return replace(layer, spec=spec, shape=replace(layer.shape, kv_heads=kv_heads))


def is_worth(lens: torch.Tensor, new_lens: torch.Tensor, group: int, least_rows: int) -> bool:
    """Whether each key is seen by `least_rows` rows of queries, on average.

    lens, new_lens: [B] int32 on the host, keys and new tokens of each request. group: query heads
    of a KV head.
    """
    keys = lens.long()
    total = int(keys.sum())
    rows = int((keys * new_lens).sum()) * group
    return total > 0 and rows >= least_rows * total
