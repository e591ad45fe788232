"""An indexer's scores and picks, against loops."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.transformers.model.sparse.ranking import best_keys, index_scores


def scores_by_loops(q, k, weights, position: int) -> list[float]:
    """Of one token, by key."""
    return [
        sum(
            float(weight) * max(0.0, float((head * k[key]).sum()))
            for weight, head in zip(weights, q, strict=True)
        )
        for key in range(position + 1)
    ]


@pytest.mark.parametrize("topk", [1, 4, 9, 20])
def test_picks_are_those_of_the_highest_scores(topk: int) -> None:
    q, k, weights = torch.randn(5, 3, 8), torch.randn(12, 8), torch.randn(5, 3)
    positions = torch.tensor([0, 3, 7, 10, 11])
    k[11, 0] = 1e30  # behind the others' places: whatever lies there
    picks = best_keys(index_scores(q, k, weights), positions, topk)
    assert picks.dtype == torch.int32
    for token in range(4):
        scores = scores_by_loops(q[token], k, weights[token], int(positions[token]))
        count = min(topk, len(scores))
        keys = picks[token, :count].tolist()
        assert len(set(keys)) == count
        # Keys of one score, such as 0, may come in any order
        best = sorted(scores, reverse=True)[:count]
        assert [scores[key] for key in keys] == pytest.approx(best, abs=1e-5)
        assert picks[token, count:].tolist() == [-1] * (topk - count)


def test_a_decoding_batch_is_many_sequences() -> None:
    q, k, weights = torch.randn(3, 1, 2, 8), torch.randn(3, 12, 8), torch.randn(3, 1, 2)
    positions = torch.tensor([[2], [11], [0]])
    together = best_keys(index_scores(q, k, weights), positions, 5)
    assert together.shape == (3, 1, 5)
    for one in range(3):
        alone = best_keys(index_scores(q[one], k[one], weights[one]), positions[one], 5)
        assert torch.equal(together[one], alone)


def test_a_key_whose_score_is_nothing_is_still_picked() -> None:
    """relu makes many scores 0: they are keys, and there is room."""
    q, k = torch.ones(1, 1, 4), -torch.ones(3, 4)
    picks = best_keys(index_scores(q, k, torch.ones(1, 1)), torch.tensor([1]), 3)
    assert sorted(picks[0].tolist()) == [-1, 0, 1]


def test_no_keys_can_be_asked_for_in_vain() -> None:
    q, k = torch.ones(1, 1, 4), torch.ones(3, 4)
    with pytest.raises(InvalidInput, match="topk: expected at least 1, got 0"):
        best_keys(index_scores(q, k, torch.ones(1, 1)), torch.tensor([1]), 0)
