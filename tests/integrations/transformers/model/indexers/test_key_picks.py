"""An indexer's picks in steps of many requests, against one request at a time in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput
from attnmux.transformers import IndexKPool, KeyPicker
from attnmux.transformers.model.sparse import picks as picking
from attnmux.transformers.model.sparse.index_pool import hadamard
from attnmux.transformers.model.sparse.ranking import index_scores

HEADS, DIM, TOPK, WIDTH = 20, 16, 6, 48  # of few heads, many keys have the same score, 0


class Sequences:
    """Requests whose slots are spread over the pool, with all that their indexer ever sees."""

    def __init__(self, lens: list[int], dtype: torch.dtype = torch.float32, dim: int = DIM) -> None:
        slots = torch.randperm(len(lens) * WIDTH) + 1
        self.table = torch.cat([torch.zeros(1, WIDTH), slots.view(-1, WIDTH)]).int()
        self.pool = IndexKPool(
            num_slots=len(slots) + 1, dtype=dtype, layer_ids=(3,), head_dim=dim, device="cpu"
        )
        self.picker = KeyPicker(pool=self.pool, req_to_token=self.table, topk=TOPK)
        self.q = [torch.randn(WIDTH, HEADS, dim) for _ in lens]
        self.k = [torch.randn(WIDTH, dim) for _ in lens]
        self.weights = [torch.randn(WIDTH, HEADS) for _ in lens]

    def step(
        self, spans: list[tuple[int, int]], mode: ForwardMode, *, captured: bool = False
    ) -> list[torch.Tensor]:
        """The picks of each request's tokens from start to stop."""
        batch = self.batch(spans, mode)
        batch = replace(batch, topk_indices=self.picker.room(batch))
        q, k, weights = (
            torch.cat([rows[start:stop] for rows, (start, stop) in zip(each, spans, strict=True)])
            for each in (self.q, self.k, self.weights)
        )
        self.picker.pick(3, q, k, weights, batch, captured=captured)
        return list(batch.topk_indices.split([stop - start for start, stop in spans]))

    def batch(self, spans: list[tuple[int, int]], mode: ForwardMode) -> ForwardBatch:
        rows = torch.arange(len(spans)) + 1
        starts, stops = (torch.tensor(each, dtype=torch.int32) for each in zip(*spans, strict=True))
        places = [torch.arange(start, stop) for start, stop in spans]
        slots = [self.table[row, own].long() for row, own in zip(rows, places, strict=True)]
        extends = mode.is_extend()
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(spans),
            req_pool_indices=rows,
            seq_lens=starts if mode.is_target_verify() else stops,
            out_cache_loc=torch.cat(slots),
            positions=torch.cat(places),
            extend_seq_lens=stops - starts if extends else None,
            extend_prefix_lens=starts if extends else None,
            extend_num_tokens=sum(map(len, places)) if extends else None,
        )

    def expected(self, request: int, place: int) -> set[int]:
        q, k = self.q[request][place].double(), self.k[request][: place + 1].double()
        scores = (torch.relu(q @ k.T) * self.weights[request][place].double()[:, None]).sum(0)
        return set(scores.topk(min(TOPK, place + 1)).indices.tolist())

    def check(self, spans: list[tuple[int, int]], picked: list[torch.Tensor]) -> None:
        for request, (start, stop) in enumerate(spans):
            for place in range(start, stop):
                row = picked[request][place - start].tolist()
                found = [key for key in row if key >= 0]
                assert len(found) == len(set(found)) == min(TOPK, place + 1)
                assert set(found) == self.expected(request, place)


def test_chunked_prompts_then_decoding() -> None:
    sequences = Sequences([WIDTH] * 3)
    for spans in (
        [(0, 9), (0, 1), (0, 4)],
        [(9, 10), (1, 20), (4, 4)],
        [(10, 31), (20, 21), (4, 9)],
    ):
        sequences.check(spans, sequences.step(spans, ForwardMode.EXTEND))
    for step in range(3):
        spans = [(end + step, end + step + 1) for end in (31, 21, 9)]
        sequences.check(spans, sequences.step(spans, ForwardMode.DECODE, captured=step == 1))


def test_drafts_of_a_chain_see_those_before_them() -> None:
    sequences = Sequences([WIDTH] * 2)
    sequences.step([(0, 20), (0, 7)], ForwardMode.EXTEND)
    spans = [(20, 24), (7, 11)]
    eager = sequences.step(spans, ForwardMode.TARGET_VERIFY)
    sequences.check(spans, eager)
    captured = sequences.step(spans, ForwardMode.TARGET_VERIFY, captured=True)
    sequences.check(spans, captured)


