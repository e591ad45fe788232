from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.core import ForwardBatch, ForwardMode

pytest.importorskip("triton")

from attnmux.core import InvalidInput
from attnmux.triton.attention.share_plans import ShareKey, SharePlan, Splitting
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.attention.tile_plans import TileKey, TilePlan
from attnmux.triton.kernels.shares import WHOLE_KEYS
from attnmux.triton.launches.configs import ShareConfig

LEAST_SHARE = 2
BLOCK = 16
CPU = torch.device("cpu")
LENS = st.lists(st.integers(0, 400), min_size=1, max_size=7)


def decoding(lens: list[int]) -> TritonStep:
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    places = torch.zeros(len(lens), dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(lens),
        req_pool_indices=torch.arange(len(lens)) + 3,
        seq_lens=seq_lens,
        out_cache_loc=places,
        positions=places,
    )
    return TritonStep.of(batch)


def planned(
    step: TritonStep,
    *,
    items: int,
    units: int,
    window: int = -1,
    splitting: Splitting | None = None,
) -> SharePlan:
    config = ShareConfig(
        block_m=16,
        block_n=BLOCK,
        num_warps=4,
        num_stages=2,
        programs_per_unit=1,
        least_share=LEAST_SHARE,
        merged_rows=8,
    )
    key = ShareKey(
        queries=1,
        is_cross=False,
        window=window,
        chunk=0,
        has_own_table=False,
        items=items,
        config=config,
        splitting=splitting,
        part_rows=4,
        part_width=16,
    )
    plan = SharePlan(key, 8, units, CPU, part_dtype=torch.float32)
    plan.fill(step)
    return plan


def blocks(length: int, window: int) -> int:
    first = max(length - 1 - window, 0) if window >= 0 else 0
    return max(-(-length // BLOCK) - first // BLOCK, 1)


@settings(max_examples=25, deadline=None)
@given(LENS, st.integers(1, 3), st.integers(1, 40), st.sampled_from([-1, 0, 37]))
def test_the_line_of_work_is_cut_into_equal_shares(lens, items, units, window):
    plan = planned(decoding(lens), items=items, units=units, window=window)
    each = [blocks(length, window) for length in lens]
    expected = max(-(-sum(each) * items // units), LEAST_SHARE)
    if max(each) <= max(LEAST_SHARE, WHOLE_KEYS.value // BLOCK) and len(lens) * items <= units:
        # Each item has a program of its own.
        expected = max(each)
        each = [expected] * len(lens)
    total, share = sum(each) * items, int(plan.buffers["share"])
    assert share == expected
    stops = [sum(each[:count]) for count in range(len(lens) + 1)]
    assert plan.buffers["stops"][: len(lens) + 1].tolist() == stops
    for program, state in enumerate(plan.buffers["starts"].tolist()):
        begin = program * share
        request, before, own, unit_blocks, cached, num_keys, row, last = state
        if begin >= total:
            assert last <= begin
            continue
        assert stops[request] * items <= begin < stops[request + 1] * items
        assert (before, own, unit_blocks) == (stops[request], each[request], 1)
        assert (cached, num_keys, row) == (lens[request] - 1, lens[request], request + 3)
        assert last == min(begin + share, total)


@settings(max_examples=25, deadline=None)
@given(LENS, st.integers(1, 6), st.integers(1, 4))
def test_a_fixed_split_depends_on_its_request_alone(lens, split_blocks, most):
    splitting = Splitting(blocks=split_blocks, most=most)
    plan = planned(decoding(lens), items=2, units=5, splitting=splitting)
    for request, length in enumerate(lens):
        alone = planned(decoding([length]), items=2, units=5, splitting=splitting)
        size = int(plan.buffers["unit_blocks"][request])
        splits = int(plan.buffers["stops"][request + 1] - plan.buffers["stops"][request])
        expected = int(alone.buffers["unit_blocks"][0]), int(alone.buffers["stops"][1])
        assert (size, splits) == expected
        assert splits <= most
        assert size >= split_blocks
        assert (splits - 1) * size < blocks(length, -1) <= splits * size


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=1, max_size=40),
    st.sampled_from([1, 4, 7]),
    st.integers(0, 30),
)
def test_tiles_cover_every_row_once_and_the_longest_requests_are_last(lens, group, trailing):
    new, cached = ([each[at] for each in lens] for at in (0, 1))
    indptr = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    plan = TilePlan(TileKey(group=group, block_m=16), CPU)
    plan.fill_for(indptr, torch.tensor(cached, dtype=torch.int32), len(new), sum(new) + trailing)
    order = sorted(range(len(new)), key=lambda request: (sum(lens[request]), request))
    wanted = [
        (request, row)
        for request in [*order, len(new)]
        for row in range(0, [*new, trailing][request] * group, 16)
    ]
    requests, rows = (values[: plan.num_tiles].tolist() for values in (plan.request, plan.row))
    made = list(zip(requests, rows, strict=True))
    assert made[: len(wanted)] == wanted
    assert all(request == -1 for request, _ in made[len(wanted) :])


def test_more_tiles_than_a_grid_holds_are_refused():
    plan = TilePlan(TileKey(group=128, block_m=64), CPU)
    with pytest.raises(InvalidInput, match=r"at most 32766 a step, got 32769 new tokens"):
        plan.fill_for(
            torch.tensor([0, 32769], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 1, 32769
        )
    assert plan.num_tiles == 0
