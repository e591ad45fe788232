from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from attnmux.core import InvalidInput, KVPool, MHATokenToKVPool, MLATokenToKVPool, PoolExhausted

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@dataclass
class Layer:
    layer_id: int


def mha(**changes: object) -> MHATokenToKVPool:
    arguments = {
        "size": 32,
        "page_size": 4,
        "dtype": torch.float32,
        "layer_ids": [5, 6, 9],
        "num_kv_heads": 2,
        "head_dim": 6,
        "v_head_dim": 4,
        "device": "cpu",
    }
    return MHATokenToKVPool(**(arguments | changes))


def mla(**changes: object) -> MLATokenToKVPool:
    arguments = {
        "size": 32,
        "page_size": 4,
        "dtype": torch.float32,
        "layer_ids": range(3, 5),
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 3,
        "device": "cpu",
    }
    return MLATokenToKVPool(**(arguments | changes))


@pytest.fixture(params=[mha, mla])
def pool(request) -> KVPool:
    return request.param()


def test_page_0_is_reserved_and_everything_is_zero(pool):
    layer_id = pool.layer_ids[0]
    keys, values = pool.get_kv_buffer(layer_id)
    assert keys.shape[0] == values.shape[0] == pool.num_slots == 36
    assert keys.view(-1, pool.page_size, *keys.shape[1:]).shape[0] == 9
    assert not keys.any()
    assert not values.any()
    assert keys.data_ptr() == pool.get_key_buffer(layer_id).data_ptr()


def test_translate_is_the_identity(pool):
    slots = torch.tensor([3, 1])
    assert pool.translate(slots, pool.layer_ids[0]) is slots


@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("page_size", {"page_size": 0}),
        ("size", {"size": 0}),
        ("size", {"size": 30}),
        ("dtype", {"dtype": torch.int32}),
        ("dtype", {"dtype": torch.float8_e8m0fnu}),
        ("layer_ids", {"layer_ids": [1, 1]}),
    ],
)
def test_impossible_pools(make, argument, changes):
    with pytest.raises(InvalidInput) as caught:
        make(**changes)
    assert caught.value.argument == argument


@pytest.mark.parametrize("argument", ["num_kv_heads", "head_dim", "v_head_dim"])
def test_impossible_mha_dims(argument):
    with pytest.raises(InvalidInput) as caught:
        mha(**{argument: 0})
    assert caught.value.argument == argument


@pytest.mark.parametrize("argument", ["kv_lora_rank", "qk_rope_head_dim"])
def test_impossible_mla_dims(argument):
    with pytest.raises(InvalidInput) as caught:
        mla(**{argument: 0})
    assert caught.value.argument == argument


@pytest.mark.parametrize("make", [mha, mla])
def test_no_memory_says_what_to_lower(make):
    with pytest.raises(PoolExhausted, match=r"in bytes: \d+ wanted, \d+ available; lower the num"):
        make(size=2**40)


