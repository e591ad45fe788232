"""FlashMLA's adapters for `adapters.py`: `flashmla`, over all keys, and `nsa`, over picked ones.

Their kernels take a row of Q whole, whose parts the contract gives: of one row, or apart, so that
they are put together. `nsa`'s takes slots, which an indexer gives as places in the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from benchmarks.adapter_grids import SPARSE, SPARSE_TINY, WHOLE_ROWS, WHOLE_ROWS_TINY
from benchmarks.adapter_setups import Setup
from benchmarks.adapter_sides import ALONE, SAME, Adapter, Ways, after_writes
from benchmarks.setups import RANK
from benchmarks.timing import Call

from attnmux.core.context import BackendContext
from attnmux.emulators.nvidia.flash_mla import flash_mla
from attnmux.emulators.nvidia.flash_mla_sparse import FlashMLA
from attnmux.nvidia.flashmla import FlashMLABackend
from attnmux.nvidia.flashmla import Kernels as DenseKernels
from attnmux.nvidia.flashmla.providers import PROVIDERS as DENSE_PROVIDERS
from attnmux.nvidia.flashmla.providers import from_flash_mla as dense_kernels
from attnmux.nvidia.flashmla.trial import try_kernels
from attnmux.nvidia.nsa import Kernels as SparseKernels
from attnmux.nvidia.nsa import NSABackend
from attnmux.nvidia.nsa.factory import installed as sparse_installed
from attnmux.nvidia.nsa.providers import from_flash_mla as sparse_kernels
from attnmux.nvidia.nsa.trial import measured_lse_unit
from attnmux.nvidia.trial import first_that_runs

DISTRIBUTIONS = ("sgl-flash-mla", "sglang-kernel")
LOOKUP = ("triton", "attnmux-triton")
"""What `nsa` looks its slots up with."""


def _first(
    address: str,
    providers: Mapping[str, Callable[[Any], Any]],
    try_kernels: Callable[[Any, BackendContext], object],
) -> Callable[[BackendContext], Any]:
    """The package that the adapter's factory would take, so that both sides call the same one."""

    def installed(context: BackendContext) -> Any:  # noqa: ANN401  # a Kernels
        kernels, _ = first_that_runs(address, providers, lambda found: try_kernels(found, context))
        return kernels

    return installed


def _dense(kernels: DenseKernels, setup: Setup) -> Ways:
    work, lens = setup.workload, setup.batch.seq_lens
    tiles, splits = kernels.schedule(lens, work.q_heads, False)
    step: dict[str, Any] = {
        "softmax_scale": setup.scaling,
        "causal": True,
        **kernels.schedule_arguments(tiles, splits),
        **kernels.constants,
    }

    def attend(rows: torch.Tensor, q: torch.Tensor) -> object:
        return kernels.flash_mla_with_kvcache(q.unsqueeze(1), rows, setup.pages, lens, RANK, **step)

    def both(rows: torch.Tensor) -> object:
        return attend(rows, setup.queries())

    q, latents = setup.queries(), setup.latents()
    alone: list[Call] = [partial(attend, rows, q) for rows in latents]
    if not work.is_apart:
        return {SAME: alone}
    same: list[Call] = [partial(both, rows) for rows in latents]
    return {SAME: same, ALONE: alone}


def _sparse(kernels: SparseKernels, setup: Setup) -> Ways:
    work, picks = setup.workload, setup.batch.topk_indices
    assert picks is not None
    slots = setup.slots.int().flatten()
    starts = torch.arange(work.batch_size, dtype=torch.int32, device=picks.device) * work.keys
    starts = starts.repeat_interleave(work.new).unsqueeze(1)

    def attend(rows: torch.Tensor, q: torch.Tensor, indices: torch.Tensor) -> object:
        return kernels.flash_mla_sparse_fwd(
            q, rows.flatten(0, 1), indices.unsqueeze(1), setup.scaling, RANK, **kernels.constants
        )

    def both(rows: torch.Tensor) -> object:
        return attend(rows, setup.queries() if work.is_apart else q, slots[starts + picks])

    q, indices, latents = setup.queries(), slots[starts + picks], setup.latents()
    same: list[Call] = [partial(both, rows) for rows in latents]
    alone: list[Call] = [partial(attend, rows, q, indices) for rows in latents]
    return {SAME: after_writes(setup, same), ALONE: after_writes(setup, alone)}


def _nsa(context: BackendContext, kernels: SparseKernels) -> NSABackend:
    return NSABackend(context, {}, kernels, lse_unit=measured_lse_unit(kernels, context))


FLASHMLA = Adapter(
    distributions=DISTRIBUTIONS,
    workloads=WHOLE_ROWS,
    tiny=WHOLE_ROWS_TINY,
    installed=_first("nvidia/flashmla", DENSE_PROVIDERS, try_kernels),
    emulated=lambda: dense_kernels(flash_mla),
    backend=lambda context, kernels: FlashMLABackend(context, {}, kernels),
    ways=_dense,
)
NSA = Adapter(
    distributions=(*DISTRIBUTIONS, *LOOKUP),
    workloads=SPARSE,
    tiny=SPARSE_TINY,
    installed=lambda context: sparse_installed(context)[0],
    emulated=lambda: sparse_kernels(FlashMLA),
    backend=_nsa,
    ways=_sparse,
)
