"""The kernels of an indexer score and pick as plain torch does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardBatch, ForwardMode
from attnmux.transformers import IndexKPool, KeyPicker
from attnmux.transformers.model.sparse import picks as picking
from attnmux.transformers.model.sparse.ranking import index_scores

pytest.importorskip("triton")

from attnmux.triton.functions.index_scores import IndexScores  # where there is a Triton

WIDTH = 150


def make_pool(dtype: torch.dtype, dim: int, requests: int) -> tuple[IndexKPool, torch.Tensor]:
    slots = torch.randperm(requests * WIDTH).int() + 1
    pool = IndexKPool(
        num_slots=len(slots) + 1, dtype=dtype, layer_ids=(0,), head_dim=dim, device="cpu"
    )
    pool.set_keys(0, torch.arange(1, len(slots) + 1), torch.randn(len(slots), dim))
    return pool, slots.view(requests, WIDTH)


@pytest.mark.parametrize(
    ("dtype", "q_dtype", "heads", "dim"),
    [
        (torch.float32, torch.float32, 5, 40),
        (torch.bfloat16, torch.bfloat16, 64, 128),
        (torch.float8_e4m3fn, torch.bfloat16, 64, 128),
        (torch.float8_e4m3fn, torch.float32, 3, 200),
    ],
)
@pytest.mark.parametrize("queries", [1, 3])
def test_scores(dtype, q_dtype, heads, dim, queries):
    pool, table = make_pool(dtype, dim, 4)
    rows = torch.tensor([2, 0, 3])
    count = len(rows) * queries
    q = torch.randn(count, heads, dim).to(q_dtype)
    weights, positions = torch.randn(count, heads), torch.randint(WIDTH, (count,))
    scores = torch.full((count, WIDTH), -7.0)
    IndexScores()(q, weights, pool.rows(0), table, rows, positions, scores)
    for token in range(count):
        stop = int(positions[token]) + 1
        keys = pool.keys(0, table[rows[token // queries], :stop].long())
        expected = index_scores(q[token : token + 1], keys, weights[token : token + 1])[0]
        torch.testing.assert_close(scores[token, :stop], expected, atol=2e-3, rtol=1e-4)
        assert bool((scores[token, stop:] == -7).all())


def test_every_byte():
    """Keys of each value that e4m3 has, NaN among them."""
    pool, table = make_pool(torch.float8_e4m3fn, 16, 2)
    stored = pool.rows(0)
    stored.keys.view(torch.uint8)[:] = 0
    values = torch.arange(256, dtype=torch.uint8)
    slots = table.view(-1)[:256].long()
    stored.keys.view(torch.uint8)[slots, 0] = values
    stored.scales.fill_(1)
    q, rows = torch.zeros(4, 2, 16), torch.tensor([0, 1])
    q[:, 0, 0], q[:, 1, 0] = 1, -1
    weights, scores = torch.tensor([[1.0, -1.0]]).repeat(4, 1), torch.empty(4, WIDTH)
    positions = torch.tensor([WIDTH - 1] * 4)
    IndexScores()(q, weights, stored, table, rows, positions, scores)
    found = torch.cat([scores[0], scores[2]])[:256]
    expected = values.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def make_batch(table, spans, mode) -> ForwardBatch:
    rows = torch.arange(len(spans))
    starts, stops = (torch.tensor(each, dtype=torch.int32) for each in zip(*spans, strict=True))
    places = [torch.arange(*span) for span in spans]
    slots = [table[row, own].long() for row, own in zip(rows, places, strict=True)]
    extends = mode.is_extend()
    lens = starts if mode.is_target_verify() else stops
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(spans),
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens,
        out_cache_loc=torch.cat(slots),
        positions=torch.cat(places),
        extend_seq_lens=stops - starts if extends else None,
        extend_prefix_lens=starts if extends else None,
        extend_num_tokens=sum(map(len, places)) if extends else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("at_once", [2**26, 2 * WIDTH])
@pytest.mark.parametrize(
    ("mode", "spans"),
    [
        (ForwardMode.EXTEND, [(0, 20), (3, 3), (70, 71), (90, 97)]),
        (ForwardMode.DECODE, [(0, 1), (40, 41), (149, 150)]),
        (ForwardMode.TARGET_VERIFY, [(5, 9), (100, 104), (146, 150)]),
    ],
)
def test_picks_in_steps(monkeypatch, dtype, captured, at_once, mode, spans):
    monkeypatch.setattr(picking, "SCORES_AT_ONCE", at_once)
    pool, table = make_pool(dtype, 128, len(spans))
    batch = make_batch(table, spans, mode)
    # Of few heads, many keys have the same score, 0
    count, heads, topk = len(batch.positions), 24, 30
    given = (torch.randn(count, heads, 128), torch.randn(count, 128), torch.randn(count, heads))
    results = []
    for kernel in (None, IndexScores()):
        picker = KeyPicker(pool=pool, req_to_token=table, topk=topk, kernel=kernel)
        step = replace(batch, topk_indices=picker.room(batch))
        picker.pick(0, *given, step, captured=captured)
        results.append(step.topk_indices.sort().values)
    assert torch.equal(*results)
