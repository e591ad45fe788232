"""The stretch of keys that a window shows agrees with an obvious loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmux.nvidia.flashinfer.step import window_view

PAGE_SIZES = st.sampled_from([1, 2, 3, 4, 16])


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=6),
    st.integers(0, 12),
    PAGE_SIZES,
    st.booleans(),
)
def test_window_view(requests, window, page_size, encoder):
    prefixes, q_lens = [prefix for prefix, _ in requests], [q for _, q in requests]
    seq_lens = [prefix + q for prefix, q in requests]
    base = [3 * i for i in range(len(requests))] if encoder else [0] * len(requests)
    lens, start = window_view(
        ints(seq_lens),
        window,
        q_lens=ints(q_lens),
        page_size=page_size,
        kv_start=ints(base) if encoder else None,
    )
    assert lens.dtype == start.dtype == torch.int32
    for i, (prefix, length) in enumerate(zip(prefixes, seq_lens, strict=True)):
        seen = [
            j for j in range(length) if any(p - window <= j <= p for p in range(prefix, length))
        ]
        first = seen[0] // page_size * page_size
        assert start[i] == base[i] + first
        assert lens[i] == length - first


def test_a_window_of_decode_is_the_last_w_plus_one_keys():
    lens, start = window_view(ints([0, 1, 4, 5, 9]), 3)
    assert lens.tolist() == [0, 1, 4, 4, 4]
    assert start.tolist() == [0, 0, 0, 1, 5]
