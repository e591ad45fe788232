"""Every builder agrees with an obvious loop, with and without sizes and buffers given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmux.core.plugin import (
    cu_seqlens,
    extend_positions,
    kv_indices,
    kv_indptr,
    mask_indptr,
    page_table,
)

PAGE_SIZES = st.sampled_from([1, 2, 3, 4, 16])
JUNK = 987_654


@dataclass(frozen=True)
class Batch:
    page_size: int
    table: torch.Tensor
    rows: torch.Tensor
    starts: list[int]
    lens: list[int]

    def slots(self, i: int) -> list[int]:
        row = self.table[self.rows[i]].tolist()
        return row[self.starts[i] : self.starts[i] + self.lens[i]]

    def pages(self, i: int) -> list[int]:
        return [slot // self.page_size for slot in self.slots(i)[:: self.page_size]]

    def all_pages(self) -> list[int]:
        return [page for i in range(len(self.lens)) for page in self.pages(i)]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def shares_memory(part: torch.Tensor, buffer: torch.Tensor) -> bool:
    return not part.numel() or part.data_ptr() == buffer.data_ptr()


def running(values: list[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Requests on scattered pages of their own, in shuffled rows, of 0 to all columns."""
    page_size = draw(PAGE_SIZES)
    num_rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 7)) * page_size
    columns += draw(st.integers(0, page_size - 1))
    per_row = -(-columns // page_size)
    order = draw(st.permutations(range(1, num_rows * per_row + 1)))
    slots = (torch.tensor(order).view(num_rows, per_row, 1) * page_size) + torch.arange(page_size)
    table = torch.zeros((num_rows + 1, columns), dtype=torch.int32)
    table[1:] = slots.view(num_rows, -1)[:, :columns]
    rows = draw(st.permutations(range(1, num_rows + 1)))[: draw(st.integers(0, num_rows))]
    starts = [draw(st.integers(0, columns // page_size)) * page_size for _ in rows]
    lens = [draw(st.integers(0, columns - start)) for start in starts]
    return Batch(page_size, table, torch.tensor(rows, dtype=torch.int64), starts, lens)


@given(batches(), st.integers(0, 5))
def test_kv_indices(batch, slack):
    expected = batch.all_pages()
    indptr = kv_indptr(ints(batch.lens), page_size=batch.page_size)
    assert indptr.tolist() == running([len(batch.pages(i)) for i in range(len(batch.lens))])

    def build(**sizes: object) -> torch.Tensor:
        return kv_indices(
            batch.table,
            batch.rows,
            indptr,
            page_size=batch.page_size,
            kv_start=ints(batch.starts),
            **sizes,
        )

    assert build().tolist() == expected
    assert build(total=len(expected)).tolist() == expected
    buffer = torch.full((len(expected) + slack,), JUNK, dtype=torch.int32)
    assert shares_memory(build(total=len(expected), out=buffer), buffer)
    assert buffer.tolist() == expected + [JUNK] * slack
    assert build(out=buffer).tolist() == expected + [0] * slack


@given(batches())
def test_kv_indices_from_the_first_column(batch):
    at_zero = Batch(batch.page_size, batch.table, batch.rows, [0] * len(batch.lens), batch.lens)
    indptr = kv_indptr(ints(batch.lens), page_size=batch.page_size)
    result = kv_indices(batch.table, batch.rows, indptr, page_size=batch.page_size)
    assert result.tolist() == at_zero.all_pages()


@given(batches(), st.booleans(), st.integers(1, 4), st.integers(0, 9))
def test_page_table(batch, from_start, multiple, slack):
    starts = batch.starts if from_start else [0] * len(batch.lens)
    batch = Batch(batch.page_size, batch.table, batch.rows, starts, batch.lens)
    pages = [batch.pages(i) for i in range(len(batch.lens))]
    max_len = max(batch.lens, default=0)

    def padded(width: int) -> list[list[int]]:
        return [row + [0] * (width - len(row)) for row in pages]

    def build(**sizes: object) -> torch.Tensor:
        return page_table(
            batch.table,
            batch.rows,
            ints(batch.lens),
            page_size=batch.page_size,
            kv_start=ints(starts) if from_start else None,
            **sizes,
        )

    width = -(-max_len // batch.page_size)
    assert build().tolist() == padded(width)
    width = -(-width // multiple) * multiple
    assert build(width_multiple=multiple).tolist() == padded(width)
    assert build(max_len=max_len, width_multiple=multiple).tolist() == padded(width)
    buffer = torch.full((len(pages) + 1, width + slack), JUNK, dtype=torch.int32)
    part = build(max_len=max_len, width_multiple=multiple, out=buffer)
    assert shares_memory(part, buffer)
    assert part.tolist() == padded(width)
    assert bool((buffer[len(pages)] == JUNK).all())
    assert bool((buffer[:, width:] == JUNK).all())
    assert build(out=buffer).tolist() == padded(width + slack)


@given(batches(), st.data())
def test_positions(batch, data):
    prefixes = [data.draw(st.integers(0, length)) for length in batch.lens]
    extends = [length - prefix for length, prefix in zip(batch.lens, prefixes, strict=True)]
    spans = zip(prefixes, batch.lens, strict=True)
    positions = [position for span in spans for position in range(*span)]
    lens = ints(prefixes), ints(extends)
    buffer = torch.full((len(positions) + 2,), JUNK)
    result = extend_positions(*lens, total=len(positions))
    assert result.tolist() == positions
    assert result.dtype == torch.int64
    assert extend_positions(*lens, out=buffer).tolist() == [*positions, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6))
def test_indptrs(pairs):
    q_lens, kv_lens = [q for q, _ in pairs], [kv for _, kv in pairs]
    buffer = torch.full((len(pairs) + 3,), JUNK, dtype=torch.int32)
    assert cu_seqlens(ints(q_lens), out=buffer).tolist() == running(q_lens)
    assert buffer[len(pairs) + 1 :].tolist() == [JUNK, JUNK]
    masks = mask_indptr(ints(q_lens), ints(kv_lens), out=buffer)
    assert masks.tolist() == running([q * kv for q, kv in pairs])
    assert masks.dtype == torch.int32
