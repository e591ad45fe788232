"""The likeliest paths: a slow search over lists gives the same candidates and trees."""

from __future__ import annotations

import math
import random

import pytest
import torch

from attnmux.parts import DraftTree
from attnmux.transformers.draft.paths import DraftPaths, likeliest

VOCABULARY = 23


def seeded(record_property) -> random.Random:
    seed = random.randrange(1 << 30)
    record_property("seed", seed)
    return random.Random(seed)


def log_probabilities(logits: list[float]) -> list[float]:
    most = max(logits)
    total = most + math.log(sum(math.exp(one - most) for one in logits))
    return [one - total for one in logits]


def best_of(values: list[float], num: int) -> list[int]:
    return sorted(range(len(values)), key=lambda place: -values[place])[:num]


def searched(model, topk: int, steps: int) -> list[tuple[float, int, int]]:
    """(score, token, parent) of all candidates. model: from a path to logits."""
    found: list[tuple[float, int, int]] = []
    paths = [((), 0.0, -1)]
    for _ in range(steps):
        after = []
        for path, score, number in paths:
            chances = log_probabilities(model(path))
            for token in best_of(chances, topk):
                after.append(((*path, token), score + chances[token], len(found)))
                found.append((score + chances[token], token, number))
        kept = best_of([score for _, score, _ in after], topk)
        paths = [after[place] for place in kept]
    return found


def drafted(models, topk: int, steps: int):
    """The same by `DraftPaths`: scores, tokens and parents [B, n]."""
    told = [[()] for _ in models]

    def logits():
        rows = [model(path) for model, paths in zip(models, told, strict=True) for path in paths]
        return torch.tensor(rows)

    paths = DraftPaths.start(*likeliest(logits(), topk))
    told = [[(token,) for token in row] for row in paths.tokens.tolist()]
    parts = [(paths.scores, paths.tokens, torch.full_like(paths.tokens, -1))]
    for _ in range(steps - 1):
        paths, new = paths.grow(logits(), sum(part[1].shape[1] for part in parts))
        parts.append([each.flatten(1) for each in (new.scores, new.tokens, new.parents)])
        rows = zip(told, paths.before.tolist(), paths.tokens.tolist(), strict=True)
        told = [
            [(*own[place], token) for place, token in zip(before, tokens, strict=True)]
            for own, before, tokens in rows
        ]
    return [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]


def a_model(rng: random.Random):
    """Logits by path, each path's own."""
    known: dict[tuple[int, ...], list[float]] = {}

    def logits(path):
        if path not in known:
            known[path] = [rng.gauss(0, 2) for _ in range(VOCABULARY)]
        return known[path]

    return logits


@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (1, 5), (2, 1), (2, 4), (4, 3), (5, 2)])
def test_candidates_are_those_of_a_search(topk, steps, record_property) -> None:
    rng = seeded(record_property)
    models = [a_model(rng) for _ in range(3)]
    scores, tokens, parents = drafted(models, topk, steps)
    assert tokens.shape[1] == topk + (steps - 1) * topk * topk
    for row, model in enumerate(models):
        expected = searched(model, topk, steps)
        assert tokens[row].tolist() == [token for _, token, _ in expected]
        assert parents[row].tolist() == [parent for _, _, parent in expected]
        given = torch.tensor([score for score, _, _ in expected])
        torch.testing.assert_close(scores[row], given, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("topk", [1, 4])
def test_trees_have_the_likeliest_candidates(topk, record_property) -> None:
    rng = seeded(record_property)
    models, steps = [a_model(rng) for _ in range(4)], 3
    found = drafted(models, topk, steps)
    num = 8 if topk > 1 else 4
    tree = DraftTree.best_of(torch.zeros(4, dtype=torch.long), *found, num, topk=topk)
    for row, (model, links) in enumerate(zip(models, tree.parents.tolist(), strict=True)):
        best = sorted(searched(model, topk, steps), reverse=True)[: num - 1]
        assert sorted(tree.draft_tokens[row, 1:].tolist()) == sorted(each[1] for each in best)
        assert links[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(links) if node)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_make_a_tree(value, record_property) -> None:
    """Of nodes that follow their parents."""
    rng = seeded(record_property)
    given = a_model(rng)

    def damaged(path):
        return [value] * VOCABULARY if path else given(path)

    found = drafted([damaged, given], 3, 3)
    assert not found[0].isnan().any()
    tree = DraftTree.best_of(torch.zeros(2, dtype=torch.long), *found, 16, topk=3)
    order = torch.arange(16)
    assert bool((tree.parents < order).all())
    assert bool((tree.parents[:, 1:] >= 0).all())


def test_a_score_is_at_most_its_parents(record_property) -> None:
    rng = seeded(record_property)
    scores, _, parents = drafted([a_model(rng) for _ in range(5)], 4, 4)
    above = scores.gather(1, parents.clamp(min=0)).where(parents >= 0, torch.zeros(()))
    assert bool((scores <= above).all())


def test_tokens_have_the_ids_that_are_given(record_property) -> None:
    rng = seeded(record_property)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    first, then = (torch.randn(n, 9, generator=generator) for n in (2, 6))
    ids = torch.randperm(50, generator=generator)[:9]
    plain, named = (likeliest(first, 3, token_ids=given) for given in (None, ids))
    assert torch.equal(named[0], plain[0])
    assert torch.equal(named[1], ids[plain[1]])
    grown, renamed = (
        DraftPaths.start(*found).grow(then, 3, token_ids=given)
        for found, given in ((plain, None), (named, ids))
    )
    for ours, theirs in zip(renamed, grown, strict=True):
        assert torch.equal(ours.scores, theirs.scores)
        assert torch.equal(ours.tokens, ids[theirs.tokens])
