"""The prefix tree against a plain model: a table of pages, each with its slots and last use."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnmux.core import InvalidInput
from attnmux.transformers.requests.prefixes import PrefixTree
from attnmux.transformers.requests.slots import PagedAllocator

NUM_PAGES = 24


def tree_of(page_size: int, num_pages: int = NUM_PAGES) -> PrefixTree:
    return PrefixTree(PagedAllocator(num_pages * page_size, page_size, "cpu"))


@pytest.mark.parametrize(
    ("page_size", "length", "reused"), [(64, 32, 0), (64, 65, 64), (64, 128, 128), (1, 32, 32)]
)
def test_whole_pages_are_shared(page_size, length, reused):
    tree = tree_of(page_size, 200 // page_size + 1)
    tokens = list(range(length))
    slots = tree.allocator.alloc(length)
    assert tree.insert(tokens, slots) == 0
    match = tree.match([*tokens, -1])
    assert torch.equal(match.slots, slots[:reused])
    assert tree.evictable_tokens == reused
    assert tree.insert(tokens, slots) == reused


def test_a_prefix_is_split_where_others_part():
    tree = tree_of(2)
    first, second = tree.allocator.alloc(6), tree.allocator.alloc(6)
    tree.insert([1, 2, 3, 4, 5, 6], first)
    assert tree.insert([1, 2, 3, 9, 5, 6], second) == 2
    assert torch.equal(tree.match([1, 2, 3, 4, 5, 6]).slots, first)
    assert torch.equal(tree.match([1, 2, 3, 9, 5, 6, 7]).slots, torch.cat([first[:2], second[2:]]))
    assert torch.equal(tree.match([1, 2, 3]).slots, first[:2])
    assert tree.match([1, 7]).slots.tolist() == []
    assert tree.match([]).slots.tolist() == []


def test_a_locked_prefix_outlives_a_split_and_an_eviction():
    tree = tree_of(1)
    slots = tree.allocator.alloc(4)
    tree.insert([1, 2, 3, 4], slots)
    held = tree.match([1, 2, 3]).node
    tree.lock(held)
    tree.match([1, 2])
    assert (tree.protected_tokens, tree.evictable_tokens) == (3, 1)
    assert tree.evict(10) == 1
    assert torch.equal(tree.match([1, 2, 3, 4]).slots, slots[:3])
    tree.unlock(held)
    assert (tree.protected_tokens, tree.evictable_tokens) == (0, 3)
    assert tree.evict(10) == 3
    assert tree.allocator.available_size() == tree.allocator.size


def test_a_prefix_may_be_locked_some_time_after_its_match():
    tree = tree_of(1)
    tree.insert([1], tree.allocator.alloc(1))
    tree.insert([2], tree.allocator.alloc(1))
    node = tree.match([1]).node
    assert tree.evict(1) == 1  # the other one
    tree.lock(node)
    assert tree.evict(1) == 0
    assert len(tree.match([1]).slots) == 1


def test_the_least_recently_used_end_goes_first_and_no_more_than_asked():
    tree = tree_of(2)
    slots = tree.allocator.alloc(8)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], slots)
    tree.insert([9, 9], tree.allocator.alloc(2))
    assert tree.evict(3) == 4
    assert torch.equal(tree.match([1, 2, 3, 4, 5, 6, 7, 8]).slots, slots[:4])
    assert tree.evict(1) == 2
    assert tree.match([9, 9]).slots.tolist() == []
    assert tree.evict(0) == 0


def test_what_was_inserted_is_a_copy():
    tree = tree_of(1)
    slots = tree.allocator.alloc(3)
    expected = slots.clone()
    tree.insert([1, 2, 3], slots)
    slots.zero_()
    assert torch.equal(tree.match([1, 2, 3]).slots, expected)


def test_misuse_is_refused():
    tree = tree_of(2)
    slots = tree.allocator.alloc(4)
    for wrong in (slots[:2], slots.int(), slots.view(2, 2), slots.to("meta"), slots.flip(0)):
        with pytest.raises(InvalidInput, match="slots: expected"):
            tree.insert([1, 2, 3, 4], wrong)
    assert tree.evictable_tokens == 0
    tree.insert([1, 2, 3, 4], slots)
    node = tree.match([1, 2, 3, 4]).node
    with pytest.raises(InvalidInput, match="without a lock"):
        tree.unlock(node)
    with pytest.raises(InvalidInput, match="num_tokens"):
        tree.evict(-1)
    tree.evict(2)
    with pytest.raises(InvalidInput, match="an evicted prefix"):
        tree.lock(node)
    nothing = tree.match([]).node
    tree.lock(nothing)
    tree.unlock(nothing)


def test_a_tensor_of_token_ids_would_never_be_found_again_and_is_refused():
    tree = tree_of(2)
    slots = tree.allocator.alloc(4)
    for call in (tree.match, lambda ids: tree.insert(ids, slots)):
        with pytest.raises(InvalidInput, match=r"token_ids\.tolist\(\)"):
            call(torch.arange(4))
    assert tree.evictable_tokens == 0


class TreeMachine(RuleBasedStateMachine):
    """Requests come, lock what they share, end, insert; others are evicted meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.start(page_size=1)

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = tree_of(page_size)
        self.clock = 0
        # By the tokens up to and with the page: its slots, last use, locks.
        self.pages: dict[tuple[int, ...], list] = {}
        self.running: list[tuple[list[int], torch.Tensor, int, object]] = []

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        whole = len(tokens) // self.page_size
        return [tuple(tokens[: (page + 1) * self.page_size]) for page in range(whole)]

    def cached(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return list(takewhile(self.pages.__contains__, self.prefixes(tokens)))

    def touch(self, keys: list[tuple[int, ...]]) -> None:
        self.clock += 1
        for key in keys:
            self.pages[key][1] = self.clock

    def match(self, tokens: list[int]) -> tuple[torch.Tensor, object]:
        match = self.tree.match(tokens)
        keys = self.cached(tokens)
        self.touch(keys)
        assert match.slots.tolist() == [slot for key in keys for slot in self.pages[key][0]]
        return match.slots, match.node

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def begin(self, tokens: list[int]) -> None:
        shared, node = self.match(tokens)
        self.tree.lock(node)
        keys = self.cached(tokens)
        for key in keys:
            self.pages[key][2] += 1
        room = self.tree.allocator.available_size()
        whole = -(-len(tokens) // self.page_size) * self.page_size
        missing = whole - len(shared)
        if missing > room:
            freed = self.tree.evict(missing - room)
            self.check_evicted(missing - room, freed)
            room += freed
        if missing > room:
            self.tree.unlock(node)
            for key in keys:
                self.pages[key][2] -= 1
            return
        own = self.tree.allocator.alloc(len(tokens) - len(shared))
        self.running.append((tokens, torch.cat([shared, own]), len(shared), node))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        tokens, slots, num_shared, node = self.running.pop(index)
        held = self.cached(tokens)[: num_shared // self.page_size]
        allocator = self.tree.allocator
        if keep:
            there = self.tree.insert(tokens, slots)
            assert there == len(self.cached(tokens)) * self.page_size
            for place, prefix in enumerate(self.prefixes(tokens)):
                own = slots[place * self.page_size : (place + 1) * self.page_size].tolist()
                self.pages.setdefault(prefix, [own, 0, 0])
            self.touch(self.prefixes(tokens))
            whole = len(tokens) - len(tokens) % self.page_size
            allocator.free(torch.cat([slots[num_shared:there], slots[whole:]]))
        else:
            allocator.free(slots[num_shared:])
        self.tree.unlock(node)
        for key in held:
            self.pages[key][2] -= 1

    @rule(num_tokens=st.integers(0, 12))
    def evict(self, num_tokens: int) -> None:
        self.check_evicted(num_tokens, self.tree.evict(num_tokens))

    def check_evicted(self, num_tokens: int, freed: int) -> None:
        """Page by page, the least recently used of those without a lock and a successor."""
        expected = 0
        while expected < num_tokens:
            inner = {prefix[: -self.page_size] for prefix in self.pages}
            leaves = [k for k, page in self.pages.items() if not page[2] and k not in inner]
            if not leaves:
                break
            del self.pages[min(leaves, key=lambda key: self.pages[key][1])]
            expected += self.page_size
        assert freed == expected

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def look(self, tokens: list[int]) -> None:
        self.match(tokens)

    @invariant()
    def every_page_is_owned_once(self) -> None:
        of_tree = [slot for page in self.pages.values() for slot in page[0]]
        of_requests = [
            slot for _, slots, num_shared, _ in self.running for slot in slots[num_shared:].tolist()
        ]
        owned = of_tree + of_requests
        assert len(set(owned)) == len(owned)
        pages = {slot // self.page_size for slot in owned}
        free = self.tree.allocator.available_size() // self.page_size
        assert len(pages) + free == NUM_PAGES

    @invariant()
    def counted(self) -> None:
        locked = sum(len(page[0]) for page in self.pages.values() if page[2])
        assert self.tree.protected_tokens == locked
        total = sum(len(page[0]) for page in self.pages.values())
        assert self.tree.evictable_tokens == total - locked

    def teardown(self) -> None:
        for tokens, _, _, _ in self.running:
            self.match(tokens)


TestPrefixTree = TreeMachine.TestCase
TestPrefixTree.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
