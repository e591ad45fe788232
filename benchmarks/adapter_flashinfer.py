"""flashinfer's adapters for `adapters.py`: `flashinfer`, `flashinfer_mla` and `trtllm_mha`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from benchmarks.adapter_grids import DENSE, DENSE_TINY, LATENT, LATENT_TINY
from benchmarks.adapter_setups import Setup
from benchmarks.adapter_sides import ONE, SAME, Adapter, Ways, after_writes, kernels_of
from benchmarks.adapter_workloads import DTYPE, KV_HEADS, Q_HEADS
from benchmarks.setups import DIM, RANK, ROPE
from benchmarks.timing import Call

from attnmux.core.choosing.offer.named import complete
from attnmux.emulators.nvidia import flashinfer as emulated
from attnmux.nvidia.cards.flashinfer import FLASHINFER as FLASHINFER_CARD
from attnmux.nvidia.cards.flashinfer_mla import FLASHINFER_MLA as FLASHINFER_MLA_CARD
from attnmux.nvidia.flashinfer.backend import FlashInferBackend
from attnmux.nvidia.flashinfer.kernels import Kernels
from attnmux.nvidia.flashinfer_mla.backend import FlashInferMLABackend
from attnmux.nvidia.flashinfer_mla.kernels import Kernels as MLAKernels

WORKSPACE_BYTES = 256 << 20
DISTRIBUTIONS = ("flashinfer-python",)


class _Plans:
    """Wrappers as an engine makes them by hand, with the kernels that the adapter's have."""

    def __init__(self, kernels: Kernels, setup: Setup) -> None:
        self._kernels, self._setup, self._work = kernels, setup, setup.workload
        self._space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setup.q.device)
        self._steps = torch.arange(self._work.batch_size + 1, dtype=torch.int32)
        self._backend = _backend(setup)

    def decode(self) -> Any:  # noqa: ANN401  # the library's class
        wrapper = self._kernels.decode(self._space, "NHD", use_tensor_cores=True)
        dims = (Q_HEADS, KV_HEADS, DIM, self._work.page_size)
        wrapper.plan(*self._pages(self._work.keys), *dims, q_data_type=DTYPE, kv_data_type=DTYPE)
        return wrapper

    def paged(self, keys: int, *, causal: bool) -> Any:  # noqa: ANN401  # the library's class
        """Over the first `keys` tokens of each request."""
        wrapper = self._kernels.paged(self._space, "NHD", backend=self._backend)
        wrapper.plan(
            self._steps * self._work.new,
            *self._pages(keys),
            Q_HEADS,
            KV_HEADS,
            DIM,
            self._work.page_size,
            causal=causal,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )
        return wrapper

    def ragged(self) -> Any:  # noqa: ANN401  # the library's class
        wrapper = self._kernels.ragged(self._space, "NHD", backend=self._backend)
        bounds = self._steps * self._work.new
        dims = (Q_HEADS, KV_HEADS, DIM)
        wrapper.plan(bounds, bounds, *dims, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE)
        return wrapper

    def _pages(self, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        page = self._work.page_size
        count = -(-keys // page)
        last = torch.full((self._work.batch_size,), (keys - 1) % page + 1, dtype=torch.int32)
        return self._steps * count, self._setup.pages[:, :count].flatten(), last


def _backend(setup: Setup) -> str:
    """The kernels that the adapters take on SM90."""
    return "fa3" if setup.q.is_cuda else "auto"


def _flashinfer(kernels: Kernels, setup: Setup) -> Ways:
    work, q, plans = setup.workload, setup.q, _Plans(kernels, setup)
    over_pool = plans.decode() if work.is_decode else plans.paged(work.keys, causal=True)

    def run_one(cache: tuple[torch.Tensor, torch.Tensor]) -> object:
        # Without `out` the library would fill one with zeros.
        return over_pool.run(q, cache, out=torch.empty_like(q))

    one = after_writes(setup, [partial(run_one, cache) for cache in setup.caches()])
    if work.is_decode:
        return {SAME: one}
    ragged, cached = plans.ragged(), work.keys - work.new
    prefix = plans.paged(cached, causal=False) if cached else None

    def run(
        cache: tuple[torch.Tensor, torch.Tensor], kv: tuple[torch.Tensor, torch.Tensor]
    ) -> object:
        if prefix is None:
            return ragged.run(q, *kv, out=torch.empty_like(q))
        out, lse = ragged.run(q, *kv, return_lse=True)
        part = prefix.run(q, cache, out=torch.empty_like(q), return_lse=True)
        kernels.merge_state_in_place(out, lse, *part)
        return out

    layers = zip(setup.caches(), setup.new_kv(), strict=True)
    return {SAME: after_writes(setup, [partial(run, *layer) for layer in layers]), ONE: one}


def _flashinfer_mla(kernels: MLAKernels, setup: Setup) -> Ways:
    work, q, q_rope = setup.workload, setup.q, setup.q_rope
    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = kernels.paged(space, backend=_backend(setup))
    steps = torch.arange(work.batch_size + 1, dtype=torch.int32)
    wrapper.plan(
        steps * work.new,
        steps * setup.pages.shape[1],
        setup.pages.flatten(),
        torch.full((work.batch_size,), work.keys, dtype=torch.int32),
        work.q_heads,
        RANK,
        ROPE,
        work.page_size,
        not work.is_decode,
        setup.scaling,
        DTYPE,
        DTYPE,
    )

    def run(rows: torch.Tensor) -> object:
        latents = rows[..., :RANK], rows[..., RANK:]
        return wrapper.run(q, q_rope, *latents, out=torch.empty_like(q))

    calls: list[Call] = [partial(run, rows.squeeze(2)) for rows in setup.latents()]
    return {SAME: after_writes(setup, calls)}


FLASHINFER = Adapter(
    distributions=DISTRIBUTIONS,
    workloads=DENSE,
    tiny=DENSE_TINY,
    installed=kernels_of("flashinfer"),
    emulated=lambda: Kernels(
        decode=emulated.BatchDecodeWithPagedKVCacheWrapper,
        paged=emulated.BatchPrefillWithPagedKVCacheWrapper,
        ragged=emulated.BatchPrefillWithRaggedKVCacheWrapper,
        merge_state_in_place=emulated.merge_state_in_place,
        fast_decode_plan=emulated.fast_decode_plan,
    ),
    backend=lambda context, kernels: FlashInferBackend(
        context, complete(FLASHINFER_CARD, {}), kernels
    ),
    ways=_flashinfer,
)
FLASHINFER_MLA = Adapter(
    distributions=DISTRIBUTIONS,
    workloads=LATENT,
    tiny=LATENT_TINY,
    installed=kernels_of("flashinfer_mla"),
    emulated=lambda: MLAKernels(paged=emulated.BatchMLAPagedAttentionWrapper),
    backend=lambda context, kernels: FlashInferMLABackend(
        context, complete(FLASHINFER_MLA_CARD, {}), kernels
    ),
    ways=_flashinfer_mla,
)
