"""Layers whose indexer picks blocks: attention against the reference, picks against float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnmux.core import (
    BestProducts,
    BlockPicker,
    ForwardBatch,
    ForwardMode,
    IndexKPool,
    InvalidInput,
    KeysOfBlocks,
    LayerSpec,
    PickedBlocksBackend,
    Request,
    dense_context,
)
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.emulators import triton_interpreter
from attnmux.testing import Case, decode, extend, fake_platform, make_setup, prepare_step
from attnmux.testing.reference import attention
from attnmux.triton.picked_blocks import BlockAttention

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


WIDTH, DIM = 50, 16


@pytest.mark.parametrize("captured", [False, True])
def test_picks_are_the_best_blocks(drawn, captured, monkeypatch):
    monkeypatch.setattr("attnmux.core.block_picks.KEYS_AT_ONCE", drawn.choice((1, 400, 1 << 26)))
    monkeypatch.setattr("attnmux.core.block_picks.SCORES_AT_ONCE", drawn.choice((1, 300, 1 << 26)))
    heads, size, topk = drawn.choice((1, 3)), drawn.choice((3, 4, 16)), drawn.choice((2, 4))
    local = drawn.choice((0, 1, 2))
    table = torch.cat([torch.zeros(1, WIDTH), (torch.randperm(3 * WIDTH) + 1).view(3, -1)]).int()
    pool = IndexKPool(
        num_slots=3 * WIDTH + 1, dtype=torch.float32, layer_ids=(3,), head_dim=DIM, device="cpu"
    )
    picker = BlockPicker(
        pool=pool,
        req_to_token=table,
        topk=topk,
        block_size=size,
        heads=heads,
        rankings={3: BestProducts(local_blocks=local)},
    )
    q, k = torch.randn(3, WIDTH, heads, DIM), torch.randn(3, WIDTH, DIM)
    spans = [[(0, 9), (0, 1), (0, 30)], [(9, 40), (1, 1), (30, 32)], [(40, 41), (1, 2), (32, 33)]]
    spans += [[(41, 44), (2, 5), (33, 36)]]
    modes = [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY]
    for each, mode in zip(spans, modes, strict=True):
        starts, stops = (torch.tensor(ends, dtype=torch.int32) for ends in zip(*each, strict=True))
        rows = torch.arange(3) + 1
        places = [torch.arange(*span) for span in each]
        extends = mode.is_extend()
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=3,
            req_pool_indices=rows,
            seq_lens=starts if mode.is_target_verify() else stops,
            out_cache_loc=torch.cat(
                [table[r, p].long() for r, p in zip(rows, places, strict=True)]
            ),
            positions=torch.cat(places),
            extend_seq_lens=stops - starts if extends else None,
            extend_prefix_lens=starts if extends else None,
            extend_num_tokens=sum(map(len, places)) if extends else None,
        )
        batch = replace(batch, topk_indices=picker.room(batch))
        mine_q, mine_k = (
            torch.cat([of[p] for of, p in zip(rows_of, places, strict=True)]) for rows_of in (q, k)
        )
        alike = len({stop - start for start, stop in each}) == 1
        picker.pick(3, mine_q, mine_k, batch, captured=captured and alike)
        found = batch.topk_indices.split([len(p) for p in places])
        for request, (start, stop) in enumerate(each):
            for place in range(start, stop):
                for head in range(heads):
                    scores = q[request, place, head].double() @ k[request, : place + 1].double().T
                    blocks = [float(part.max()) for part in scores.split(size)]
                    last = len(blocks) - 1
                    forced = set(range(max(0, last - local + 1), last + 1) if local else ())
                    ranked = sorted(range(len(blocks)), key=lambda b: -blocks[b])
                    ranked = [*sorted(forced), *(b for b in ranked if b not in forced)]
                    picks = found[request][place - start, head].tolist()
                    wanted = set(ranked[:topk])
                    assert {b for b in picks if b >= 0} == wanted
                    assert picks.count(-1) == topk - len(wanted)


@pytest.mark.parametrize("captured", [False, True])
def test_picks_are_the_best_whole_blocks(drawn, captured, monkeypatch):
    """By a key for each: here the product of what is kept of its tokens."""
    monkeypatch.setattr("attnmux.core.block_picks.KEYS_AT_ONCE", drawn.choice((1, 400, 1 << 26)))
    heads, size, topk = drawn.choice((1, 2)), drawn.choice((1, 3, 4)), drawn.choice((2, 3, 5))
    table = (torch.randperm(2 * WIDTH) + 1).view(2, -1).int()
    pool = IndexKPool(
        num_slots=2 * WIDTH + 1, dtype=torch.float32, layer_ids=(0,), head_dim=DIM, device="cpu"
    )
    made = KeysOfBlocks(make=lambda rows: rows.prod(2)[..., 2:])
    picker = BlockPicker(
        pool=pool, req_to_token=table, topk=topk, block_size=size, heads=heads, rankings={0: made}
    )
    q, rows = torch.randn(2, WIDTH, 8, DIM - 2), torch.randn(2, WIDTH, DIM)
    starts, stops = [drawn.randrange(20), 0], [40, drawn.randrange(1, 40)]
    if captured:
        stops = [starts[0] + 5, 5]
    for begin, end in (([0, 0], starts), (starts, stops)):
        places = [torch.arange(*span) for span in zip(begin, end, strict=True)]
        first, last = (torch.tensor(each, dtype=torch.int32) for each in (begin, end))
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=2,
            req_pool_indices=torch.arange(2),
            seq_lens=last,
            out_cache_loc=torch.cat([table[r, p].long() for r, p in enumerate(places)]),
            positions=torch.cat(places),
            extend_seq_lens=last - first,
            extend_prefix_lens=first,
            extend_num_tokens=sum(map(len, places)),
        )
        batch = replace(batch, topk_indices=picker.room(batch))
        mine = (torch.cat([of[r, p] for r, p in enumerate(places)]) for of in (q, rows))
        picker.pick(0, *mine, batch, captured=captured and begin == starts)
    found = batch.topk_indices.split([len(p) for p in places])
    for request, span in enumerate(places):
        for row, place in enumerate(span.tolist()):
            whole = (place + 1) // size
            parts = rows[request, : whole * size].double().view(whole, size, DIM).prod(1)[:, 2:]
            scores = (parts @ q[request, place].double().T).relu().sum(1)
            wanted = set(scores.argsort(descending=True)[: topk - 1].tolist())
            wanted |= set() if (place + 1) % size == 0 else {place // size}
            for head in range(heads):
                picks = found[request][row, head].tolist()
                assert {b for b in picks if b >= 0} == wanted
                assert picks.count(-1) == topk - len(wanted)


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
