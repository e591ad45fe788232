"""Draft trees and their verification, against loops over nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnmux.core import InvalidInput
from attnmux.parts import AcceptedDrafts, DraftTree
from attnmux.parts.speculation import tree_visibility
from attnmux.testing.reference.greedy_trees import verify_tree_greedy
from attnmux.transformers.draft.proposers import NgramIndex

TREE = [-1, 0, 0, 0, 1, 1]
"""0 → {1, 2, 3}, 1 → {4, 5}."""


def children(parents: list[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def walked(parents: list[int], tokens: list[int], predict: list[int]) -> list[int]:
    """The accepted path, node by node."""
    path = [0]
    while True:
        right = [
            child for child in children(parents, path[-1]) if tokens[child] == predict[path[-1]]
        ]
        if not right:
            return path
        path.append(right[0])


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Parents, draft tokens and the target's tokens of 1 to 4 trees of one size. Siblings differ,
    and few tokens make many matches."""
    size, num = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    parents, tokens, predict = [], [], []
    for _ in range(num):
        links = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
        row = [0] * size
        for node in range(size):
            for place, child in enumerate(children(links, node)):
                row[child] = place
        parents.append(links)
        tokens.append(row)
        predict.append([draw(st.integers(-1, 2)) for _ in range(size)])
    return parents, tokens, predict


@settings(max_examples=200, deadline=None)
@given(forests())
def test_random_trees_agree_with_walking_node_by_node(forest) -> None:
    parents, tokens, predict = forest
    tree = DraftTree.of(torch.tensor(tokens), torch.tensor(parents), topk=2)
    check(verify_tree_greedy(tree, torch.tensor(predict)), forest)
    for row, links in enumerate(parents):
        depths = [0] * len(links)
        for node in range(1, len(links)):
            depths[node] = depths[links[node]] + 1
        assert tree.depths[row].tolist() == depths


def check(verified: AcceptedDrafts, forest) -> None:
    for row, (links, tokens, predict) in enumerate(zip(*forest, strict=True)):
        path = walked(links, tokens, predict)
        rest = [-1] * (len(links) - len(path))
        assert verified.accept_index[row].tolist() == path + rest
        assert verified.predict[row].tolist() == [predict[node] for node in path] + rest
        assert verified.accept_token_num[row] == len(path) - 1


@pytest.mark.parametrize("field", ["links", "visible"])
def test_a_wrong_tree_is_found(field: str) -> None:
    tokens, predict = [0, 7, 8, 9, 10, 11], [9, 11, 1, 1, 1, 1]
    tree = DraftTree.of(torch.tensor([tokens]), torch.tensor([TREE]), topk=3)
    forest = [TREE], [tokens], [predict]
    check(verify_tree_greedy(tree, torch.tensor([predict])), forest)
    wrong = {"links": tree.links.clone(), "visible": tree.visible.clone()}[field]
    wrong[0, 3] = wrong[0, 4]
    with pytest.raises(AssertionError):
        check(verify_tree_greedy(replace(tree, **{field: wrong}), torch.tensor([predict])), forest)


@pytest.mark.parametrize("topk", [1, 3])
def test_padding_is_never_accepted(topk: int) -> None:
    tokens, predict = torch.tensor([[5, 1, 1]]), torch.tensor([[1, 1, 0, 0, 0]])
    small = DraftTree.of(tokens, torch.tensor([[-1, 0, 1]]), topk=topk)
    tree = small.padded(5)
    assert tree.padded(5) is tree
    assert tree.depths[0, :3].tolist() == [0, 1, 2]
    found = verify_tree_greedy(tree, predict)
    assert found.accept_index.tolist() == [[0, 1, 2, -1, -1]]
    assert found.predict.tolist() == [[1, 1, 0, -1, -1]]
    if topk > 1:
        assert torch.equal(tree.visible, tree_visibility(tree.parents))


def test_a_chain_is_accepted_up_to_the_first_token_that_differs() -> None:
    chain = DraftTree.chains(torch.tensor([[9, 5, 6, 7], [9, 5, 6, 7], [9, 5, 6, 7]]))
    predict = torch.tensor([[5, 6, 7, 1], [5, 2, 7, 1], [3, 6, 7, 1]])
    found = verify_tree_greedy(chain, predict)
    assert found.accept_token_num.tolist() == [3, 1, 0]
    assert found.accept_index.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1]]
    assert found.predict.tolist() == [[5, 6, 7, 1], [5, 2, -1, -1], [3, -1, -1, -1]]


