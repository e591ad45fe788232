from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmux.core import InvalidInput, MHATokenToKVPool, PoolExhausted, SWAKVPool
from attnmux.transformers.requests.slots import swa_tokens_in_budget, tokens_in_budget

SHAPE = {"num_kv_heads": 2, "head_dim": 4}


def pool_of(size: int, page_size: int, layer_ids: range) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=torch.bfloat16,
        layer_ids=layer_ids,
        device="cpu",
        **SHAPE,
    )


def per_token(num_layers: int) -> int:
    return MHATokenToKVPool.bytes_per_token(dtype=torch.bfloat16, num_layers=num_layers, **SHAPE)


@given(budget=st.integers(0, 60_000), page_size=st.sampled_from([1, 3, 16]), layers=st.just(3))
def test_as_many_whole_pages_as_fit(budget: int, page_size: int, layers: int) -> None:
    page = per_token(layers) * page_size
    if budget < 2 * page:
        with pytest.raises(PoolExhausted, match=f"in bytes: {2 * page} wanted, {budget} available"):
            tokens_in_budget(budget, per_token(layers), page_size)
        return
    size = tokens_in_budget(budget, per_token(layers), page_size)
    assert size % page_size == 0
    assert pool_of(size, page_size, range(layers)).nbytes <= budget
    assert pool_of(size, page_size, range(layers)).nbytes + page > budget


@given(
    budget=st.integers(0, 100_000),
    page_size=st.sampled_from([1, 3, 16]),
    share=st.integers(1, 20),
    own=st.integers(0, 100),
)
def test_as_many_pages_of_both_pools_as_fit(
    budget: int, page_size: int, share: int, own: int
) -> None:
    full_bytes, swa_bytes = per_token(1), per_token(3)
    page = (full_bytes + swa_bytes) * page_size
    arguments = (budget, full_bytes, swa_bytes, page_size)

    def wanted(full: int) -> int:
        return max(own + full // share, 1)

    if budget < 2 * page:
        with pytest.raises(PoolExhausted, match=f"{2 * page} wanted"):
            swa_tokens_in_budget(*arguments, swa_tokens=wanted)
        return
    sizes = swa_tokens_in_budget(*arguments, swa_tokens=wanted)
    least = min(wanted(sizes.full), sizes.full)
    assert least <= sizes.swa < least + page_size
    pool = SWAKVPool(
        full=pool_of(sizes.full, page_size, range(1)),
        swa=pool_of(sizes.swa, page_size, range(1, 4)),
    )
    assert pool.nbytes <= budget
    assert pool.nbytes + page > budget


def test_impossible_sizes():
    with pytest.raises(InvalidInput, match="bytes_per_token"):
        tokens_in_budget(100, 0, 1)
    with pytest.raises(InvalidInput, match="page_size"):
        tokens_in_budget(100, 1, 0)
    with pytest.raises(InvalidInput, match="swa_bytes_per_token"):
        swa_tokens_in_budget(100, 1, 0, 1, swa_tokens=lambda full: full)
    with pytest.raises(PoolExhausted, match="0 available"):
        tokens_in_budget(-5, 1, 1)


def test_budgets_of_real_machines():
    """32 layers of 8 KV heads of 128 in bfloat16 take 128 KiB a token."""
    wide = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
    token = MHATokenToKVPool.bytes_per_token(dtype=torch.bfloat16, **wide)
    assert token == 128 * 2**10
    assert tokens_in_budget(128 * 2**30, token, 64) == 2**20 - 64
    sizes = swa_tokens_in_budget(
        128 * 2**30, token // 2, token // 2, 64, swa_tokens=lambda full: full // 4
    )
    assert (sizes.full + 64) * token // 2 + (sizes.swa + 64) * token // 2 <= 128 * 2**30
    assert sizes.full > 1.59 * 2**20
