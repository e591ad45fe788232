"""An indexer's picks on a device: scores in one launch, the highest ones in another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.triton.bound_kernel import BoundKernel, Launcher
from attnmux.triton.kernels.index_scores import score_keys, select_highest
from attnmux.triton.shapes import next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import BackendContext, IndexRows

BLOCK_N = 64
"""Keys that a program scores."""
BLOCK_SCORES = 4096
"""Scores that a program ranks at a time."""
BLOCK_D = 128
"""Columns of a product: those that share a scale of e4m3."""
LEAST = 16
"""Rows and columns of a product, at least."""


class IndexPicks:
    """A `PicksKeys`. Keeps the compiled kernels."""

    def __init__(self) -> None:
        self._launcher = Launcher()
        self._score: dict[tuple[int, int, torch.dtype], BoundKernel] = {}
        self._select = BoundKernel(
            self._launcher,
            select_highest,
            {"BLOCK": BLOCK_SCORES},
            tensors=("scores", "positions", "picks"),
            numbers=("picks_stride",),
            counts=("scores_stride", "topk"),
            options={"num_warps": 16},
        )

    def __call__(
        self,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        stored: IndexRows,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        width: int,
        picks: torch.Tensor,
    ) -> None:
        """As `PicksKeys`. Raises BackendFailed where the kernels do not compile."""
        num_tokens = index_q.shape[0]
        shape = num_tokens, max(width, 1)
        scores = torch.empty(shape, dtype=torch.float32, device=index_q.device)
        self.score(index_q, weights, stored, req_to_token, rows, positions, scores)
        self.select(scores, positions, picks)

    def score(
        self,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        stored: IndexRows,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Write scores [T, S] float32 up to each token's place, which is below S."""
        num_tokens, heads, dim = index_q.shape
        keys, scales = stored.keys, stored.scales
        if scales is None and keys.dtype == torch.float32:
            index_q = index_q.float()
        index_q = index_q if index_q.stride(2) == 1 else index_q.contiguous()
        weights = weights.float().contiguous()
        if scales is not None:
            keys = keys.view(torch.uint8)
        self._scoring(heads, dim, index_q.dtype)(
            (num_tokens, -(-scores.shape[1] // BLOCK_N), 1),
            (
                index_q,
                weights,
                rows.contiguous(),
                positions.contiguous(),
                req_to_token,
                keys,
                scales,
                scores,
            ),
            (
                *index_q.stride()[:2],
                weights.stride(0),
                req_to_token.stride(0),
                keys.stride(0),
                0 if scales is None else scales.stride(0),
            ),
            (scores.stride(0), num_tokens // len(rows)),
            (index_q.dtype, keys.dtype, scales is None),
        )

    def select(self, scores: torch.Tensor, positions: torch.Tensor, picks: torch.Tensor) -> None:
        """Write picks [T, topk] int32, whose columns are contiguous, of scores [T, S]."""
        self._select(
            (len(picks), 1, 1),
            (scores, positions.contiguous(), picks),
            (picks.stride(0),),
            (scores.stride(0), picks.shape[1]),
        )

    def _scoring(self, heads: int, dim: int, dtype: torch.dtype) -> BoundKernel:
        bound = self._score.get((heads, dim, dtype))
        if bound is None:
            bound = self._score[heads, dim, dtype] = BoundKernel(
                self._launcher,
                score_keys,
                {
                    "HEADS": heads,
                    "DIM": dim,
                    "BLOCK_H": max(LEAST, next_power_of_2(heads)),
                    "BLOCK_D": min(BLOCK_D, max(LEAST, next_power_of_2(dim))),
                    "BLOCK_N": BLOCK_N,
                    "PRECISION": "ieee",
                },
                tensors=(
                    "q", "weights", "rows", "positions", "table", "keys", "scales", "scores",
                ),
                numbers=(
                    "q_stride",
                    "q_head_stride",
                    "weights_stride",
                    "table_stride",
                    "keys_stride",
                    "scales_stride",
                ),
                counts=("scores_stride", "queries"),
                options={"num_warps": 4},
            )  # fmt: skip
        return bound


def make_picks(context: BackendContext) -> IndexPicks:
    """The kernels for the context's device. The selection compiles here; the scores' kernel, whose
    shapes are the model's, at its first launch."""
    picks = IndexPicks()
    nothing = torch.zeros((1, 1), dtype=torch.float32, device=context.device)
    place = torch.zeros(1, dtype=torch.int64, device=context.device)
    picks.select(nothing, place, torch.full((1, 1), -1, dtype=torch.int32, device=context.device))
    return picks
