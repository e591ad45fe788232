"""An indexer's scores of the keys in a request table, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.triton.kernels.index_scores import score_keys
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.shapes import next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import BackendContext
    from attnmux.core.plugin import IndexRows

BLOCK_N = 64
"""Keys that a program scores."""
BLOCK_D = 128
"""Columns of a product: those that share a scale of e4m3."""
LEAST = 16
"""Rows and columns of a product, at least."""


class IndexScores:
    """A `ScoresKeys`. Keeps the compiled kernel of each shape."""

    def __init__(self) -> None:
        self._launcher = Launcher()
        self._score: dict[tuple[int, int, torch.dtype], BoundKernel] = {}

    def __call__(
        self,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        stored: IndexRows,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """See `ScoresKeys`. Raises BackendFailed if the kernel does not compile."""
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


def make_scores(context: BackendContext) -> IndexScores:
    """The kernel for the context's device. Its shapes are the model's: it compiles at its first
    launch."""
    return IndexScores()
