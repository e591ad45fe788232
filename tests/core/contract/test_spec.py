"""Masks of draft trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.core import InvalidInput
from attnmux.core.contract.spec import whole_mask
from attnmux.parts.speculation import tree_visibility

TREE = [-1, 0, 0, 0, 1, 1]
"""0 → {1, 2, 3}, 1 → {4, 5}."""

SEEN = [{0}, {0, 1}, {0, 2}, {0, 3}, {0, 1, 4}, {0, 1, 5}]


def test_a_token_sees_itself_and_its_ancestors() -> None:
    visible = tree_visibility(torch.tensor([TREE]))
    assert [set(row.nonzero().flatten().tolist()) for row in visible[0]] == SEEN


def test_the_mask_is_the_prefix_and_then_the_tree() -> None:
    seq_lens = torch.tensor([3, 5])
    mask = whole_mask(tree_visibility(torch.tensor([TREE, TREE])), seq_lens)
    assert len(mask) == 120
    first, second = mask[:54].view(6, 9), mask[54:].view(6, 11)
    for part, prefix in ((first, 3), (second, 5)):
        assert bool(part[:, :prefix].all())
        assert [set(row.nonzero().flatten().tolist()) for row in part[:, prefix:]] == SEEN


def test_a_chain_is_causal() -> None:
    visible = tree_visibility(torch.tensor([[-1, 0, 1, 2, 3]]))
    assert torch.equal(visible[0], torch.ones(5, 5, dtype=torch.bool).tril())


@settings(max_examples=50, deadline=None)
@given(
    trees=st.integers(1, 9).flatmap(
        lambda d: st.lists(
            st.tuples(*(st.integers(-1 if i == 0 else 0, i - 1) for i in range(d))),
            min_size=1,
            max_size=3,
        )
    )
)
def test_agrees_with_walking_up(trees: list[tuple[int, ...]]) -> None:
    visible = tree_visibility(torch.tensor(trees))
    for tree, rows in zip(trees, visible, strict=True):
        for token, row in enumerate(rows):
            seen = set()
            while token >= 0:
                seen.add(token)
                token = tree[token]
            assert set(row.nonzero().flatten().tolist()) == seen


def test_no_requests_and_no_drafts_give_no_mask() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    no_requests = tree_visibility(torch.zeros(0, 6, dtype=torch.int64))
    assert len(whole_mask(no_requests, nothing)) == 0
    no_drafts = tree_visibility(torch.zeros(2, 0, dtype=torch.int64))
    assert len(whole_mask(no_drafts, torch.tensor([3, 4]))) == 0


@pytest.mark.parametrize("parents", [[[-1, 1]], [[-1, 2, 0]], [[0]]])
def test_a_parent_precedes_its_child(parents: list[list[int]]) -> None:
    with pytest.raises(InvalidInput, match="draft order"):
        tree_visibility(torch.tensor(parents))


def test_parents_come_as_rows_of_requests() -> None:
    with pytest.raises(InvalidInput, match=r"\[B, d\]"):
        tree_visibility(torch.tensor([-1, 0]))
