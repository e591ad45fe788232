"""Target-only sampling of draft trees: the distribution, and what thresholds change."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import AcceptThresholds, DraftTree, InvalidInput, sample_tree_target_only

PARENTS = [-1, 0, 0, 1, 1, 2, 0]
TOKENS = [0, 1, 2, 0, 3, 3, 1]
"""The last node repeats its sibling's token."""
VOCABULARY, DRAWS = 5, 100_000
MOST = 27.9
"""Chi-square of 4 degrees of freedom that chance exceeds once in 76,000 runs."""


def sampled(probs: torch.Tensor, limits: AcceptThresholds | None = None):
    """probs: [d, vocabulary], of every request."""
    noise = torch.Generator().manual_seed(7)
    rows = [torch.tensor([each]).expand(DRAWS, -1) for each in (TOKENS, PARENTS)]
    tree = DraftTree.of(*rows, topk=3)
    coins = torch.rand(DRAWS, len(TOKENS), generator=noise, dtype=torch.float64)
    return sample_tree_target_only(tree, probs.repeat(DRAWS, 1), coins, limits)


@pytest.fixture
def probs() -> torch.Tensor:
    noise = torch.Generator().manual_seed(3)
    return torch.rand(len(TOKENS), VOCABULARY, generator=noise).softmax(-1)


def chi_square(counts: torch.Tensor, chances: torch.Tensor) -> float:
    expected = chances.double() / chances.double().sum() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_distribution_is_the_targets(probs: torch.Tensor) -> None:
    """Of first tokens; and of second ones, wherever the first was an accepted draft."""
    found = sampled(probs)
    first = found.predict[:, 0]
    assert chi_square(torch.bincount(first, minlength=VOCABULARY), probs[0]) < MOST
    for node in (1, 2):
        second = found.predict[first == TOKENS[node], 1]
        assert len(second) > 10_000
        assert chi_square(torch.bincount(second, minlength=VOCABULARY), probs[node]) < MOST


@pytest.mark.parametrize("limits", [AcceptThresholds(acc=0.6), AcceptThresholds(single=0.2)])
def test_lower_thresholds_accept_more(probs: torch.Tensor, limits: AcceptThresholds) -> None:
    found, exact = sampled(probs, limits), sampled(probs)
    assert not limits.exact
    assert found.accept_token_num.sum() > 1.1 * exact.accept_token_num.sum()
    # So that the check of the distribution can fail
    counts = torch.bincount(found.predict[:, 0], minlength=VOCABULARY)
    assert chi_square(counts, probs[0]) > 10 * MOST


def test_the_likeliest_token_alone_is_followed() -> None:
    probs = torch.zeros(len(TOKENS), VOCABULARY)
    probs[[0, 2, 5], [2, 3, 4]] = 1
    found = sampled(probs)
    assert found.accept_index.unique(dim=0).tolist() == [[0, 2, 5, -1, -1, -1, -1]]
    assert found.predict.unique(dim=0).tolist() == [[2, 3, 4, -1, -1, -1, -1]]


@pytest.mark.parametrize("value", [0.0, 1.5, -1.0])
def test_thresholds_outside_of_their_range(value: float) -> None:
    with pytest.raises(InvalidInput, match="threshold_acc"):
        AcceptThresholds(acc=value)
    with pytest.raises(InvalidInput, match="threshold_single"):
        AcceptThresholds(single=value)
