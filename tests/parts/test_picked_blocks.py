"""Layers whose indexer picks blocks: attention against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnmux.core import InvalidInput, LayerSpec, Request
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.emulators import triton_interpreter
from attnmux.parts.picked_blocks import PickedBlocksBackend, dense_context
from attnmux.testing import Case, decode, extend, fake_platform, make_setup, prepare_step
from attnmux.testing.reference import attention
from attnmux.triton.functions.picked_blocks import BlockAttention

STEPS = (extend((0, 14), (17, 1), (5, 21)), decode(75, 1, 33), extend((60, 3)))


def no_kernel(context):
    """Plain torch."""


def few_units(context):
    return BlockAttention(context, compute_units=4)


def many_units(context):
    """Programs share the picks of a token."""
    return BlockAttention(context, compute_units=10_000)


@pytest.fixture(params=[no_kernel, few_units, many_units])
def kernel(request):
    with triton_interpreter.interpreted():
        yield request.param


@pytest.fixture
def drawn(record_property) -> random.Random:
    """Fresh at each run; the report of a failure has its seed."""
    seed = random.randrange(1 << 30)
    record_property("seed", seed)
    torch.manual_seed(seed)
    return random.Random(seed)


def drawn_blocks(batch, positions, heads, topk, size):
    """Random blocks up to each token's own, which is among them, in random order."""
    picks = torch.full((batch.num_tokens, heads, topk), -1, dtype=torch.int32)
    for token, position in enumerate(positions.tolist()):
        for head in range(heads):
            own = position // size
            chosen = [own, *torch.randperm(own)[: topk - 1].tolist()]
            order = torch.randperm(len(chosen))
            picks[token, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)[order]
    return picks


@pytest.mark.parametrize(("page_size", "kv_dtype"), [(1, None), (16, "fp8_e4m3")])
def test_attention_is_the_reference(drawn, kernel, page_size, kv_dtype):
    kv_heads, per_kv, size, topk = (
        drawn.choice(each) for each in ((1, 2, 3), (1, 2), (4, 5, 16), (1, 3, 40))
    )
    case = Case(
        name="blocks",
        steps=STEPS,
        page_size=page_size,
        num_q_heads=kv_heads * per_kv * drawn.choice((1, 3)),
        num_kv_heads=kv_heads,
        head_dim=drawn.choice((16, 24)),
        v_head_dim=drawn.choice((16, 40)),
        dtype="float32",
        kv_dtype=kv_dtype,
        max_context_len=96,
    )
    setup = make_setup(case, fake_platform(), "cpu", seed=drawn.randrange(1 << 30))
    first, *others = setup.context.layers
    request = setup.context.request.replace(index_topk=topk, index_block_size=size)
    layers = (replace(first, index_block_size=size), *others)
    context = replace(setup.context, layers=layers, request=request, debug=True)
    backend = PickedBlocksBackend(
        context, dense=TorchNativeBackend(dense_context(context)), attend=kernel(context)
    )
    tolerance = 1e-4 if kernel is no_kernel else 2e-3
    for lens in STEPS:
        step = prepare_step(setup, lens, host_lens=drawn.random() < 0.5)
        picks = drawn_blocks(step.batch, step.batch.positions, kv_heads * per_kv, topk, size)
        batch = replace(step.batch, topk_indices=picks)
        backend.init_forward_metadata(batch)
        for given in step.inputs:
            layer = context.layer(given.layer.layer_id)
            # As when the host knows that a step sees every key, so that the picks do not matter
            all_seen = layer.index_block_size and backend._sees_all
            lse = torch.empty(given.q.shape[:2])
            out = backend.forward(given.q, given.k, given.v, layer, batch, lse=lse)
            expected, expected_lse = attention(
                given.q,
                replace(layer, index_block_size=0) if all_seen else layer,
                batch,
                context.req_to_token_pool.req_to_token,
                context.token_to_kv_pool,
            )
            real = slice(step.num_real_tokens)
            torch.testing.assert_close(
                out[real].double(), expected[real], rtol=tolerance, atol=tolerance
            )
            torch.testing.assert_close(lse[real].double(), expected_lse[real], rtol=1e-3, atol=1e-3)


LAYER = {
    **dict.fromkeys(("tp_q_head_num", "tp_k_head_num", "tp_v_head_num"), 2),
    **{"layer_id": 0, "qk_head_dim": 8, "v_head_dim": 8, "scaling": 1.0, "index_block_size": 4},
}


@pytest.mark.parametrize(
    "given",
    [
        {"sliding_window_size": 4},
        {"attention_chunk_size": 4},
        {"logit_cap": 5.0},
        {"sinks": torch.zeros(2)},
        {"is_causal": False},
        {"index_block_size": -1},
    ],
    ids=str,
)
def test_other_layers_have_no_blocks(given):
    with pytest.raises(InvalidInput, match="index_block_size"):
        LayerSpec(**{**LAYER, **given})


@pytest.mark.parametrize(
    "text",
    [
        "index_block_size=4",
        "index_block_size=4,index_topk=2,kind=mla",
        "index_block_size=4,index_topk=2,spec_topk=2",
        "index_block_size=4,index_topk=2,kv_dtype=fp4",
        "index_block_size=4,index_topk=2,custom_mask=true",
        "index_block_size=4,index_topk=2,sparse=quest,sparse_budget=64,page_size=16",
    ],
)
def test_requests_that_blocks_exclude(text):
    with pytest.raises(InvalidInput, match=r"index_block_size|sparse"):
        Request.parse(text)


def setup_of(steps, **fields):
    case = Case(name="blocks", steps=steps, dtype="float32", head_dim=16, v_head_dim=16, **fields)
    setup = make_setup(case, fake_platform(), "cpu")
    layers = tuple(replace(layer, index_block_size=4) for layer in setup.context.layers)
    request = setup.context.request.replace(index_topk=2, index_block_size=4)
    context = replace(setup.context, layers=layers, request=request)
    backend = PickedBlocksBackend(context, dense=TorchNativeBackend(dense_context(context)))
    return setup, context, backend


def run(backend, given, layer, batch):
    backend.init_forward_metadata(batch)
    return backend.forward(given.q, given.k, given.v, layer, batch)


def test_wrong_picks_are_refused():
    setup, context, backend = setup_of((decode(20, 9),), num_q_heads=4, num_kv_heads=2)
    step = prepare_step(setup, decode(20, 9))
    given, layer = step.inputs[0], context.layers[0]
    right = torch.zeros(2, 2, 2, dtype=torch.int32)
    for picks in (None, right.long(), right[:1], right[:, 0], right.repeat(1, 3, 1), right[:, :1]):
        batch = replace(step.batch, topk_indices=picks)
        with pytest.raises(InvalidInput, match="topk_indices"):
            run(backend, given, layer, batch)
    twice = replace(step.batch, topk_indices=right)
    later = right.clone()
    later[1, :, 1] = 3
    backend.context = replace(context, debug=True)
    for picks, message in ((twice.topk_indices, "twice"), (later, "up to 2")):
        batch = replace(step.batch, topk_indices=picks)
        with pytest.raises(InvalidInput, match=message):
            run(backend, given, layer, batch)
