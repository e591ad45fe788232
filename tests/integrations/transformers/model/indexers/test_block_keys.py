"""Keys of blocks of tokens: what steps write and see, against float64 over whole requests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput, MHATokenToKVPool
from attnmux.emulators import triton_interpreter
from attnmux.testing import Case, decode, fake_platform, make_setup
from attnmux.transformers import (
    BlockRows,
    CompressedKeys,
    CompressedPool,
    CompressedShape,
    IndexQueries,
)
from attnmux.triton.functions.picked_blocks import BlockAttention

DIM, INDEX_DIM, ROW, HEADS, WIDTH = 16, 8, 20, 6, 96
SPANS = (
    (ForwardMode.EXTEND, ((0, 21), (0, 1), (0, 40))),
    (ForwardMode.MIXED, ((21, 59), (1, 2), (40, 43))),
    (ForwardMode.DECODE, ((59, 60), (2, 3), (43, 44))),
    (ForwardMode.TARGET_VERIFY, ((60, 64), (3, 7), (44, 48))),
    (ForwardMode.DECODE, ((62, 63), (4, 5), (48, 49))),
)
"""Of three requests. The first two keep no or one of the drafts after which the last step comes."""


@pytest.fixture
def drawn(record_property) -> random.Random:
    """Fresh at each run; the report of a failure has its seed."""
    seed = random.randrange(1 << 30)
    record_property("seed", seed)
    torch.manual_seed(seed)
    return random.Random(seed)


def made(blocks: BlockRows):
    """A key in which the place of each row, and the block's, count."""
    weights = torch.linspace(1, 2, blocks.rows.shape[1], dtype=blocks.rows.dtype).view(1, -1, 1)
    sums = (blocks.rows.masked_fill(blocks.missing.unsqueeze(-1), 0) * weights).sum(1)
    sums = (sums + blocks.starts.unsqueeze(1) / 10).tanh()
    return sums[:, :DIM], sums[:, -INDEX_DIM:]


def whole(rows, shape):
    """The keys of a request's rows [W, ROW], one block after another, in float64."""
    rows, keys = rows.double(), []
    for end in range(shape.block_size, len(rows) + 1, shape.block_size):
        first = end - shape.num_blocks * shape.block_size
        mine = torch.cat([rows.new_zeros(max(0, -first), ROW), rows[max(0, first) : end]])
        start = torch.tensor([end - shape.block_size])
        keys.append(
            made(BlockRows(rows=mine[None], missing=torch.zeros(1, len(mine)) > 0, starts=start))
        )
    return [torch.cat(each) for each in zip(*keys, strict=True)]


def step(table, mode, spans):
    starts, stops = (torch.tensor(ends, dtype=torch.int32) for ends in zip(*spans, strict=True))
    places = [torch.arange(*span) for span in spans]
    rows, extends = torch.arange(3) + 1, mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
    return places, ForwardBatch(
        forward_mode=mode,
        batch_size=3,
        req_pool_indices=rows,
        seq_lens=starts if mode.is_target_verify() else stops,
        out_cache_loc=torch.cat([table[r, p].long() for r, p in zip(rows, places, strict=True)]),
        positions=torch.cat(places),
        extend_seq_lens=stops - starts if extends else None,
        extend_prefix_lens=starts if extends else None,
        extend_num_tokens=sum(map(len, places)) if extends else None,
    )


