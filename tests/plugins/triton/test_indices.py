"""The device's builders are core's: by signature, by refusal, and by result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux import core
from attnmux.core import InvalidInput
from attnmux.core.plugin import KVView

pytest.importorskip("triton")

from attnmux.triton import indices as ours  # where there is a Triton

NAMES = (
    "cu_seqlens",
    "kv_indices",
    "kv_indptr",
    "kv_last_page_len",
    "mask_indptr",
    "page_table",
    "window_view",
)
PAGE_SIZES = st.sampled_from([1, 3, 16, 64])
LENS = st.lists(st.integers(0, 200), max_size=6)
JUNK = 987_654
quick = settings(max_examples=25, deadline=None)


@dataclass(frozen=True)
class Batch:
    page_size: int
    table: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor | None
    lens: torch.Tensor

    @property
    def where(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table, self.rows


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def apart(values: torch.Tensor) -> torch.Tensor:
    """The same, not side by side."""
    return values.repeat_interleave(2, -1)[..., ::2]


def junk(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, JUNK, dtype=dtype)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Requests on scattered pages of their own, in shuffled rows, of 0 to all columns."""
    page_size = draw(PAGE_SIZES)
    num_rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6)) * page_size
    columns += draw(st.integers(0, page_size - 1))
    per_row = -(-columns // page_size)
    order = torch.randperm(num_rows * per_row).add_(1).view(num_rows, per_row, 1)
    slots = order * page_size + torch.arange(page_size)
    table = torch.zeros((num_rows + 1, columns), dtype=torch.int32)
    table[1:] = slots.view(num_rows, -1)[:, :columns]
    rows = draw(st.permutations(range(1, num_rows + 1)))[: draw(st.integers(0, num_rows))]
    starts = [0] * len(rows)
    if has_starts := draw(st.booleans()):
        starts = [draw(st.integers(0, columns // page_size)) * page_size for _ in rows]
    lens = [draw(st.integers(0, columns - start)) for start in starts]
    return Batch(
        page_size,
        table,
        torch.tensor(rows, dtype=torch.int64),
        ints(starts) if has_starts else None,
        ints(lens),
    )


def assert_same(name: str, *args: Any, **options: Any) -> Any:
    """The core's result, which ours has to be."""
    expected, result = getattr(core, name)(*args, **options), getattr(ours, name)(*args, **options)
    assert type(result) is type(expected)
    pairs = zip(result, expected, strict=True) if name == "window_view" else [(result, expected)]
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    return expected


def assert_same_into(name: str, buffer: torch.Tensor, *args: Any, **options: Any) -> None:
    """Writes the same values to a buffer, leaves the same rest alone, and returns a part of it."""
    for make in (torch.clone, apart):
        mine, theirs = make(buffer), make(buffer)
        result = getattr(ours, name)(*args, **options, out=mine)
        expected = getattr(core, name)(*args, **options, out=theirs)
        assert torch.equal(mine, theirs)
        assert result.shape == expected.shape
        assert not result.numel() or result.data_ptr() == mine.data_ptr()
        assert not result.numel() or result.stride()[-1] == mine.stride()[-1]


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name):
    """Core's also take a request table in the place of its tensor."""
    mine, theirs = (inspect.signature(getattr(each, name)).parameters for each in (ours, core))
    shown = [[(p.name, p.kind, p.default) for p in each.values()] for each in (mine, theirs)]
    assert shown[0] == shown[1]


@quick
@given(batches(), st.integers(0, 5))
def test_kv_indices(batch, slack):
    indptr = assert_same("kv_indptr", batch.lens, page_size=batch.page_size)
    total = int(indptr[-1])
    options = {"page_size": batch.page_size, "kv_start": batch.starts}
    assert_same("kv_indices", *batch.where, indptr, **options)
    assert_same("kv_indices", *batch.where, indptr, **options, total=total)
    buffer = junk(total + slack)
    assert_same_into("kv_indices", buffer, *batch.where, indptr, **options, total=total)
    assert_same_into("kv_indices", buffer, *batch.where, indptr, **options)


@quick
@given(batches(), st.integers(1, 4), st.integers(0, 9))
def test_page_table(batch, multiple, slack):
    where = (*batch.where, batch.lens)
    options = {"page_size": batch.page_size, "kv_start": batch.starts}
    width = assert_same("page_table", *where, **options).shape[1]
    options["width_multiple"] = multiple
    assert_same("page_table", *where, **options)
    max_len = width * batch.page_size
    width = assert_same("page_table", *where, **options, max_len=max_len).shape[1]
    buffer = junk(len(batch.lens) + 1, width + slack)
    assert_same_into("page_table", buffer, *where, **options, max_len=max_len)
    assert_same_into("page_table", buffer, *where, **options)


@quick
@given(LENS, PAGE_SIZES)
def test_of_lengths(lens, page_size):
    for given_lens in (ints(lens), apart(ints(lens))):
        assert_same("cu_seqlens", given_lens)
        assert_same("kv_indptr", given_lens, page_size=page_size)
        assert_same("kv_last_page_len", given_lens, page_size)
    buffer = junk(len(lens) + 3)
    assert_same_into("cu_seqlens", buffer, ints(lens))
    assert_same_into("kv_indptr", buffer, ints(lens), page_size=page_size)
    assert_same_into("kv_last_page_len", buffer, ints(lens), page_size)


@quick
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6), st.integers(0, 9))
def test_mask_indptr(pairs, drafts):
    q_lens, kv_lens = ints([q for q, _ in pairs]), ints([kv for _, kv in pairs])
    for given_lens in (q_lens, apart(q_lens), drafts):
        assert_same("mask_indptr", given_lens, kv_lens)
        assert_same_into("mask_indptr", junk(len(pairs) + 2), given_lens, kv_lens)


@quick
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 8)), max_size=6),
    st.integers(-1, 120),
    PAGE_SIZES,
    st.booleans(),
)
def test_window_view(requests, window, page_size, has_starts):
    seq_lens = ints([prefix + new for prefix, new in requests])
    starts = ints([3 * i for i in range(len(requests))]) if has_starts else None
    for q_lens in (1, 4, ints([new for _, new in requests])):
        options = {"q_lens": q_lens, "page_size": page_size, "kv_start": starts}
        assert_same("window_view", seq_lens, window, **options)
        mine, theirs = (KVView(junk(9), apart(junk(9))) for _ in range(2))
        view = ours.window_view(seq_lens, window, **options, out=mine)
        core.window_view(seq_lens, window, **options, out=theirs)
        assert all(map(torch.equal, mine, theirs))
        assert [part.shape for part in view] == [seq_lens.shape] * 2
        assert not requests or [part.data_ptr() for part in view] == [
            buffer.data_ptr() for buffer in mine
        ]


