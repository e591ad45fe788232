"""A step as the kernels see it: lengths and offsets on the device. The host reads none back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attnmux.core import ForwardBatch, InvalidInput
from attnmux.core.plugin import limited_drafts, mask_indptr
from attnmux.triton.kernels.indices import sum_lens
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.shapes import next_power_of_2

if TYPE_CHECKING:
    from attnmux.triton.attention.wide_places import WidePlaces

BLOCK = 1024
"""Lengths that `sum_lens` adds up at a time."""
NO_STEP = "no step is prepared: call init_forward_metadata(batch) first"
LEAST_BATCH = 256
"""Plans are compiled for at least as many requests: one variant serves all smaller batches."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trees:
    """The keys that drafts of trees see in layers of one window and chunk."""

    visible: torch.Tensor
    """[B, d, d] bool: the drafts that each draft sees."""
    first: torch.Tensor
    """[B, d] int32: the first visible key of the prefix."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TritonStep:
    """A batch, by its shape and its device tensors."""

    batch: ForwardBatch
    queries: int | None
    """New tokens of each request if all have equally many, as in decode and verify."""
    lens: torch.Tensor
    """[B] int32. `lens + lens_shift` tokens precede the new ones."""
    lens_shift: int
    indptr: dict[str, torch.Tensor] = field(default_factory=dict)
    """Written by `RunningSums.fill`, [at least B + 1] int32 each: where each request's "queries",
    its tokens of the "encoder" and its values of the "mask" begin. Only those that the step has."""
    trees: dict[tuple[int, int], Trees] = field(default_factory=dict)
    """Trees of a step whose mask is between drafts alone, by the layers' window and chunk. Written
    by `fill_trees`."""
    tiles: dict[Hashable, tuple[bool, int]] = field(default_factory=dict)
    """Whether tiles are short, and how many programs share the keys of one, by the layers'
    kinds."""
    takes_short_tiles: bool | None = None
    """None if its lengths decide."""
    wide: dict[Hashable, WidePlaces | None] = field(default_factory=dict)
    """Where keys of 8 bits are written as 16 bits, by the layers' shapes."""
    in_capture: bool = False
    """Whether its launches are captured in a graph."""

    @classmethod
    def of(cls, batch: ForwardBatch, *, in_capture: bool = False) -> TritonStep:
        """Raises InvalidInput for a batch without the lengths of its mode, and for lengths, rows or
        masks that are not contiguous."""
        _check_contiguous(batch)
        queries = batch.queries_each()
        return cls(
            batch=batch,
            queries=queries,
            lens=batch.extend_lens()[1] if queries is None else batch.seq_lens,
            lens_shift=-1 if batch.forward_mode.is_decode() else 0,
            in_capture=in_capture,
        )

    def new_lens(self) -> torch.Tensor:
        """[B] int32: new tokens. Raises InvalidInput in decode, which has no such tensor."""
        return self.batch.extend_lens()[0]

    def key_lens(self) -> torch.Tensor:
        """[B] int32: keys of each request without the encoder's."""
        if self.queries is None:
            return self.lens + self.new_lens()
        more = self.queries + self.lens_shift
        return self.lens + more if more else self.lens

    @property
    def mask(self) -> torch.Tensor | None:
        """The whole custom mask, flat bool."""
        spec = self.batch.spec_info
        return None if spec is None else spec.custom_mask

    @property
    def hides(self) -> bool:
        """Whether a mask or items hide keys, in addition to causality, windows and chunks."""
        is_masked = self.batch.tree_mask is not None
        return is_masked or self.batch.multi_item is not None

    def encoder_lens(self) -> torch.Tensor:
        """[B] int32. Raises InvalidInput without an encoder."""
        if self.batch.encoder_lens is None:
            raise InvalidInput("encoder_lens", got=None, expected="lengths for cross attention")
        return self.batch.encoder_lens


def _check_contiguous(batch: ForwardBatch) -> None:
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
                got=f"strides {tuple(values.stride())}",
                expected="values side by side: its .contiguous()",
            )


class RunningSums:
    """The buffers of `TritonStep.indptr`, made once and filled at every step."""

    def __init__(self, max_batch_size: int, device: torch.device, launcher: Launcher) -> None:
        self._sums = {
            name: torch.zeros(max_batch_size + 1, dtype=torch.int32, device=device)
            for name in ("queries", "encoder")
        }
        self._bound = {name: _bind(sums, launcher) for name, sums in self._sums.items()}

    def fill(self, step: TritonStep) -> None:
        batch, spec, indptr = step.batch, step.batch.spec_info, step.indptr
        if step.queries is None:
            indptr["queries"] = self._filled("queries", step.new_lens())
            if batch.encoder_lens is not None:
                indptr["encoder"] = self._filled("encoder", batch.encoder_lens)
        if spec is not None and spec.custom_mask is not None:
            begins = spec.mask_indptr
            if begins is None:
                queries = step.new_lens() if step.queries is None else step.queries
                begins = mask_indptr(queries, step.key_lens())
            indptr["mask"] = begins

    def _filled(self, name: str, lens: torch.Tensor) -> torch.Tensor:
        self._bound[name]((1, 1, 1), (lens,), counts=(lens.shape[0],))
        return self._sums[name]


def _bind(sums: torch.Tensor, launcher: Launcher) -> BoundKernel:
    return BoundKernel(
        launcher,
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


def batch_block(count: int) -> int:
    """The number of requests that a plan of `count` requests is compiled for."""
    return max(next_power_of_2(count), LEAST_BATCH)


def fill_trees(step: TritonStep, limits: Iterable[tuple[int, int]]) -> None:
    """Make `TritonStep.trees`. limits: the layers' windows and chunks."""
    if not step.batch.masks_drafts:
        return
    visible = step.batch.visible_drafts()
    for window, chunk in limits:
        seen, first = limited_drafts(visible, step.lens, window=window, chunk=chunk)
        step.trees[window, chunk] = Trees(visible=seen.contiguous(), first=first)
