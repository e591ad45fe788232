"""Lengths on the host, which every plan of flashinfer is made of."""

from __future__ import annotations

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import InvalidInput


def check_tokens(batch: ForwardBatch, num_rows: int) -> None:
    """Raises InvalidInput for fewer tokens than the requests' `num_rows`, and in decode for more.

    Rows that follow the requests' are padding, which decode pads with requests instead.
    """
    is_short = batch.num_tokens < num_rows
    if is_short or (batch.forward_mode.is_decode() and batch.num_tokens > num_rows):
        raise InvalidInput(
            "out_cache_loc",
            came=f"{batch.num_tokens} tokens",
            expected=f"the requests' {num_rows}",
        )


def on_host(batch: ForwardBatch, field: str) -> torch.Tensor:
    """The batch's lengths of that name. Raises InvalidInput where there are none."""
    lens: torch.Tensor | None = getattr(batch, field)
    if lens is None:
        raise InvalidInput(
            field, came=None, expected="lengths on the host, which flashinfer plans with"
        )
    return lens
