"""Two pools for one model: what is translated, and who owns what of which."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnmux.core import (
    InvalidInput,
    MHATokenToKVPool,
    MLATokenToKVPool,
    PoolExhausted,
    SWAKVPool,
)
from attnmux.transformers.requests.prefixes import PrefixTree
from attnmux.transformers.requests.slots import SWAAllocator

FULL_LAYERS, WINDOW_LAYERS = (5, 1), (0, 7)


@dataclass
class Layer:
    layer_id: int


def mha(layer_ids: tuple[int, ...], **changes: object) -> MHATokenToKVPool:
    arguments = {
        "size": 32,
        "page_size": 4,
        "dtype": torch.float32,
        "layer_ids": layer_ids,
        "num_kv_heads": 2,
        "head_dim": 4,
        "device": "cpu",
    }
    return MHATokenToKVPool(**(arguments | changes))


def pool_of(page_size: int = 4, pages: int = 8, swa_pages: int = 3, **changes: object) -> SWAKVPool:
    common = {"page_size": page_size, **changes}
    return SWAKVPool(
        full=mha(FULL_LAYERS, size=pages * page_size, **common),
        swa=mha(WINDOW_LAYERS, size=swa_pages * page_size, **common),
    )


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_layers_and_sizes():
    pool = pool_of()
    assert pool.layers_mapping == {5: (0, False), 1: (1, False), 0: (0, True), 7: (1, True)}
    assert pool.layer_ids == (0, 1, 5, 7)
    assert (pool.size, pool.num_slots, pool.page_size) == (32, 36, 4)
    assert pool.nbytes == pool.full.nbytes + pool.swa.nbytes
    assert [pool.group_of(layer_id) for layer_id in (0, 1, 5, 7)] == [1, 0, 0, 1]
    assert mha((3,)).group_of(3) == 0
    assert pool.get_key_buffer(5).shape[0] == 36
    assert pool.get_key_buffer(7).shape[0] == 16
    for call in (pool.get_key_buffer, pool.get_value_buffer, pool.group_of):
        with pytest.raises(InvalidInput, match="layer_id: expected one of"):
            call(2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_translation(dtype):
    pool = pool_of()
    pool.pair(torch.tensor([6, 2]), torch.tensor([1, 3]))
    slots = torch.tensor([[0, 24, 27], [9, 4, 11]], dtype=dtype)
    moved = pool.translate(slots, 0)
    assert moved.dtype == dtype
    assert moved.tolist() == [[0, 4, 7], [13, 0, 15]]
    assert pool.translate(slots, 1) is slots
    pages = torch.tensor([[6, 2], [5, 0]], dtype=dtype)
    assert pool.translate_pages(pages, 7).tolist() == [[1, 3], [0, 0]]
    assert pool.translate_pages(pages, 7).dtype == dtype
    assert pool.translate_pages(pages, 5) is pages
    assert pool.slot_map(0)[slots.long()].tolist() == moved.tolist()
    assert pool.slot_map(1) is None
    pool.unpair(torch.tensor([6]))
    assert pool.translate(slots, 0).tolist() == [[0, 0, 0], [13, 0, 15]]
    with pytest.raises(InvalidInput, match="slots: expected int32 or int64"):
        pool.translate(slots.short(), 0)
    with pytest.raises(InvalidInput, match="pages: expected int32 or int64"):
        pool.translate_pages(slots.short(), 0)


def test_writes_go_where_reads_look():
    pool = pool_of()
    allocator = SWAAllocator(pool)
    loc = allocator.alloc(6)
    k, v = torch.randn(6, 2, 4), torch.randn(6, 2, 4)
    for layer_id in pool.layer_ids:
        pool.set_kv_buffer(Layer(layer_id), loc, k, v)
        moved = pool.translate(loc, layer_id)
        keys, values = pool.get_kv_buffer(layer_id)
        assert torch.equal(keys[moved], k)
        assert torch.equal(values[moved], v)
        assert int(keys.flatten(1).any(1).sum()) == 6
    with pytest.raises(InvalidInput, match=r"loc: expected torch\.int64"):
        pool.set_kv_buffer(Layer(0), loc.int(), k, v)


def test_quantised_and_latent_pools():
    pool = pool_of(dtype=torch.float8_e4m3fn)
    loc = SWAAllocator(pool).alloc(1)
    pool.set_kv_buffer(Layer(0), loc, torch.ones(1, 2, 4), torch.ones(1, 2, 4), 0.5, 0.25)
    keys, values = pool.get_kv_buffer(0)
    moved = pool.translate(loc, 0)
    assert (keys[moved].float() == 2).all()
    assert (values[moved].float() == 4).all()
    assert pool.read_scales(0.5, 0.25) == (0.5, 0.25)
    latent = {"page_size": 1, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "device": "cpu"}
    latent["dtype"] = torch.float32
    pool = SWAKVPool(
        full=MLATokenToKVPool(size=4, layer_ids=[0], **latent),
        swa=MLATokenToKVPool(size=2, layer_ids=[1], **latent),
    )
    loc = SWAAllocator(pool).alloc(1)
    pool.set_mla_kv_buffer(Layer(1), loc, torch.ones(1, 1, 4), torch.ones(1, 1, 2))
    assert (pool.get_key_buffer(1)[pool.translate(loc, 1)] == 1).all()


def test_window_layers_of_another_dtype_are_translated_in_their_part():
    pool = SWAKVPool(full=mha(FULL_LAYERS, dtype=torch.float8_e4m3fn), swa=mha(WINDOW_LAYERS))
    part = pool.of_layers(WINDOW_LAYERS)
    loc = SWAAllocator(pool).alloc(1)
    rows = torch.rand(1, 2, 4)
    part.set_kv_buffer(Layer(7), loc, rows, rows)
    assert (part.dtype, part.read_scales(2.0, 2.0)) == (torch.float32, (1.0, 1.0))
    assert pool.of_layers(FULL_LAYERS).read_scales(2.0, 2.0) == (2.0, 2.0)
    moved = part.translate(loc, 7)
    assert torch.equal(moved, pool.translate(loc, 7))
    assert torch.equal(pool.get_key_buffer(7)[moved], rows)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("swa.page_size", {"page_size": 2}),
        ("swa.device", {"device": "meta"}),
        ("layer_ids", {"layer_ids": (0, 5)}),
    ],
)
def test_pools_that_do_not_go_together(argument, changes):
    with pytest.raises(InvalidInput) as caught:
        SWAKVPool(full=mha(FULL_LAYERS), swa=mha(**{"layer_ids": WINDOW_LAYERS, **changes}))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("seq_len", "window", "page_size", "behind"),
    [(0, 8, 1, 0), (8, 8, 1, 0), (9, 8, 1, 1), (23, 8, 16, 0), (24, 8, 16, 16), (9, 0, 4, 8),
     (50, -1, 4, 0)],
)  # fmt: skip
def test_tokens_behind_the_window(seq_len, window, page_size, behind):
    assert SWAKVPool.tokens_behind_window(seq_len, window, page_size) == behind


def test_what_no_later_token_sees_is_behind():
    for seq_len in range(12):
        for window in range(12):
            seen_by_next = [j for j in range(seq_len + 1) if seq_len - window <= j]
            assert SWAKVPool.tokens_behind_window(seq_len, window, 1) == seen_by_next[0]


def test_the_lesser_pool_counts_and_nothing_is_taken_when_it_is_full():
    pool = pool_of(swa_pages=3)
    allocator = SWAAllocator(pool)
    assert allocator.available_size() == 12
    slots = allocator.alloc(8)
    with pytest.raises(PoolExhausted, match="for window layers: 2 wanted, 1 available"):
        allocator.alloc(5)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (24, 4)
    allocator.free_swa(slots[:4])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (24, 8)
    assert not pool.translate(slots[:4], 0).any()
    assert bool(pool.translate(slots[4:], 0).all())
    allocator.free(slots)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (32, 12)
    allocator = SWAAllocator(pool_of(pages=2, swa_pages=3))
    with pytest.raises(PoolExhausted, match="3 wanted, 2 available"):
        allocator.alloc(9)
    assert allocator.swa_available_size() == 12


@pytest.mark.parametrize("debug", [True, False])
def test_clear(debug):
    pool = pool_of()
    allocator = SWAAllocator(pool, debug=debug)
    slots = allocator.alloc(8)
    allocator.free_swa(slots[:4])
    allocator.clear()
    assert allocator.available_size() == 12
    assert not pool.translate(slots, 0).any()


def test_misuse_changes_nothing():
    allocator = SWAAllocator(pool_of())
    slots = allocator.alloc(6)
    for wrong in (slots[[0, 0]], torch.tensor([0]), torch.tensor([99]), torch.tensor([31])):
        with pytest.raises(InvalidInput):
            allocator.free_swa(wrong)
    allocator.free_swa(slots)
    with pytest.raises(InvalidInput, match="whose window pages were freed"):
        allocator.free_swa(slots[:1])
    with pytest.raises(InvalidInput, match="whose window pages were freed"):
        allocator.alloc_extend(ints(6), ints(7), slots[-1:].int(), 1)
    with pytest.raises(InvalidInput, match="whose window pages were freed"):
        PrefixTree(allocator).insert(list(range(4)), slots)
    assert allocator.full_available_size() == 24
    allocator.free(slots)
    with pytest.raises(InvalidInput):
        allocator.free(slots)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (32, 12)


@pytest.mark.parametrize("debug", [True, False])
def test_what_the_window_gave_up_is_never_shared(debug):
    allocator = SWAAllocator(pool_of(), debug=debug)
    tree = PrefixTree(allocator)
    slots = allocator.alloc(8)
    allocator.free_swa(slots[:4])
    with pytest.raises(InvalidInput, match="whose window pages were freed"):
        tree.insert(list(range(8)), slots)
    assert tree.evictable_tokens == 0
    allocator.free(slots)
    whole = allocator.alloc(8)
    assert tree.insert(list(range(8)), whole) == 0
    assert torch.equal(tree.match(list(range(8))).slots, whole)


class SWAMachine(RuleBasedStateMachine):
    """Requests grow, slide and end; both pools stay accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.start(page_size=1, debug=True)

    @initialize(page_size=st.sampled_from([1, 2, 3]), debug=st.booleans())
    def start(self, page_size: int, debug: bool) -> None:
        self.page_size = page_size
        self.pool = pool_of(page_size=page_size, pages=10, swa_pages=6)
        self.allocator = SWAAllocator(self.pool, debug=debug)
        # Slots of each request, and how many at its front have no window part.
        self.requests: list[list] = []

    def grow(self, request: list, more: int) -> bool:
        slots, _ = request
        needed = self.num_pages(len(slots) + more) - self.num_pages(len(slots))
        sizes = self.allocator.full_available_size(), self.allocator.swa_available_size()
        arguments = (
            ints(len(slots)),
            ints(len(slots) + more),
            ints(slots[-1] if slots else 0),
            more,
        )
        if needed * self.page_size > self.allocator.available_size():
            with pytest.raises(PoolExhausted):
                self.allocator.alloc_extend(*arguments)
            assert sizes == (
                self.allocator.full_available_size(),
                self.allocator.swa_available_size(),
            )
            return False
        slots += self.allocator.alloc_extend(*arguments).tolist()
        return True

    @rule(length=st.integers(1, 9))
    def begin(self, length: int) -> None:
        request: list = [[], 0]
        if self.grow(request, length):
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.integers(1, 4))
    def extend(self, data: st.DataObject, more: int) -> None:
        self.grow(data.draw(st.sampled_from(self.requests)), more)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), window=st.integers(1, 5))
    def slide(self, data: st.DataObject, window: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        behind = SWAKVPool.tokens_behind_window(len(request[0]), window, self.page_size)
        if behind > request[1]:
            self.allocator.free_swa(torch.tensor(request[0][request[1] : behind]))
            request[1] = behind

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slots, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.allocator.free(torch.tensor(slots))

    @invariant()
    def accounted_for(self) -> None:
        pages = sum(self.num_pages(len(slots)) for slots, _ in self.requests)
        free = self.allocator.full_available_size() // self.page_size
        assert pages + free == 10
        gone = sum(behind // self.page_size for _, behind in self.requests)
        assert pages - gone + self.allocator.swa_available_size() // self.page_size == 6

    @invariant()
    def each_visible_token_has_a_window_slot_of_its_own(self) -> None:
        seen: list[int] = []
        for slots, behind in self.requests:
            moved = self.pool.translate(torch.tensor(slots), WINDOW_LAYERS[0]).tolist()
            assert not any(moved[:behind])
            assert all(
                moved[place] % self.page_size == place % self.page_size
                for place in range(behind, len(slots))
            )
            seen += moved[behind:]
        assert len(set(seen)) == len(seen)
        assert all(slot >= self.page_size for slot in seen)

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


TestSWA = SWAMachine.TestCase
TestSWA.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
