"""What the graphs of a runner are captured for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.errors import InvalidInput

Forward: TypeAlias = Callable[[ForwardBatch, Mapping[str, torch.Tensor]], Any]
"""A model's call: the batch, and by name what only the model reads. Returns a tensor, or a tuple,
list or dict of tensors, each with T rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInput:
    """One tensor that only the model reads: [*leading, T, *trailing].

    `input_ids` is ModelInput(dtype=torch.int64); multimodal rotary positions have leading (3,);
    hidden states have trailing (hidden size,). Rows of padding are 0.
    """

    dtype: torch.dtype
    leading: tuple[int, ...] = ()
    trailing: tuple[int, ...] = ()


def check_names(inputs: Mapping[str, torch.Tensor], known: Collection[str]) -> None:
    """Raise InvalidInput for an input that no buffer is for: a graph would not read it."""
    for name in inputs:
        if name not in known:
            raise InvalidInput(
                "inputs", came=repr(name), expected=f"what the runner was made for: {[*known]}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """What the graphs of a runner are captured for."""

    batch_sizes: tuple[int, ...]
    """Ascending; see `graph_batch_sizes`."""
    forward_mode: ForwardMode = ForwardMode.DECODE
    """DECODE or TARGET_VERIFY."""
    tokens_per_request: int = 1
    """1 in DECODE, the number of draft tokens in TARGET_VERIFY."""
    padding: bool = True
    """Whether a batch may replay a larger graph than its own size."""
    host_lens: bool = False
    """Whether batches carry `seq_lens_cpu`, as backends with `needs_cpu_seq_lens` want."""
    encoder: bool = False
    """Whether batches carry `encoder_lens`."""
    spec_topk: int = 1
    custom_mask: bool = False
    """Whether the drafts come with a mask, as trees do."""
    index_topk: int = 0
    """Keys that an indexer picks for each token: with more than 0 the runner owns a buffer for
    `ForwardBatch.topk_indices`, which the captured model writes before each layer's call."""
    two_batches: bool = False
    """Whether batches have `tbo_children`: the first half of the rows and the others."""
    compile: Callable[[Forward], Forward] | None = None
    """Such as torch.compile: applied to the model's call of batch sizes up to
    `compile_max_batch_size`."""
    compile_max_batch_size: int = 32

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise InvalidInput("batch_sizes", came=sizes, expected="ascending sizes from 1 up")
        is_verify = self.forward_mode.is_target_verify()
        if not is_verify and not self.forward_mode.is_decode():
            raise InvalidInput(
                "forward_mode", came=self.forward_mode.name, expected="DECODE or TARGET_VERIFY"
            )
        if self.tokens_per_request < 1 or (self.tokens_per_request > 1 and not is_verify):
            raise InvalidInput(
                "tokens_per_request",
                came=self.tokens_per_request,
                expected="1 in DECODE, the number of draft tokens in TARGET_VERIFY",
            )
        if self.index_topk < 0:
            raise InvalidInput("index_topk", came=self.index_topk, expected="at least 0")
        if self.custom_mask and (self.two_batches or not is_verify):
            raise InvalidInput(
                "custom_mask", came=True, expected="False but in TARGET_VERIFY of one batch"
            )

    @property
    def max_batch_size(self) -> int:
        return self.batch_sizes[-1]

    @property
    def max_num_tokens(self) -> int:
        return self.max_batch_size * self.tokens_per_request
