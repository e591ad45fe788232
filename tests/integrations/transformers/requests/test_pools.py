"""Which pool a model's layers get, and what a token takes in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import (
    Decision,
    FrozenMapping,
    InvalidInput,
    JoinedKVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    Request,
    SWAKVPool,
)
from attnmux.core.find.cpu import probe_cpu
from attnmux.transformers.requests.pools import (
    SLOT_MAP_BYTES,
    bytes_per_token,
    make_pool,
    make_pools,
    pool_sizes,
)

CPU = torch.device("cpu")


def decision(page_size=4, kv_dtype="float32"):
    return Decision(
        platform=probe_cpu(),
        request=Request(page_size=page_size, kv_dtype=kv_dtype),
        page_size=page_size,
        kv_dtype=kv_dtype,
        phases=FrozenMapping({}),
    )


def heads(layer_id, **changes):
    given = {
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "tp_v_head_num": 2,
        "qk_head_dim": 24,
        "v_head_dim": 16,
        "scaling": 0.2,
        **changes,
    }
    return LayerSpec(layer_id=layer_id, **given)


def latent(layer_id):
    return heads(layer_id, tp_k_head_num=1, tp_v_head_num=1, kind="mla")


@pytest.mark.parametrize(
    ("layers", "kind", "values"),
    [
        ([heads(3), heads(7)], MHATokenToKVPool, 2 * 2 * (24 + 16)),
        ([latent(0), latent(1), latent(2)], MLATokenToKVPool, 3 * 24),
    ],
)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_a_pool_takes_what_bytes_per_token_says(layers, kind, values, kv_dtype):
    decided = decision(kv_dtype=kv_dtype)
    pool = make_pool(layers, decided, size=32, device=CPU)
    assert type(pool) is kind
    assert (pool.size, pool.page_size) == (32, 4)
    assert pool.layer_ids == tuple(layer.layer_id for layer in layers)
    per_token = bytes_per_token(layers, decided)
    assert per_token == values * pool.dtype.itemsize
    assert pool.nbytes == per_token * (pool.size + pool.page_size)


@pytest.mark.parametrize("windowed", [False, True])
def test_layers_that_differ_have_a_pool_for_each_shape(windowed):
    wide = {"qk_head_dim": 32, "v_head_dim": 32, "tp_k_head_num": 1, "tp_v_head_num": 1}
    layers = [heads(0), heads(1, **wide), heads(2)]
    if windowed:
        layers = [replace(layer, sliding_window_size=3 * (layer.layer_id < 2)) for layer in layers]
        layers[2] = replace(layers[2], sliding_window_size=-1)
    given = {"max_tokens": 256, "nbytes": None, "max_batch_size": 2, "window_step_tokens": 8}
    sizes = pool_sizes(layers, decision(), **given)
    pool, _, _ = make_pools(layers, decision(), sizes, device=CPU)
    assert isinstance(pool, SWAKVPool) == windowed
    joined = pool.swa if windowed else pool
    assert isinstance(joined, JoinedKVPool)
    assert [each.layer_ids for each in joined.pools] == [(0,), (1,)] if windowed else [(0, 2), (1,)]
    own, other = (2 * (24 + 16) * 4, 64 * 4)
    token = 2 * own + other
    assert bytes_per_token(layers, decision()) == token
    slots, swa_slots = sizes.full + 4, (sizes.swa or 0) + 4
    wanted = own * slots + (own + other) * swa_slots if windowed else token * slots
    assert pool.nbytes == wanted
    k, v = pool.get_kv_buffer(1)
    assert (k.shape[1:], v.shape[1:]) == ((1, 32), (1, 32))


def test_deepseek_v3_takes_576_values_a_token_and_layer():
    """Against 40,960 of the 128 expanded heads of 192 and 128 dims."""
    absorbed = heads(
        0,
        tp_q_head_num=128,
        tp_k_head_num=1,
        tp_v_head_num=1,
        qk_head_dim=576,
        v_head_dim=512,
        kind="mla",
    )
    expanded = heads(
        0, tp_q_head_num=128, tp_k_head_num=128, tp_v_head_num=128, qk_head_dim=192, v_head_dim=128
    )
    assert bytes_per_token([absorbed], decision(kv_dtype="bfloat16")) == 576 * 2
    assert bytes_per_token([expanded], decision(kv_dtype="bfloat16")) == 40_960 * 2


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "none"),
        ([latent(0), replace(latent(1), qk_head_dim=32)], "layer 1"),
        ([latent(0), heads(1)], "kind"),
    ],
)
def test_layers_that_no_pool_holds_are_refused(layers, words):
    with pytest.raises(InvalidInput, match=words):
        make_pool(layers, decision(), size=32, device=CPU)
    with pytest.raises(InvalidInput, match=words):
        bytes_per_token(layers, decision())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch", [1, 8])
def test_gpt_oss_holds_1_9_times_as_many_tokens_at_32768(page_size, batch):
    """24 layers of 8 KV heads of 64, half of them with a window of 128."""
    shape = {"tp_q_head_num": 64, "tp_k_head_num": 8, "tp_v_head_num": 8}
    shape |= {"qk_head_dim": 64, "v_head_dim": 64}
    layers = [
        heads(layer_id, **shape, sliding_window_size=-1 if layer_id % 2 else 127)
        for layer_id in range(24)
    ]
    decided = decision(page_size=page_size, kv_dtype="bfloat16")
    nbytes = (batch * 32_768 + page_size) * bytes_per_token(layers, decided)
    asked = {"max_tokens": None, "nbytes": nbytes, "max_batch_size": batch}
    sizes = pool_sizes(layers, decided, **asked, window_step_tokens=2048)
    assert sizes.one_pool == batch * 32_768
    assert sizes.gain == pytest.approx(1.88, abs=0.01)
    one = pool_sizes(layers, decided, **asked, window_step_tokens=None)
    assert (one.full, one.swa, one.gain) == (batch * 32_768, None, 1.0)


@pytest.mark.parametrize(
    ("window_layers", "has_pool"), [((), False), ((3,), True), ((0, 3, 5), True)]
)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("make", [heads, latent])
def test_both_pools_fit_into_the_memory(window_layers, has_pool, page_size, make):
    layers = [make(layer_id) for layer_id in (0, 3, 5)]
    layers = [
        replace(layer, sliding_window_size=4) if layer.layer_id in window_layers else layer
        for layer in layers
    ]
    decided = decision(page_size=page_size)
    nbytes = 400 * bytes_per_token(layers, decided)
    sizes = pool_sizes(
        layers,
        decided,
        max_tokens=None,
        nbytes=nbytes,
        max_batch_size=2,
        window_step_tokens=8,
    )
    pool, allocator, tree = make_pools(layers, decided, sizes, device=CPU)
    assert isinstance(pool, SWAKVPool) == (tree is not None) == (sizes.swa is not None) == has_pool
    assert allocator.full_available_size() == pool.size == sizes.full
    assert pool.nbytes + has_pool * SLOT_MAP_BYTES * pool.num_slots <= nbytes
    if has_pool:
        assert sizes.full > sizes.one_pool > sizes.full / 20
        assert pool.swa.layer_ids == window_layers


def test_a_window_pool_that_saves_nothing_is_not_made():
    layers = [heads(0), heads(1, sliding_window_size=100)]
    asked = {"max_tokens": 256, "nbytes": None, "window_step_tokens": 64}
    assert pool_sizes(layers, decision(), **asked, max_batch_size=2).swa is None
    layers[1] = heads(1, attention_chunk_size=20)
    assert pool_sizes(layers, decision(), **asked, max_batch_size=2).swa == 64 + 2 * 40
