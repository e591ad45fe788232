"""An indexer's picks of blocks, against float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardBatch, ForwardMode
from attnmux.transformers import BestProducts, BlockPicker, IndexKPool, KeysOfBlocks

WIDTH, DIM = 50, 16


@pytest.fixture
def drawn(record_property) -> random.Random:
    """Fresh at each run; the report of a failure has its seed."""
    seed = random.randrange(1 << 30)
    record_property("seed", seed)
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.mark.parametrize("captured", [False, True])
def test_picks_are_the_best_blocks(drawn, captured, monkeypatch):
    monkeypatch.setattr(
        "attnmux.transformers.model.sparse.picks.KEYS_AT_ONCE",
        drawn.choice((1, 400, 1 << 26)),
    )
    monkeypatch.setattr(
        "attnmux.transformers.model.sparse.picks.SCORES_AT_ONCE",
        drawn.choice((1, 300, 1 << 26)),
    )
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
    monkeypatch.setattr(
        "attnmux.transformers.model.sparse.picks.KEYS_AT_ONCE",
        drawn.choice((1, 400, 1 << 26)),
    )
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
