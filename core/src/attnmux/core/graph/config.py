"""The configuration of graph runners: mode, inputs and batch sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.progress import Progress as ProgressBar

from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.facts.errors import InvalidInput

Forward: TypeAlias = Callable[[ForwardBatch, Mapping[str, torch.Tensor]], Any]
"""A model's call, with the batch and the other inputs by name. Returns a tensor, or a tuple, list
or dict of tensors, each with T rows."""
Progress: TypeAlias = Callable[[Sequence[int]], Iterable[int]]
"""Iterates over the sizes to capture and shows how far it is."""

NO_INPUTS: Mapping[str, torch.Tensor] = MappingProxyType({})

MAX_GRAPH_BATCH_SIZE = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInput:
    """An input of the model that is not in the batch: [*leading, T, *trailing].

    `input_ids` is ModelInput(dtype=torch.int64); multimodal rotary positions have leading (3,);
    hidden states have trailing (hidden size,). Rows of padding are 0.
    """

    dtype: torch.dtype
    leading: tuple[int, ...] = ()
    trailing: tuple[int, ...] = ()


NO_MODEL_INPUTS: Mapping[str, ModelInput] = MappingProxyType({})


def check_names(inputs: Mapping[str, torch.Tensor], known: Collection[str]) -> None:
    """Raise InvalidInput for an input without a buffer, which a graph would not read."""
    for name in inputs:
        if name not in known:
            expected = f"one of the runner's inputs: {[*known]}"
            raise InvalidInput("inputs", got=repr(name), expected=expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """The steps that a runner's graphs are captured for."""

    batch_sizes: tuple[int, ...]
    """Ascending; see `sizes`."""
    forward_mode: ForwardMode = ForwardMode.DECODE
    """DECODE, TARGET_VERIFY or DRAFT_EXTEND."""
    tokens_per_request: int = 1
    """1 in DECODE, or the number of steps that a draft model's backend prepares at once; the number
    of draft tokens in TARGET_VERIFY, and the new tokens of each request in DRAFT_EXTEND."""
    host_lens: bool = False
    """Whether batches have `seq_lens_cpu`, which backends with `needs_cpu_seq_lens` require."""
    encoder: bool = False
    """Whether batches have `encoder_lens`."""
    spec_topk: int = 1
    custom_mask: bool = False
    """Whether drafts come with a whole mask, `SpecInput.custom_mask`, which takes room for the
    longest contexts."""
    visible: bool = False
    """Whether drafts come with `SpecInput.visible`, as trees do, or in a form that it is made from.
    It takes d * d bytes for each request."""
    index_topk: int = 0
    """Keys that an indexer picks for each token. Above 0 the runner owns a buffer for
    `ForwardBatch.topk_indices`, which the captured model writes before each layer's call."""
    index_heads: int = 0
    """Above 0 an indexer picks blocks for so many heads: the buffer is [T, index_heads,
    index_topk]."""
    pads: bool = True
    """Whether a step of fewer requests is padded to the next larger size; without it, a step whose
    size was not captured has no graph."""
    two_batches: bool = False
    """Whether batches have `tbo_children`: the first half of the rows and the others. The runner
    makes them, also for batches without."""

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise InvalidInput("batch_sizes", got=sizes, expected="ascending sizes from 1 up")
        mode = self.forward_mode
        is_verify = mode.is_target_verify()
        if not (is_verify or mode.is_decode() or mode.is_draft_extend()):
            expected = "DECODE, TARGET_VERIFY or DRAFT_EXTEND"
            raise InvalidInput("forward_mode", got=mode.name, expected=expected)
        InvalidInput.check_at_least(1, "tokens_per_request", self.tokens_per_request)
        if mode.is_draft_extend() and self.two_batches:
            raise InvalidInput("two_batches", got=True, expected="False in DRAFT_EXTEND")
        for name in ("index_topk", "index_heads"):
            InvalidInput.check_at_least(0, name, getattr(self, name))
        for name in ("custom_mask", "visible"):
            if getattr(self, name) and not is_verify:
                expected = "False, except in TARGET_VERIFY"
                raise InvalidInput(name, got=True, expected=expected)
        if self.custom_mask and self.visible:
            got, expected = "custom_mask and visible", "one of them"
            raise InvalidInput("visible", got=got, expected=expected)

    @property
    def max_batch_size(self) -> int:
        return self.batch_sizes[-1]

    @property
    def max_num_tokens(self) -> int:
        return self.max_batch_size * self.tokens_per_request

    @staticmethod
    def sizes(
        *,
        pool_size: int,
        max_batch_size: int | None = None,
        speculation: bool = False,
        chosen: Sequence[int] | None = None,
    ) -> tuple[int, ...]:
        """Batch sizes to capture, ascending.

        pool_size: rows of the request table, which limit a batch. max_batch_size: the largest size
        to capture; None: 160, or the largest of `chosen`. chosen: the user's sizes, instead of the
        default ones.

        If the largest size exceeds the pool, pool_size - 1 and pool_size are added, so that a
        full pool has a graph. Sizes above the pool or the maximum are dropped.
        Raises InvalidInput for sizes below 1, and if no size is left.
        """
        InvalidInput.check_at_least(1, "pool_size", pool_size)
        if chosen is not None:
            if not chosen or min(chosen) < 1:
                raise InvalidInput("chosen", got=list(chosen), expected="batch sizes from 1 up")
            sizes = set(chosen)
        elif speculation:
            sizes = set(range(1, 33))
        else:
            sizes = {1, 2, 4, *range(8, 161, 8)}
        if max_batch_size is None:
            max_batch_size = MAX_GRAPH_BATCH_SIZE if chosen is None else max(sizes)
        InvalidInput.check_at_least(1, "max_batch_size", max_batch_size)
        if max(sizes) > pool_size:
            sizes |= {pool_size - 1, pool_size}
        limit = min(pool_size, max_batch_size)
        kept = tuple(sorted(size for size in sizes if 1 <= size <= limit))
        if not kept:
            expected = f"at least {min(sizes)}, the smallest size"
            raise InvalidInput("max_batch_size", got=max_batch_size, expected=expected)
        return kept


def padded_size(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds `count`; None if the largest does not."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def show_progress(batch_sizes: Sequence[int]) -> Iterator[int]:
    """The sizes, with a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("capturing graphs", total=len(batch_sizes))
        for size in batch_sizes:
            bar.update(task, description=f"capturing graphs, batch size {size}")
            yield size
            bar.advance(task)
