"""8-bit floats as the dtype that products are made in.

torch converts them one by one on a CPU. There are 65536 pairs of them, so a gather from a table
of pairs is several times as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_WORD_OF_TWO = {2: torch.int32, 4: torch.int64}
"""An integer dtype that holds two values of so many bytes."""


class Widening:
    """From one 8-bit float dtype to a wider one, exactly."""

    def __init__(self, source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
        """The wider dtype represents every value of the 8-bit one."""
        self._word = _WORD_OF_TWO[target.itemsize]
        # Built on the host, where bytes and pairs are in the order that views of memory have.
        pairs = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(source)
        self._table = pairs.to(target).view(self._word).to(device)

    def __call__(
        self,
        values: torch.Tensor,
        out: torch.Tensor,
        scratch: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        """Write contiguous `values` to contiguous `out` of the same shape, and return it."""
        if values.numel() % 2 or values.device.type != "cpu":
            return out.copy_(values)
        pairs = values.view(-1).view(torch.uint16)
        places = scratch("pairs", (pairs.numel(),), torch.int32).copy_(pairs)
        torch.index_select(self._table, 0, places, out=out.view(-1).view(self._word))
        return out
