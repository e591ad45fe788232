"""Prefixes of models with recurrent layers: which can be continued, and whose states make room."""

from __future__ import annotations

import random

import pytest
import torch

from attnmux.core import InvalidInput, LinearLayerSpec
from attnmux.parts import LinearStatePool
from attnmux.transformers.requests.prefixes import StatePrefixTree
from attnmux.transformers.requests.slots import PagedAllocator

LAYERS = [
    LinearLayerSpec(
        layer_id=each, kind="lightning", num_k_heads=1, num_v_heads=1, head_k_dim=1, head_v_dim=1
    )
    for each in (0, 1)
]


def tree_of(*, page_size=1, kept_size=3, pages=64):
    states = LinearStatePool(
        size=2, layers=LAYERS, conv_dtype=torch.float32, device="cpu", kept_size=kept_size
    )
    return StatePrefixTree(PagedAllocator(pages * page_size, page_size, "cpu"), states)


def say(tree, row, value):
    """Give a row states by which it is known again."""
    for number, buffer in enumerate(tree.states.buffers):
        buffer[row] = value + number


def heard(tree, row):
    first, *others = [float(buffer[row]) for buffer in tree.states.buffers]
    assert others == [first + 1 + number for number in range(len(others))]
    return first


def cache(tree, ids, value):
    """Insert tokens and keep states after them."""
    slots = tree.allocator.alloc(len(ids))
    known = tree.insert(ids, slots)
    tree.allocator.free(slots[:known])
    say(tree, 1, value)
    tree.keep(tree.find(ids).node, 1)


def restored(tree, ids):
    """(n, the value of the states) of the longest prefix that can be continued."""
    match = tree.match(ids)
    say(tree, 2, -1)
    tree.restore(match.node, 2)
    return len(match.slots), heard(tree, 2)


def test_a_prefix_can_be_continued_where_its_states_are():
    tree = tree_of()
    cache(tree, [1, 2, 3, 4, 5, 6], 60)
    assert restored(tree, [1, 2, 3, 4, 5, 6, 7]) == (6, 60)
    parts = tree.match([1, 2, 3, 9])
    assert (len(parts.slots), parts.known) == (0, 3)
    assert restored(tree, [1, 2, 3, 9]) == (0, -1)
    cache(tree, [1, 2, 3], 30)
    assert restored(tree, [1, 2, 3, 9]) == (3, 30)
    assert restored(tree, [1, 2, 3, 4, 5]) == (3, 30)
    assert tree.match([1, 2, 3, 4, 5]).known == 5
    assert restored(tree, [1, 2, 3, 4, 5, 6]) == (6, 60)


def test_the_states_that_were_used_last_stay():
    tree = tree_of(kept_size=2)
    for value in (10, 20):
        cache(tree, [value], value)
    tree.match([10])
    cache(tree, [30], 30)
    assert [restored(tree, [value]) for value in (10, 20, 30)] == [(1, 10), (0, -1), (1, 30)]
    assert len(tree._kept) == 2


def test_states_leave_with_their_pages():
    tree = tree_of(page_size=2)
    cache(tree, [1, 2, 3, 4, 5, 6], 60)
    cache(tree, [1, 2], 20)
    assert tree.evict(2) == 2  # the last page, and the states after it
    assert len(tree._kept) == 1
    assert restored(tree, [1, 2, 3, 4, 5, 6]) == (2, 20)
    assert tree.match([1, 2, 3, 4, 5, 6]).known == 4
    tree.evict(4)
    assert len(tree._kept) == 0
    for value in range(5):
        cache(tree, [value] * 2, value)
    assert len(tree._kept) == 3


def test_nothing_to_keep_and_nothing_kept():
    tree = tree_of(kept_size=0)
    cache(tree, [1, 2], 5)
    assert len(tree._kept) == 0
    assert restored(tree, [1, 2]) == (0, -1)
    node = tree.find([1, 2]).node
    with pytest.raises(InvalidInput, match="node: expected that of the latest match, got a prefix"):
        tree.restore(node, 1)
    tree.evict(2)
    with pytest.raises(InvalidInput, match="an evicted prefix"):
        tree.keep(node, 1)


@pytest.mark.parametrize("page_size", [1, 3])
def test_random_use(page_size):
    """Against a dict from prefixes to states: what is restored is what was kept there."""
    rng = random.Random(page_size)
    tree, values, seen = tree_of(page_size=page_size, kept_size=4), {}, set()
    for step in range(600):
        ids = tuple(rng.randrange(2) for _ in range(page_size * rng.randrange(1, 6)))
        if tree.allocator.available_size() < len(ids):
            tree.evict(len(ids) + rng.randrange(20))
        if rng.random() < 0.5:
            if tree.find(ids).node not in tree._kept or tree.find(ids).known < len(ids):
                values[ids] = step
            cache(tree, list(ids), values[ids])
        num, value = restored(tree, list(ids))
        assert value == (values[ids[:num]] if num else -1)
        seen.add(num // page_size)
        assert len(tree._kept) <= 4
        assert len(set(tree._kept.values())) == len(tree._kept)
        assert len(tree._free_rows) == 4 - len(tree._kept)
    assert seen >= {0, 1, 2, 3}
