"""How much a runner has room for, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    Decision,
    InvalidInput,
    KVPool,
    LayerSpec,
    LinearStatePool,
    PoolExhausted,
    ReqToTokenPool,
    torch_dtype,
)
from attnmux.core.plugin import RequestPages
from attnmux.transformers.draft import hidden_states
from attnmux.transformers.draft.hidden_states import HiddenStates
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.sparse.compressed_pool import CompressedPool
from attnmux.transformers.model.sparse.index_pool import IndexKPool
from attnmux.transformers.model.sparse.indexers import Indexers
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
    """Of the KV pool, the linear states, and the bounds and copies of chosen pages. If both are
    given, the smaller one counts."""
    spare_pages: int = 0
    """As in `RunnerOptions`."""
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
        """Of the request table."""
        return self.max_encoder_len + self.max_context_len

    def pool_tokens(self, page_size: int, ranks: Ranks) -> int | None:
        """Tokens of a rank's pool, in whole pages; None where memory alone limits them."""
        if self.max_total_tokens is None:
            return None
        # With tokens interleaved over ranks, each page of these may be filled in part
        part_filled = self.max_batch_size if page_size > 1 or ranks.tokens_each(2) < 2 else 0
        tokens = ranks.tokens_each(self.max_total_tokens)
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
    index_keys: IndexKPool | None
    """Of the model's indexers."""
    compressed: tuple[CompressedPool, ...]
    """Keys of blocks of tokens."""
    hidden: HiddenStates | None
    """Of cached tokens, where the model keeps them."""


def allocate(
    model: ServedModel, decision: Decision, capacity: Capacity, ranks: Ranks
) -> RunnerMemory:
    """The memory of a model for so much. Raises PoolExhausted where it does not suffice."""
    device, stored = model.module.device, ranks.stored(model.layers)
    more_bytes, compressors = (0, 0), model.compressors
    if compressors is not None:
        stored = compressors.stored(stored)
        more_bytes = compressors.bytes_per_token(decision)
    batch_size = capacity.max_batch_size
    states = make_states(model.linear, decision, batch_size, capacity.kept_states, device)
    sizes = pool_sizes(
        stored,
        decision,
        max_tokens=capacity.pool_tokens(decision.page_size, ranks),
        nbytes=_kv_bytes(model, decision, capacity, stored, states, ranks),
        max_batch_size=capacity.max_batch_size,
        window_step_tokens=None if capacity.max_encoder_len else capacity.window_step_tokens,
        more_bytes=more_bytes,
    )
    own, allocator, window_tree = make_pools(stored, decision, sizes, device=device, states=states)
    pool, allocator = ranks.shared_pool(own, allocator)
    table = ReqToTokenPool(batch_size, capacity.columns, device)
    return RunnerMemory(
        sizes=sizes,
        kv_tokens=allocator.size * ranks.num_parts,
        table=table,
        pool=pool,
        allocator=allocator,
        window_tree=window_tree,
        state_tree=_state_tree(states, allocator, window_tree),
        linear_states=states,
        index_keys=_index_keys(model, decision, pool),
        compressed=() if compressors is None else compressors.pools(decision, pool),
        hidden=_hidden(model, pool),
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
    return StatePrefixTree(allocator, allocator.page_size, states)


def _hidden(model: ServedModel, pool: KVPool) -> HiddenStates | None:
    if not model.keeps_hidden:
        return None
    return HiddenStates(_decoder(model), num_slots=pool.num_slots, layers=model.hidden_layers)


def _decoder(model: ServedModel) -> PreTrainedModel:
    """The model, where it may keep hidden states. Raises InvalidInput for another."""
    if isinstance(model.module, PackedDecoder):
        got = "an encoder-decoder model"
        raise InvalidInput("hidden_states", got=got, expected="a decoder-only model")
    return model.module


def _index_keys(model: ServedModel, decision: Decision, pool: KVPool) -> IndexKPool | None:
    if model.indexers is None:
        return None
    dtype, device = _index_dtype(model.indexers, decision), model.module.device
    return model.indexers.pool(num_slots=pool.num_slots, dtype=dtype, device=device)


def _index_dtype(indexers: Indexers, decision: Decision) -> torch.dtype:
    """Of an indexer's keys: as coarse as the KV cache, where that is e4m3 and keys are stored."""
    kv_dtype = torch_dtype(decision.kv_dtype)
    own = torch_dtype(decision.request.dtype or decision.kv_dtype)
    coarse = kv_dtype == torch.float8_e4m3fn and not indexers.shape.begun_block
    return kv_dtype if coarse else own


def _kv_bytes(
    model: ServedModel,
    decision: Decision,
    capacity: Capacity,
    stored: Sequence[LayerSpec],
    states: LinearStatePool | None,
    ranks: Ranks,
) -> int | None:
    """What the budget leaves to the KV pool. A share is one of the memory after the states.

    Raises PoolExhausted where the states leave nothing.
    """
    memory, page_size = capacity.memory, decision.page_size
    if memory is None:
        return None
    given, taken = memory.resolve(model.module.device), 0
    if states is not None and memory.nbytes is not None:
        taken = states.nbytes
        if taken >= given:
            what, hint = states.described
            what += ", beside a KV pool, in bytes"
            raise PoolExhausted(what, wanted=taken, available=given, hint=hint)
    taken += _copies_bytes(decision, capacity, stored)
    left = max(given - taken, 0)
    ours, theirs = bytes_per_token(stored, decision) * page_size, _bounds_bytes(decision, stored)
    if model.indexers is not None:
        theirs += model.indexers.bytes_per_token(_index_dtype(model.indexers, decision)) * page_size
    if model.keeps_hidden:
        hidden = hidden_states.bytes_per_token(_decoder(model), model.hidden_layers)
        theirs += hidden * page_size
    left = left * ours // (ours + theirs)
    return ranks.smallest(left)


def _bounds_bytes(decision: Decision, stored: Sequence[LayerSpec]) -> int:
    """Of a page, where decode steps choose pages by their bounds: the smallest and largest K."""
    if decision.request.sparse_budget is None:
        return 0
    dtype = torch_dtype(decision.kv_dtype)
    values = sum(layer.tp_k_head_num * layer.qk_head_dim for layer in stored)
    return 2 * values * dtype.itemsize


def _copies_bytes(decision: Decision, capacity: Capacity, stored: Sequence[LayerSpec]) -> int:
    """Of the pools that chosen pages are copied to: a layer's for each shape of layers."""
    budget, page_size = decision.request.sparse_budget, decision.page_size
    if budget is None:
        return 0
    pages = RequestPages.of_budget(budget, page_size=page_size, max_context_len=capacity.columns)
    tokens = (capacity.max_batch_size * pages + 1) * page_size
    first = [alike[0] for alike in by_shape(stored, *SHAPE)]
    return tokens * sum(bytes_per_token([layer], decision) for layer in first)
