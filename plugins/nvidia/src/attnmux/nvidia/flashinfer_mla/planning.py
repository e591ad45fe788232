"""The library's wrappers for MLA, and how each is planned for a step.

Kernels read two things of a plan: the wrapper's int workspace, which stays where it is, and the
indices, which `plan` takes as they are where they lie on the device. So a wrapper whose indices are
in fixed memory serves graphs of every batch size, and eager steps between their replays. The
library's own `use_cuda_graph` adds copies of lengths that no kernel reads, and wants a wrapper for
each batch size, of 8 MiB on the device and as much pinned on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core import LATENT_DIM, ROPE_DIM, BackendContext, ForwardBatch
from attnmux.nvidia.flashinfer.shared import CaptureKey, capture_key
from attnmux.nvidia.flashinfer_mla.step import FlashInferMLAStep, LatentGroup, Planned

MOST_HEADS = 128
"""Rows of the largest tile, a row being a head of a token: a tile holds whole tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashInferMLAKernels:
    """A class of flashinfer 0.6, by the library's name."""

    BatchMLAPagedAttentionWrapper: Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all plans of one backend have in common."""

    dtype: torch.dtype
    """Of Q, of the output and of the keys that kernels read."""
    widens: bool
    """The pool's rows are of 8 bits, and copied to `dtype` before a kernel reads them."""
    page_size: int
    """Of the view that the kernels have of the pool; 1 of rows that are copied."""
    backend: str
    """Kernels, by the library's names."""


class Planner:
    """Makes wrappers, each when it is first planned, and plans them."""

    def __init__(
        self, kernels: FlashInferMLAKernels, settings: Settings, workspace: torch.Tensor
    ) -> None:
        self._kernels = kernels
        self._settings = settings
        self._workspace = workspace
        self._wrappers: dict[tuple[bool, LatentGroup, int], Any] = {}

    def plan(
        self, group: LatentGroup, step: FlashInferMLAStep, slots: torch.Tensor | None
    ) -> Planned:
        """slots: the pages of keys, as `FlashInferMLAStep.indices` has them; None where the call
        brings the keys."""
        settings, of_call = self._settings, slots is None
        heads = padded_heads(group.num_heads) if step.is_causal else group.num_heads
        parts = step.parts(heads, of_call=of_call)
        indices = slots
        if indices is None or settings.widens:
            # Keys of the call and copies are read in order.
            keys = int(parts[-1].kv_indptr[-1])
            indices = torch.arange(keys, dtype=torch.int32, device=self._workspace.device)
        in_one = len(parts) == 1 and step.num_rows == step.batch.num_tokens
        calls: list[tuple[slice | None, Any]] = []
        for number, part in enumerate(parts):
            wrapper = self._wrapper(of_call, group, number)
            wrapper.plan(
                qo_indptr=part.qo_indptr,
                kv_indptr=part.kv_indptr,
                kv_indices=indices,
                kv_len_arr=part.kv_lens,
                num_heads=heads,
                head_dim_ckv=LATENT_DIM,
                head_dim_kpe=ROPE_DIM,
                page_size=1 if of_call else settings.page_size,
                causal=step.is_causal,
                sm_scale=group.scaling,
                q_data_type=settings.dtype,
                kv_data_type=settings.dtype,
            )
            calls.append((None if in_one else part.rows, wrapper))
        return Planned(
            num_heads=heads,
            num_rows=step.num_rows,
            calls=tuple(calls),
            slots=indices if slots is None else slots,
        )

    def _wrapper(self, of_call: bool, group: LatentGroup, number: int) -> Any:  # noqa: ANN401  # the library's class
        key = (of_call, group, number)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._kernels.BatchMLAPagedAttentionWrapper(
                self._workspace, backend=self._settings.backend
            )
            self._wrappers[key] = wrapper
        return wrapper


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
            self.of_group = {
                group.pool_group: torch.zeros(pages, dtype=torch.int32, device=context.device)
                for group in groups
            }
        self._captured: set[CaptureKey] = set()

    def capture(self, batch: ForwardBatch) -> None:
        self._captured.add(capture_key(batch))

    def has(self, batch: ForwardBatch) -> bool:
        return capture_key(batch) in self._captured


def padded_heads(num_heads: int) -> int:
    """The heads that a causal plan is made for: the next power of 2, up to `MOST_HEADS`.

    Rows of Q are all heads of a token, token by token, and a tile is 64 or 128 of them. To find the
    last 64 keys that a tile sees, the causal kernels divide the tile's end by the head count,
    rounding down (`kv_tile_idx` in mla.cuh and mla_hopper.cuh of 0.6.13; `MLAPlan` rounds up).
    Where a tile ends within a token and its keys end on a multiple of 64, that token's own key is
    left out. So heads are padded until tiles end where tokens do.
    """
    return 1 << (num_heads - 1).bit_length()