def test_the_step_of_a_tree_has_its_mask_and_that_of_a_chain_has_none() -> None:
    parents, device = torch.tensor([TREE, TREE]), torch.device("cpu")
    tree = DraftTree.of(torch.zeros_like(parents), parents, topk=3)
    spec = tree.spec_input(device)
    assert (spec.draft_token_num, spec.topk, spec.custom_mask) == (6, 3, None)
    assert torch.equal(spec.visible, tree_visibility(parents))
    chain = DraftTree.chains(torch.zeros_like(parents))
    assert chain.depths.tolist() == [list(range(6))] * 2
    assert chain.spec_input(device).visible is None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_best_candidates_and_their_links(data: st.DataObject) -> None:
    num = data.draw(st.integers(0, 10))
    size = data.draw(st.integers(1, num + 1))
    above = [data.draw(st.integers(-1, node - 1)) for node in range(num)]
    scores: list[float] = []
    for parent in above:
        best = 1.0 if parent < 0 else scores[parent]
        scores.append(best * data.draw(st.sampled_from([0.25, 0.5, 1.0])))
    tree = DraftTree.best_of(
        torch.tensor([99]),
        torch.tensor([scores]).view(1, num),
        torch.arange(num).unsqueeze(0),
        torch.tensor([above], dtype=torch.int64).view(1, num),
        size,
        topk=2,
    )
    chosen = sorted(sorted(range(num), key=lambda one: (-scores[one], one))[: size - 1])
    assert tree.draft_tokens.tolist() == [[99, *chosen]]
    places = {candidate: place + 1 for place, candidate in enumerate(chosen)} | {-1: 0}
    assert tree.parents.tolist() == [[-1, *(places[above[candidate]] for candidate in chosen)]]


def test_trees_of_no_shape_are_refused() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InvalidInput, match="draft order"):
        DraftTree.of(tokens, torch.tensor([[-1, 2, 0]]), topk=2)
    with pytest.raises(InvalidInput, match=r"parents: expected shape \(1, 3\)"):
        DraftTree.of(tokens, torch.tensor([[-1, 0]]), topk=2)
    with pytest.raises(InvalidInput, match="draft_token_num"):
        DraftTree.best_of(tokens[0, :1], tokens.float(), tokens, tokens - 1, 5, topk=2)


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), max_size=30),
    width=st.integers(1, 4),
    depth=st.integers(1, 5),
    cut=st.integers(0, 30),
)
def test_lookups_agree_with_a_search(text, width, depth, cut) -> None:
    index = NgramIndex(min_ngram=1, max_ngram=3)
    index.chains(text[:cut], depth=1, width=1)  # what was read in pieces is found alike
    expected: list[list[int]] = []
    for length in (3, 2, 1):
        for place in range(len(text) - 1, length - 1, -1):
            if length < len(text) and text[place - length : place] == text[len(text) - length :]:
                goes_on = text[:]
                for _ in range(depth):
                    goes_on.append(goes_on[len(goes_on) - (len(text) - place)])
                if (chain := goes_on[len(text) :]) not in expected:
                    expected.append(chain)
    assert index.chains(text, depth=depth, width=width) == expected[:width]


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), max_size=30),
    num_tokens=st.integers(1, 9),
    topk=st.integers(1, 4),
)
def test_a_tree_holds_the_first_continuations(text, num_tokens, topk) -> None:
    tokens, parents = NgramIndex().tree(text, num_tokens=num_tokens, depth=4, topk=topk)
    chains = NgramIndex().chains(text, depth=min(4, num_tokens), width=topk)
    paths = set()
    for node, parent in enumerate(parents):
        assert parent < node
        path = [tokens[node]]
        while parent >= 0:
            path.insert(0, tokens[parent])
            parent = parents[parent]
        paths.add(tuple(path))
    assert len(paths) == len(tokens) <= num_tokens
    wanted = [tuple(chain[: end + 1]) for chain in chains for end in range(len(chain))]
    assert paths == set(list(dict.fromkeys(wanted))[:num_tokens])
    assume(chains)
    assert tokens[: len(chains[0])] == chains[0]
    assert parents[: len(chains[0])] == list(range(-1, len(chains[0]) - 1))


def test_lengths_of_ngrams_are_checked() -> None:
    with pytest.raises(InvalidInput, match="max_ngram"):
        NgramIndex(min_ngram=3, max_ngram=2)
    with pytest.raises(InvalidInput, match="min_ngram"):
        NgramIndex(min_ngram=0)
