"""Decoding over chosen pages: bounds, scores, choice and copies, in one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core import torch_dtype
from attnmux.parts import RequestPages
from attnmux.triton.kernels.chosen_pages import (
    choose_places,
    copy_pages,
    score_pages,
    widen_bounds,
)
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.shapes import LEAST_WIDTH, next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import BackendContext

BLOCK_N = 64
"""Pages that a program scores."""
BLOCK_D = 128
"""Columns of a product."""
TILE = 4096
"""Values of a tile."""
COPIED = 8192
"""Values of a tile that is only moved."""
LEAST_CHOSEN_FROM = 1024
"""Scores that a program has room for, so that steps of few kinds are compiled."""
MOST_CHOSEN_FROM = 16384
"""Scores that a program holds in registers. Of more, torch's topk chooses."""


class ChosenPages:
    """A `PageKernels` for layers of one shape. Keeps the compiled kernels."""

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, v_head_dim: int, page_size: int
    ) -> None:
        self._heads, self._page_size = num_kv_heads, page_size
        self._dims = head_dim, v_head_dim
        self.launcher = Launcher()
        self._widen, self._tokens = self._widening()
        self._score: dict[int, BoundKernel] = {}
        self._choose: dict[int, BoundKernel] = {}
        self._copy, self._copied = self._copying()

    def widen(
        self, keys: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, loc: torch.Tensor
    ) -> None:
        """Like `PageKernels.widen`, but NaN is left out of bounds. Slots that the pool does not
        have are skipped."""
        if len(loc):
            width = self._heads * self._dims[0]
            self._widen(
                (len(loc), -(-width // self._tokens), 1),
                (keys, lower, upper, loc.contiguous()),
                (),
                (len(loc), len(lower)),
                keys.dtype,
            )

    def score(
        self, q: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, requests: RequestPages
    ) -> torch.Tensor:
        """See `PageKernels.score`."""
        size, width, heads = len(q), requests.width, self._heads
        scores = torch.empty((size, heads, width), dtype=torch.float32, device=q.device)
        if not size:
            return scores
        q = q if q.stride(2) == 1 else q.contiguous()
        rows, lens = requests.rows.contiguous(), requests.lens.contiguous()
        self._scoring(q.shape[1] // heads)(
            (size, -(-width // BLOCK_N), heads),
            (q, lower, upper, requests.table, rows, lens, scores),
            (*q.stride()[:2], requests.table.stride(0)),
            (width,),
            (q.dtype, lower.dtype, rows.dtype, lens.dtype),
        )
        return scores

    def choose(self, scores: torch.Tensor, requests: RequestPages, number: int) -> torch.Tensor:
        """See `PageKernels.choose`: of equal scores the first."""
        size, heads, width = scores.shape
        if width > MOST_CHOSEN_FROM:
            return scores.topk(number, dim=-1, sorted=False).indices.sort(-1).values
        places = torch.empty((size, heads, number), dtype=torch.int64, device=scores.device)
        if size:
            lens = requests.lens.contiguous()
            self._choosing(next_power_of_2(max(width, LEAST_CHOSEN_FROM)))(
                (size * heads, 1, 1), (scores, lens, places), (), (width, number), lens.dtype
            )
        return places

    def copy(
        self,
        source: tuple[torch.Tensor, torch.Tensor],
        target: tuple[torch.Tensor, torch.Tensor],
        places: torch.Tensor,
        requests: RequestPages,
    ) -> None:
        """See `PageKernels.copy`. Places beyond a request's last page keep their content."""
        size, heads, number = places.shape
        if size:
            rows, lens = requests.rows.contiguous(), requests.lens.contiguous()
            self._copy(
                (size, -(-number * self._page_size // self._copied), heads),
                (*source, *target, requests.table, rows, lens, places),
                (requests.table.stride(0),),
                (number,),
                (source[0].dtype, rows.dtype, lens.dtype),
            )

    def _widening(self) -> tuple[BoundKernel, int]:
        """The kernel, and the columns of a program."""
        width, block_p = self._heads * self._dims[0], next_power_of_2(self._page_size)
        block_w = min(next_power_of_2(width), max(LEAST_WIDTH, TILE // block_p))
        fixed = {
            "WIDTH": width,
            "PAGE": self._page_size,
            "BLOCK_P": block_p,
            "BLOCK_T": max(LEAST_WIDTH, TILE // block_p),
            "BLOCK_W": block_w,
        }
        bound = BoundKernel(
            self.launcher,
            widen_bounds,
            fixed,
            tensors=("keys", "lower", "upper", "loc"),
            counts=("num_tokens", "num_pages"),
            options={"num_warps": 4},
        )
        return bound, block_w

    def _scoring(self, group: int) -> BoundKernel:
        bound = self._score.get(group)
        if bound is None:
            dim = self._dims[0]
            fixed = {
                "HEADS": self._heads,
                "GROUP": group,
                "DIM": dim,
                "PAGE": self._page_size,
                "FIRST": RequestPages.FIRST,
                "LAST": RequestPages.LAST,
                "BLOCK_G": max(LEAST_WIDTH, next_power_of_2(group)),
                "BLOCK_D": min(BLOCK_D, max(LEAST_WIDTH, next_power_of_2(dim))),
                "BLOCK_N": BLOCK_N,
                "PRECISION": "ieee",
            }
            bound = self._score[group] = BoundKernel(
                self.launcher,
                score_pages,
                fixed,
                tensors=("q", "lower", "upper", "table", "rows", "lens", "scores"),
                numbers=("q_stride", "q_head_stride", "table_stride"),
                counts=("width",),
                options={"num_warps": 4},
            )
        return bound

    def _choosing(self, block: int) -> BoundKernel:
        bound = self._choose.get(block)
        if bound is None:
            bound = self._choose[block] = BoundKernel(
                self.launcher,
                choose_places,
                {"HEADS": self._heads, "PAGE": self._page_size, "BLOCK_N": block},
                tensors=("scores", "lens", "places"),
                counts=("width", "number"),
                options={"num_warps": min(16, block // 256)},
            )
        return bound

    def _copying(self) -> tuple[BoundKernel, int]:
        """The kernel, and the tokens of a program."""
        k_dim, v_dim = self._dims
        block_k, block_v = next_power_of_2(k_dim), next_power_of_2(v_dim)
        block_t = max(LEAST_WIDTH, COPIED // max(block_k, block_v))
        fixed = {
            "HEADS": self._heads,
            "K_DIM": k_dim,
            "V_DIM": v_dim,
            "PAGE": self._page_size,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "BLOCK_T": block_t,
        }
        bound = BoundKernel(
            self.launcher,
            copy_pages,
            fixed,
            tensors=("k", "v", "k_copies", "v_copies", "table", "rows", "lens", "places"),
            numbers=("table_stride",),
            counts=("number",),
            options={"num_warps": 4},
        )
        return bound, block_t


def make_kernels(context: BackendContext) -> ChosenPages:
    """The kernels of the context's layers, compiled by launches over two pages of their own."""
    layer, page_size = context.layers[0], context.token_to_kv_pool.page_size
    heads, dims = layer.tp_k_head_num, (layer.qk_head_dim, layer.v_head_dim)
    kernels = ChosenPages(
        num_kv_heads=heads, head_dim=dims[0], v_head_dim=dims[1], page_size=page_size
    )
    device, dtype = context.device, context.token_to_kv_pool.dtype
    k, v = (torch.zeros(2 * page_size, heads, dim, dtype=dtype, device=device) for dim in dims)
    lower, upper = k[:2].clone(), k[:2].clone()
    own = dtype if context.request.dtype is None else torch_dtype(context.request.dtype)
    q = torch.zeros(1, layer.tp_q_head_num, dims[0], dtype=own, device=device)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    requests = RequestPages(
        table=torch.zeros_like(context.req_to_token_pool.req_to_token[:1]),
        rows=rows,
        lens=torch.ones(1, dtype=torch.int32, device=device),
        page_size=page_size,
        width=-(-context.max_context_len // page_size),
    )
    kernels.widen(k, lower, upper, rows)
    places = kernels.choose(kernels.score(q, lower, upper, requests), requests, 1)
    kernels.copy((k, v), (k, v), places, requests)
    return kernels
