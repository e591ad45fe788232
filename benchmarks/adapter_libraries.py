"""The libraries of `adapters.py`: each with its adapter, and called by hand."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.adapter_workloads import DIM, DTYPE, KV_HEADS, Q_HEADS, Setup
from benchmarks.timing import Call

from attnmux.core.backend import AttentionBackend, BackendContext
from attnmux.core.choosing.options import complete
from attnmux.nvidia.cards.flashinfer import FLASHINFER
from attnmux.nvidia.emulators import flashinfer as emulated_flashinfer
from attnmux.nvidia.emulators import sgl_flash_attn
from attnmux.nvidia.fa3 import FA3Backend
from attnmux.nvidia.fa3 import Kernels as FA3Kernels
from attnmux.nvidia.flashinfer.backend import FlashInferBackend
from attnmux.nvidia.flashinfer.kernels import Kernels as FlashInferKernels

WORKSPACE_BYTES = 256 << 20

Raw = Callable[[Setup], list[Call]]
"""The library's own calls for each layer; in extend they store the new K and V first."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Library:
    """A kernel library with its adapter."""

    distribution: str
    backend: Callable[[BackendContext], AttentionBackend]
    same_calls: Raw
    """Those that the adapter makes."""
    fewest_calls: Raw | None = None
    """One call over all keys in the pool, where the adapter makes others in extend."""


def fa3(*, emulated: bool) -> Library:
    kernels = (
        FA3Kernels(
            flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache,
            flash_attn_varlen_func=sgl_flash_attn.flash_attn_varlen_func,
        )
        if emulated
        else _installed("fa3")
    )

    def raw(setup: Setup) -> list[Call]:
        batch, new = setup.batch, setup.workload.new
        q, lens, queries = setup.q, batch.seq_lens, {}
        if new == 1:
            q = setup.q.unsqueeze(1)
        else:
            bounds = torch.arange(0, len(setup.q) + 1, new, dtype=torch.int32, device=lens.device)
            queries = {"cu_seqlens_q": bounds, "max_seqlen_q": new}
        calls: list[Call] = [
            partial(
                kernels.flash_attn_with_kvcache,
                q,
                keys,
                values,
                cache_seqlens=lens,
                page_table=setup.pages,
                causal=True,
                **queries,
            )
            for keys, values in setup.caches()
        ]
        return calls if new == 1 else _after_writes(setup, calls)

    return Library(
        distribution="sglang-kernel",
        backend=lambda context: FA3Backend(context, {}, kernels),
        same_calls=raw,
    )


def flashinfer(*, emulated: bool) -> Library:
    kernels = (
        FlashInferKernels(
            decode=emulated_flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            paged=emulated_flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            ragged=emulated_flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
            merge_state_in_place=emulated_flashinfer.merge_state_in_place,
            fast_decode_plan=emulated_flashinfer.fast_decode_plan,
        )
        if emulated
        else _installed("flashinfer")
    )
    return Library(
        distribution="flashinfer-python",
        backend=lambda context: FlashInferBackend(context, complete(FLASHINFER, {}), kernels),
        same_calls=partial(_flashinfer_calls, kernels),
        fewest_calls=partial(_flashinfer_paged, kernels),
    )


LIBRARIES: Mapping[str, Callable[..., Library]] = {"fa3": fa3, "flashinfer": flashinfer}


def _installed(name: str) -> Any:  # noqa: ANN401  # the Kernels of any library
    return pkgutil.resolve_name(f"attnmux.nvidia.{name}.factory:KERNELS")


def _after_writes(setup: Setup, calls: Sequence[Call]) -> list[Call]:
    def both(layer_id: int, kv: tuple[torch.Tensor, torch.Tensor], call: Call) -> object:
        setup.write(layer_id, *kv)
        return call()

    layer_ids = setup.context.token_to_kv_pool.layer_ids
    return [partial(both, *each) for each in zip(layer_ids, setup.new_kv(), calls, strict=True)]


class _FlashInferPlans:
    """Wrappers as an engine makes them by hand, with the kernels that the adapter's have."""

    def __init__(self, kernels: FlashInferKernels, setup: Setup) -> None:
        self._kernels, self._setup, self._work = kernels, setup, setup.workload
        self._space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setup.q.device)
        self._steps = torch.arange(self._work.batch_size + 1, dtype=torch.int32)
        self._backend = "fa3" if setup.q.is_cuda else "auto"

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


def _flashinfer_paged(kernels: FlashInferKernels, setup: Setup) -> list[Call]:
    work, plans = setup.workload, _FlashInferPlans(kernels, setup)
    wrapper = plans.decode() if work.new == 1 else plans.paged(work.keys, causal=True)

    def run(cache: tuple[torch.Tensor, torch.Tensor]) -> object:
        # Without `out` the library would fill one with zeros.
        return wrapper.run(setup.q, cache, out=torch.empty_like(setup.q))

    calls: list[Call] = [partial(run, cache) for cache in setup.caches()]
    return calls if work.new == 1 else _after_writes(setup, calls)


def _flashinfer_calls(kernels: FlashInferKernels, setup: Setup) -> list[Call]:
    work, q = setup.workload, setup.q
    if work.new == 1:
        return _flashinfer_paged(kernels, setup)
    plans = _FlashInferPlans(kernels, setup)
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
    return _after_writes(setup, [partial(run, *layer) for layer in layers])