@pytest.mark.parametrize(
    ("page_size", "has_kernel", "captured", "topk"),
    [
        *[(1, False, False, 0), (1, True, True, 0), (16, True, False, 0), (16, False, True, 0)],
        *[(1, True, False, 3), (1, False, True, 3), (16, False, False, 3), (16, True, True, 3)],
    ],
)
def test_tokens_see_whole_blocks(drawn, monkeypatch, page_size, has_kernel, captured, topk):
    monkeypatch.setattr(
        "attnmux.transformers.model.sparse.picks.SCORES_AT_ONCE",
        drawn.choice((1, 300, 1 << 26)),
    )
    monkeypatch.setattr(
        "attnmux.transformers.model.sparse.compressed_keys.shared_kernel",
        lambda name, context: BlockAttention(context, compute_units=4) if has_kernel else None,
    )
    shape = CompressedShape(
        block_size=drawn.choice((2, 3, 4, 8)),
        num_blocks=drawn.choice((1, 2)),
        row_dim=ROW,
        head_dim=DIM,
        index_dim=INDEX_DIM if topk else 0,
        topk=topk,
    )
    case = Case(
        name="keys",
        steps=(decode(1, 1, 1),),
        page_size=page_size,
        num_q_heads=HEADS,
        num_kv_heads=1,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype="float32",
        max_context_len=WIDTH,
    )
    context = make_setup(case, fake_platform(), "cpu").context
    table = context.req_to_token_pool.req_to_token
    pages = (torch.randperm(3 * WIDTH // page_size) + 1) * page_size
    table[1:4, :WIDTH] = (pages.unsqueeze(1) + torch.arange(page_size)).view(3, WIDTH)
    layer = replace(context.layers[0], layer_id=0, sliding_window_size=5)
    pool = MHATokenToKVPool(
        size=3 * WIDTH,
        page_size=page_size,
        dtype=torch.float32,
        layer_ids=(0,),
        num_kv_heads=1,
        head_dim=DIM,
        device="cpu",
    )
    of_blocks = CompressedPool(shape, pool=pool, dtype=torch.float32, layer_ids=(0,))
    # What earlier requests may have left
    of_blocks.keys.get_key_buffer(0).fill_(torch.nan)
    for each in (of_blocks.rows, of_blocks.index_keys):
        if each is not None:
            each.rows(0).keys.fill_(torch.nan)
    with triton_interpreter.interpreted():
        keys = CompressedKeys(of_blocks, context, (layer,))
        check_steps(drawn, keys, table, layer, captured)


def check_steps(drawn, keys, table, layer, captured):
    shape, sinks = keys.pool.shape, torch.randn(HEADS)
    rows = torch.randn(3, WIDTH, ROW)
    for mode, spans in SPANS:
        places, batch = step(table, mode, spans)
        mine = torch.cat([of[p] for of, p in zip(rows, places, strict=True)])
        alike = len({stop - start for start, stop in spans}) == 1
        is_captured = captured and alike
        keys.write(0, mine, batch, lambda blocks: answer(blocks, shape), captured=is_captured)
        q, out = torch.randn(2, len(mine), HEADS, DIM)
        lse = torch.randn(len(mine), HEADS)
        queries = None
        if shape.topk:
            index_q = torch.randn(len(mine), 12, INDEX_DIM)
            queries = IndexQueries(q=index_q, weights=torch.rand(len(mine), 12))
        expected = seen(rows, places, shape, layer, q, out, lse, queries, sinks)
        keys.attend(0, q, batch, out, lse, queries=queries, sinks=sinks, captured=is_captured)
        torch.testing.assert_close(out.double(), expected[0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse.double(), expected[1], rtol=1e-3, atol=1e-3)
        if mode.is_target_verify():  # what was rejected comes again, otherwise
            for of, kept in zip(rows, (62, 4, 48), strict=True):
                of[kept:] = torch.randn(WIDTH - kept, ROW)


def answer(blocks, shape):
    keys, index_keys = made(blocks)
    return keys, index_keys if shape.topk else None


def seen(rows, places, shape, layer, q, out, lse, queries, sinks):
    """(out, lse) in float64, of one token and its request after another."""
    found, token = [], 0
    for of, mine in zip(rows, places, strict=True):
        keys, index_keys = whole(of, shape)
        for place in mine.tolist():
            chosen = torch.arange((place + 1) // shape.block_size)
            if queries is not None:
                scores = (queries.q[token].double() @ index_keys[chosen].T).relu()
                scores = queries.weights[token].double() @ scores
                chosen = scores.topk(min(shape.topk, len(chosen))).indices
            logits = q[token].double() @ keys[chosen].T * layer.scaling
            logits = torch.cat([lse[token, :, None], logits, sinks[:, None]], dim=1).double()
            weights = logits.softmax(1)
            found.append(
                (
                    weights[:, :1] * out[token].double() + weights[:, 1:-1] @ keys[chosen],
                    logits.logsumexp(1),
                )
            )
            token += 1
    return [torch.stack(each) for each in zip(*found, strict=True)]


GIVEN = {"block_size": 4, "num_blocks": 1, "row_dim": 8, "head_dim": 4}


@pytest.mark.parametrize("more", [{"block_size": 0}, {"topk": 2}, {"index_dim": 4}], ids=str)
def test_impossible_shapes_are_refused(more):
    with pytest.raises(InvalidInput, match=r"block_size|topk"):
        CompressedShape(**{**GIVEN, **more})


def small_pool(shape, page_size):
    """Of keys, and the KV pool of 64 tokens that it is for."""
    pool = MHATokenToKVPool(
        size=64,
        page_size=page_size,
        dtype=torch.float32,
        layer_ids=(0, 1),
        num_kv_heads=1,
        head_dim=4,
        device="cpu",
    )
    return CompressedPool(shape, pool=pool, dtype=torch.bfloat16, layer_ids=(0, 1)), pool


@pytest.mark.parametrize(("page_size", "tokens"), [(1, 1), (2, 2), (4, 4), (16, 4)])
def test_the_tokens_of_a_block_share_a_slot(page_size, tokens):
    found, pool = small_pool(CompressedShape(**GIVEN), page_size)
    slots = found.key_slots(torch.arange(pool.num_slots))
    assert slots.tolist() == [key for key in range(found.keys.num_slots) for _ in range(tokens)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_bytes_are_those_of_a_token(page_size):
    shape = CompressedShape(**GIVEN, index_dim=8, topk=2)
    found, pool = small_pool(shape, page_size)
    keys, rows = CompressedPool.bytes_per_token(
        shape, page_size=page_size, dtype=torch.bfloat16, kv_dtype=torch.float32, num_layers=2
    )
    assert found.nbytes == (keys + rows) * pool.num_slots
    assert keys * min(page_size, 4) == 2 * (4 * 4 + 8 * 2)
