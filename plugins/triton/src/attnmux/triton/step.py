"""What a step is to the kernels: lengths and places on the device, nothing read from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """A batch, as far as its shape and its device tensors say."""

    batch: ForwardBatch
    queries: int | None
    """New tokens of every request where all have as many: decode and verify."""
    lens: torch.Tensor
    """[B] int32: `lens_shift` more are the tokens before the new ones."""
    lens_shift: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> Step:
        """Raises InvalidInput for a batch without the lengths of its mode, and for lengths, rows or
        masks that are parts of wider tensors: the kernels read them one after the other."""
        _check_dense(batch)
        if batch.forward_mode.is_decode():
            if batch.num_tokens != batch.batch_size:
                raise InvalidInput(
                    "out_cache_loc",
                    came=f"{batch.num_tokens} tokens of {batch.batch_size} requests",
                    expected="one token a request in decode",
                )
            return cls(batch=batch, queries=1, lens=batch.seq_lens, lens_shift=-1)
        if batch.extend_seq_lens is None or batch.extend_prefix_lens is None:
            raise InvalidInput(
                "extend_seq_lens", came=None, expected="new and cached lengths in an extend step"
            )
        if not batch.forward_mode.is_target_verify():
            return cls(batch=batch, queries=None, lens=batch.extend_prefix_lens, lens_shift=0)
        if batch.spec_info is None:
            raise InvalidInput("spec_info", came=None, expected="a SpecInput in TARGET_VERIFY")
        drafts = batch.spec_info.draft_token_num
        if batch.num_tokens != batch.batch_size * drafts:
            raise InvalidInput(
                "out_cache_loc",
                came=f"{batch.num_tokens} tokens of {batch.batch_size} requests",
                expected=f"{drafts} draft tokens a request",
            )
        return cls(batch=batch, queries=drafts, lens=batch.seq_lens, lens_shift=0)

    def new_lens(self) -> torch.Tensor:
        """[B] int32: new tokens. Raises InvalidInput in decode, which has no such tensor."""
        lens = self.batch.extend_seq_lens
        if lens is None:
            raise InvalidInput("extend_seq_lens", came=None, expected="lengths in an extend step")
        return lens

    def key_lens(self) -> torch.Tensor:
        """[B] int32: keys of each request, the encoder's apart."""
        if self.queries is None:
            return self.lens + self.new_lens()
        more = self.queries + self.lens_shift
        return self.lens + more if more else self.lens

    @property
    def mask(self) -> torch.Tensor | None:
        """The custom mask, flat bool."""
        spec = self.batch.spec_info
        return None if spec is None else spec.custom_mask

    @property
    def hides(self) -> bool:
        """Whether more is hidden than by causality, windows and chunks."""
        return self.mask is not None or self.batch.multi_item is not None

    def encoder_lens(self) -> torch.Tensor:
        """[B] int32. Raises InvalidInput without an encoder."""
        if self.batch.encoder_lens is None:
            raise InvalidInput("encoder_lens", came=None, expected="lengths for cross attention")
        return self.batch.encoder_lens


def _check_dense(batch: ForwardBatch) -> None:
    items, spec = batch.multi_item, batch.spec_info
    for argument, values in (
        ("req_pool_indices", batch.req_pool_indices),
        ("seq_lens", batch.seq_lens),
        ("extend_seq_lens", batch.extend_seq_lens),
        ("extend_prefix_lens", batch.extend_prefix_lens),
        ("encoder_lens", batch.encoder_lens),
        ("spec_info.custom_mask", None if spec is None else spec.custom_mask),
        ("spec_info.mask_indptr", None if spec is None else spec.mask_indptr),
        ("multi_item.prefix_lens", None if items is None else items.prefix_lens),
        ("multi_item.token_pos_in_items", None if items is None else items.token_pos_in_items),
    ):
        if values is not None and not values.is_contiguous():
            raise InvalidInput(
                argument,
                came=f"strides {tuple(values.stride())}",
                expected="values side by side: its .contiguous()",
            )
