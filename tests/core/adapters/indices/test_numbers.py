"""The worked examples that every index builder has to reproduce."""

from __future__ import annotations

import pytest
import torch

from attnmux.core.adapters.indices.ragged import uniform_indptr
from attnmux.core.plugin import (
    cu_seqlens,
    extend_positions,
    kv_indices,
    kv_indptr,
    mask_indptr,
    page_table,
)


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table_of(rows: list[list[int]]) -> torch.Tensor:
    """A request table with the rows from 1 on; row 0 and what lies behind a row are 0."""
    width = max(map(len, rows))
    return torch.tensor(
        [[0] * width, *(row + [0] * (width - len(row)) for row in rows)], dtype=torch.int32
    )


def test_csr_of_slots_with_a_shared_prefix():
    rows = [[0, 1, 2, 3, 4, 7, 8], [5, 6], [0, 1, 2, 3, 4, 9, 10, 11, 12, 13]]
    indptr = kv_indptr(lens(7, 2, 10))
    indices = kv_indices(table_of(rows), torch.tensor([1, 2, 3]), indptr)
    assert indptr.tolist() == [0, 7, 9, 19]
    assert indices.tolist() == rows[0] + rows[1] + rows[2]
    assert indptr.dtype == indices.dtype == torch.int32


@pytest.mark.parametrize("page_size", [4, 6])
def test_csr_of_pages(page_size):
    pages = [[0, 1, 3, 5, 6], [2, 7], [4, 8]]
    slots = [[page * page_size + i for page in row for i in range(page_size)] for row in pages]
    kv_lens = lens(5 * page_size, page_size + 1, 2 * page_size - 1)
    indptr = kv_indptr(kv_lens, page_size=page_size)
    indices = kv_indices(
        table_of(slots), torch.tensor([1, 2, 3]), indptr, page_size=page_size, total=9
    )
    assert indptr.tolist() == [0, 5, 7, 9]
    assert indices.tolist() == [0, 1, 3, 5, 6, 2, 7, 4, 8]


def test_page_table_is_padded_with_the_reserved_page():
    slots = [[page * 4 + i for page in row for i in range(4)] for row in ([3, 1, 9], [7])]
    table = page_table(table_of(slots), torch.tensor([2, 1]), lens(1, 9), page_size=4)
    assert table.tolist() == [[7, 0, 0], [3, 1, 9]]
    assert table.dtype == torch.int32


def test_mask_bounds():
    kv_lens = lens(9, 11)
    assert mask_indptr(6, kv_lens).tolist() == [0, 54, 120]
    assert mask_indptr(lens(6, 6), kv_lens).tolist() == [0, 54, 120]


def test_block_table_width_is_a_multiple():
    table = torch.zeros((2, 4096), dtype=torch.int32)
    for page_size, multiple, width in ((32, 4, 36), (64, 2, 18)):
        blocks = page_table(
            table,
            torch.tensor([1]),
            lens(33 * 32),
            page_size=page_size,
            width_multiple=multiple,
        )
        assert blocks.shape == (1, width)


def test_empty_batch():
    none = lens()
    table, rows = torch.zeros((1, 8), dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    assert cu_seqlens(none).tolist() == [0]
    assert kv_indptr(none, page_size=4).tolist() == [0]
    assert uniform_indptr(0, 3, device="cpu").tolist() == [0]
    assert mask_indptr(4, none).tolist() == [0]
    assert extend_positions(none, none).shape == (0,)
    assert kv_indices(table, rows, cu_seqlens(none)).shape == (0,)
    assert kv_indices(table, rows, cu_seqlens(none), out=lens(7, 7)).tolist() == [0, 0]
    assert page_table(table, rows, none, page_size=4).shape == (0, 0)
