"""Where each request's part of what a step brings begins."""

from __future__ import annotations

import torch

from attnmux.core.indices import mask_indptr
from attnmux.triton.kernels.indices import sum_lens
from attnmux.triton.launching import BoundKernel, Launcher
from attnmux.triton.step import Step

BLOCK = 1024
"""Lengths that are added up at a time."""


class RunningSums:
    """Buffers of running sums, made once and filled at every step."""

    def __init__(self, max_batch_size: int, device: torch.device, launcher: Launcher) -> None:
        self._launcher = launcher
        self._sums = {
            name: torch.zeros(max_batch_size + 1, dtype=torch.int32, device=device)
            for name in ("queries", "encoder")
        }
        self._bound = {name: self._bind(sums) for name, sums in self._sums.items()}

    def of(self, step: Step) -> dict[str, torch.Tensor]:
        """[at least B + 1] int32 each: of "queries" and tokens of the "encoder" where requests have
        lengths of their own, and of the values of a "mask"."""
        found: dict[str, torch.Tensor] = {}
        batch, spec = step.batch, step.batch.spec_info
        if step.queries is None:
            found["queries"] = self._filled("queries", step.new_lens())
            if batch.encoder_lens is not None:
                found["encoder"] = self._filled("encoder", batch.encoder_lens)
        if spec is not None and spec.custom_mask is not None:
            begins = spec.mask_indptr
            if begins is None:
                queries = step.new_lens() if step.queries is None else step.queries
                begins = mask_indptr(queries, step.key_lens())
            found["mask"] = begins
        return found

    def _filled(self, name: str, lens: torch.Tensor) -> torch.Tensor:
        self._bound[name]((1, 1, 1), (lens,), counts=(lens.shape[0],))
        return self._sums[name]

    def _bind(self, sums: torch.Tensor) -> BoundKernel:
        return BoundKernel(
            self._launcher,
            sum_lens,
            {
                "factor": 1,
                "result": sums,
                "result_stride": 1,
                "PAGE": 1,
                "HAS_FACTORS": False,
                "BLOCK": BLOCK,
            },
            tensors=("lens",),
            counts=("batch_size",),
            options={"num_warps": 4},
        )
