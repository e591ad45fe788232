"""TensorRT-LLM's MHA adapter for `adapters.py`, `trtllm_mha`: on SM90 XQA decodes and fmha_v2
prefills, both through flashinfer."""

from __future__ import annotations

from functools import partial

import torch
from benchmarks.adapter_flashinfer import DISTRIBUTIONS, WORKSPACE_BYTES
from benchmarks.adapter_grids import PAGED, PAGED_TINY
from benchmarks.adapter_setups import Setup
from benchmarks.adapter_sides import ALONE, SAME, Adapter, Ways, after_writes, kernels_of
from benchmarks.adapter_workloads import DTYPE

from attnmux.core.choosing.offer.named import complete
from attnmux.emulators.nvidia.flashinfer import trtllm_decode, trtllm_prefill
from attnmux.nvidia.cards.trtllm_mha import TRTLLM_MHA as CARD
from attnmux.nvidia.trtllm_mha import Kernels, TRTLLMMHABackend


def _trtllm(kernels: Kernels, setup: Setup) -> Ways:
    return _xqa(kernels, setup) if setup.workload.is_decode else _fmha_v2(kernels, setup)


def _xqa(kernels: Kernels, setup: Setup) -> Ways:
    q, work = setup.q, setup.workload
    # Its counters have to be 0 before the first launch.
    space = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)

    def run(cache: tuple[torch.Tensor, torch.Tensor]) -> object:
        return kernels.xqa_batch_decode_with_kv_cache(
            q,
            cache,
            space,
            setup.pages,
            setup.batch.seq_lens,
            work.keys,
            bmm1_scale=setup.scaling,
            bmm2_scale=1.0,
            out=torch.empty_like(q),
            kv_layout="NHD",
        )

    return {SAME: [partial(run, cache) for cache in setup.caches()]}


def _fmha_v2(kernels: Kernels, setup: Setup) -> Ways:
    """It reads K and V of a page from one tensor, so that the adapter copies the step's pages."""
    q, work, lens = setup.q, setup.workload, setup.batch.seq_lens
    space = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    bounds, pages = setup.bounds(), setup.pages.flatten()
    key_bounds = bounds // work.new * work.keys
    # Copied, a request's pages lie one behind the other.
    table = torch.arange(len(pages), dtype=torch.int32, device=q.device).view_as(setup.pages)

    def attend(staged: torch.Tensor) -> object:
        return kernels.trtllm_fmha_v2_prefill(
            (q, staged),
            "Q_PAGED_KV_NHD",
            space,
            lens,
            work.new,
            work.keys,
            setup.scaling,
            1.0,
            work.batch_size,
            bounds,
            key_bounds,
            block_tables=table,
            out=torch.empty_like(q),
            mask_mode="causal",
        )

    def stage(cache: tuple[torch.Tensor, torch.Tensor], staged: torch.Tensor) -> torch.Tensor:
        for half, buffer in enumerate(cache):
            torch.index_select(buffer, 0, pages, out=staged[:, half])
        return staged

    caches = setup.caches()
    shape = (len(pages), 2, *caches[0][0].shape[1:])
    shared = torch.empty(shape, dtype=DTYPE, device=q.device)

    def both(cache: tuple[torch.Tensor, torch.Tensor]) -> object:
        return attend(stage(cache, shared))

    ready = [stage(cache, torch.empty_like(shared)) for cache in caches]
    same = after_writes(setup, [partial(both, cache) for cache in caches])
    alone = after_writes(setup, [partial(attend, staged) for staged in ready])
    return {SAME: same, ALONE: alone}


TRTLLM_MHA = Adapter(
    distributions=DISTRIBUTIONS,
    workloads=PAGED,
    tiny=PAGED_TINY,
    installed=kernels_of("trtllm_mha"),
    emulated=lambda: Kernels(
        xqa_batch_decode_with_kv_cache=trtllm_decode.xqa_batch_decode_with_kv_cache,
        trtllm_batch_decode_with_kv_cache=trtllm_decode.trtllm_batch_decode_with_kv_cache,
        trtllm_fmha_v2_prefill=trtllm_prefill.trtllm_fmha_v2_prefill,
        trtllm_batch_context_with_kv_cache=trtllm_prefill.trtllm_batch_context_with_kv_cache,
    ),
    backend=lambda context, kernels: TRTLLMMHABackend(context, complete(CARD, {}), kernels),
    ways=_trtllm,
)