def test_more_requests_and_keys_than_a_program_takes():
    lens = torch.randint(0, 5, (2500,), dtype=torch.int32)
    lens[7] = 3000
    table = torch.randint(1, 2**31 - 1, (4, 3100), dtype=torch.int32)
    rows = torch.randint(0, 4, (2500,))
    indptr = assert_same("cu_seqlens", lens)
    assert_same("kv_indices", table, rows, indptr)
    assert_same("page_table", table, rows[:9], lens[:9], max_len=3100)
    assert_same("mask_indptr", lens, lens)
    assert_same("kv_last_page_len", lens, 16)
    assert_same("window_view", lens, 2)


def test_a_table_of_more_cells_than_int32_counts(tmp_path):
    num_rows = 2**31 // 4096 + 8
    path = tmp_path / "table"
    path.touch()
    # A sparse file: 8 GiB of zeros that take no memory but for the row that is written.
    table = torch.from_file(str(path), shared=True, size=num_rows * 4096, dtype=torch.int32)
    table = table.view(num_rows, 4096)
    table[-1] = torch.arange(4096, dtype=torch.int32)
    last, lens = torch.tensor([num_rows - 1]), ints([4096])
    assert torch.equal(ours.kv_indices(table, last, ours.kv_indptr(lens)), table[-1])
    assert torch.equal(ours.page_table(table, last, lens)[0], table[-1])


def test_lengths_that_the_table_does_not_hold_read_nothing_beside_it():
    room = junk(3 * 8)
    table = room[8:16].view(2, 4).fill_(5)
    rows, lens = torch.tensor([1]), ints([7])
    assert ours.kv_indices(table, rows, ints([0, 7])).tolist() == [5, 5, 5, 5, 0, 0, 0]
    assert ours.page_table(table, rows, lens).tolist() == [[5, 5, 5, 5, 0, 0, 0]]
    before = ints([-9])
    assert ours.kv_indices(table, rows, ints([0, 2]), kv_start=before).tolist() == [0, 0]
    assert ours.page_table(table, rows, ints([2]), kv_start=before).tolist() == [[0, 0]]


