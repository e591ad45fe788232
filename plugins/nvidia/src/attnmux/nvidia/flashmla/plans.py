"""What the kernels are told of a step, once for all layers.

Requests without keys: the kernels for 16-bit caches give them output 0. The one for e4m3 would read
the block table one entry before such a request's row, and whatever page it finds there; it is told
of one key, in the reserved page, and its answer is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.indices import segment_of_place
from attnmux.nvidia.flashmla.calls import PAGE, LayerCall, PlanGroup
from attnmux.nvidia.flashmla.kernels import Kernels
from attnmux.nvidia.latent import KeyLens
from attnmux.nvidia.page_tables import KeyGroup, Keys, Step, fixed_buffers

ROWS = 2**22 - 2**16
"""Most queries of all heads in one call: the kernels count the float32 of split results, 512 a row,
in int32 (`oaccum_ptr` in splitkv_mla.cuh), and there are some more rows of those."""

FP8_REQUESTS = 4095
"""Most requests of one call over e4m3 (`MaxBatchSize` in flash_fwd_mla_metadata.cu, which ends the
process beyond)."""

FP8_QUERIES = PAGE + 2
"""Most queries of a request over e4m3: causality hides keys of the last two pages alone
(`n_masking_steps` in flash_fwd_mla_kernel.h), and the last may hold a single key."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """A step for the layers of one group. The kernel's requests have as many queries each."""

    queries_each: int
    block_table: torch.Tensor
    """[R, width] int32."""
    cache_seqlens: torch.Tensor
    """[R] int32: what the kernel is told."""
    lens: KeyLens
    """Which requests have no keys in truth."""
    schedule: dict[str, Any]
    """By the library's names."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanBuffers:
    """What graphs replay with."""

    keys: dict[KeyGroup, Keys]
    lens: KeyLens
    schedules: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """By heads: the two tensors of `Kernels.schedule`, as large as they get."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planner:
    """Makes the plans of all groups of layers."""

    kernels: Kernels
    context: BackendContext
    groups: tuple[PlanGroup, ...]
    is_fp8: bool
    max_queries: int | None
    """Of a request; None where any number is served."""

    @classmethod
    def of(
        cls, calls: Mapping[int, LayerCall], context: BackendContext, kernels: Kernels
    ) -> Planner:
        groups = tuple(dict.fromkeys(call.group for call in calls.values()))
        is_fp8 = any(call.is_fp8 for call in calls.values())
        return cls(
            kernels=kernels,
            context=context,
            groups=groups,
            is_fp8=is_fp8,
            max_queries=_fp8_queries(groups, context, kernels) if is_fp8 else None,
        )

    def buffers(self, max_batch_size: int) -> PlanBuffers:
        """For graphs of up to max_batch_size requests, with any number of queries each.

        Raises InvalidInput for more requests than the kernels take.
        """
        self.check(max_batch_size)
        device = self.context.device
        lens = KeyLens.buffers(max_batch_size, device)
        heads = dict.fromkeys(group.num_heads for group in self.groups)
        return PlanBuffers(
            keys=fixed_buffers(self._key_groups(), max_batch_size, self.context),
            lens=lens,
            # A single query each has the most parts.
            schedules={count: self._schedule(lens.at_least_one, count) for count in heads},
        )

    def check(self, num_requests: int, queries_each: int = 1) -> None:
        """Raises InvalidInput for more requests or queries than the kernels take: they do not
        refuse them."""
        rows = num_requests * queries_each * _most_heads(self.groups)
        if rows > ROWS:
            raise InvalidInput(
                "batch_size",
                came=f"{rows} queries of all heads",
                expected=f"at most {ROWS} in one call",
            )
        if self.max_queries is not None and queries_each > self.max_queries:
            raise InvalidInput(
                "spec_info",
                came=f"{queries_each} draft tokens a request",
                expected=f"at most {self.max_queries} over {self.context.token_to_kv_pool.dtype}",
            )
        if self.is_fp8 and num_requests > FP8_REQUESTS:
            raise InvalidInput(
                "batch_size",
                came=f"{num_requests} requests of the kernel",
                expected=f"at most {FP8_REQUESTS} over {self.context.token_to_kv_pool.dtype}",
            )

    def plan(
        self, step: Step, batch: ForwardBatch, buffers: PlanBuffers | None
    ) -> dict[PlanGroup, Plan]:
        """Device operations of static shape; what they leave is in the buffers where given."""
        step.fill(batch, self._key_groups(), self.context)
        keys = step.keys
        if step.queries_each is None:
            keys = _by_token(step, batch)
        queries_each = step.queries_each or 1
        # Only the places of keys differ by group.
        given = keys[self.groups[0].keys].lens
        lens = KeyLens.of(given, None if buffers is None else buffers.lens)
        told = lens.at_least_one if self.is_fp8 else given
        schedules = {
            heads: self._schedule_arguments(told, heads, queries_each, buffers)
            for heads in dict.fromkeys(group.num_heads for group in self.groups)
        }
        return {
            group: Plan(
                queries_each=queries_each,
                block_table=keys[group.keys].page_table,
                cache_seqlens=told,
                lens=lens,
                schedule=schedules[group.num_heads],
            )
            for group in self.groups
        }

    def _schedule_arguments(
        self, lens: torch.Tensor, heads: int, queries_each: int, buffers: PlanBuffers | None
    ) -> dict[str, Any]:
        tiles, splits = self._schedule(lens, queries_each * heads)
        if buffers is not None:
            fixed_tiles, fixed_splits = buffers.schedules[heads]
            tiles = fixed_tiles[: len(tiles)].copy_(tiles)
            splits = fixed_splits[: len(splits)].copy_(splits)
        return self.kernels.schedule_arguments(tiles, splits)

    def _schedule(self, lens: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        tiles, splits = self.kernels.schedule(lens, num_rows, self.is_fp8)
        return tiles, splits

    def _key_groups(self) -> tuple[KeyGroup, ...]:
        return tuple(dict.fromkeys(group.keys for group in self.groups))


def _most_heads(groups: tuple[PlanGroup, ...]) -> int:
    return max(group.num_heads for group in groups)


def _fp8_queries(groups: tuple[PlanGroup, ...], context: BackendContext, kernels: Kernels) -> int:
    """Most queries of a request over e4m3. A multiprocessor takes 64 rows of queries and heads; of
    more than all of them take together no schedule can be made, and the device traps."""
    one = torch.ones(1, dtype=torch.int32, device=context.device)
    tiles, _ = kernels.schedule(one, 1, True)
    return min(FP8_QUERIES, 64 * len(tiles) // _most_heads(groups))


def _by_token(step: Step, batch: ForwardBatch) -> dict[KeyGroup, Keys]:
    """Each new token as a request of its own, with the keys that it sees: one call takes requests
    with as many queries each, and these have different numbers. Tokens of no request see no key.
    """
    new = batch.extend_seq_lens
    assert new is not None  # which a Step has checked
    bounds = step.query_bounds(new.device)
    tokens = torch.arange(batch.num_tokens, dtype=torch.int32, device=new.device)
    request = segment_of_place(bounds, batch.num_tokens)
    owner = request.clamp(max=batch.batch_size - 1)
    place = tokens - bounds[owner]
    expanded = {}
    for group, keys in step.keys.items():
        lens = (keys.lens - new)[owner] + place + 1
        expanded[group] = Keys(
            page_table=keys.page_table[owner],
            lens=torch.where(request < batch.batch_size, lens, 0),
        )
    return expanded
