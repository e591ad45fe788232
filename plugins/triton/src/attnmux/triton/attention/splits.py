"""Few tiles of queries over many keys: programs share the keys of a tile, and a launch merges them.

A prompt's last chunk or a turn of a conversation has few new tokens behind a long prefix. With a
program for each tile and KV head, most of the device would be idle.
"""

from __future__ import annotations

import math

import torch

from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.kernels.merge import MOST_SPLITS, merge_splits
from attnmux.triton.launches.bound_kernel import BoundKernel
from attnmux.triton.launches.operands import Results
from attnmux.triton.launches.shapes import next_power_of_2

LEAST_KEYS = 512
"""Keys of a split: a smaller one costs more to merge than it saves."""
BUSY = 0.8
"""A device with this part of its units busy is not worth splitting for."""
GOOD = 0.9
"""The fewest splits whose last round is nearly as full as the best number's are taken, as in
FlashAttention's `num_splits_heuristic`."""
MERGED_ROWS = 4


def num_splits(tiles: int, units: int, keys: int) -> int:
    """How many programs share the keys of each tile.

    tiles: of all KV heads. units: programs that the device runs at a time. keys: of the longest
    request.
    """
    most = min(keys // LEAST_KEYS, MOST_SPLITS.value)
    if most < 2 or tiles >= BUSY * units:
        return 1
    fullness = [_fullness(tiles * splits, units) for splits in range(1, most + 1)]
    enough = GOOD * max(fullness)
    return next(splits for splits, full in enumerate(fullness, 1) if full >= enough)


def _fullness(programs: int, units: int) -> float:
    """The part of the device that is busy, on average over the rounds of its programs."""
    return programs / (units * math.ceil(programs / units))


class SplitMerge:
    """A layer's launches of `merge_splits`."""

    def __init__(self, layer: TritonLayer) -> None:
        self._layer = layer
        self._bound: dict[bool, BoundKernel] = {}

    def parts(self, splits: int, num_tokens: int, device: torch.device) -> Results:
        """Memory for the results of all splits: out [splits, T, Hq, Dv] and lse [splits, T, Hq],
        float32, each as one tensor of the first split's shape."""
        spec = self._layer.spec
        shape = (splits, num_tokens, spec.tp_q_head_num)
        out = torch.empty((*shape, spec.v_head_dim), dtype=torch.float32, device=device)
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        return Results(out[0], lse[0])

    def __call__(self, splits: int, parts: Results, results: Results) -> None:
        """Merge the results of the splits, and count the sinks."""
        out, lse = results
        bound = self._bound.get(lse is None)
        if bound is None:
            bound = self._bound[lse is None] = self._bind(has_lse=lse is not None)
        num_rows = out.shape[0] * out.shape[1]
        bound(
            (-(-num_rows // MERGED_ROWS), 1, 1),
            (*parts, out, lse),
            (out.stride()[0], 0 if lse is None else lse.stride()[0]),
            (num_rows, splits),
            out.dtype,
        )

    def _bind(self, *, has_lse: bool) -> BoundKernel:
        spec = self._layer.spec
        return BoundKernel(
            self._layer.launcher,
            merge_splits,
            {
                "sinks": spec.sinks,
                "HEADS": spec.tp_q_head_num,
                "DV": spec.v_head_dim,
                "HAS_SINKS": spec.sinks is not None,
                "HAS_LSE": has_lse,
                "BLOCK_R": MERGED_ROWS,
                "BLOCK_D": next_power_of_2(spec.v_head_dim),
            },
            tensors=("parts", "part_lse", "out", "lse"),
            numbers=("out_stride", "lse_stride"),
            counts=("num_rows", "num_splits"),
            options={"num_warps": 4},
        )
