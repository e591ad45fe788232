"""Prefixes of models with windows: what a span keeps, and the tree's locks and evictions."""

from __future__ import annotations

import random

import pytest
import torch

from attnmux.core import InvalidInput, MHATokenToKVPool, SWAKVPool
from attnmux.transformers.requests.prefixes import WindowPrefixTree, WindowSpan
from attnmux.transformers.requests.slots import SWAAllocator

SPANS = (
    WindowSpan(sliding_window_size=0),
    WindowSpan(sliding_window_size=5),
    WindowSpan(attention_chunk_sizes=(6,)),
    WindowSpan(sliding_window_size=3, attention_chunk_sizes=(4, 9)),
)


def sees(span, position, key):
    """Whether some window layer's token at a position sees an earlier key."""
    in_window = 0 <= position - key <= span.sliding_window_size
    return in_window or any(position // size == key // size for size in span.attention_chunk_sizes)


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_no_later_token_sees_what_a_span_gives_up(span, page_size):
    for num_tokens in range(40):
        first = span.kept_from(num_tokens, page_size)
        assert first % page_size == 0
        whole = num_tokens // page_size * page_size
        for position in range(whole, 60):
            assert not any(sees(span, position, key) for key in range(first))
        needed = [key for key in range(whole) if sees(span, whole, key)]
        assert whole - first <= span.most_tokens + page_size
        assert first == min(needed, default=whole) // page_size * page_size


def tree_of(span, *, page_size=1, pages=64, window_pages=32):
    kind = {"page_size": page_size, "dtype": torch.float32, "num_kv_heads": 1, "head_dim": 1}
    pool = SWAKVPool(
        full=MHATokenToKVPool(size=pages * page_size, layer_ids=[0], device="cpu", **kind),
        swa=MHATokenToKVPool(size=window_pages * page_size, layer_ids=[1], device="cpu", **kind),
    )
    return WindowPrefixTree(SWAAllocator(pool), span)


def test_pages_without_windows_take_those_of_the_next_request():
    tree = tree_of(WindowSpan(sliding_window_size=3))
    allocator, ids = tree.swa_allocator, list(range(12))
    first = allocator.alloc(12)
    allocator.free_swa(first[:9])
    with pytest.raises(InvalidInput, match="whose window pages were freed"):
        tree.insert(ids, first, windows_from=8)
    assert tree.insert(ids, first, windows_from=9) == 0
    assert tree.window_tokens == 3
    assert len(tree.match(ids).slots) == 12
    assert len(tree.match(ids[:8]).slots) == 0
    assert torch.equal(tree.find(ids[:8]).slots, first[:8])
    second = allocator.alloc(8)
    windows = allocator.pool.translate(second, 1)
    assert tree.insert(ids[:8], second, windows_from=2) == 8
    assert torch.equal(allocator.pool.translate(first[2:8], 1), windows[2:])
    assert not allocator.pool.translate(second[2:], 1).any()
    allocator.free(second)
    assert torch.equal(tree.match(ids[:8]).slots, first[:8])
    assert tree.window_tokens == 9
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (52, 23)
    tree.evict(tree.evictable_tokens)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (64, 32)


def test_locked_windows_stay():
    tree = tree_of(WindowSpan(sliding_window_size=3))
    tree.insert(range(12), tree.swa_allocator.alloc(12))
    match = tree.match(range(12))
    tree.lock(match.node)
    tree.lock_windows(match.node)
    assert tree.evictable_window_tokens == 9
    assert tree.evict_windows(99) == 9
    assert len(tree.match(range(12)).slots) == 12
    tree.unlock_windows(match.node)
    assert tree.evict_windows(2) == 2
    assert len(tree.match(range(12)).slots) == 0
    assert tree.evict_windows(99) == 1
    assert tree.evict(99) == 0
    tree.unlock(match.node)
    assert tree.evict(99) == 12
    assert tree.swa_allocator.available_size() == 32


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.turns(3)
def test_a_match_always_has_its_windows(span, page_size):
    """Random prefixes come and lose their windows; what matches can be continued."""
    rng = random.Random(3)
    tree = tree_of(span, page_size=page_size)
    allocator, length = tree.swa_allocator, 12 * page_size
    stems = [[rng.randrange(3) for _ in range(length)] for _ in range(3)]
    matched = 0
    for _ in range(500):
        ids = rng.choice(stems)[: rng.randrange(length)] + [rng.randrange(3)] * page_size
        match = tree.match(ids)
        there, held = len(match.slots), len(ids) // page_size * page_size
        first = span.kept_from(there, page_size)
        assert bool((allocator.pool.translate(match.slots[first:], 1) > 0).all())
        matched += there
        tree.lock(match.node)
        tree.lock_windows(match.node)
        room = held - there
        tree.evict(max(room - allocator.full_available_size(), 0))
        tree.evict_windows(max(room - allocator.swa_available_size(), 0))
        slots = torch.cat([match.slots, allocator.alloc(room)])
        known = tree.insert(ids, slots, windows_from=there)
        allocator.free(slots[there:known])
        tree.unlock_windows(match.node)
        tree.unlock(match.node)
        tree.evict_windows(rng.choice([0, 0, page_size]))
        assert tree.window_tokens + allocator.swa_available_size() == 32 * page_size
        cached = tree.evictable_tokens
        assert cached + allocator.full_available_size() == 64 * page_size
        assert tree.evictable_window_tokens == tree.window_tokens
    assert matched > 0