TABLE = torch.ones((4, 8), dtype=torch.int32)
ROWS = torch.tensor([1, 2])
TWO = ints([3, 5])
WRONG: dict[str, Callable[[Any], object]] = {
    "lens of int64": lambda of: of.cu_seqlens(TWO.long()),
    "lens of two dims": lambda of: of.cu_seqlens(TWO.view(1, 2)),
    "short buffer": lambda of: of.cu_seqlens(TWO, out=junk(2)),
    "buffer of floats": lambda of: of.cu_seqlens(TWO, out=torch.zeros(3)),
    "table of int64": lambda of: of.kv_indices(TABLE.long(), ROWS, ints([0, 3, 8])),
    "part of a table": lambda of: of.kv_indices(TABLE[:, :4], ROWS, ints([0, 3, 8])),
    "rows of int32": lambda of: of.kv_indices(TABLE, ROWS.int(), ints([0, 3, 8])),
    "short indptr": lambda of: of.kv_indices(TABLE, ROWS, TWO),
    "short starts": lambda of: of.kv_indices(TABLE, ROWS, ints([0, 3, 8]), kv_start=TWO[:1]),
    "page 0": lambda of: of.kv_indices(TABLE, ROWS, ints([0, 3, 8]), page_size=0),
    "short indices": lambda of: of.kv_indices(TABLE, ROWS, ints([0, 3, 8]), total=8, out=junk(7)),
    "indices of int64": lambda of: of.kv_indices(TABLE, ROWS, ints([0, 3, 8]), out=junk(8).long()),
    "indices of two dims": lambda of: of.kv_indices(TABLE, ROWS, ints([0, 3, 8]), out=junk(8, 1)),
    "page 0 of lens": lambda of: of.kv_indptr(TWO, page_size=0),
    "page 0 at the end": lambda of: of.kv_last_page_len(TWO, 0),
    "short last pages": lambda of: of.kv_last_page_len(TWO, 1, out=junk(1)),
    "another batch": lambda of: of.page_table(TABLE, ROWS, TWO[:1]),
    "page 0 of a table": lambda of: of.page_table(TABLE, ROWS, TWO, page_size=0),
    "multiple of 0": lambda of: of.page_table(TABLE, ROWS, TWO, width_multiple=0),
    "starts of a table": lambda of: of.page_table(TABLE, ROWS, TWO, kv_start=TWO.long()),
    "narrow table": lambda of: of.page_table(TABLE, ROWS, TWO, max_len=5, out=junk(4, 4)),
    "low table": lambda of: of.page_table(TABLE, ROWS, TWO, out=junk(1, 8)),
    "another batch of queries": lambda of: of.mask_indptr(TWO[:1], TWO),
    "queries of a window": lambda of: of.window_view(TWO, 3, q_lens=TWO[:1]),
    "page 0 of a window": lambda of: of.window_view(TWO, 3, page_size=0),
    "starts of a window": lambda of: of.window_view(TWO, 3, kv_start=TWO.long()),
    "short window": lambda of: of.window_view(TWO, 3, out=KVView(junk(2), junk(1))),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses_as_core_does(case):
    with pytest.raises(InvalidInput) as theirs:
        WRONG[case](core)
    with pytest.raises(InvalidInput) as mine:
        WRONG[case](ours)
    assert str(mine.value) == str(theirs.value)


def test_nothing_is_written_where_one_of_two_buffers_is_too_short():
    view = KVView(junk(2), junk(1))
    with pytest.raises(InvalidInput):
        ours.window_view(TWO, 3, out=view)
    assert view.kv_lens.tolist() == [JUNK, JUNK]


@pytest.mark.parametrize("page_size", [1, 16])
def test_no_synchronisation_once_sizes_are_known(monkeypatch, page_size):
    """No value is asked for on the host."""

    def asked(*_: object) -> int:
        raise AssertionError("a value was read")

    lens, indptr = ints([3, 5]), ours.kv_indptr(ints([3, 5]), page_size=page_size)
    for name in ("__int__", "__bool__", "__index__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, asked)
    ours.kv_indices(TABLE, ROWS, indptr, page_size=page_size, out=junk(20))
    ours.kv_indices(TABLE, ROWS, indptr, page_size=page_size, total=2)
    ours.page_table(TABLE, ROWS, lens, page_size=page_size, max_len=6)
    ours.page_table(TABLE, ROWS, lens, page_size=page_size, kv_start=lens, out=junk(4, 4))
    ours.window_view(lens, 3, q_lens=lens, page_size=page_size)
    ours.mask_indptr(4, lens)
    ours.kv_last_page_len(lens, page_size)
    with pytest.raises(AssertionError, match="a value was read"):
        ours.kv_indices(TABLE, ROWS, indptr, page_size=page_size)
