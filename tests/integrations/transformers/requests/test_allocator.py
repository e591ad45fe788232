from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from attnmux.core import InvalidInput, PoolExhausted
from attnmux.transformers.requests.slots import PagedAllocator


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decoded(allocator: PagedAllocator, lens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Slots of one new token a request, which the lengths count."""
    return allocator.alloc_extend(lens - 1, lens, last, len(lens))


@pytest.fixture
def pages() -> PagedAllocator:
    return PagedAllocator(32, 4, "cpu")


@pytest.fixture(params=[1, 4])
def allocator(request) -> PagedAllocator:
    return PagedAllocator(32, request.param, "cpu")


def test_every_slot_but_the_reserved_page(allocator):
    slots = allocator.alloc(32)
    assert slots.dtype == torch.int64
    assert sorted(slots.tolist()) == list(range(allocator.page_size, 32 + allocator.page_size))
    assert allocator.available_size() == 0


def test_the_token_allocator_has_pages_of_one():
    allocator = PagedAllocator(5, 1, "cpu")
    assert allocator.page_size == 1
    assert allocator.alloc(5).tolist() == [1, 2, 3, 4, 5]


def test_extend_continues_the_last_page_and_goes_on_with_whole_ones(pages):
    first = pages.alloc_extend(ints(0, 0, 0), ints(6, 0, 3), ints(0, 0, 0), 9)
    assert first.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    assert pages.available_size() == 20
    second = pages.alloc_extend(ints(6, 3), ints(13, 4), torch.stack([first[5], first[8]]), 8)
    assert second.tolist() == [10, 11, 16, 17, 18, 19, 20, 15]
    assert pages.available_size() == 12


def test_extend_of_a_full_page_opens_one(pages):
    first = pages.alloc_extend(ints(0), ints(4), ints(0), 4)
    assert pages.alloc_extend(ints(4), ints(5), first[-1:], 1).tolist() == [8]


def test_extend_by_nothing(pages):
    assert pages.alloc_extend(ints(), ints(), ints(), 0).shape == (0,)
    first = pages.alloc_extend(ints(0, 0), ints(3, 0), ints(0, 0), 3)
    again = pages.alloc_extend(ints(3, 0), ints(3, 0), torch.stack([first[-1], first[-1]]), 0)
    assert again.shape == (0,)
    assert pages.available_size() == 28


def test_decode(pages):
    prompt = pages.alloc_extend(ints(0, 0), ints(4, 2), ints(0, 0), 6)
    last = prompt[[3, 5]]
    slots = decoded(pages, ints(5, 3), last)
    assert slots.tolist() == [12, 10]
    assert decoded(pages, ints(6, 4), slots).tolist() == [13, 11]
    assert decoded(pages, ints(), ints()).shape == (0,)


def test_alloc_leaves_a_page_to_be_continued(pages):
    slots = pages.alloc(6)
    assert slots.tolist() == [4, 5, 6, 7, 8, 9]
    assert decoded(pages, ints(7), slots[-1:]).tolist() == [10]


@pytest.mark.parametrize(
    "fill",
    [
        lambda a: a.alloc(9),
        lambda a: a.alloc_extend(ints(0, 0), ints(4, 5), ints(0, 0), 9),
    ],
)
def test_exhaustion_changes_nothing(allocator, fill):
    held = allocator.alloc(24)
    with pytest.raises(PoolExhausted, match="available; free finished requests"):
        fill(allocator)
    assert allocator.available_size() == 8
    allocator.free(held)
    assert sorted(allocator.alloc(32).tolist())[0] == allocator.page_size


def test_exhaustion_in_decode_changes_nothing(pages):
    held = pages.alloc_extend(ints(0, 0), ints(16, 16), ints(0, 0), 32)
    with pytest.raises(PoolExhausted, match="pages of 4 tokens: 2 wanted, 0 available"):
        decoded(pages, ints(17, 17), held[[15, 31]])
    pages.free(held[16:])
    assert decoded(pages, ints(17), held[15:16]).shape == (1,)


def test_any_slot_of_a_page_frees_the_page_once(pages):
    slots = pages.alloc(8)
    pages.free(slots[[1, 2, 5]])
    assert pages.available_size() == 32
    with pytest.raises(InvalidInput, match="free already or never handed out"):
        pages.free(slots[:1])


@pytest.mark.parametrize("stray", [0, 3, 12, 36, -1, 10**9])
def test_foreign_slots(pages, stray):
    slots = pages.alloc(8)
    with pytest.raises(InvalidInput, match="slots"):
        pages.free(torch.cat([slots, torch.tensor([stray])]))
    assert pages.available_size() == 24
    pages.free(slots)
    assert pages.available_size() == 32


@pytest.mark.parametrize(
    "slots", [torch.tensor([[1, 2]]), torch.tensor([1.0]), torch.tensor([True])]
)
def test_slots_of_another_shape_or_dtype(allocator, slots):
    allocator.alloc(8)
    before = allocator.available_size()
    with pytest.raises(InvalidInput, match="int32 or int64"):
        allocator.free(slots)
    assert allocator.available_size() == before


def test_double_free(allocator):
    slots = allocator.alloc(8)
    allocator.free(slots)
    with pytest.raises(InvalidInput):
        allocator.free(slots[-1:])
    assert allocator.available_size() == 32
    assert len(set(allocator.alloc(32).tolist())) == 32


def test_one_slot_twice_in_a_call(allocator):
    slots = allocator.alloc(8)
    with pytest.raises(InvalidInput, match="twice"):
        allocator.free(slots[[0, 4, 4]])
    assert allocator.available_size() == 24


def test_clear(allocator):
    allocator.alloc(20)
    allocator.clear()
    assert len(set(allocator.alloc(32).tolist())) == 32


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("num_tokens", lambda a, last: a.alloc(-1)),
        ("seq_lens", lambda a, last: a.alloc_extend(ints(6), ints(5), last, -1)),
        ("extend_num_tokens", lambda a, last: a.alloc_extend(ints(6), ints(8), last, 3)),
        ("last_loc", lambda a, last: a.alloc_extend(ints(6, 0), ints(8, 1), last, 3)),
        ("last_loc", lambda a, last: a.alloc_extend(ints(7), ints(8), last, 1)),
        ("last_loc", lambda a, last: decoded(a, ints(8), last)),
        ("seq_lens", lambda a, last: decoded(a, ints(0), last)),
        ("slots", lambda a, last: decoded(a, ints(7), last + 8)),
    ],
)
def test_a_refused_allocation_changes_nothing(pages, argument, call):
    last = pages.alloc(6)[-1:]
    with pytest.raises(InvalidInput) as caught:
        call(pages, last)
    assert caught.value.argument == argument
    assert pages.available_size() == 24


@pytest.mark.parametrize(("size", "page_size"), [(0, 1), (30, 4), (4, 0), (2, 4)])
def test_impossible_sizes(size, page_size):
    with pytest.raises(InvalidInput):
        PagedAllocator(size, page_size, "cpu")


def test_host_mirrors_stand_in_for_the_lengths():
    """Without checks, nothing but the mirrors is read: the rest may be on a device."""
    meta = torch.device("meta")
    allocator = PagedAllocator(32, 4, meta)
    assert not allocator.debug
    prefix, seq = ints(0, 0), ints(6, 3)
    slots = allocator.alloc_extend(
        prefix.to(meta), seq.to(meta), prefix.to(meta), 9, prefix_lens_cpu=prefix, seq_lens_cpu=seq
    )
    assert slots.shape == (9,)
    assert allocator.available_size() == 20
    slots = allocator.alloc_extend(
        seq.to(meta), seq.to(meta), seq.to(meta), 2, prefix_lens_cpu=seq, seq_lens_cpu=ints(7, 5)
    )
    assert slots.shape == (2,)
    assert allocator.available_size() == 16


def test_without_checks_it_allocates_the_same():
    plain, checked = (PagedAllocator(32, 4, "cpu", debug=debug) for debug in (False, True))
    for allocator in (plain, checked):
        slots = allocator.alloc_extend(ints(0, 0), ints(6, 3), ints(0, 0), 9)
        allocator.free(slots[:6])
    assert plain.available_size() == checked.available_size() == 28
    assert plain.alloc(28).tolist() == checked.alloc(28).tolist()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_negative_count_is_refused_even_without_checks(page_size):
    allocator = PagedAllocator(32, page_size, "cpu", debug=False)
    with pytest.raises(InvalidInput):
        allocator.alloc_extend(ints(8), ints(0), ints(4), -8)
    assert allocator.available_size() == 32


def test_pages_by_their_numbers(allocator):
    pages = allocator.alloc_pages(3)
    assert allocator.available_size() == 32 - 3 * allocator.page_size
    with pytest.raises(InvalidInput, match="twice"):
        allocator.free_pages(pages[[0, 0]])
    allocator.free_pages(pages[:1])
    allocator.free_pages(pages[1:2])
    with pytest.raises(InvalidInput, match="free already"):
        allocator.free_pages(pages[:1])
    allocator.free_pages(pages[2:])
    assert allocator.available_size() == 32
    with pytest.raises(PoolExhausted):
        allocator.alloc_pages(33)
    taken = allocator.alloc_pages(32 // allocator.page_size)
    assert sorted(taken.tolist()) == list(range(1, 32 // allocator.page_size + 1))


def test_whole_pages_come_and_go_without_a_look_at_values():
    with FakeTensorMode():  # where no tensor has any
        allocator = PagedAllocator(32, 4, "cpu", debug=False)
        slots = allocator.alloc(20)
        allocator.free_pages(allocator.alloc_pages(3))
        assert allocator.available_size() == 12
        with pytest.raises(DynamicOutputShapeException):
            allocator.free(slots)
