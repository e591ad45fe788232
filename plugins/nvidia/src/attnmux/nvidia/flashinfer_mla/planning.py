"""The library's wrappers, and how each is planned for a step.

Kernels read two things of a plan: the wrapper's int workspace, which stays where it is, and the
indices, which `plan` takes as they are where they lie on the device. So a wrapper whose indices are
in fixed memory serves graphs of every batch size, and eager steps between their replays. The
library's own `use_cuda_graph` adds copies of lengths that no kernel reads, and wants a wrapper for
each batch size, of 8 MiB on the device and as much pinned on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.context import BackendContext
from attnmux.nvidia.flashinfer_mla.heads import padded_heads
from attnmux.nvidia.flashinfer_mla.kernels import Kernels
from attnmux.nvidia.flashinfer_mla.settings import PlanGroup, Settings
from attnmux.nvidia.flashinfer_mla.step import Step
from attnmux.nvidia.latent import RANK, ROPE


class Source(Enum):
    """Where keys come from. Plans of one step for both stand side by side."""

    POOL = auto()
    CALL = auto()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """A step's plan for a group of layers."""

    num_heads: int
    """Of Q as the kernels get it."""
    num_rows: int
    """Of Q that belong to requests."""
    calls: tuple[tuple[slice | None, Any], ...]
    """Rows of Q, None for all, and the wrapper that is planned for them: one, but in the longest
    steps."""
    slots: torch.Tensor
    """[keys] int32: the pool's rows, which are read from there where they are widened."""


class Plans:
    """Wrappers, each made when first planned."""

    def __init__(self, kernels: Kernels, settings: Settings, workspace: torch.Tensor) -> None:
        self._kernels = kernels
        self._settings = settings
        self._workspace = workspace
        self._wrappers: dict[tuple[Source, PlanGroup, int], Any] = {}

    def plan(
        self, source: Source, group: PlanGroup, step: Step, out: torch.Tensor | None = None
    ) -> Planned:
        """out: where the indices go, for a step of a captured graph."""
        settings, of_call = self._settings, source is Source.CALL
        page_size = 1 if of_call else settings.page_size
        heads = padded_heads(group.num_heads) if step.is_causal else group.num_heads
        parts = step.parts(heads, of_call=of_call)
        slots = indices = self._workspace.new_empty(0, dtype=torch.int32)
        if not of_call:
            slots = indices = step.indices(group, out)
        if of_call or settings.widens:
            keys = int(parts[-1].kv_indptr[-1])
            indices = torch.arange(keys, dtype=torch.int32, device=self._workspace.device)
        in_one = len(parts) == 1 and step.num_rows == step.batch.num_tokens
        calls: list[tuple[slice | None, Any]] = []
        for number, part in enumerate(parts):
            wrapper = self._wrapper(source, group, number)
            wrapper.plan(
                part.qo_indptr,
                part.kv_indptr,
                indices,
                part.kv_lens,
                heads,
                RANK,
                ROPE,
                page_size,
                step.is_causal,
                group.scaling,
                settings.dtype,
                settings.dtype,
            )
            calls.append((None if in_one else part.rows, wrapper))
        return Planned(num_heads=heads, num_rows=step.num_rows, calls=tuple(calls), slots=slots)

    def _wrapper(self, source: Source, group: PlanGroup, number: int) -> Any:  # noqa: ANN401  # the library's class
        key = (source, group, number)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._kernels.paged(self._workspace, backend=self._settings.backend)
            self._wrappers[key] = wrapper
        return wrapper


class GraphIndices:
    """Where graphs of up to so many requests read indices, and which batches were captured so.

    A batch is recognised by the address of its tensors.
    """

    def __init__(
        self,
        groups: Sequence[PlanGroup],
        context: BackendContext,
        page_size: int,
        max_batch_size: int,
    ) -> None:
        self.max_batch_size = max_batch_size
        pages = max_batch_size * -(-context.max_context_len // page_size)
        with torch.inference_mode(False):
            self.of_group = {
                group.pool_group: torch.zeros(pages, dtype=torch.int32, device=context.device)
                for group in groups
            }
        self._captured: set[tuple[ForwardMode, int, int]] = set()

    def capture(self, batch: ForwardBatch) -> None:
        self._captured.add(_address(batch))

    def serves(self, batch: ForwardBatch) -> bool:
        return _address(batch) in self._captured


def _address(batch: ForwardBatch) -> tuple[ForwardMode, int, int]:
    return batch.forward_mode, batch.batch_size, batch.req_pool_indices.data_ptr()
