from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput, ReqToTokenPool
from attnmux.core.plugin import kv_indices, kv_indptr, page_table
from attnmux.vllm.block_table import BlockTable

PAGE = 4
LENS = torch.tensor([9, 3, 0, 16], dtype=torch.int32)
BLOCKS = torch.tensor([[7, 2, 5, 0], [1, 9, 9, 9], [4, 4, 4, 4], [3, 8, 6, 10]], dtype=torch.int32)


def tables() -> tuple[BlockTable, ReqToTokenPool]:
    """The same requests, by page and by token."""
    blocks = BlockTable(5, 4, page_size=PAGE, device="cpu")
    blocks.write(BLOCKS, 16)
    tokens = ReqToTokenPool(5, 16, "cpu")
    slots = BLOCKS.unsqueeze(-1) * PAGE + torch.arange(PAGE)
    tokens.req_to_token[1:5] = slots.flatten(1)
    return blocks, tokens


@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("start", [None, torch.tensor([4, 0, 0, 8], dtype=torch.int32)])
def test_builders_read_either_table(page_size, start):
    blocks, tokens = tables()
    rows = torch.tensor([1, 2, 3, 4])
    lens = LENS if start is None else LENS - start
    indptr = kv_indptr(lens, page_size=page_size)
    tables_of, indices = [], []
    for source in (blocks, tokens, tokens.req_to_token):
        tables_of.append(page_table(source, rows, lens, page_size=page_size, kv_start=start))
        indices.append(kv_indices(source, rows, indptr, page_size=page_size, kv_start=start))
    assert all(torch.equal(table, tables_of[-1]) for table in tables_of)
    assert all(torch.equal(each, indices[-1]) for each in indices)


def test_slots_are_derived_once_a_backend_asks_for_them():
    blocks, tokens = tables()
    table, tokens_each = blocks.columns_for(PAGE)
    assert (table.data_ptr(), tokens_each) == (blocks.block_table.data_ptr(), PAGE)
    assert blocks._slots is None
    slots = blocks.req_to_token
    assert torch.equal(slots[1:5], tokens.req_to_token[1:5])
    assert not blocks.block_table[0].any()
    blocks.write(torch.tensor([[11, 12]], dtype=torch.int32), 6)
    assert slots[1, :6].tolist() == [44, 45, 46, 47, 48, 49]
    assert blocks.req_to_token.data_ptr() == slots.data_ptr()
    assert blocks.columns_for(2)[0].data_ptr() == slots.data_ptr()


@pytest.mark.parametrize(("rows", "max_len"), [(6, 4), (1, 17)])
def test_refuses_what_has_no_room(rows, max_len):
    blocks, _ = tables()
    with pytest.raises(InvalidInput, match="blocks"):
        blocks.write(torch.zeros(rows, 5, dtype=torch.int32), max_len)


@pytest.mark.parametrize(
    "pages",
    [
        torch.ones(2, 1, dtype=torch.int32),  # torch would spread the column over the row
        torch.ones(2, dtype=torch.int32),
        torch.ones(2, 3),
    ],
)
def test_refuses_pages_of_another_shape_or_dtype(pages):
    blocks, _ = tables()
    before = blocks.block_table.clone()
    with pytest.raises(InvalidInput, match="blocks"):
        blocks.write(pages, 2 * PAGE + 1)
    assert torch.equal(blocks.block_table, before)
