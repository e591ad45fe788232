"""The context of the backend over chosen pages, which are copied to a small pool."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnmux.core.choosing.ask.sparse import check_budget
from attnmux.core.errors import InvalidInput
from attnmux.core.kv.foreign import ForeignKVPool
from attnmux.core.kv.memory import allocate_zeroed
from attnmux.core.kv.request_table import ReqToTokenPool
from attnmux.core.layer import check_features

if TYPE_CHECKING:
    from attnmux.core.context import BackendContext


def pages_of_budget(budget: int, *, page_size: int, max_context_len: int) -> int:
    """Pages of each request that a step reads: a budget of tokens, or a whole request if fewer."""
    return min(budget // page_size, -(-max_context_len // page_size))


def sparse_context(context: BackendContext, budget: int) -> BackendContext:
    """The context of the backend that attends over chosen pages: `budget` tokens of each request.

    Raises InvalidInput for pages of one token, a budget that is not whole pages or too few, layers
    that are not plain and causal, and a pool with gaps or of another dtype than the model's.
    """
    pool = context.token_to_kv_pool
    page_size = pool.page_size
    check_budget(budget, page_size)
    for layer in context.layers:
        check_features(layer, "sinks", "logit_cap", "index_block_size")
    if pool.is_strided or not pool.dtype.is_floating_point or pool.dtype.itemsize == 1:
        got = f"{pool.dtype}{', with gaps' if pool.is_strided else ''}"
        expected = "16 or 32 bits a value and no gaps between slots"
        raise InvalidInput("token_to_kv_pool", got=got, expected=expected)
    pages = pages_of_budget(budget, page_size=page_size, max_context_len=context.max_context_len)
    size, width = context.max_batch_size, pages * page_size
    table = ReqToTokenPool(size, width, context.device)
    slots = torch.arange(size * width, dtype=torch.int32, device=context.device) + page_size
    table.req_to_token[1:] = slots.view(size, width)
    return replace(
        context,
        request=context.request.replace(
            origin="model", sparse=None, sparse_budget=None, phases=("decode",)
        ),
        req_to_token_pool=table,
        token_to_kv_pool=_pool_of(context, size * width),
        kv_writer=None,
        max_context_len=width,
        # The new tokens' slots are the engine's, and the step was checked whole
        debug=False,
    )


def _pool_of(context: BackendContext, tokens: int) -> ForeignKVPool:
    """Room for copies of chosen pages. All layers share one buffer, since each fills it anew.

    Raises PoolExhausted when memory does not suffice.
    """
    pool, layer = context.token_to_kv_pool, context.layers[0]
    shape = (tokens + pool.page_size, layer.tp_k_head_num)
    k, v = allocate_zeroed(
        [(*shape, layer.qk_head_dim), (*shape, layer.v_head_dim)],
        dtype=pool.dtype,
        device=pool.device,
        what=f"copies of chosen pages, {tokens} tokens",
        hint="lower the budget, or the number of requests",
    )
    pairs = {each.layer_id: (k, v) for each in context.layers}
    return ForeignKVPool(pairs, page_size=pool.page_size)
