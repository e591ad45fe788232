"""Tall tiles or short ones: which end a step earlier, and that both give the reference's answer."""

from __future__ import annotations

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from attnmux.triton.attention.tile_heights import (
    MOST_ROUNDS,
    least_makespan,
    takes_short_tiles,
    tile_keys,
)


def is_short(new: list[int], lens: list[int], **changed) -> bool:
    heights = {"tall": 192, "short": 128, "group": 4, "kv_heads": 8, "units": 132}
    return takes_short_tiles(torch.tensor(new), torch.tensor(lens), **{**heights, **changed})


def test_short_tiles_where_tall_ones_leave_most_of_the_last_round_empty() -> None:
    # 176 tall tiles are two rounds of 132, as 256 short ones are
    assert is_short([512] * 2, [4608] * 2)
    assert not is_short([3072], [64000])  # 512 tall tiles fill four rounds, 768 short ones six
    assert not is_short([8192], [8192])  # tiles of all lengths fill the gaps


def test_rounds_beyond_the_most_are_not_counted() -> None:
    tokens = MOST_ROUNDS * 132 // 8 * 192 // 4
    assert not is_short([tokens + 48 * 10], [tokens + 48 * 10])


def test_a_window_makes_tiles_equally_long() -> None:
    assert is_short([1000], [100_000], most_keys=127, kv_heads=8) == is_short([1000], [3000])
    assert not is_short([], [])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([16, 24]),
)
def test_the_keys_of_a_tile_are_those_of_its_last_row(requests, group, height) -> None:
    rows = torch.tensor([new * group for new, _ in requests])
    lens = torch.tensor([new + cached for new, cached in requests])
    wanted = [
        cached + (min(first + height, new * group) - 1) // group + 1
        for new, cached in requests
        for first in range(0, new * group, height)
    ]
    assert tile_keys(rows, lens, height, group).tolist() == wanted
    everything = [new + cached for new, cached in requests for _ in range(0, new * group, height)]
    assert tile_keys(rows, lens, height, 0).tolist() == everything


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 50), max_size=30),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_no_schedule_is_shorter_than_the_bound(work, copies, units) -> None:
    busy = [0] * units
    for each in sorted(work * copies, reverse=True):
        heapq.heapreplace(busy, busy[0] + each)
    bound = least_makespan(torch.tensor(work), copies, units)
    # Longest first takes at most 4/3 of the best schedule (Graham 1969)
    assert bound <= max(busy) + 1e-9
    if len(set(work)) == 1:
        assert bound == pytest.approx(max(busy))
