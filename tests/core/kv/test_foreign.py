from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from attnmux.core import (
    InvalidInput,
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    foreign_pool,
)
from attnmux.sglang.request_table import ForeignRequestTable

PAGE, PAGES, HEADS, DIM, V_DIM, RANK, ROPE = 4, 9, 2, 6, 4, 8, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@dataclass
class Layer:
    layer_id: int


def side_by_side(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[pages, page, Hkv, Dk + Dv], K and V of a head next to each other."""
    cache = torch.zeros(PAGES, PAGE, HEADS, DIM + V_DIM, dtype=dtype).flatten(0, 1)
    return cache[..., :DIM], cache[..., DIM:]


def apart(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense slots, in two tensors."""
    slots = PAGES * PAGE
    return torch.zeros(slots, HEADS, DIM, dtype=dtype), torch.zeros(
        slots, HEADS, V_DIM, dtype=dtype
    )


def interleaved(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K of a slot, then V of the slot, each with contiguous heads."""
    cache = torch.zeros(PAGES * PAGE, 2, HEADS, DIM, dtype=dtype)
    return cache[:, 0], cache[:, 1, :, :V_DIM]


LAYOUTS = [side_by_side, apart, interleaved]


def pools(layout, dtype) -> tuple[KVPool, KVPool]:
    """A pool over foreign buffers, and one with buffers of its own."""
    foreign = foreign_pool({layer: layout(dtype) for layer in (5, 9)}, page_size=PAGE)
    own = MHATokenToKVPool(
        size=foreign.size,
        page_size=PAGE,
        dtype=dtype,
        layer_ids=[5, 9],
        num_kv_heads=HEADS,
        head_dim=DIM,
        v_head_dim=V_DIM,
        device="cpu",
    )
    return foreign, own


def latent_pools(dtype) -> tuple[KVPool, KVPool]:
    wide = torch.zeros(PAGES * PAGE, 1, RANK + ROPE + 5, dtype=dtype)
    foreign = foreign_pool(
        {1: wide[..., : RANK + ROPE], 2: torch.zeros_like(wide)[..., : RANK + ROPE]},
        page_size=PAGE,
        kv_lora_rank=RANK,
    )
    own = MLATokenToKVPool(
        size=foreign.size,
        page_size=PAGE,
        dtype=dtype,
        layer_ids=[1, 2],
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        device="cpu",
    )
    return foreign, own


def bits(pool: KVPool, layer_id: int) -> list[list[int]]:
    return [
        buffer.contiguous().view(torch.uint8).tolist() for buffer in pool.get_kv_buffer(layer_id)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_what_a_pool_of_its_own_writes(layout, dtype):
    foreign, own = pools(layout, dtype)
    loc = torch.tensor([7, 4, 30])
    rows = torch.randn(3, HEADS, 2 * DIM + V_DIM) * 3
    k, v = rows[..., DIM : 2 * DIM], rows[..., 2 * DIM :]
    for pool in (foreign, own):
        pool.set_kv_buffer(Layer(9), loc, k, v, 0.5, 2.0)
        assert pool.size == (PAGES - 1) * PAGE
    for layer_id in (5, 9):
        assert bits(foreign, layer_id) == bits(own, layer_id)
    assert foreign.read_scales(0.5, 2.0) == own.read_scales(0.5, 2.0)
    assert foreign.nbytes == own.nbytes
    foreign.zero(torch.tensor([7]))
    own.zero(torch.tensor([7]))
    assert bits(foreign, 9) == bits(own, 9)
    foreign.zero()
    assert not any(buffer.float().any() for buffer in foreign.get_kv_buffer(9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_too(dtype):
    foreign, own = latent_pools(dtype)
    loc = torch.tensor([7, 4, 30])
    for pool in (foreign, own):
        torch.manual_seed(0)
        pool.set_mla_kv_buffer(Layer(2), loc, torch.randn(3, 1, RANK), torch.randn(3, 1, ROPE), 0.5)
    for layer_id in (1, 2):
        assert bits(foreign, layer_id) == bits(own, layer_id)
    assert foreign.read_scales(0.5, None) == own.read_scales(0.5, None)
    assert foreign.nbytes == own.nbytes


def test_layers_may_share_a_cache():
    k, v = side_by_side(torch.float32)
    pool = foreign_pool({0: (k, v), 3: (k, v)}, page_size=PAGE)
    row = torch.ones(1, HEADS, DIM)
    pool.set_kv_buffer(Layer(0), torch.tensor([5]), row, row[..., :V_DIM])
    assert pool.get_value_buffer(3)[5].eq(1).all()
    assert pool.nbytes == (k.numel() + v.numel()) * 4


def test_writing_changes_nothing_else():
    k, v = side_by_side(torch.float32)
    pool = foreign_pool({0: (k, v)}, page_size=PAGE)
    pool.set_kv_buffer(
        Layer(0), torch.tensor([5]), torch.ones(1, HEADS, DIM), torch.full((1, HEADS, V_DIM), 2.0)
    )
    assert k.sum() == HEADS * DIM
    assert v.sum() == 2 * HEADS * V_DIM


@pytest.mark.parametrize(
    ("buffers", "argument"),
    [
        ({}, "buffers"),
        ({0: (torch.zeros(6, 1, 2), torch.zeros(6, 1, 2))}, "size"),
        ({0: (torch.zeros(8, 1, 2), torch.zeros(12, 1, 2))}, "buffers, layer 0"),
        ({3: (torch.zeros(8, 1, 2), torch.zeros(8, 1, 2).half())}, "buffers, layer 3"),
        ({0: (torch.zeros(8, 1, 2), torch.zeros(8, 2))}, "buffers, layer 0"),
        ({0: (torch.zeros(8, 2, 1).mT, torch.zeros(8, 1, 4)[..., ::2])}, "buffers, layer 0"),
        ({0: (torch.zeros(8, 1, 2, dtype=torch.uint8),) * 2}, "dtype"),
    ],
)
def test_refuses_buffers_that_are_no_pool(buffers, argument):
    with pytest.raises(InvalidInput) as caught:
        foreign_pool(buffers, page_size=PAGE)
    assert caught.value.argument == argument


def test_refuses_rows_that_do_not_fit():
    foreign, _ = pools(side_by_side, torch.float32)
    with pytest.raises(InvalidInput, match="layer_id"):
        foreign.get_key_buffer(1)
    with pytest.raises(InvalidInput, match=r"^v: "):
        foreign.set_kv_buffer(
            Layer(5), torch.tensor([4]), torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, DIM)
        )
    assert not foreign.get_key_buffer(5).any()


def test_a_request_table_is_read_in_place() -> None:
    theirs = torch.zeros(5, 10, dtype=torch.int32)
    table = ForeignRequestTable(theirs)
    assert (table.size, table.max_context_len) == (4, 10)
    theirs[2, 0] = 7
    assert table.req_to_token[2, 0] == 7
    columns, tokens = table.columns_for(16)
    assert columns is theirs
    assert tokens == 1


@pytest.mark.parametrize(
    "theirs",
    [
        torch.zeros(5, 10, dtype=torch.int64),
        torch.zeros(10, dtype=torch.int32),
        torch.zeros(1, 10, dtype=torch.int32),
    ],
)
def test_a_request_table_that_does_not_fit(theirs) -> None:
    with pytest.raises(InvalidInput, match=r"req_to_token: expected torch\.int32 of shape"):
        ForeignRequestTable(theirs)
