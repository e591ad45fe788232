"""FlashAttention's adapters for `adapters.py`: `fa3`, `fa3_mla` and `fa4`."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.adapter_grids import DENSE, DENSE_TINY, EXTEND, EXTEND_TINY, LATENT, LATENT_TINY
from benchmarks.adapter_setups import Setup
from benchmarks.adapter_sides import SAME, Adapter, Ways, after_writes, kernels_of
from benchmarks.setups import RANK
from benchmarks.timing import Call

from attnmux.emulators.nvidia import sgl_flash_attn
from attnmux.emulators.nvidia.flash_attn_cute import FlashAttnCute
from attnmux.nvidia.fa3 import FA3Backend
from attnmux.nvidia.fa3 import Kernels as FA3Kernels
from attnmux.nvidia.fa3_mla import FA3MLABackend
from attnmux.nvidia.fa3_mla import Kernels as FA3MLAKernels
from attnmux.nvidia.fa4 import FA4Backend
from attnmux.nvidia.fa4 import Kernels as FA4Kernels


def _step(setup: Setup) -> dict[str, Any]:
    """What `flash_attn_with_kvcache` is told of the step."""
    told: dict[str, Any] = {
        "cache_seqlens": setup.batch.seq_lens,
        "page_table": setup.pages,
        "causal": True,
    }
    if not setup.workload.is_decode:
        told |= {"cu_seqlens_q": setup.bounds(), "max_seqlen_q": setup.workload.new}
    return told


def _fa3(kernels: FA3Kernels, setup: Setup) -> Ways:
    q = setup.q.unsqueeze(1) if setup.workload.is_decode else setup.q
    step = _step(setup)
    calls: list[Call] = [
        partial(kernels.flash_attn_with_kvcache, q, keys, values, **step)
        for keys, values in setup.caches()
    ]
    return {SAME: after_writes(setup, calls)}


def _fa3_mla(kernels: FA3MLAKernels, setup: Setup) -> Ways:
    q, q_rope = setup.q, setup.q_rope
    assert q_rope is not None
    if setup.workload.is_decode:
        q, q_rope = q.unsqueeze(1), q_rope.unsqueeze(1)
    step = {**_step(setup), "softmax_scale": setup.scaling, "qv": q}
    calls: list[Call] = [
        partial(kernels.flash_attn_with_kvcache, q_rope, rows[..., RANK:], rows[..., :RANK], **step)
        for rows in setup.latents()
    ]
    return {SAME: after_writes(setup, calls)}


def _fa4(kernels: FA4Kernels, setup: Setup) -> Ways:
    work = setup.workload
    step: dict[str, Any] = {
        "cu_seqlens_q": setup.bounds(),
        "max_seqlen_q": work.new,
        "max_seqlen_k": work.keys,
        "seqused_k": setup.batch.seq_lens,
        "page_table": setup.pages,
        "softmax_scale": setup.scaling,
        "causal": True,
        "num_splits": 1,
    }
    calls: list[Call] = [
        partial(kernels.flash_attn_varlen_func, setup.q, keys, values, **step)
        for keys, values in setup.caches()
    ]
    return {SAME: after_writes(setup, calls)}


FA3 = Adapter(
    distributions=("sglang-kernel",),
    workloads=DENSE,
    tiny=DENSE_TINY,
    installed=kernels_of("fa3"),
    emulated=lambda: FA3Kernels(
        flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache,
        flash_attn_varlen_func=sgl_flash_attn.flash_attn_varlen_func,
        get_scheduler_metadata=sgl_flash_attn.get_scheduler_metadata,
        merge_state_v2=sgl_flash_attn.merge_state_v2,
    ),
    backend=lambda context, kernels: FA3Backend(context, {}, kernels),
    ways=_fa3,
)
FA3_MLA = Adapter(
    distributions=("sglang-kernel",),
    workloads=LATENT,
    tiny=LATENT_TINY,
    installed=kernels_of("fa3_mla"),
    emulated=lambda: FA3MLAKernels(
        flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache,
        flash_attn_varlen_func=sgl_flash_attn.flash_attn_varlen_func,
        get_scheduler_metadata=sgl_flash_attn.get_scheduler_metadata,
        merge_state_v2=sgl_flash_attn.merge_state_v2,
    ),
    backend=lambda context, kernels: FA3MLABackend(context, {}, kernels),
    ways=_fa3_mla,
)
FA4 = Adapter(
    distributions=("flash-attn-4",),
    workloads=EXTEND,
    tiny=EXTEND_TINY,
    installed=kernels_of("fa4"),
    emulated=lambda: FA4Kernels(
        flash_attn_varlen_func=FlashAttnCute(arch=90).flash_attn_varlen_func
    ),
    backend=lambda context, kernels: FA4Backend(context, {}, kernels),
    ways=_fa4,
)
