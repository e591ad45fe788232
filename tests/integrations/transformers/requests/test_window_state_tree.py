"""Prefixes of models with windows and recurrent layers: continued where both are there."""

from __future__ import annotations

import random

import pytest
import torch

from attnmux.core import LinearLayerSpec, MHATokenToKVPool, SWAKVPool
from attnmux.parts import LinearStatePool
from attnmux.transformers.requests.prefixes import WindowSpan, WindowStatePrefixTree
from attnmux.transformers.requests.slots import SWAAllocator

LAYER = LinearLayerSpec(
    layer_id=0, kind="lightning", num_k_heads=1, num_v_heads=1, head_k_dim=1, head_v_dim=1
)


def tree_of(*, page_size=1, window=3, kept_size=4):
    kind = {"page_size": page_size, "dtype": torch.float32, "num_kv_heads": 1, "head_dim": 1}
    pool = SWAKVPool(
        full=MHATokenToKVPool(size=64 * page_size, layer_ids=[0], device="cpu", **kind),
        swa=MHATokenToKVPool(size=32 * page_size, layer_ids=[1], device="cpu", **kind),
    )
    states = LinearStatePool(
        size=2, layers=[LAYER], conv_dtype=torch.float32, device="cpu", kept_size=kept_size
    )
    span = WindowSpan(sliding_window_size=window)
    return WindowStatePrefixTree(SWAAllocator(pool), span, states)


def cache(tree, ids, *, keep=True):
    """Insert tokens with all their windows, and keep states after them."""
    slots = tree.allocator.alloc(len(ids))
    known = tree.insert(ids, slots)
    tree.allocator.free(slots[:known])
    if keep:
        tree.keep(tree.find(ids).node, 1)


def reused(tree, ids):
    return len(tree.match(ids).slots)


def test_a_prefix_needs_its_states_and_its_windows():
    tree = tree_of()
    cache(tree, [1, 2, 3, 4, 5, 6], keep=False)
    assert (reused(tree, [1, 2, 3, 4, 5, 6]), tree.match([1, 2, 3, 4, 5, 6]).known) == (0, 6)
    cache(tree, [1, 2, 3, 4, 5, 6])
    assert reused(tree, [1, 2, 3, 4, 5, 6, 7]) == 6
    tree.evict_windows(tree.evictable_window_tokens)
    assert len(tree._kept) == 1
    assert reused(tree, [1, 2, 3, 4, 5, 6, 7]) == 0
    cache(tree, [1, 2, 3, 4, 5, 6])  # another request brings the windows
    assert reused(tree, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_windows_at_kept_states_go_last():
    """In a prefix that goes on without parting, requests begin only where states are."""
    tree = tree_of(window=1)
    cache(tree, [1, 2, 3, 4])
    cache(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    assert tree.evict_windows(6) == 6
    assert reused(tree, [1, 2, 3, 4]) == 4
    assert reused(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert tree.window_tokens == 2


def test_a_locked_window_stays_until_it_is_unlocked():
    tree = tree_of()
    cache(tree, [1, 2, 3, 4, 5, 6])
    node = tree.match([1, 2, 3, 4, 5, 6]).node
    tree.lock_windows(node)
    tree.evict_windows(6)
    assert (reused(tree, [1, 2, 3, 4, 5, 6]), tree.window_tokens) == (6, 3)
    tree.unlock_windows(node)
    tree.evict_windows(6)
    assert reused(tree, [1, 2, 3, 4, 5, 6]) == 0


@pytest.mark.parametrize("page_size", [1, 3])
def test_random_use(page_size):
    """The longest prefix at whose end states are kept and every page of the window is there."""
    rng = random.Random(page_size)
    tree, seen = tree_of(page_size=page_size), set()
    for _ in range(500):
        ids = [rng.randrange(2) for _ in range(page_size * rng.randrange(1, 8))]
        for free, evict in (
            (tree.allocator.full_available_size, tree.evict),
            (tree.swa_allocator.swa_available_size, tree.evict_windows),
        ):
            if free() < len(ids):
                evict(len(ids) + rng.randrange(20))
        if rng.random() < 0.5:
            cache(tree, ids, keep=rng.random() < 0.7)
        elif rng.random() < 0.3:
            tree.evict_windows(rng.randrange(1, 9))
        found = [length for length in range(page_size, len(ids) + 1, page_size)]
        ends = [0]
        for length in found:
            match = tree.find(ids[:length])
            if match.node.end == length and match.node in tree._kept:
                windows = tree.swa_allocator.pool.translate(match.slots, 1)
                first = tree.span.kept_from(length, page_size)
                if bool(windows[first:].all()):
                    ends.append(length)
        assert reused(tree, ids) == ends[-1]
        seen.add(ends[-1] // page_size)
        owned = tree.window_tokens + tree.swa_allocator.swa_available_size()
        assert owned == tree.swa_allocator.pool.swa.size
    assert seen >= {0, 1, 2, 3}