def test_scores_are_made_a_few_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(picking, "SCORES_AT_ONCE", 2 * HEADS * 30)
    sequences = Sequences([WIDTH] * 2)
    spans = [(0, 33), (0, 14)]
    sequences.check(spans, sequences.step(spans, ForwardMode.EXTEND))
    spans = [(33, 34), (14, 15)]
    sequences.check(spans, sequences.step(spans, ForwardMode.DECODE))


def test_what_earlier_owners_left_is_not_seen() -> None:
    sequences = Sequences([WIDTH] * 2)
    every = torch.arange(sequences.pool.num_slots)
    sequences.pool.set_keys(3, every, torch.full((len(every), DIM), torch.nan))
    spans = [(0, 12), (0, 30)]
    sequences.check(spans, sequences.step(spans, ForwardMode.EXTEND))
    spans = [(12, 13), (30, 31)]
    sequences.check(spans, sequences.step(spans, ForwardMode.DECODE, captured=True))


@pytest.mark.parametrize("dim", [16, 128, 200])
def test_eight_bit_keys_are_within_a_rounding(dim: int) -> None:
    sequences = Sequences([WIDTH], torch.float8_e4m3fn, dim)
    keys = sequences.k[0] * torch.logspace(-3, 3, WIDTH).unsqueeze(1)
    keys[5] = 0
    slots = sequences.table[1].long()
    sequences.pool.set_keys(3, slots, keys)
    read = sequences.pool.keys(3, slots)
    largest = keys.abs().amax(1, keepdim=True)
    # Half of e4m3's last of 3 bits, and of its smallest step where values are small
    assert bool(((read - keys).abs() <= keys.abs() / 16 + largest / 448 * 2**-10).all())
    assert bool((read[5] == 0).all())


@pytest.mark.parametrize("dim", [16, 128, 200])
@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_scores_of_eight_bit_keys_are_within_the_bound(dim: int, outlier: float) -> None:
    sequences = Sequences([WIDTH], torch.float8_e4m3fn, dim)
    sequences.k[0][:, 3] *= outlier
    sequences.step([(0, WIDTH)], ForwardMode.EXTEND)
    pool = sequences.pool
    stored = pool.keys(3, sequences.table[1].long())
    q, k, weights = (each[0].double() for each in (sequences.q, sequences.k, sequences.weights))
    found = index_scores(pool.rotated(sequences.q[0]), stored, weights.float())
    exact = torch.einsum("ths,th->ts", torch.relu(q @ k.T), weights)
    norms = (weights.abs() * q.norm(dim=-1)).sum(1, keepdim=True) * k.norm(dim=-1)
    assert bool(((found - exact).abs() <= norms * (1 / 16 + dim**0.5 / 448 / 1024)).all())
    # The bound is for the worst signs; of random ones, errors are a share of the scores
    assert (found - exact).norm() <= exact.norm() / 16


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_the_rotation_keeps_products(size: int) -> None:
    turn = hadamard(size, device="cpu")
    torch.testing.assert_close(turn @ turn.T, torch.eye(size))
    assert torch.equal(turn, turn.T)
    torch.testing.assert_close(turn.abs(), torch.full((size, size), size**-0.5))


@pytest.mark.parametrize("size", [0, -2, 96])
def test_a_rotation_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(InvalidInput, match="size: expected a power of 2"):
        hadamard(size, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bytes(dtype: torch.dtype) -> None:
    pool = IndexKPool(num_slots=9, dtype=dtype, layer_ids=(0, 4), head_dim=130, device="cpu")
    each = IndexKPool.bytes_per_token(dtype=dtype, num_layers=2, head_dim=130)
    assert pool.nbytes == 9 * each


def test_refusals() -> None:
    sequences = Sequences([WIDTH])
    with pytest.raises(InvalidInput, match="layer_id: expected one of"):
        sequences.pool.keys(4, torch.tensor([1]))
    with pytest.raises(InvalidInput, match="keys: expected shape"):
        sequences.pool.set_keys(3, torch.tensor([1]), torch.zeros(1, DIM + 1))
    with pytest.raises(InvalidInput, match="dtype"):
        IndexKPool(num_slots=9, dtype=torch.int8, layer_ids=(0,), head_dim=8, device="cpu")
    with pytest.raises(InvalidInput, match="topk: expected at least 1"):
        KeyPicker(pool=sequences.pool, req_to_token=sequences.table, topk=0)
    batch = sequences.batch([(0, 2)], ForwardMode.EXTEND)
    q, k, weights = torch.zeros(2, HEADS, DIM), torch.zeros(2, DIM), torch.zeros(2, HEADS)
    with pytest.raises(InvalidInput, match=f"topk_indices: expected room for {TOPK}, got None"):
        sequences.picker.pick(3, q, k, weights, batch)
