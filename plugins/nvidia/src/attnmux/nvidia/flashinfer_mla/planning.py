"""The library's wrappers for MLA, and how each is planned for a step.

Kernels read two things of a plan: the wrapper's int workspace, and the indices, which `plan` takes
as they are where they lie on the device. From 0.7 on each `plan` allocates a workspace, so a
captured batch has a wrapper of its own, whose indices are in fixed memory. A replay plans into its
workspace (`FlashInferMLAKernels.replan`), and so does an eager step of the last one's shape. The
library's own `use_cuda_graph` adds copies of lengths that no kernel reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core import BackendContext, ForwardBatch, GraphUnsupported
from attnmux.nvidia.flashinfer.shared import CaptureKey, capture_key
from attnmux.nvidia.flashinfer_mla.kernels import FlashInferMLAKernels
from attnmux.nvidia.flashinfer_mla.step import FlashInferMLAStep, LatentGroup, Planned

MOST_HEADS = 128
"""Rows of the largest tile, a row being a head of a token: a tile holds whole tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings that all plans of one backend have in common."""

    dtype: torch.dtype
    """Dtype of Q, of the output and of the keys that kernels read."""
    widens: bool
    """The pool's rows are of 8 bits, and copied to `dtype` before a kernel reads them."""
    page_size: int
    """Page size of the view that the kernels have of the pool; 1 for rows that are copied."""
    backend: str
    """Kernels, by the library's names."""


WrapperKey = tuple[LatentGroup, int, bool, bool, int]
"""A group of layers, the padded heads, whether rows see different keys, whether the call brings the
keys, and the number of the plan in its step: with the settings, all that a plan fixes except
lengths and indices."""


@dataclass(kw_only=True, slots=True, eq=False)
class Wrapper:
    """A wrapper of the library, and the subject of its last plan."""

    library: Any
    shape: tuple[int, int] | None = None
    """Rows and requests; None before the first plan, and after one that failed."""


class Planner:
    """Makes wrappers, each when it is first planned, and plans them."""

    def __init__(
        self, kernels: FlashInferMLAKernels, settings: Settings, workspace: torch.Tensor
    ) -> None:
        self._kernels = kernels
        self._settings = settings
        self._workspace = workspace
        self._wrappers: dict[WrapperKey, Wrapper] = {}

    def plan(
        self, group: LatentGroup, step: FlashInferMLAStep, slots: torch.Tensor | None
    ) -> Planned:
        """An eager step's plan. slots: the pages of keys, as `FlashInferMLAStep.indices` has them;
        None if the call brings the keys."""
        return self._plan(group, step, slots, self._wrappers)

    def capture(self, group: LatentGroup, step: FlashInferMLAStep, slots: torch.Tensor) -> Planned:
        """The plan of a step that is about to be captured, on a wrapper of its own.

        Raises GraphUnsupported for a step of several plans, whose indices are copies.
        """
        planned = self._plan(group, step, slots, {})
        if len(planned.calls) > 1:
            raise GraphUnsupported(
                f"a captured step is one plan, and {step.batch.num_tokens} tokens of "
                f"{group.num_heads} heads are {len(planned.calls)}: capture fewer"
            )
        return planned

    def replan(self, planned: Planned, step: FlashInferMLAStep) -> None:
        """Plan a captured batch's next replay. Its indices are filled."""
        parts = step.parts(planned.num_heads, of_call=False)
        for (_, wrapper), part in zip(planned.calls, parts, strict=True):
            self._kernels.replan(
                wrapper, part.lens(), num_heads=planned.num_heads, causal=step.is_causal
            )

    def _plan(
        self,
        group: LatentGroup,
        step: FlashInferMLAStep,
        slots: torch.Tensor | None,
        wrappers: dict[WrapperKey, Wrapper],
    ) -> Planned:
        """wrappers: the planned wrappers; missing ones are made."""
        settings, of_call = self._settings, slots is None
        heads = padded_heads(group.num_heads) if step.is_causal else group.num_heads
        parts = step.parts(heads, of_call=of_call)
        indices = slots
        if indices is None or settings.widens:
            # Keys of the call and copies are read in order.
            indices = torch.arange(
                max(part.num_pages for part in parts),
                dtype=torch.int32,
                device=self._workspace.device,
            )
        in_one = len(parts) == 1 and step.num_rows == step.batch.num_tokens
        calls: list[tuple[slice | None, Any]] = []
        for number, part in enumerate(parts):
            key = (group, heads, step.is_causal, of_call, number)
            wrapper = wrappers.get(key) or wrappers.setdefault(key, self._make())
            shape, wrapper.shape = wrapper.shape, None
            planned = (part.rows.stop - part.rows.start, len(part.kv_lens))
            self._kernels.plan(
                wrapper.library,
                part.lens(),
                part.indices(indices),
                num_heads=heads,
                page_size=1 if of_call else settings.page_size,
                causal=step.is_causal,
                sm_scale=group.scaling,
                dtype=settings.dtype,
                again=planned == shape,
            )
            wrapper.shape = planned
            calls.append((None if in_one else part.rows, wrapper.library))
        return Planned(
            kernels=self._kernels,
            num_heads=heads,
            num_rows=step.num_rows,
            calls=tuple(calls),
            slots=indices if slots is None else slots,
        )

    def _make(self) -> Wrapper:
        return Wrapper(
            library=self._kernels.BatchMLAPagedAttentionWrapper(
                self._workspace, backend=self._settings.backend
            )
        )


class GraphIndices:
    """Where graphs of up to so many requests read indices, and which batches were captured."""

    def __init__(
        self,
        groups: Sequence[LatentGroup],
        context: BackendContext,
        page_size: int,
        max_batch_size: int,
    ) -> None:
        pages = max_batch_size * -(-context.max_context_len // page_size)
        with torch.inference_mode(False):
            self._indices = {
                group.pool_group: torch.zeros(pages, dtype=torch.int32, device=context.device)
                for group in groups
            }
        self._groups = groups
        self._captured: dict[CaptureKey, dict[LatentGroup, Planned]] = {}

    def has(self, batch: ForwardBatch) -> bool:
        """Whether the batch was captured."""
        return capture_key(batch) in self._captured

    def plan(self, planner: Planner, step: FlashInferMLAStep) -> dict[LatentGroup, Planned]:
        """The plans of a batch that is captured, or of its next replay."""
        slots = {
            group: step.indices(group, self._indices[group.pool_group]) for group in self._groups
        }
        key = capture_key(step.batch)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = {
                group: planner.capture(group, step, slots[group]) for group in self._groups
            }
            return captured
        for planned in captured.values():
            planner.replan(planned, step)
        return captured


def padded_heads(num_heads: int) -> int:
    """The heads that a causal plan is made for: the next power of 2, up to `MOST_HEADS`.

    Rows of Q are all heads of a token, token by token, and a tile is 64 or 128 of them. To find the
    last 64 keys that a tile sees, the causal kernels divide the tile's end by the head count,
    rounding down (`kv_tile_idx` in mla.cuh and mla_hopper.cuh of 0.6.13; `MLAPlan` rounds up).
    If a tile ends within a token and its keys end on a multiple of 64, that token's own key is
    left out, and 0.7.2 refuses the plan. So heads are padded until tiles end where tokens do.
    """
    return 1 << (num_heads - 1).bit_length()
