"""Pools of 8-bit floats: what they store, and what it is read as."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmux.core import InvalidInput, KVPool, MHATokenToKVPool, MLATokenToKVPool
from attnmux.core.contract.dtypes import ACTIVATION_DTYPES

LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
}


@dataclass
class Layer:
    layer_id: int


def finite_values(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of the format, ascending and once each, as float64."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].unique()


def nearest(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest finite value of the format; of two, the one whose last bit is 0."""
    values = finite_values(dtype)
    distances = (rows.double().reshape(-1, 1) - values).abs()
    is_even = values.to(dtype).view(torch.uint8) % 2 == 0
    candidates = distances == distances.amin(1, keepdim=True)
    picked = (candidates.int() * (1 + is_even.int())).argmax(1)
    return values[picked].view(rows.shape)


def mha(dtype: torch.dtype, **changes: object) -> MHATokenToKVPool:
    arguments = {
        "size": 32,
        "page_size": 4,
        "dtype": dtype,
        "layer_ids": [5],
        "num_kv_heads": 2,
        "head_dim": 8,
        "v_head_dim": 6,
        "device": "cpu",
    }
    return MHATokenToKVPool(**(arguments | changes))


def mla(dtype: torch.dtype) -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=32,
        page_size=4,
        dtype=dtype,
        layer_ids=[5],
        kv_lora_rank=8,
        qk_rope_head_dim=3,
        device="cpu",
    )


@pytest.mark.parametrize("dtype", KVPool.FP8_DTYPES)
@pytest.mark.parametrize("source", ACTIVATION_DTYPES)
def test_rounds_to_the_nearest(dtype, source):
    magnitudes = torch.logspace(-9, 5, 4001)
    rows = torch.cat([magnitudes, -magnitudes, finite_values(dtype).float()])
    # Ties between neighbours, too.
    values = finite_values(dtype)
    rows = torch.cat([rows, ((values[1:] + values[:-1]) / 2).float(), torch.zeros(1)]).to(source)
    rows = rows[rows.isfinite()]
    stored = KVPool.quantise(rows, dtype, None)
    assert stored.dtype == dtype
    torch.testing.assert_close(stored.double(), nearest(rows, dtype), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", KVPool.FP8_DTYPES)
@pytest.mark.parametrize("source", ACTIVATION_DTYPES)
@pytest.mark.parametrize("scale", [None, 1.0, 2.0**-20, 0.003])
def test_overflow_saturates(dtype, source, scale):
    most = torch.finfo(source).max
    rows = torch.tensor([most, -most, torch.inf, -torch.inf, 60000.0], dtype=source)
    expected = LARGEST[dtype] * torch.tensor([1.0, -1, 1, -1, 1])
    assert torch.equal(KVPool.quantise(rows, dtype, scale).float(), expected)


@pytest.mark.parametrize("dtype", KVPool.FP8_DTYPES)
def test_what_is_no_number_stays_none(dtype):
    assert KVPool.quantise(torch.tensor([torch.nan, 1.0]), dtype, 2.0).float().isnan().tolist() == [
        True,
        False,
    ]


@given(
    dtype=st.sampled_from(KVPool.FP8_DTYPES),
    scale=st.floats(2.0**-30, 2.0**30),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_value_comes_back_within_half_a_unit(dtype, scale, seed):
    """Relative to the value 2^-4 in e4m3 and 2^-3 in e5m2, where it is not below the smallest."""
    rows = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * scale
    back = KVPool.quantise(rows, dtype, scale).double() * scale
    unit, smallest = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny
    bound = (rows.double().abs() * unit).clamp(min=smallest * unit * scale)
    assert bool(((back - rows.double()).abs() <= bound * (1 + 1e-6)).all())


@pytest.mark.parametrize("dtype", KVPool.FP8_DTYPES)
@pytest.mark.parametrize("scales", [(None, None), (0.5, 3.0), (0.001, 1.0)])
@pytest.mark.parametrize("source", ACTIVATION_DTYPES)
def test_mha_write_and_read(dtype, scales, source):
    pool = mha(dtype)
    loc = torch.tensor([7, 35, 4])
    k, v = torch.randn(3, 2, 8).to(source), torch.randn(3, 2, 6).to(source)
    pool.set_kv_buffer(Layer(5), loc, k, v, *scales)
    k_scale, v_scale = pool.read_scales(*scales)
    assert (k_scale, v_scale) == tuple(1.0 if scale is None else scale for scale in scales)
    keys, values = pool.get_kv_buffer(5)
    assert keys.dtype == values.dtype == pool.dtype == dtype
    expected_k, expected_v = torch.zeros(36, 2, 8).double(), torch.zeros(36, 2, 6).double()
    expected_k[loc] = nearest(k.float() / k_scale, dtype)
    expected_v[loc] = nearest(v.float() / v_scale, dtype)
    assert torch.equal(keys.double(), expected_k)
    assert torch.equal(values.double(), expected_v)


@pytest.mark.parametrize("dtype", KVPool.FP8_DTYPES)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_a_latent_has_one_scale(dtype, scale):
    pool = mla(dtype)
    loc = torch.tensor([7, 35])
    nope, rope = torch.randn(2, 1, 8), torch.randn(2, 1, 3)
    pool.set_mla_kv_buffer(Layer(5), loc, nope, rope, scale)
    expected = nearest(torch.cat([nope, rope], dim=-1) / (scale or 1), dtype)
    assert torch.equal(pool.get_key_buffer(5)[loc].double(), expected)
    assert torch.equal(pool.get_value_buffer(5)[loc].double(), expected[..., :8])
    assert pool.read_scales(scale, 7.0) == (scale or 1, scale or 1)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_cannot_be_changes_nothing(scale):
    pool, latent, loc = mha(torch.float8_e4m3fn), mla(torch.float8_e5m2), torch.tensor([4])
    with pytest.raises(InvalidInput, match="scale: expected a positive"):
        pool.set_kv_buffer(Layer(5), loc, torch.ones(1, 2, 8), torch.ones(1, 2, 6), 1.0, scale)
    with pytest.raises(InvalidInput, match="scale: expected a positive"):
        latent.set_mla_kv_buffer(Layer(5), loc, torch.ones(1, 1, 8), torch.ones(1, 1, 3), scale)
    for of_pool in (pool, latent):
        with pytest.raises(InvalidInput, match="scale: expected a positive"):
            of_pool.read_scales(scale, 1.0)
        assert not of_pool.get_key_buffer(5).any()


def test_half_the_bytes():
    shape = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 6}
    for dtype in KVPool.FP8_DTYPES:
        per_token = MHATokenToKVPool.bytes_per_token(dtype=dtype, **shape)
        assert 2 * per_token == MHATokenToKVPool.bytes_per_token(dtype=torch.bfloat16, **shape)
        assert mha(dtype).nbytes == per_token * 36


def test_rows_that_require_gradients_are_written():
    pool = mha(torch.float8_e4m3fn)
    k, v = torch.ones(1, 2, 8, requires_grad=True), torch.ones(1, 2, 6, requires_grad=True)
    pool.set_kv_buffer(Layer(5), torch.tensor([4]), k, v)
    assert bool((pool.get_key_buffer(5)[4].float() == 1).all())
