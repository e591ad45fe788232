"""Trees accepted by the target's probabilities: the distribution, and what thresholds do to it."""

from __future__ import annotations

import math

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.parts import AcceptThresholds, DraftTree, sample_tree_target_only

DRAWS = 100_000
VOCABULARY = 5
PARENTS = [-1, 0, 0, 1, 1, 2]
TOKENS = [4, 1, 3, 0, 2, 2]


def a_tree(size, parents=PARENTS, tokens=TOKENS):
    given = (torch.tensor([each] * size) for each in (tokens, parents))
    return DraftTree.of(*given, topk=3)


def target(seed=0, num=6):
    """[d, vocabulary]: after each node."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num, VOCABULARY, generator=generator).softmax(-1)


def sampled(probs, thresholds=None, size=DRAWS, tree=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    coins = torch.rand(size, len(probs), dtype=torch.float64, generator=generator)
    tree = tree or a_tree(size)
    return sample_tree_target_only(tree, probs.repeat(size, 1), coins, thresholds)


def surprise(counts, expected):
    """The chi-square statistic, in standard deviations above its mean."""
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", range(4))
def test_the_text_has_the_targets_distribution(seed):
    """The first token, and the second after each first one that was drafted."""
    probs = target(seed)
    found = sampled(probs, seed=seed + 10)
    first = found.predict[:, 0]
    counts = first.bincount(minlength=VOCABULARY).double()
    assert surprise(counts, probs[0].double() * DRAWS) < 5
    for node in (1, 2):
        second = found.predict[first == TOKENS[node], 1]
        assert len(second) > 1000
        counts = second.bincount(minlength=VOCABULARY).double()
        assert surprise(counts, probs[node].double() * len(second)) < 5


def test_the_statistic_sees_another_distribution():
    probs = target()
    found = sampled(probs, AcceptThresholds(acc=0.9))
    counts = found.predict[:, 0].bincount(minlength=VOCABULARY).double()
    assert surprise(counts, probs[0].double() * DRAWS) > 50


def test_paths_say_their_own_tokens():
    found = sampled(target(), size=2000)
    tokens, parents = torch.tensor(TOKENS), torch.tensor(PARENTS)
    for path, said, count in zip(
        found.accept_index, found.predict, found.accept_token_num, strict=True
    ):
        nodes = path[path >= 0]
        assert len(nodes) == count + 1
        assert torch.equal(parents[nodes[1:]], nodes[:-1])
        assert torch.equal(tokens[nodes[1:]], said[:count])
        assert 0 <= int(said[count]) < VOCABULARY
        # A token that a child has would have been accepted
        beneath = tokens[(parents == nodes[-1])]
        assert int(said[count]) not in beneath.tolist()


@pytest.mark.parametrize("name", ["single", "acc"])
def test_lower_thresholds_accept_more(name):
    means = [
        float(sampled(target(), AcceptThresholds(**{name: value})).accept_token_num.double().mean())
        for value in (1.0, 0.6, 0.25, 0.1)
    ]
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.5


def test_of_likely_tokens_alone_nothing_is_left_to_chance():
    """A greedy request: all weight is on one token."""
    probs = torch.eye(VOCABULARY)[[3, 0, 2, 1, 1, 4]]
    found = sampled(probs, size=50)
    assert found.predict[:, :3].tolist() == [[3, 2, 4]] * 50
    assert found.accept_token_num.tolist() == [2] * 50


def test_chains_and_padding():
    chain = DraftTree.chains(torch.tensor([[4, 1, 3]] * DRAWS)).padded(5)
    probs = target(3, 5)
    found = sampled(probs, tree=chain)
    counts = found.predict[:, 0].bincount(minlength=VOCABULARY).double()
    assert surprise(counts, probs[0].double() * DRAWS) < 5
    assert int(found.accept_index.max()) == 2


def test_no_numbers_draw_no_token():
    probs = target()
    probs[2] = math.nan
    found = sampled(probs, size=3000)
    ends = found.accept_index.amax(1)
    drawn = found.predict.gather(1, found.accept_token_num.unsqueeze(1)).squeeze(1)
    assert bool((drawn[ends == 2] == -1).all())
    assert bool((drawn[ends != 2] >= 0).all())
    assert int((ends == 2).sum()) > 100


@pytest.mark.parametrize("value", [0.0, -1.0, 1.5, math.nan])
@pytest.mark.parametrize("name", ["single", "acc"])
def test_thresholds_outside(name, value):
    with pytest.raises(InvalidInput, match=f"threshold_{name}"):
        AcceptThresholds(**{name: value})


def test_other_shapes():
    with pytest.raises(InvalidInput, match="probs"):
        sample_tree_target_only(a_tree(2), torch.rand(3, 5), torch.rand(2, 6).double())
    with pytest.raises(InvalidInput, match="coins"):
        sample_tree_target_only(a_tree(2), torch.rand(12, 5), torch.rand(2, 6))
