"""FlashMLA's dense decode: one call of the library for each layer, over the pool's own pages.

The library takes Q [B, d, Hq, 576], latent and rotary part in one row, and counts causality from
the end of the keys. Its LSE [B, Hq, d] is a natural logarithm, and +inf for a query without keys.
Over e4m3 it rounds Q and the softmax's weights to e4m3 too, and its output is bfloat16. The library
allocates the output.

Requests without keys: the kernels for 16-bit caches give them output 0. The one for e4m3 would read
the block table one entry before that request's row, and whatever page that names; the request is
given one key, in the reserved page, and its answer is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import ForwardMode, InvalidInput, KVPool
from attnmux.core.plugin import (
    DecodeBuffers,
    DecodeStep,
    KernelLibrary,
    KeyGroup,
    KeyLens,
    Keys,
    LatentRows,
    LibraryBackend,
    PageTables,
    rehearse,
)
from attnmux.nvidia.kernel_rows import FP8, check_own_or_fp8, store_lse
from attnmux.nvidia.latent.base import LatentDecodeBackend
from attnmux.nvidia.latent.flashmla_kernels import DENSE, FlashMLAKernels

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

PAGE = 64
"""Tokens of a page: the one size that the kernels read."""
ROWS = 2**22 - 2**16
"""Most queries of all heads in one call: the kernels count the float32 of split results, 512 a row,
in int32 (`oaccum_ptr` in splitkv_mla.cuh), and there are some more rows of those."""
FP8_REQUESTS = 4095
"""Most requests of one call over e4m3 (`MaxBatchSize` in flash_fwd_mla_metadata.cu, which ends the
process beyond)."""
FP8_QUERIES = PAGE + 2
"""Most queries of a request over e4m3: causality hides only keys of the last two pages
(`n_masking_steps` in flash_fwd_mla_kernel.h), and the last may hold a single key."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlashMLALayer:
    """A layer's arguments that no step changes."""

    group: KeyGroup
    heads: int
    k_cache: torch.Tensor
    """[pages, 64, 1, 576], the pool's memory."""
    is_fp8: bool
    """Whether the cache holds e4m3, which the kernel then expects of Q too."""
    arguments: dict[str, Any]
    """By the library's names."""


@dataclass(kw_only=True, slots=True, eq=False)
class FlashMLABuffers(DecodeBuffers):
    """Fixed tensors that graphs replay with."""

    schedules: dict[int, Sequence[torch.Tensor]]
    """By heads: the two tensors of `FlashMLAKernels.schedule` at their largest."""


