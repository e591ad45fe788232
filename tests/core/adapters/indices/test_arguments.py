"""What the builders refuse, and that none of them looks at values once sizes are given."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import (
    cu_seqlens,
    extend_positions,
    kv_indices,
    kv_indptr,
    mask_indptr,
    page_table,
)

TABLE = torch.zeros((4, 8), dtype=torch.int32)
ROWS = torch.tensor([1, 2])
LENS = torch.tensor([3, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("lens", lambda: cu_seqlens(LENS.long())),
        ("lens", lambda: cu_seqlens(LENS.view(1, 2))),
        ("out", lambda: cu_seqlens(LENS, out=torch.zeros(2, dtype=torch.int32))),
        ("out", lambda: cu_seqlens(LENS, out=torch.zeros(3))),
        ("req_to_token", lambda: kv_indices(TABLE.long(), ROWS, kv_indptr(LENS))),
        ("req_to_token", lambda: kv_indices(TABLE[:, :4], ROWS, kv_indptr(LENS))),
        ("req_pool_indices", lambda: kv_indices(TABLE, ROWS.int(), kv_indptr(LENS))),
        ("kv_indptr", lambda: kv_indices(TABLE, ROWS, LENS)),
        ("kv_start", lambda: kv_indices(TABLE, ROWS, kv_indptr(LENS), kv_start=LENS[:1])),
        ("page_size", lambda: kv_indptr(LENS, page_size=0)),
        ("kv_lens", lambda: page_table(TABLE, ROWS, LENS[:1])),
        ("width_multiple", lambda: page_table(TABLE, ROWS, LENS, width_multiple=0)),
        ("out", lambda: page_table(TABLE, ROWS, LENS, max_len=5, out=TABLE[:, :4])),
        ("out", lambda: page_table(TABLE, ROWS, LENS, out=TABLE[:1])),
        ("prefix_lens", lambda: extend_positions(LENS[:1], LENS)),
        ("q_lens", lambda: mask_indptr(LENS[:1], LENS)),
    ],
)
def test_refused(argument, call):
    with pytest.raises(InvalidInput) as caught:
        call()
    assert caught.value.argument == argument


def test_no_synchronisation_once_sizes_are_known():
    """On the meta device there are no values, so reading one would fail."""
    table, rows, lens = TABLE.to("meta"), ROWS.to("meta"), LENS.to("meta")
    indptr, buffer = kv_indptr(lens), torch.zeros(64, dtype=torch.int32, device="meta")
    long_buffer = buffer.long()
    assert kv_indices(table, rows, indptr, out=buffer).shape == (64,)
    assert page_table(table, rows, lens, page_size=2, max_len=6).shape == (2, 3)
    assert page_table(table, rows, lens, kv_start=lens, out=buffer.view(4, 16)).shape == (2, 16)
    assert extend_positions(lens, lens, out=long_buffer).shape == (64,)
    assert mask_indptr(4, lens).shape == (3,)
    with pytest.raises(RuntimeError, match="meta"):
        kv_indices(table, rows, indptr)


def test_a_table_of_more_cells_than_int32_counts(tmp_path):
    rows = 2**31 // 4096 + 8
    path = tmp_path / "table"
    path.touch()
    # A sparse file: 8 GiB of zeros that take no memory but for the row that is written.
    table = torch.from_file(str(path), shared=True, size=rows * 4096, dtype=torch.int32)
    table = table.view(rows, 4096)
    table[-1] = torch.arange(4096, dtype=torch.int32)
    last = torch.tensor([rows - 1])
    lens = torch.tensor([4096], dtype=torch.int32)
    assert torch.equal(kv_indices(table, last, kv_indptr(lens)), table[-1])
    assert torch.equal(page_table(table, last, lens, kv_start=torch.zeros_like(lens))[0], table[-1])


def test_page_table_of_a_strided_buffer():
    buffer = torch.full((4, 20), 9, dtype=torch.int32)
    table = torch.arange(1, 33, dtype=torch.int32).view(4, 8)
    part = page_table(table, ROWS, LENS, max_len=5, out=buffer[:, ::2])
    assert part.tolist() == [[9, 10, 11, 0, 0], [17, 18, 19, 20, 21]]
    assert buffer[:2, 1].tolist() == [9, 9]
