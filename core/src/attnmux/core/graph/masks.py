"""Fixed buffers for the masks of draft trees."""

from __future__ import annotations

import torch

from attnmux.core.arguments import check_vector
from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import InvalidInput
from attnmux.core.graph.config import GraphConfig


class MaskBuffers:
    """A flat mask of the largest size, and the start of each request's part.

    A graph sees room for `size` requests of the longest context and does not read the values after
    the last request's part. Padding rows see all of their keys.
    """

    def __init__(
        self,
        config: GraphConfig,
        max_bs: int,
        *,
        seq_len_fill: int,
        max_len: int,
        device: torch.device,
    ) -> None:
        draft = config.tokens_per_request
        self._padding_width = draft * (seq_len_fill + draft)
        self._width = max(draft * max_len, self._padding_width)
        self._mask = torch.ones(max_bs * self._width, dtype=torch.bool, device=device)
        self._indptr = torch.arange(max_bs + 1, device=device).int() * self._padding_width
        self._padding_ends = self._indptr[1:].clone()

    def views(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask and indptr of a padded size."""
        return self._mask[: size * self._width], self._indptr[: size + 1]

    def load(self, batch: ForwardBatch, size: int) -> None:
        """Copy the batch's mask; the requests after it, up to `size`, become padding.

        Raises InvalidInput, changing nothing, for a mask that is missing or too large.
        """
        spec, real = batch.spec_info, batch.batch_size
        if spec is None or spec.custom_mask is None or spec.mask_indptr is None:
            expected = "a mask and its mask_indptr"
            raise InvalidInput("spec_info.custom_mask", got=None, expected=expected)
        total, room = spec.custom_mask.numel(), real * self._width
        if total > room or spec.custom_mask.dtype != torch.bool:
            raise InvalidInput(
                "spec_info.custom_mask",
                got=f"{total} values of {spec.custom_mask.dtype}",
                expected=f"at most {room} of torch.bool, for {real} requests of full context",
            )
        check_vector("spec_info.mask_indptr", spec.mask_indptr, torch.int32, real + 1)
        self._mask[:total].copy_(spec.custom_mask)
        self._indptr[: real + 1].copy_(spec.mask_indptr)
        self._pad(real, total, size)

    def load_padding(self, size: int) -> None:
        """Make all of `size` requests padding."""
        self._indptr[0].zero_()
        self._pad(0, 0, size)

    def _pad(self, real: int, total: int, size: int) -> None:
        """Make the requests real to size padding, after `total` values of the mask."""
        padding = size - real
        if padding:
            self._mask[total : total + padding * self._padding_width].fill_(True)
            torch.add(self._padding_ends[:padding], total, out=self._indptr[real + 1 : size + 1])

    def clear(self) -> None:
        """Make every request padding."""
        self._mask.fill_(True)
        self._indptr[0].zero_()
        self._indptr[1:].copy_(self._padding_ends)