def test_a_layer_of_another_rank(pool):
    for call in (pool.get_key_buffer, pool.get_value_buffer, pool.get_kv_buffer):
        with pytest.raises(InvalidInput, match="layer_id: expected one of"):
            call(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dims", [(2, 6, 4), (3, 5, 5), (1, 1, 3), (8, 128, 64)])
def test_mha_write_and_read(dtype, source, dims):
    heads, dim, v_dim = dims
    pool = mha(dtype=dtype, num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim)
    loc = torch.tensor([7, 35, 4])
    k = torch.randn(3, heads, dim).to(source)
    v = torch.randn(3, heads, v_dim).to(source)
    pool.set_kv_buffer(Layer(9), loc, k, v)
    expected_k = torch.zeros(36, heads, dim, dtype=dtype)
    expected_v = torch.zeros(36, heads, v_dim, dtype=dtype)
    expected_k[loc], expected_v[loc] = k.to(dtype), v.to(dtype)
    assert torch.equal(pool.get_key_buffer(9), expected_k)
    assert torch.equal(pool.get_value_buffer(9), expected_v)
    assert not pool.get_key_buffer(5).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dims", [(8, 3), (512, 64), (5, 2)])
def test_mla_write_and_read(dtype, source, dims):
    rank, rope = dims
    pool = mla(dtype=dtype, kv_lora_rank=rank, qk_rope_head_dim=rope)
    loc = torch.tensor([7, 35, 4])
    k_nope, k_rope = torch.randn(3, 1, rank).to(source), torch.randn(3, 1, rope).to(source)
    pool.set_mla_kv_buffer(Layer(4), loc, k_nope, k_rope)
    expected = torch.zeros(36, 1, rank + rope, dtype=dtype)
    expected[loc] = torch.cat([k_nope, k_rope], dim=-1).to(dtype)
    assert torch.equal(pool.get_key_buffer(4), expected)
    assert torch.equal(pool.get_value_buffer(4), expected[..., :rank])
    assert not pool.get_key_buffer(3).any()


def test_the_latent_value_is_a_view_of_the_key():
    pool = mla()
    assert pool.get_value_buffer(3).data_ptr() == pool.get_key_buffer(3).data_ptr()
    assert pool.get_value_buffer(3).shape == (36, 1, 8)


def test_slices_of_a_fused_projection_are_written():
    pool = mha(v_head_dim=6)
    fused = torch.randn(3, 2 * 6 * 2 + 1, requires_grad=True)
    k, v = fused[:, 1:13].view(3, 2, 6), fused[:, 13:].view(3, 2, 6)
    pool.set_kv_buffer(Layer(5), torch.tensor([4, 5, 6]), k, v)
    assert torch.equal(pool.get_key_buffer(5)[4:7], k)
    assert torch.equal(pool.get_value_buffer(5)[4:7], v)


def test_a_row_that_begins_in_the_middle_of_a_word_is_written():
    pool = mha(v_head_dim=6)
    fused = torch.randn(1, 25)
    k, v = fused[:, 1:13].view(1, 2, 6), fused[:, 13:].view(1, 2, 6)
    pool.set_kv_buffer(Layer(5), torch.tensor([4]), k, v)
    assert torch.equal(pool.get_key_buffer(5)[4:5], k)
    assert torch.equal(pool.get_value_buffer(5)[4:5], v)


def test_nothing_is_written_when_one_tensor_lies_elsewhere():
    pool, latent = mha(v_head_dim=6), mla()
    loc, rows = torch.tensor([4, 5]), torch.ones(2, 2, 6)
    with pytest.raises(InvalidInput, match="v: expected one on cpu"):
        pool.set_kv_buffer(Layer(5), loc, rows, rows.to("meta"))
    with pytest.raises(InvalidInput, match="k_rope: expected one on cpu"):
        latent.set_mla_kv_buffer(
            Layer(3), loc, torch.ones(2, 1, 8), torch.ones(2, 1, 3, device="meta")
        )
    assert not pool.get_key_buffer(5).any()
    assert not latent.get_key_buffer(3).any()


def test_padding_rows_share_slot_0():
    pool = mha(v_head_dim=6)
    k = torch.randn(4, 2, 6)
    pool.set_kv_buffer(Layer(5), torch.tensor([4, 0, 0, 0]), k, k)
    assert torch.equal(pool.get_key_buffer(5)[4], k[0])
    assert not pool.get_key_buffer(5)[1:4].any()


def test_nothing_to_write(pool):
    none = torch.empty(0, dtype=torch.int64)
    if isinstance(pool, MLATokenToKVPool):
        pool.set_mla_kv_buffer(Layer(3), none, torch.empty(0, 1, 8), torch.empty(0, 1, 3))
    else:
        pool.set_kv_buffer(Layer(5), none, torch.empty(0, 2, 6), torch.empty(0, 2, 4))
    assert not pool.get_key_buffer(pool.layer_ids[0]).any()


def test_scales_are_for_quantised_pools_only():
    pool = mha(v_head_dim=6)
    k = torch.randn(1, 2, 6)
    pool.set_kv_buffer(Layer(5), torch.tensor([4]), k, k, 2.0, 3.0)
    assert torch.equal(pool.get_key_buffer(5)[4], k[0])
    assert torch.equal(pool.get_value_buffer(5)[4], k[0])


@pytest.mark.parametrize(
    ("argument", "layer_id", "changes"),
    [
        ("layer_id", 7, {}),
        ("loc", 5, {"loc": torch.tensor([4, 5], dtype=torch.int32)}),
        ("loc", 5, {"loc": torch.tensor([[4, 5]])}),
        ("k", 5, {"loc": torch.tensor([4])}),
        ("k", 5, {"k": torch.ones(2, 12)}),
        ("k", 5, {"k": torch.ones(2, 2, 4)}),
        ("k", 5, {"k": torch.ones(2, 2, 6, dtype=torch.int32)}),
        ("v", 5, {"v": torch.ones(2, 2, 6)}),
        ("v", 5, {"v": torch.ones(1, 2, 4)}),
        ("v", 5, {"v": torch.ones(2, 2, 4, dtype=torch.float64)}),
    ],
)
def test_a_refused_mha_write_changes_nothing(argument, layer_id, changes):
    pool = mha()
    rows = {"loc": torch.tensor([4, 5]), "k": torch.ones(2, 2, 6), "v": torch.ones(2, 2, 4)}
    with pytest.raises(InvalidInput) as caught:
        pool.set_kv_buffer(Layer(layer_id), **(rows | changes))
    assert caught.value.argument == argument
    assert not any(buffer.any() for id_ in pool.layer_ids for buffer in pool.get_kv_buffer(id_))


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("k_nope", {"k_nope": torch.ones(2, 8)}),
        ("k_nope", {"k_nope": torch.ones(3, 1, 8)}),
        ("k_rope", {"k_rope": torch.ones(2, 1, 8)}),
        ("k_rope", {"k_rope": torch.ones(2, 1, 3, dtype=torch.int64)}),
    ],
)
def test_a_refused_mla_write_changes_nothing(argument, changes):
    pool = mla()
    rows = {"k_nope": torch.ones(2, 1, 8), "k_rope": torch.ones(2, 1, 3)}
    with pytest.raises(InvalidInput) as caught:
        pool.set_mla_kv_buffer(Layer(3), torch.tensor([4, 5]), **(rows | changes))
    assert caught.value.argument == argument
    assert not pool.get_key_buffer(3).any()