@dataclass(kw_only=True, slots=True, eq=False)
class FlashMLAStep(DecodeStep):
    """A step of the kernel's requests, which have the same number of queries."""

    buffers: FlashMLABuffers | None
    schedules: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By heads, as `schedule_arguments`; set by `fill_step`."""


class FlashMLABackend(
    LatentDecodeBackend[FlashMLAKernels, FlashMLALayer, FlashMLAStep, FlashMLABuffers]
):
    """Decoding, verification and drafts of MLA on Hopper GPUs; prefill is another backend's."""

    modes = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: FlashMLAKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options, kernels)
        self._heads = tuple(dict.fromkeys(layer.heads for layer in self._layers.values()))
        self._is_fp8 = context.token_to_kv_pool.dtype == FP8
        self._max_queries = self._most_fp8_queries() if self._is_fp8 else None

    def prepare_layer(self, layer: LayerSpec) -> FlashMLALayer:
        self.context.check_page_size(PAGE)
        check_own_or_fp8(self.context)
        pool = self.context.token_to_kv_pool
        is_fp8 = pool.dtype == FP8
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            # The kernels do not mask a single query, which is the last.
            "causal": True,
            "is_fp8_kvcache": is_fp8,
            **self.kernels.constants,
        }
        if is_fp8:
            scale, _ = pool.read_scales(layer.k_scale, None)
            # Engines change torch's default dtype while they load a model.
            unit = torch.ones(1, dtype=torch.float32, device=self.context.device)
            # The second serves V too, which is the front of the same rows.
            arguments |= {"descale_q": unit, "descale_k": unit * scale}
        return FlashMLALayer(
            group=KeyGroup.of(layer, self.context),
            heads=layer.tp_q_head_num,
            k_cache=self.context.latent_pages(layer, PAGE),
            is_fp8=is_fp8,
            arguments=arguments,
        )

    def plan_decode(self, batch: ForwardBatch, buffers: FlashMLABuffers | None) -> FlashMLAStep:
        step = FlashMLAStep.of(batch, self.context, buffers)
        queries = step.tables.queries_each
        self._check(batch.num_tokens if queries is None else batch.batch_size, queries or 1)
        return step

    def fill_step(self, step: FlashMLAStep, batch: ForwardBatch) -> None:
        if not batch.num_tokens:
            return
        tables, buffers = step.tables, step.buffers
        tables.fill(batch, self._groups, self.context)
        keys = tables.keys if tables.queries_each else _by_token(tables, batch)
        lens = keys[self._groups[0]].lens  # as in every group
        step.lens = KeyLens.of(lens, buffers.lens if buffers else None)
        lens = step.lens.at_least_one if self._is_fp8 else lens
        step.keys = {group: key.with_lens(lens) for group, key in keys.items()}
        step.schedules = {heads: self._schedule(step, heads, buffers) for heads in self._heads}

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> FlashMLABuffers:
        self._check(max_bs)
        ones = torch.ones(max_bs, dtype=torch.int32, device=self.context.device)
        # A single query a request has the most parts.
        schedules = {
            heads: self.kernels.schedule(ones, heads, self._is_fp8) for heads in self._heads
        }
        return FlashMLABuffers.of(self._groups, max_bs, self.context, schedules=schedules)

    def attend(
        self, call: AttentionCall, layer: FlashMLALayer, step: FlashMLAStep, batch: ForwardBatch
    ) -> torch.Tensor:
        keys, lens = LibraryBackend.filled(step.keys)[layer.group], LibraryBackend.filled(step.lens)
        queries = step.tables.queries_each or 1
        q = LatentRows.joined(call.q, call.q_rope)
        if layer.is_fp8:
            q = KVPool.quantise(q, FP8, None)  # which saturates beyond 448
        result, lse = self.kernels.flash_mla_with_kvcache(
            q.view(-1, queries, *q.shape[1:]),
            layer.k_cache,
            keys.page_table,
            keys.lens,
            LatentRows.LATENT_DIM,
            **step.schedules[layer.heads],
            **layer.arguments,
        )
        if layer.is_fp8:
            lens.replace(result, 0)
        if call.lse is not None:
            lens.replace(lse, -torch.inf)
            store_lse(lse, call.lse, queries)
        return result.flatten(0, 1).to(call.q.dtype)

    def _schedule(
        self, step: FlashMLAStep, heads: int, buffers: FlashMLABuffers | None
    ) -> dict[str, Any]:
        lens = LibraryBackend.filled(step.keys)[self._groups[0]].lens
        rows = (step.tables.queries_each or 1) * heads
        tensors = self.kernels.schedule(lens, rows, self._is_fp8)
        if buffers is not None:
            fixed = zip(buffers.schedules[heads], tensors, strict=True)
            tensors = [buffer[: len(tensor)].copy_(tensor) for buffer, tensor in fixed]
        return self.kernels.schedule_arguments(*tensors)

    def _check(self, num_requests: int, queries_each: int = 1) -> None:
        """Raises InvalidInput beyond the kernels' limits, which they do not check."""
        dtype = self.context.token_to_kv_pool.dtype
        rows = num_requests * queries_each * max(self._heads)
        if rows > ROWS:
            raise InvalidInput(
                "batch_size",
                got=f"{rows} queries of all heads",
                expected=f"at most {ROWS} in one call",
            )
        if self._max_queries is not None and queries_each > self._max_queries:
            raise InvalidInput(
                "spec_info",
                got=f"{queries_each} draft tokens a request",
                expected=f"at most {self._max_queries} over {dtype}",
            )
        if self._is_fp8 and num_requests > FP8_REQUESTS:
            raise InvalidInput(
                "batch_size",
                got=f"{num_requests} requests of the kernel",
                expected=f"at most {FP8_REQUESTS} over {dtype}",
            )

    def _most_fp8_queries(self) -> int:
        """Most queries of a request over e4m3. A multiprocessor takes 64 rows of queries and heads;
        the device traps if all of them together cannot hold a request's rows."""
        unit = torch.ones(1, dtype=torch.int32, device=self.context.device)
        tiles, _ = self.kernels.schedule(unit, 1, True)
        return min(FP8_QUERIES, 64 * len(tiles) // max(self._heads))


def _by_token(tables: PageTables, batch: ForwardBatch) -> dict[KeyGroup, Keys]:
    """Each new token as a request of its own, with the keys that it sees.

    A call takes the same number of queries of each request, and drafts have different numbers.
    Tokens of no request see no key.
    """
    new = batch.extend_seq_lens
    assert new is not None  # which PageTables.of has checked
    bounds = tables.query_bounds(new.device)
    tokens = torch.arange(batch.num_tokens, dtype=torch.int32, device=new.device)
    request = torch.searchsorted(bounds[1:], tokens, right=True, out_int32=True)
    owner = request.clamp(max=batch.batch_size - 1)
    place = tokens - bounds[owner]
    expanded = {}
    for group, keys in tables.keys.items():
        lens = (keys.lens - new)[owner] + place + 1
        expanded[group] = Keys(
            page_table=keys.page_table[owner],
            lens=torch.where(request < batch.batch_size, lens, 0),
        )
    return expanded


make = KernelLibrary(
    address="nvidia/flashmla",
    backend=FlashMLABackend,
    providers=DENSE,
    trial=rehearse,
)
