"""How much a runner has room for, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core import (
    Decision,
    InvalidInput,
    KVPool,
    LayerSpec,
    PoolExhausted,
    ReqToTokenPool,
    torch_dtype,
)
from attnmux.parts import LinearStatePool, RequestPages
from attnmux.transformers.requests.memory_budget import MemoryBudget
from attnmux.transformers.requests.pools import (
    PoolSizes,
    bytes_per_token,
    make_pools,
    make_states,
    pool_sizes,
)
from attnmux.transformers.requests.prefixes import StatePrefixTree, WindowPrefixTree
from attnmux.transformers.requests.shapes import SHAPE, by_shape
from attnmux.transformers.requests.slots import PagedAllocator
from attnmux.transformers.run.ranks import Ranks
from attnmux.transformers.run.served_model import ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The most that requests take. Raises InvalidInput without max_total_tokens and memory."""

    max_batch_size: int
    max_context_len: int
    max_total_tokens: int | None = None
    """Tokens of all requests together; they fit even if each one's last page is partly filled."""
    memory: MemoryBudget | None = None
    """Budget of the KV pool, the linear states, and the bounds and copies of chosen pages. If both
    are given, the smaller one counts."""
    spare_pages: int = 0
    """See `RunnerOptions`."""
    max_encoder_len: int = 0
    """Encoder tokens of a request, in addition to its `max_context_len`; 0 for a decoder-only
    model."""
    kept_states: int = 0
    """Prefixes whose linear layers' states are kept."""
    window_step_tokens: int | None = None
    """The prompt tokens of a step, at least, for which a window pool has room (see `pool_sizes`);
    None puts all layers into one pool. Callers then `slide` requests before each step, as the
    engine does."""

    def __post_init__(self) -> None:
        if self.max_total_tokens is None and self.memory is None:
            raise InvalidInput("memory", got=None, expected="max_total_tokens, memory or both")

    @property
    def columns(self) -> int:
        """Columns of the request table."""
        return self.max_encoder_len + self.max_context_len

    def pool_tokens(self, page_size: int, ranks: Ranks) -> int | None:
        """Tokens of a rank's pool, in whole pages; None if memory alone limits them."""
        if self.max_total_tokens is None:
            return None
        # With tokens interleaved over ranks, each page of these may be filled in part
        part_filled = (
            self.max_batch_size if page_size > 1 or ranks.building.tokens_each(2) < 2 else 0
        )
        tokens = ranks.building.tokens_each(self.max_total_tokens)
        return (tokens // page_size + part_filled + self.spare_pages) * page_size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunnerMemory:
    """The pools of a model, and the tables of their slots."""

    sizes: PoolSizes
    kv_tokens: int
    """Tokens that the KV memory of all ranks holds."""
    table: ReqToTokenPool
    pool: KVPool
    allocator: PagedAllocator
    window_tree: WindowPrefixTree | None
    state_tree: StatePrefixTree | None
    linear_states: LinearStatePool | None


def allocate(
    model: ServedModel, decision: Decision, capacity: Capacity, ranks: Ranks
) -> RunnerMemory:
    """The memory of a model for so much. Raises PoolExhausted if it does not suffice."""
    device, stored = model.module.device, ranks.building.stored(model.layers)
    for part in model.parts:
        stored = part.stored(stored)
    taken = [part.bytes_per_token(decision) for part in model.parts]
    batch_size = capacity.max_batch_size
    one_pool = capacity.max_encoder_len > 0 or any(part.one_pool for part in model.parts)
    states = make_states(model.linear, decision, batch_size, capacity.kept_states, device)
    sizes = pool_sizes(
        stored,
        decision,
        max_tokens=capacity.pool_tokens(decision.page_size, ranks),
        nbytes=_kv_bytes(
            decision, capacity, stored, states, ranks, sum(cost.beside for cost in taken), device
        ),
        max_batch_size=capacity.max_batch_size,
        window_step_tokens=None if one_pool else capacity.window_step_tokens,
        more_bytes=(sum(cost.full for cost in taken), sum(cost.windowed for cost in taken)),
    )
    rank_pool, allocator, window_tree = make_pools(
        stored, decision, sizes, device=device, states=states
    )
    pool, allocator = ranks.building.shared_pool(rank_pool, allocator)
    table = ReqToTokenPool(batch_size, capacity.columns, device)
    return RunnerMemory(
        sizes=sizes,
        kv_tokens=allocator.size * ranks.requests.num_parts,
        table=table,
        pool=pool,
        allocator=allocator,
        window_tree=window_tree,
        state_tree=_state_tree(states, allocator, window_tree),
        linear_states=states,
    )


def _state_tree(
    states: LinearStatePool | None,
    allocator: PagedAllocator,
    window_tree: WindowPrefixTree | None,
) -> StatePrefixTree | None:
    if states is None or not states.kept_size:
        return None
    if isinstance(window_tree, StatePrefixTree):  # one tree keeps both
        return window_tree
    return StatePrefixTree(allocator, states)


def _kv_bytes(
    decision: Decision,
    capacity: Capacity,
    stored: Sequence[LayerSpec],
    states: LinearStatePool | None,
    ranks: Ranks,
    beside: int,
    device: torch.device,
) -> int | None:
    """The part of the budget for the KV pool. A share is one of the memory after the states.

    beside: bytes of a token in its slot, in addition to K and V.
    Raises PoolExhausted if the states leave nothing.
    """
    memory, page_size = capacity.memory, decision.page_size
    if memory is None:
        return None
    budget, taken = memory.resolve(device), 0
    if states is not None and memory.nbytes is not None:
        taken = states.nbytes
        if taken >= budget:
            what, hint = states.described
            what += ", next to a KV pool, in bytes"
            raise PoolExhausted(what, wanted=taken, available=budget, hint=hint)
    taken += _copies_bytes(decision, capacity, stored)
    left = max(budget - taken, 0)
    ours = bytes_per_token(stored, decision) * page_size
    theirs = _bounds_bytes(decision, stored) + beside * page_size
    left = left * ours // (ours + theirs)
    return ranks.building.smallest(left)


def _bounds_bytes(decision: Decision, stored: Sequence[LayerSpec]) -> int:
    """Bytes of a page's bounds if decode steps choose pages by them: the smallest and largest K."""
    if decision.request.sparse_budget is None:
        return 0
    dtype = torch_dtype(decision.kv_dtype)
    values = sum(layer.tp_k_head_num * layer.qk_head_dim for layer in stored)
    return 2 * values * dtype.itemsize


def _copies_bytes(decision: Decision, capacity: Capacity, stored: Sequence[LayerSpec]) -> int:
    """Bytes of the pools that chosen pages are copied to: a layer's for each shape of layers."""
    budget, page_size = decision.request.sparse_budget, decision.page_size
    if budget is None:
        return 0
    pages = RequestPages.of_budget(budget, page_size=page_size, max_context_len=capacity.columns)
    tokens = (capacity.max_batch_size * pages + 1) * page_size
    first = [alike[0] for alike in by_shape(stored, *SHAPE)]
    return tokens * sum(bytes_per_token([layer], decision) for layer in first)
