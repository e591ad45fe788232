"""A model for a runner, and the memory that its requests take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    Decision,
    KVPool,
    LayerSpec,
    LinearLayerSpec,
    PoolExhausted,
    ReqToTokenPool,
    torch_dtype,
)
from attnmux.parts import LinearStatePool, RequestPages
from attnmux.transformers.model.eagle_head import EagleHead
from attnmux.transformers.model.hidden_states import decoder_layers
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.part import ModelPart
from attnmux.transformers.options import RunnerOptions
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServedModel:
    """A model that calls attnmux for attention, on the device that it runs on."""

    module: PreTrainedModel | PackedDecoder
    """Loaded with attn_implementation="attnmux"; an encoder-decoder model as a `PackedDecoder`."""
    layers: Sequence[LayerSpec]
    """From `record_layers` or `record_decoder`, as its parts mark them."""
    parts: Sequence[ModelPart] = ()
    """Features beyond attention over all keys, bound."""

    @property
    def linear(self) -> tuple[LinearLayerSpec, ...]:
        """Layers without softmax attention."""
        return tuple(layer for part in self.parts for layer in part.linear)

    @property
    def head(self) -> EagleHead | None:
        """The model, if it is an EAGLE head, whose tokens join hidden states."""
        return self.module if isinstance(self.module, EagleHead) else None


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


def allocate(model: ServedModel, decision: Decision, options: RunnerOptions) -> RunnerMemory:
    """The memory of a model for the requests of the options. Raises PoolExhausted if it does not
    suffice."""
    ranks = options.ranks
    device, stored = model.module.device, ranks.building.stored(model.layers)
    for part in model.parts:
        stored = part.stored(stored)
    taken = [part.bytes_per_token(decision) for part in model.parts]
    batch_size = options.max_batch_size
    one_pool = bool(options.max_encoder_len) or any(part.one_pool for part in model.parts)
    kept_states = batch_size if options.kept_states is None else options.kept_states
    states = make_states(model.linear, decision, batch_size, kept_states, device)
    sizes = pool_sizes(
        stored,
        decision,
        max_tokens=options.pool_tokens(decision.page_size),
        nbytes=_kv_bytes(
            decision,
            options,
            stored,
            states,
            beside=sum(cost.beside for cost in taken),
            pieces=_piece_bytes(model.module, decision, options),
            device=device,
        ),
        max_batch_size=batch_size,
        window_step_tokens=None if one_pool else options.window_step_tokens,
        more_bytes=(sum(cost.full for cost in taken), sum(cost.windowed for cost in taken)),
    )
    rank_pool, allocator, window_tree = make_pools(
        stored, decision, sizes, device=device, states=states
    )
    pool, allocator = ranks.building.shared_pool(rank_pool, allocator)
    table = ReqToTokenPool(batch_size, options.columns, device)
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


def _piece_bytes(model: torch.nn.Module, decision: Decision, options: RunnerOptions) -> int:
    """About the memory of steps that are captured in pieces, which a share of the memory leaves
    free: twice the results of the linear maps of the widest layer."""
    num_tokens = options.piece_tokens if decision.request.graph else 0
    if not num_tokens or options.memory is None or options.memory.fraction is None:
        return 0
    widths = [
        sum(each.out_features for each in layer.modules() if isinstance(each, torch.nn.Linear))
        for layer, _, _ in decoder_layers(model)
    ]
    itemsize = max((weight.dtype.itemsize for weight in model.parameters()), default=1)
    return 2 * num_tokens * max(widths, default=0) * itemsize


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
    options: RunnerOptions,
    stored: Sequence[LayerSpec],
    states: LinearStatePool | None,
    *,
    beside: int,
    pieces: int,
    device: torch.device,
) -> int | None:
    """The part of the budget for the KV pool. A share is one of the memory after the states.

    beside: bytes of a token in its slot, in addition to K and V. pieces: bytes to leave for steps
    in pieces.
    Raises PoolExhausted if the states leave nothing.
    """
    memory, page_size = options.memory, decision.page_size
    if memory is None:
        return None
    budget, taken = memory.resolve(device) - pieces, 0
    if states is not None and memory.nbytes is not None:
        taken = states.nbytes
        if taken >= budget:
            what, hint = states.described
            what += ", next to a KV pool, in bytes"
            raise PoolExhausted(what, wanted=taken, available=budget, hint=hint)
    taken += _copies_bytes(decision, options, stored)
    left = max(budget - taken, 0)
    ours = bytes_per_token(stored, decision) * page_size
    theirs = _bounds_bytes(decision, stored) + beside * page_size
    left = left * ours // (ours + theirs)
    return options.ranks.building.smallest(left)


def _bounds_bytes(decision: Decision, stored: Sequence[LayerSpec]) -> int:
    """Bytes of a page's bounds if decode steps choose pages by them: the smallest and largest K."""
    if decision.request.sparse_budget is None:
        return 0
    dtype = torch_dtype(decision.kv_dtype)
    values = sum(layer.tp_k_head_num * layer.qk_head_dim for layer in stored)
    return 2 * values * dtype.itemsize


def _copies_bytes(decision: Decision, options: RunnerOptions, stored: Sequence[LayerSpec]) -> int:
    """Bytes of the pools that chosen pages are copied to: a layer's for each shape of layers."""
    budget, page_size = decision.request.sparse_budget, decision.page_size
    if budget is None:
        return 0
    pages = RequestPages.of_budget(budget, page_size=page_size, max_context_len=options.columns)
    tokens = (options.max_batch_size * pages + 1) * page_size
    first = [alike[0] for alike in by_shape(stored, *SHAPE)]
    return tokens * sum(bytes_per_token([layer], decision) for layer in first)
