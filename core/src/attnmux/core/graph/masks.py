"""Fixed buffers for the masks of draft trees."""

from __future__ import annotations

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import InvalidInput
from attnmux.core.graph.config import GraphConfig


class MaskBuffers:
    """A flat mask of the largest size, and where each request's part starts.

    A graph sees room for `size` requests of the longest context; the values behind the last
    request's part are not read. Padding rows see all of their keys.
    """

    def __init__(
        self, config: GraphConfig, *, seq_len_fill: int, max_len: int, device: torch.device
    ) -> None:
        draft = config.tokens_per_request
        of_padding = draft * (seq_len_fill + draft)
        self._width = max(draft * max_len, of_padding)
        self._mask = torch.ones(
            config.max_batch_size * self._width, dtype=torch.bool, device=device
        )
        self._indptr = torch.arange(config.max_batch_size + 1, device=device).int() * of_padding
        self._of_padding = of_padding
        self._steps = self._indptr[1:].clone()

    def views(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask and indptr of a padded size."""
        return self._mask[: size * self._width], self._indptr[: size + 1]

    def load(self, batch: ForwardBatch, size: int) -> None:
        """Copy the batch's mask; the requests behind it up to `size` become padding.

        Raises InvalidInput, changing nothing, for a mask that is missing or too large.
        """
        spec, real = batch.spec_info, batch.batch_size
        if spec is None or spec.custom_mask is None or spec.mask_indptr is None:
            raise InvalidInput(
                "spec_info.custom_mask", came=None, expected="a mask and its mask_indptr"
            )
        total, room = spec.custom_mask.numel(), real * self._width
        if total > room or spec.custom_mask.dtype != torch.bool:
            raise InvalidInput(
                "spec_info.custom_mask",
                came=f"{total} values of {spec.custom_mask.dtype}",
                expected=f"at most {room} of torch.bool, for {real} requests of full context",
            )
        if spec.mask_indptr.shape != (real + 1,):
            raise InvalidInput(
                "spec_info.mask_indptr",
                came=f"shape {tuple(spec.mask_indptr.shape)}",
                expected=f"shape ({real + 1},)",
            )
        self._mask[:total].copy_(spec.custom_mask)
        self._indptr[: real + 1].copy_(spec.mask_indptr)
        padding = size - real
        if padding:
            self._mask[total : total + padding * self._of_padding].fill_(True)
            torch.add(self._steps[:padding], total, out=self._indptr[real + 1 : size + 1])

    def clear(self) -> None:
        """Every request is padding."""
        self._mask.fill_(True)
        self._indptr[0].zero_()
        self._indptr[1:].copy_(self._steps)