def test_each_pool_refuses_the_other_kind_of_write():
    loc, rows = torch.tensor([4]), torch.ones(1, 1, 1)
    with pytest.raises(InvalidInput, match="latent"):
        mha().set_mla_kv_buffer(Layer(5), loc, rows, rows)
    with pytest.raises(InvalidInput, match="latent"):
        mla().set_kv_buffer(Layer(3), loc, rows, rows)


def test_bytes():
    pool = mha(dtype=torch.bfloat16)
    per_token = MHATokenToKVPool.bytes_per_token(
        dtype=torch.bfloat16, num_layers=3, num_kv_heads=2, head_dim=6, v_head_dim=4
    )
    assert per_token == 3 * 2 * (6 + 4) * 2
    assert pool.nbytes == per_token * pool.num_slots


def test_a_latent_is_a_small_part_of_its_expanded_keys_and_values():
    latent = MLATokenToKVPool.bytes_per_token(
        dtype=torch.bfloat16, num_layers=1, kv_lora_rank=512, qk_rope_head_dim=64
    )
    expanded = MHATokenToKVPool.bytes_per_token(
        dtype=torch.bfloat16, num_layers=1, num_kv_heads=128, head_dim=128
    )
    assert (latent // 2, expanded // 2) == (576, 32_768)
    assert round(100 * (1 - latent / expanded), 2) == 98.24
    pool = mla(dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, layer_ids=[0])
    assert pool.nbytes == latent * pool.num_slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("make", [mha, mla])
def test_slots_move_as_if_all_were_read_first(make, dtype) -> None:
    pool = make(dtype=dtype)
    for layer_id in pool.layer_ids:
        buffer = pool.get_key_buffer(layer_id)
        buffer.copy_(torch.randn(buffer.shape).to(dtype))
        if make is mha:
            buffer = pool.get_value_buffer(layer_id)
            buffer.copy_(torch.randn(buffer.shape).to(dtype))
    before = {one: [each.clone() for each in pool.get_kv_buffer(one)] for one in pool.layer_ids}
    source, target = torch.tensor([7, 9, 20, 5]), torch.tensor([5, 7, 9, 30])
    pool.move(source, target)
    for layer_id in pool.layer_ids:
        for old, new in zip(before[layer_id], pool.get_kv_buffer(layer_id), strict=True):
            expected = old.view(torch.uint8).clone()
            expected[target] = old.view(torch.uint8)[source]
            assert torch.equal(new.view(torch.uint8), expected)


@pytest.mark.parametrize("make", [mha, mla])
def test_slots_that_do_not_fit_are_neither_moved_nor_zeroed(make) -> None:
    pool = make()
    slots = torch.tensor([7, 9])
    for source, target, argument in (
        (slots, slots[:1], "target"),
        (slots.view(1, 2), slots, "source"),
        (slots, slots.float(), "target"),
    ):
        with pytest.raises(InvalidInput) as caught:
            pool.move(source, target)
        assert caught.value.argument == argument
    with pytest.raises(InvalidInput):
        pool.zero(slots.int())
