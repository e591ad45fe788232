"""Attention of a tree's drafts to each other, merged with attention to their prefixes, in one
launch a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from attnmux.core import torch_dtype
from attnmux.parts import DraftKeys, SeenPrefixes, Trees, attend_to_drafts
from attnmux.triton.kernels.draft_attention import attend_drafts
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.shapes import LEAST_WIDTH, next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import BackendContext, LayerSpec

MOST_DRAFTS = 64
"""Drafts of a request whose keys a program holds at once. Plain operations take more."""
BLOCK_M = 16
"""Rows of a program. Few, because a step of one request has few."""
MOST_COLUMNS = 128
"""Columns of a tile."""
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

Kind = tuple[object, ...]


class TritonDraftAttention:
    """A `DraftAttention`. Keeps the compiled kernels of each kind of layer."""

    def __init__(self) -> None:
        self.launcher = Launcher()
        self._kernels: dict[Kind, BoundKernel] = {}

    def __call__(
        self,
        q: torch.Tensor,
        keys: DraftKeys,
        seen: SeenPrefixes,
        trees: Trees,
        layer: LayerSpec,
        *,
        q_rope: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See core's `attend_to_drafts`. Raises BackendFailed if the kernel does not compile."""
        size, width, _ = trees.visible.shape
        if width > MOST_DRAFTS:
            return attend_to_drafts(q, keys, seen, trees, layer, q_rope=q_rope, lse=lse)
        heads, groups = layer.tp_q_head_num, layer.tp_k_head_num
        out = q.new_empty((size * width, heads, layer.v_head_dim))
        if not size:
            return out
        q, found = _whole(q), _whole(seen.out)
        rope = None if q_rope is None else _whole(q_rope)
        kept = lse if lse is None or lse.stride(1) == 1 else lse.contiguous()
        self._kernel(layer, q, keys.k, rope, kept)(
            (-(-width * heads // groups // BLOCK_M), groups, size),
            (
                *(q, rope, keys.k, keys.v, keys.slots, _bytes(trees.visible)),
                *(found, seen.lse, _bytes(trees.sees_prefix), layer.sinks, out, kept),
            ),
            (
                *(*q.stride()[:2], *((0, 0) if rope is None else rope.stride()[:2])),
                *(*keys.k.stride()[:2], *keys.v.stride()[:2]),
                *(*found.stride()[:2], seen.lse.stride(0)),
                0 if kept is None else kept.stride(0),
                *(float(layer.scaling * keys.k_scale), keys.v_scale, float(layer.logit_cap)),
                *(width, max(LEAST_WIDTH, next_power_of_2(width))),
            ),
            (seen.lse.shape[1] // heads,),
        )
        if lse is not None and kept is not None and kept is not lse:
            lse.copy_(kept)
        return out

    def _kernel(
        self,
        layer: LayerSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        q_rope: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> BoundKernel:
        rope = 0 if q_rope is None else q_rope.shape[2]
        heads, groups = layer.tp_q_head_num, layer.tp_k_head_num
        shape = heads, groups, q.shape[2], rope, layer.v_head_dim
        has_cap = layer.logit_cap > 0
        has = layer.sinks is not None, lse is not None
        kind = *shape, has_cap, *has, q.dtype, k.dtype
        bound = self._kernels.get(kind)
        if bound is None:
            computed = torch.float32 if k.dtype == torch.float32 else q.dtype
            bound = self._kernels[kind] = BoundKernel(
                self.launcher,
                attend_drafts,
                {
                    "KV_HEADS": groups,
                    "GROUP": heads // groups,
                    "D": shape[2],
                    "ROPE": rope,
                    "DV": layer.v_head_dim,
                    "HAS_CAP": has_cap,
                    "DTYPE": DTYPES[computed],
                    # Products of float32 are not rounded to TF32.
                    "PRECISION": "ieee",
                    "BLOCK_M": BLOCK_M,
                    "BLOCK_C": _block(max(shape[2], layer.v_head_dim)),
                    "BLOCK_R": _block(rope),
                },
                tensors=(
                    *("q", "q_rope", "k", "v", "slots", "visible"),
                    *("seen", "seen_lse", "has_prefix", "sinks", "out", "lse"),
                ),
                numbers=(
                    *("q_stride", "q_head_stride", "q_rope_stride", "q_rope_head_stride"),
                    *("k_stride", "k_head_stride", "v_stride", "v_head_stride"),
                    *("seen_stride", "seen_row_stride", "seen_lse_stride", "lse_stride"),
                    *("scaling", "v_scale", "cap", "WIDTH", "BLOCK_N"),
                ),
                counts=("drafts",),
                options={"num_warps": 4},
            )
        return bound


def make_attention(context: BackendContext) -> TritonDraftAttention:
    """The kernel, tried with each shape of the context's layers on its device."""
    made = TritonDraftAttention()
    try_layers(made, context)
    return made


def try_layers(made: TritonDraftAttention, context: BackendContext) -> None:
    """Launch it once for each shape of the context's layers."""
    for layer in {
        (stored.tp_q_head_num, stored.qk_head_dim): stored for stored in context.layers
    }.values():
        _try(made, layer, context)


def _try(made: TritonDraftAttention, layer: LayerSpec, context: BackendContext) -> None:
    """A launch for one request."""
    request, device = context.request, context.device
    drafts, heads = min(request.spec_draft_tokens or 1, MOST_DRAFTS), layer.tp_q_head_num
    dtype = torch.bfloat16 if request.dtype is None else torch_dtype(request.dtype)
    q = torch.zeros(drafts, heads, layer.qk_head_dim, dtype=dtype, device=device)
    width = layer.v_head_dim if layer.kind == "mla" else layer.qk_head_dim
    rows = q.new_zeros(1, drafts * heads, layer.v_head_dim)
    slots = torch.zeros(drafts, dtype=torch.int64, device=device)
    made(
        q[..., :width],
        DraftKeys.of(context.token_to_kv_pool, layer, slots),
        SeenPrefixes(out=rows, lse=rows.new_zeros(rows.shape[:2], dtype=torch.float32)),
        Trees.blank(1, drafts, device),
        layer,
        q_rope=q[..., width:] if width < layer.qk_head_dim else None,
    )


def _whole(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _bytes(flags: torch.Tensor) -> torch.Tensor:
    return flags.contiguous().view(torch.uint8)


def _block(columns: int) -> int:
    return min(MOST_COLUMNS, max(LEAST_WIDTH, next_power_of_2(columns)))
