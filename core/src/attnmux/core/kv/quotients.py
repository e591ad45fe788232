"""Division that rounds once on every device."""

from __future__ import annotations

import torch


def quotients(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """values / divisor in the dtype of `values`, each rounded once.

    Of a number as divisor, torch multiplies by the reciprocal on a GPU, which rounds twice; kernels
    divide. Does not synchronise.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
