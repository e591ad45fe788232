"""Which pool a model's layers get, and what a token takes in it."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import (
    Decision,
    FrozenMapping,
    InvalidInput,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    Request,
)
from attnmux.core.choosing.machine.cpu import probe_cpu
from attnmux.transformers.pools import bytes_per_token, make_pool

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
        ([heads(0), heads(1, v_head_dim=24)], "layer 1"),
        ([latent(0), heads(1)], "kind"),
    ],
)
def test_layers_that_no_pool_holds_are_refused(layers, words):
    with pytest.raises(InvalidInput, match=words):
        make_pool(layers, decision(), size=32, device=CPU)
    with pytest.raises(InvalidInput, match=words):
        bytes_per_token(layers, decision())
