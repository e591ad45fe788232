"""Layers and contexts from a decision."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnmux.core import (
    BackendContext,
    Decision,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    JoinedKVPool,
    LayerGroup,
    LayerSpec,
    MLATokenToKVPool,
    Platform,
    Plugins,
    Request,
    build,
    make_context,
    solve,
)

CPU = Platform.parse("cpu:x86_64")
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
LATENT = {
    "kind": "mla",
    "num_q_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "dtype": "float32",
}
ROOM = {"size": 64, "max_batch_size": 2, "max_context_len": 32}


def decided(**fields: object) -> Decision:
    pytest.importorskip("attnmux.cpu.plugin")
    return solve(Request(**fields), CPU, Plugins.load(("cpu",), ()).offers())


def prompt(context: BackendContext, length: int) -> ForwardBatch:
    """A prompt of one request, whose slots are recorded."""
    table = context.req_to_token_pool
    rows, lens = torch.tensor(table.alloc(1)), torch.tensor([length], dtype=torch.int32)
    page_size = context.token_to_kv_pool.page_size
    slots = torch.arange(page_size, page_size + length)
    table.write(rows, torch.zeros_like(lens), lens, slots)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=slots,
        positions=torch.arange(length),
        extend_seq_lens=lens,
        extend_prefix_lens=torch.zeros_like(lens),
        extend_num_tokens=length,
    )


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_backend_over_it_attends(page_size: int) -> None:
    decision = decided(**HEADS, page_size=page_size)
    layer = LayerSpec.of(decision.request, 3)
    context = make_context(decision, layers=[layer], **ROOM)
    batch, backend = prompt(context, 7), build(decision, context)
    q, k, v = (torch.randn(7, heads, 16) for heads in (4, 2, 2))
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch)
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


def test_latent_layers_get_a_pool_of_latents() -> None:
    decision = decided(**LATENT)
    layer = LayerSpec.of(decision.request, 0)
    assert (layer.qk_head_dim, layer.v_head_dim, layer.scaling) == (40, 32, 24**-0.5)
    context = make_context(decision, layers=[layer], **ROOM)
    assert isinstance(context.token_to_kv_pool, MLATokenToKVPool)
    build(decision, context)


def test_layers_that_differ_get_joined_pools() -> None:
    wide = LayerGroup(layers=1, num_q_heads=4, num_kv_heads=1, head_dim=32)
    decision = decided(**HEADS, other_layers=[wide])
    layers = [LayerSpec.of(group.request, place) for place, group in enumerate(decision.groups)]
    context = make_context(decision, layers=layers, **ROOM)
    pool = context.token_to_kv_pool
    assert isinstance(pool, JoinedKVPool)
    assert [pool.get_key_buffer(place).shape[1:] for place in (0, 1)] == [(2, 16), (1, 32)]
    build(decision, context)


def test_a_layer_has_the_features_of_the_request() -> None:
    request = Request(**HEADS, sliding_window=5, logit_cap=30.0, sinks=True)
    sinks = torch.zeros(4)
    layer = LayerSpec.of(request, 0, sinks=sinks, scaling=1.0)
    assert layer.features == {"sliding_window", "logit_cap", "sinks"}
    assert (layer.sliding_window_size, layer.scaling) == (5, 1.0)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(num_q_heads=4, num_kv_heads=2), "request.head_dim"),
        (Request(**HEADS, sinks=True), "sinks"),
        (Request(**HEADS, alibi=True), "alibi_slopes"),
        (Request(**{**HEADS, "kind": "dual_chunk"}), "kind"),
        (Request(kind="gdn", head_dim=16), "kind"),
    ],
)
def test_what_a_request_does_not_say_is_refused(request_: Request, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        LayerSpec.of(request_, 0)


def test_an_engine_s_own_memory_is_taken() -> None:
    decision = decided(**HEADS)
    layers = [LayerSpec.of(decision.request, 0)]
    first = make_context(decision, layers=layers, **ROOM)
    again = make_context(
        decision, layers=layers, token_to_kv_pool=first.token_to_kv_pool, debug=True, **ROOM
    )
    assert again.token_to_kv_pool is first.token_to_kv_pool
    assert again.debug


def test_a_context_needs_layers() -> None:
    with pytest.raises(InvalidInput, match="layers"):
        make_context(decided(**HEADS), layers=[], **ROOM)
