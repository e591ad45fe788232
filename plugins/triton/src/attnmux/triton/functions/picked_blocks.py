"""Attention to the blocks that an indexer picked, in one launch, or two if programs share a
token's picks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.triton.attention.factory import compute_units
from attnmux.triton.attention.layer import LOG2_E, TritonLayer
from attnmux.triton.attention.splits import SplitMerge
from attnmux.triton.kernels.merge import MOST_SPLITS
from attnmux.triton.kernels.picked_blocks import attend_picked_blocks
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.operands import Results
from attnmux.triton.launches.shapes import halves, next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, LayerSpec
    from attnmux.parts import PickedBlocks

LEAST = 16
"""Rows and columns of a product, at least."""
BLOCK_N, STAGES = 32, 2
"""Keys that a program gathers at a time, and how many times that it has on their way."""
FAST_ARCH, FAST_BLOCK_N, FAST_STAGES = "sm90", 128, 3
"""With 32 keys, decode steps take 1.3 to 2.7 times as long on an H100. Elsewhere this is untried,
and gfx1201 has too few registers."""
FAST_BYTES = 1 << 16
"""Bytes of the keys and values of a block: the shared memory of SM90 holds three times that."""
LEAST_KEYS = 128
"""Keys of a part: a smaller one costs more to merge than it saves."""
STRIDES = (
    *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride"),
    *("table_stride", "picks_stride", "picks_head_stride", "out_stride", "lse_stride"),
)


class BlockAttention:
    """An `AttendsToBlocks` of a context's layers. Keeps the compiled kernels."""

    def __init__(self, context: BackendContext, *, compute_units: int) -> None:
        """compute_units: SMs or CUs of the device, which share the picks of few tokens."""
        self._context = context
        self.launcher = Launcher()
        self._units = compute_units
        self._layers: dict[int, TritonLayer] = {}
        self._merges: dict[int, SplitMerge] = {}
        self._bound: dict[tuple[int, int, int, bool], BoundKernel] = {}

    def __call__(self, call: AttentionCall, picked: PickedBlocks) -> torch.Tensor:
        """See `AttendsToBlocks`. Raises BackendFailed if the kernel does not compile."""
        results, layer_id = Results.of(call), call.layer.layer_id
        num_tokens, heads, topk = picked.picks.shape
        if not num_tokens:
            return results.out
        layer = self._layer(call.layer)
        keys = layer.required_keys()
        part_picks = self._part_picks(num_tokens * heads, topk, picked.size)
        parts = -(-topk // part_picks)
        into = results
        if parts > 1:
            into = self._merges[layer_id].parts(parts, num_tokens, call.q.device)
        picks = picked.picks if picked.picks.stride(2) == 1 else picked.picks.contiguous()
        out, lse = into
        self._kernel(layer, heads, picked.size, has_lse=lse is not None)(
            (num_tokens, heads, parts),
            (
                *(call.q, keys.k, keys.v, picked.table, picked.rows.contiguous()),
                *(picked.positions.contiguous(), picks, out, lse),
            ),
            (
                *call.q.stride()[:2],
                *keys.k.stride()[:2],
                *keys.v.stride()[:2],
                picked.table.stride(0),
                *picks.stride()[:2],
                out.stride(0),
                0 if lse is None else lse.stride(0),
            ),
            (topk, part_picks, num_tokens),
            (call.q.dtype, keys.k.dtype, out.dtype),
        )
        if parts > 1:
            self._merges[layer_id](parts, into, results)
        return results.handed_to(call)

    def _part_picks(self, programs: int, topk: int, size: int) -> int:
        """Picks of each part. All are one part if the device is busy without."""
        most = topk * size // LEAST_KEYS
        if not self._context.request.deterministic:
            most = min(most, self._units // programs)
        parts = min(most, int(MOST_SPLITS.value), topk)
        return topk if parts < 2 else -(-topk // parts)

    def _layer(self, spec: LayerSpec) -> TritonLayer:
        layer = self._layers.get(spec.layer_id)
        if layer is None:
            layer = TritonLayer.of(spec, self._context, self.launcher)
            self._layers[spec.layer_id] = layer
            self._merges[spec.layer_id] = SplitMerge(layer)
        return layer

    def _kernel(self, layer: TritonLayer, heads: int, size: int, *, has_lse: bool) -> BoundKernel:
        key = (layer.spec.layer_id, heads, size, has_lse)
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._bind(layer, heads, size, has_lse=has_lse)
        return bound

    def _bind(self, layer: TritonLayer, heads: int, size: int, *, has_lse: bool) -> BoundKernel:
        spec, (k_scale, v_scale) = layer.spec, layer.scales
        group, dims = spec.tp_q_head_num // heads, (spec.qk_head_dim, spec.v_head_dim)
        widths = [max(LEAST, next_power_of_2(dim)) for dim in dims]
        block_n, stages = _gathered(layer, sum(widths))
        return BoundKernel(
            self.launcher,
            attend_picked_blocks,
            {
                "slot_map": self._context.token_to_kv_pool.slot_map(spec.layer_id),
                "scale": spec.scaling * k_scale * LOG2_E,
                "v_scale": v_scale,
                "SIZE": size,
                "GROUP": group,
                "SHARED": heads // spec.tp_k_head_num,
                "DIM": dims[0],
                "V_DIM": dims[1],
                "BLOCK_D": widths[0],
                "BLOCK_V": widths[1],
                "BLOCK_H": max(LEAST, next_power_of_2(group)),
                "BLOCK_N": block_n,
                "PRECISION": "ieee",
                "HAS_LSE": has_lse,
            },
            tensors=("q", "k", "v", "table", "rows", "positions", "picks", "out", "lse"),
            numbers=STRIDES,
            counts=("topk", "part_picks", "num_tokens"),
            options={"num_warps": 4, "num_stages": stages},
        )


def _gathered(layer: TritonLayer, width: int) -> tuple[int, int]:
    """Keys of a gathered block, and stages. width: columns of K and V."""
    if layer.dispatch.arch != FAST_ARCH:
        return BLOCK_N, STAGES
    dtype = layer.dispatch.traits.dtype or torch.float32
    most, _ = halves(FAST_BYTES // (width * dtype.itemsize))
    return max(BLOCK_N, min(FAST_BLOCK_N, most)), FAST_STAGES


def make_attention(context: BackendContext) -> BlockAttention:
    """The kernel for the context's device. Its shapes are the model's: it compiles at its first
    launch."""
    return BlockAttention(context, compute_units=compute_units(context))
