"""`attnmux.core.topk_slots` on a device, in one launch, as every sparse layer calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import check_tensor
from attnmux.triton.kernels.indices import look_up_picks
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher

if TYPE_CHECKING:
    from attnmux.core import BackendContext

BLOCK = 512
"""Places that a program looks up. A token's 2048 take four programs."""


class TopkSlots:
    """The same arguments and results. Keeps the compiled kernel."""

    def __init__(self) -> None:
        self._look_up = BoundKernel(
            Launcher(),
            look_up_picks,
            {"BLOCK": BLOCK},
            tensors=("table", "rows", "picks", "result"),
            numbers=("table_width", "picks_stride", "topk"),
            options={"num_warps": 4},
        )

    def __call__(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, topk_indices: torch.Tensor
    ) -> torch.Tensor:
        """The slots of the picked keys, [T, topk] int32; -1 if there is none.

        rows: [T] int64, each token's row of the request table. topk_indices: [T, topk] int32.
        Raises InvalidInput for other shapes and dtypes, BackendFailed if the kernel does not
        compile.
        """
        check_tensor("req_to_token", req_to_token, ("rows", "max_context"), None, torch.int32)
        if not req_to_token.is_contiguous():
            got = f"strides {req_to_token.stride()}"
            raise InvalidInput("req_to_token", got=got, expected="a contiguous table")
        check_tensor("rows", rows, ("T",), None, torch.int64)
        check_tensor("topk_indices", topk_indices, (len(rows), "topk"), None, torch.int32)
        num_tokens, topk = topk_indices.shape
        result = torch.empty((num_tokens, topk), dtype=torch.int32, device=topk_indices.device)
        if result.numel():
            picks = topk_indices if topk_indices.stride(1) == 1 else topk_indices.contiguous()
            self._look_up(
                (num_tokens, -(-topk // BLOCK), 1),
                (req_to_token, rows.contiguous(), picks, result),
                (req_to_token.shape[1], picks.stride(0), topk),
            )
        return result


def make_lookup(context: BackendContext) -> TopkSlots:
    """The compiled look-up, for the context's device."""
    fused = TopkSlots()
    nowhere = torch.full((1, 1), -1, dtype=torch.int32, device=context.device)
    fused(nowhere, torch.zeros(1, dtype=torch.int64, device=context.device), nowhere)
    return fused
