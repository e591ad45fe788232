"""Items of SGLang's scoring steps, against walks over tokens; SGLang itself is not needed."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("attnmux.sglang")

import torch

from attnmux.core import InvalidInput
from attnmux.sglang.items import items_of


def step(cached: list[int], new: list[int], delimiters: list[list[int]]) -> SimpleNamespace:
    """As SGLang describes a step; positions are those in the sequence."""
    rows = [torch.arange(p, p + n) for p, n in zip(cached, new, strict=True)]
    indices = [torch.tensor(each, dtype=torch.int64) for each in delimiters]
    return SimpleNamespace(positions=torch.cat(rows), multi_item_delimiter_indices=indices)


def test_places_and_positions_agree_with_a_walk(record_property) -> None:
    seed = random.randrange(2**32)
    record_property("seed", seed)
    rng = random.Random(seed)
    for _ in range(50):
        new = [rng.randint(1, 12) for _ in range(rng.randint(1, 4))]
        cached = [rng.randint(0, 5) for _ in new]
        delimiters = [sorted(rng.sample(range(n), rng.randint(0, n))) for n in new]
        theirs = step(cached, new, delimiters)
        items = items_of(theirs, torch.tensor(new).int(), torch.tensor(cached).int())
        assert items is not None, seed
        token = 0
        for request, own in enumerate(delimiters):
            first = own[0] if own else new[request]
            assert int(items.prefix_lens[request]) == cached[request] + first
            place = None
            for index in range(new[request]):
                place = 0 if index in own else None if place is None else place + 1
                position = cached[request] + index
                if place is not None:
                    assert int(items.token_pos_in_items[token]) == place
                    position = cached[request] + first + place - 1
                assert int(theirs.positions[token]) == position
                token += 1
        assert items.token_pos_in_items.dtype is items.prefix_lens.dtype is torch.int32


def test_a_step_without_items_has_none() -> None:
    assert items_of(SimpleNamespace(multi_item_delimiter_indices=None), None, None) is None
    assert items_of(SimpleNamespace(), None, None) is None


def test_lengths_have_to_be_on_the_host() -> None:
    with pytest.raises(InvalidInput, match="by which the items are found"):
        items_of(step([0], [3], [[1]]), None, None)
