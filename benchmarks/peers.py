"""The libraries that `triton_gpu.py` compares with, each called by hand as its users do.

A function makes one call a layer, planned ahead; what a call returns is its output, [T, Hq, Dv], or
begins with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.setups import DIM, RANK, ROPE
from benchmarks.timing import Call
from benchmarks.triton_setups import Setup

from attnmux.core.dtypes import torch_dtype

WORKSPACE_BYTES = 512 << 20

Calls = Callable[[Any, Setup], list[Call]]
"""Of the library's module and a workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A kernel of a library, and how it serves which family of workloads."""

    name: str
    module: str
    distribution: str
    calls: Mapping[str, Calls]

    def load(self, *, emulated: bool) -> Any:  # noqa: ANN401  # the library's module
        """Raises ImportError where it is not installed, or nothing emulates it."""
        if not emulated:
            return importlib.import_module(self.module)
        if self.module not in EMULATORS:
            raise ImportError(f"nothing emulates {self.module}")
        return importlib.import_module(EMULATORS[self.module])


def flashinfer_decode(library: Any, setup: Setup) -> list[Call]:  # noqa: ANN401  # a module
    """Its decode wrapper with tensor cores."""
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        _space(setup), "NHD", use_tensor_cores=True
    )
    wrapper.plan(*_page_lists(setup), *_heads(setup), **_dtypes(setup))
    run = partial(wrapper.run, setup.q, out=torch.empty_like(setup.q))
    return [partial(run, cache) for cache in setup.caches()]


def flashinfer_extend(library: Any, setup: Setup, *, backend: str) -> list[Call]:  # noqa: ANN401  # a module
    """Its prefill wrapper over the pool, which holds the new tokens."""
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_space(setup), "NHD", backend=backend)
    bounds = torch.arange(setup.workload.batch_size + 1, dtype=torch.int32) * setup.workload.new
    wrapper.plan(bounds, *_page_lists(setup), *_heads(setup), causal=True, **_dtypes(setup))
    run = partial(wrapper.run, setup.q, out=torch.empty_like(setup.q))
    return [partial(run, cache) for cache in setup.caches()]


def flashinfer_mla(library: Any, setup: Setup) -> list[Call]:  # noqa: ANN401  # a module
    """Its MLA wrapper with kernels for Hopper GPUs."""
    work, lens = setup.workload, setup.batch.seq_lens
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(_space(setup), backend="fa3")
    bounds, indices, _ = _page_lists(setup)
    wrapper.plan(
        torch.arange(work.batch_size + 1, dtype=torch.int32, device=lens.device),
        bounds.to(lens.device),
        indices,
        lens,
        work.q_heads,
        RANK,
        ROPE,
        work.page_size,
        False,
        setup.scaling,
        *_dtypes(setup).values(),
    )
    run = partial(wrapper.run, setup.q, setup.q_rope, out=torch.empty_like(setup.q))
    latents = [keys.squeeze(2) for keys, _ in setup.caches()]
    return [partial(run, rows[..., :RANK], rows[..., RANK:]) for rows in latents]


def fa3_decode(library: Any, setup: Setup) -> list[Call]:  # noqa: ANN401  # a module
    given = {"cache_seqlens": setup.batch.seq_lens, "page_table": setup.pages, "causal": True}
    run = partial(library.flash_attn_with_kvcache, setup.q.unsqueeze(1), **given)
    return [partial(run, *cache) for cache in setup.caches()]


def fa3_extend(library: Any, setup: Setup) -> list[Call]:  # noqa: ANN401  # a module
    """Over the pool, which holds the new tokens."""
    new, lens = setup.workload.new, setup.batch.seq_lens
    bounds = torch.arange(0, len(setup.q) + 1, new, dtype=torch.int32, device=lens.device)
    given = {"cache_seqlens": lens, "page_table": setup.pages, "causal": True}
    given |= {"cu_seqlens_q": bounds, "max_seqlen_q": new}
    run = partial(library.flash_attn_with_kvcache, setup.q, **given)
    return [partial(run, *cache) for cache in setup.caches()]


def fa3_mla(library: Any, setup: Setup) -> list[Call]:  # noqa: ANN401  # a module
    """The rotary part as Q and K, the latent as a second query and as V."""
    given = {"cache_seqlens": setup.batch.seq_lens, "page_table": setup.pages, "causal": True}
    given |= {"qv": setup.q.unsqueeze(1), "softmax_scale": setup.scaling}
    run = partial(library.flash_attn_with_kvcache, _rope(setup).unsqueeze(1), **given)
    return [partial(run, keys[..., RANK:], latents) for keys, latents in setup.caches()]


def flashmla(library: Any, setup: Setup) -> list[Call]:  # noqa: ANN401  # a module
    lens = setup.batch.seq_lens
    tiles, splits = library.get_mla_metadata(lens, setup.workload.q_heads, 1)
    q = torch.cat([setup.q, _rope(setup)], dim=-1).unsqueeze(1)
    run = partial(library.flash_mla_with_kvcache, softmax_scale=setup.scaling, causal=True)
    return [
        partial(run, q, keys, setup.pages, lens, RANK, tiles, splits) for keys, _ in setup.caches()
    ]


PEERS = (
    Peer(
        name="flashinfer",
        module="flashinfer",
        distribution="flashinfer-python",
        calls={
            "decode": flashinfer_decode,
            "fp8": flashinfer_decode,
            "mla": flashinfer_mla,
            "extend": partial(flashinfer_extend, backend="fa3"),
        },
    ),
    Peer(
        name="flashinfer fa2",
        module="flashinfer",
        distribution="flashinfer-python",
        calls={"extend": partial(flashinfer_extend, backend="fa2")},
    ),
    Peer(
        name="fa3",
        module="sgl_kernel.flash_attn",
        distribution="sglang-kernel",
        calls={"decode": fa3_decode, "mla": fa3_mla, "extend": fa3_extend},
    ),
    Peer(
        name="flashmla",
        module="sgl_kernel.flash_mla",
        distribution="sglang-kernel",
        calls={"mla": flashmla},
    ),
)
EMULATORS = {
    "flashinfer": "attnmux.emulators.nvidia.flashinfer",
    "sgl_kernel.flash_attn": "attnmux.emulators.nvidia.sgl_flash_attn",
}


def _space(setup: Setup) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setup.q.device)


def _page_lists(setup: Setup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bounds of each request's pages, on the host; the pages; tokens in the last one."""
    counts, page = setup.page_counts, setup.workload.page_size
    bounds = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    rows = zip(setup.pages, counts.tolist(), strict=True)
    indices = torch.cat([row[:count] for row, count in rows])
    lens = torch.tensor(setup.workload.lens, dtype=torch.int32)
    return bounds, indices, (lens - 1) % page + 1


def _heads(setup: Setup) -> tuple[int, int, int, int]:
    work = setup.workload
    return work.q_heads, work.kv_heads, DIM, work.page_size


def _dtypes(setup: Setup) -> dict[str, torch.dtype]:
    work = setup.workload
    return {"q_data_type": setup.q.dtype, "kv_data_type": torch_dtype(work.kv_dtype)}


def _rope(setup: Setup) -> torch.Tensor:
    if setup.q_rope is None:
        raise ValueError(f"{setup.workload}: no rotary part")
    return setup.q_rope
