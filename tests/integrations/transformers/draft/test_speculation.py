"""Decode steps that verify drafts: the same text as without, and every page accounted for."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hashing import (
    VOCABULARY,
    DrawingRunner,
    HashingRunner,
    check_accounts,
    check_all_free,
    continued,
    finish,
    next_token,
)

from attnmux.core import (
    ForwardMode,
    GraphConfig,
    InvalidInput,
)
from attnmux.parts import DraftTree
from attnmux.parts.speculation import tree_visibility
from attnmux.testing.reference.greedy_trees import verify_tree_greedy
from attnmux.transformers import Engine, NgramProposer, SamplingParams
from attnmux.transformers.draft import verify_step as verify_step_module
from attnmux.transformers.engine import scheduler
from attnmux.transformers.engine.acceptance import HostTrees
from attnmux.transformers.requests.sampling import Sampler, Upcoming, sample


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Waking threads would take most of the time. Requests are let in without regard to how they
    grow, so that memory runs out often."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class RandomProposer:
    """Trees of random shapes and sizes. Many of their tokens are right."""

    def __init__(self, seed=0, draft_token_num=8, right=0.6, chains=False):
        self.rng = random.Random(seed)
        self.draft_token_num = draft_token_num
        self.right, self.chains = right, chains
        self.topk = 1 if chains else draft_token_num

    def propose(self, states, num_tokens):
        size = self.rng.randint(1, min(num_tokens, self.draft_token_num))
        if size == 1:
            return None
        rows, links = zip(*(self._tree(state.token_ids, size) for state in states), strict=True)
        if self.chains:
            return DraftTree.chains(torch.tensor(rows))
        return DraftTree.of(torch.tensor(rows), torch.tensor(links), topk=4)

    def keep_only(self, states):
        """Nothing is held."""

    def _tree(self, ids, size):
        tokens, parents, paths = [ids[-1]], [-1], [list(ids)]
        for node in range(1, size):
            parent = node - 1 if self.chains else self.rng.randrange(node)
            beside = {tokens[one] for one in range(1, node) if parents[one] == parent}
            right = next_token(paths[parent])
            token = right if self.rng.random() < self.right else self.rng.randrange(VOCABULARY)
            while token in beside:
                token = self.rng.randrange(VOCABULARY)
            tokens.append(token)
            parents.append(parent)
            paths.append([*paths[parent], token])
        return tokens, parents


def random_prompts(rng, num):
    prompts = []
    for _ in range(num):
        stem = list(rng.choice(prompts))[: rng.randrange(20)] if prompts else []
        prompts.append(stem + [rng.randrange(3) for _ in range(rng.randrange(1, 12))])
    return prompts


def generated(prompts, drafts, *, runner=None, num=12, **options):
    engine = Engine(runner or HashingRunner(), drafts=drafts, **options)
    for ids in prompts:
        engine.add(ids, max_new_tokens=num)
    results = finish(engine)
    check_all_free(engine)
    return [list(results[one].token_ids) for one in range(len(prompts))], engine


PROPOSERS = {
    "random trees": RandomProposer,
    "random chains": partial(RandomProposer, chains=True),
    "n-gram chains": NgramProposer,
    "n-gram trees": partial(NgramProposer, topk=3, draft_token_num=7),
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("proposer", ["random chains", "n-gram chains"])
def test_text_is_the_same_with_drafts_and_a_window(proposer, page_size):
    prompts = random_prompts(random.Random(page_size), 12)
    runner = HashingRunner(page_size=page_size, size=192, window=5)
    texts, engine = generated(prompts, PROPOSERS[proposer](), runner=runner)
    assert texts == [continued(ids, 12) for ids in prompts]
    assert engine.stats.drafts.accepted_tokens > 0


def verify_config(trees):
    return GraphConfig(
        batch_sizes=(1, 2, 3, 4),
        forward_mode=ForwardMode.TARGET_VERIFY,
        tokens_per_request=8,
        spec_topk=4 if trees else 1,
        visible=trees,
    )


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_trees_smaller_than_the_graphs_are_padded(proposer, page_size):
    prompts = random_prompts(random.Random(page_size), 12)
    config = verify_config("trees" in proposer)
    runner = HashingRunner(page_size=page_size, size=192, context=40, graphs=config)
    texts, engine = generated(prompts, PROPOSERS[proposer](), runner=runner)
    assert texts == [continued(ids, min(12, 41 - len(ids))) for ids in prompts]
    assert engine.stats.drafts.accepted_tokens > 0
    assert 0 < runner.padded_steps < runner.steps_with_drafts


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.turns(over="page_size")
def test_text_is_the_same_with_drafts(proposer, page_size):
    """Over shared prefixes, chunks, retractions and requests that end at different times."""
    rng = random.Random(page_size)
    accepted = retractions = 0
    for size, options in ((96, {}), (64, {"prefill_tokens": 7}), (64, {"prefix_cache": False})):
        prompts = random_prompts(rng, 12)
        runner = HashingRunner(page_size=page_size, size=size)
        found, engine = generated(prompts, PROPOSERS[proposer](), runner=runner, **options)
        assert found == [continued(ids, 12) for ids in prompts]
        accepted += engine.stats.drafts.accepted_tokens
        retractions += engine.stats.retractions
        assert engine.stats.drafts.requests >= runner.steps_with_drafts > 0
        tokens = engine.stats.extend.new_tokens + engine.stats.mixed.new_tokens
        assert tokens + engine.stats.decode.new_tokens == 12 * len(prompts)
    assert accepted > 30
    assert retractions or page_size == 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_long_texts_use_the_slots_that_were_taken_ahead(page_size):
    """Each request takes slots several times, at different steps."""
    prompts = [[1] * length for length in (2, 7, 9)]
    runner = HashingRunner(page_size=page_size, size=512, context=128)
    found, engine = generated(prompts, NgramProposer(), runner=runner, num=110)
    assert found == [continued(ids, 110) for ids in prompts]
    assert engine.stats.drafts.accepted_tokens > 0


def test_a_step_yields_many_tokens_when_drafts_are_right():
    drafts = RandomProposer(right=1.0, chains=True, draft_token_num=6)
    drafts.rng.randint = lambda low, high: high
    found, engine = generated([[1, 2, 3]], drafts, num=13)
    assert found == [continued([1, 2, 3], 13)]
    assert engine.stats.decode.steps == 2
    assert engine.stats.drafts.accepted_per_step == 5


def test_full_contexts():
    runner = HashingRunner(rows=3, context=20)
    prompts = [[1, 2, 3], [2] * 15, [0, 1] * 6]
    found, _ = generated(prompts, RandomProposer(chains=True), runner=runner, num=40)
    assert found == [continued(ids, 21 - len(ids)) for ids in prompts]


def test_a_stop_id_and_a_limit_end_a_request_inside_an_accepted_run():
    drafts = RandomProposer(right=1.0, chains=True, draft_token_num=6)
    drafts.rng.randint = lambda low, high: high
    engine = Engine(HashingRunner(), drafts=drafts)
    text = continued([1, 2, 3], 20)
    stop = next(token for token in text[2:] if token not in text[:2])
    length = text.index(stop) + 1
    engine.add([1, 2, 3], max_new_tokens=20, stop_ids={stop})
    engine.add([1, 2, 3], max_new_tokens=9)
    results = finish(engine)
    assert [results[0].finish_reason, results[1].finish_reason] == ["stop", "length"]
    assert list(results[0].token_ids) == text[:length]
    assert list(results[1].token_ids) == text[:9]
    check_all_free(engine)


def test_text_is_told_in_order():
    engine = Engine(HashingRunner(), drafts=RandomProposer(), tokenizer=Spelling())
    pieces = []
    engine.add([1, 2], max_new_tokens=15, on_text=lambda piece, last: pieces.append((piece, last)))
    (result,) = finish(engine).values()
    text = "".join(chr(65 + token) for token in continued([1, 2], 15))
    assert result.text == "".join(piece for piece, _ in pieces) == text
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]


class Spelling:
    """A tokenizer with one letter a token."""

    def decode(self, ids, **_):
        return "".join(chr(65 + token) for token in ids)


@pytest.mark.parametrize("proposer", ["n-gram chains", "n-gram trees"])
def test_drawn_text_is_the_same_with_drafts(proposer):
    rng = random.Random(3)
    prompts = random_prompts(rng, 10)
    ways = [
        SamplingParams(),
        SamplingParams(seed=5, temperature=0.7),
        SamplingParams(seed=1, temperature=2, top_p=0.8),
    ]
    texts = []
    for drafts in (None, PROPOSERS[proposer]()):
        engine = Engine(DrawingRunner(page_size=4), drafts=drafts)
        for place, ids in enumerate(prompts):
            engine.add(ids, max_new_tokens=15, sampling=ways[place % 3])
        results = finish(engine)
        texts.append([results[one].token_ids for one in range(len(prompts))])
    assert texts[0] == texts[1]
    assert engine.stats.drafts.accepted_tokens > 10


def test_logits_that_are_not_numbers_end_one_request_and_leave_nothing():
    runner = HashingRunner(page_size=4)
    victim = [1, 2, *continued([1, 2], 5)]
    runner.damaged = lambda ids: ids[:7] == victim
    engine = Engine(runner, drafts=RandomProposer(right=1.0))
    for ids in ([1, 2], [2, 1], [0, 2]):
        engine.add(ids, max_new_tokens=12)
    results = finish(engine)
    assert results[0].finish_reason == "error"
    assert list(results[0].token_ids) == victim[2:]
    assert list(results[1].token_ids) == continued([2, 1], 12)
    check_all_free(engine)


@pytest.mark.parametrize("when", ["model", "proposer"])
def test_a_failure_loses_no_page(when):
    runner, drafts = HashingRunner(), RandomProposer()
    engine = Engine(runner, drafts=drafts)
    engine.add([1, 2, 3], max_new_tokens=10)
    engine.step()

    def fail(*_):
        raise RuntimeError("broken")

    if when == "model":
        runner.during = fail
    else:
        drafts.propose, propose = fail, drafts.propose
    with pytest.raises(RuntimeError, match="broken"):
        finish(engine)
    check_accounts(engine)
    runner.during = lambda: None
    if when == "proposer":
        drafts.propose = propose
        assert list(finish(engine)[0].token_ids) == continued([1, 2, 3], 10)
    engine.add([2, 2], max_new_tokens=10)
    assert list(finish(engine)[1].token_ids) == continued([2, 2], 10)
    check_all_free(engine)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.turns(4)
def test_nothing_leaks_in_random_steps(page_size, window, graphs, full):
    """Arrivals, aborts, evictions and trees of random shapes, from outside and within steps. A
    window takes chains alone."""
    rng = random.Random(11)
    config = verify_config(window is None) if graphs else None
    runner = HashingRunner(rows=5, size=72, page_size=page_size, window=window, graphs=config)
    drafts = RandomProposer(seed=5, chains=window is not None)
    engine = Engine(runner, drafts=drafts, prefill_tokens=13)
    asked, alive = {}, set()
    prompts = random_prompts(rng, 200)

    def during():
        if alive and rng.random() < 0.05:
            alive.discard(victim := rng.choice(sorted(alive)))
            engine.abort(victim)

    runner.during = during
    results = steps = 0
    num_steps = 2_500 if full else 400
    while steps < num_steps:
        if rng.random() < 0.3 and len(alive) < 12:
            ids, num = rng.choice(prompts), rng.randrange(1, 20)
            alive.add(request := engine.add(ids, max_new_tokens=num))
            asked[request] = ids, num
        if rng.random() < 0.02:
            engine._cache.make_room(rng.randrange(72))
        steps += 1
        for output in engine.step():
            if output.result is not None:
                alive.discard(output.request_id)
                ids, num = asked.pop(output.request_id)
                assert list(output.result.token_ids) == continued(ids, num)
                results += 1
        check_accounts(engine)
    finish(engine)
    check_all_free(engine)
    stats = engine.stats
    least = min(results, stats.retractions, stats.aborted, stats.evicted_tokens)
    assert least > num_steps * 30 // 2_500
    assert stats.drafts.accepted_tokens > num_steps * 2 // 5
    assert (runner.padded_steps > num_steps // 5) == graphs


MUTANTS = {
    "a stale slot is kept": (
        verify_step_module.VerifyStep,
        "commit",
        lambda commit: (
            lambda self, paths, zero=(): commit(self, [range(len(path)) for path in paths], zero)
        ),
    ),
    "a rejected slot is kept": (
        verify_step_module.VerifyStep,
        "commit",
        lambda commit: (
            lambda self, paths, zero=(): commit(
                self, [[*path, *range(len(path), self.num_drafts)] for path in paths], zero
            )
        ),
    ),
    "a branch is not masked": (
        DraftTree,
        "spec_input",
        lambda make: (
            lambda self, device: replace(
                spec := make(self, device), visible=torch.ones_like(spec.visible)
            )
        ),
    ),
    "positions are places in the tree": (
        DraftTree,
        "depths",
        lambda _: property(
            lambda self: torch.arange(self.draft_token_num).expand_as(self.draft_tokens)
        ),
    ),
    "padding is accepted": (
        DraftTree,
        "padded",
        lambda pad: (
            lambda self, num: (
                self
                if num == self.draft_token_num
                else DraftTree.of(
                    pad(self, num).draft_tokens.fill_(1),
                    pad(self, num).links.clamp(min=0) - (torch.arange(num) == 0).long(),
                    topk=4,
                )
            )
        ),
    ),
    "a node hangs on another branch": (
        HostTrees,
        "of",
        lambda read: lambda tree: read(replace(tree, links=tree.links - (tree.links > 0).long())),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    where, name, change = MUTANTS[mutant]
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    with pytest.raises((AssertionError, InvalidInput)):
        check_text(random_prompts(random.Random(2), 12))


def check_text(prompts):
    runner = HashingRunner(graphs=verify_config(trees=True))
    texts = generated(prompts, RandomProposer(), runner=runner)[0]
    assert texts == [continued(ids, 12) for ids in prompts]


def test_trees_of_ancestors_alone():
    """What a draft sees in these tests is what `tree_visibility` says."""
    tree = RandomProposer()._tree([1, 2, 3], 8)
    visible = tree_visibility(torch.tensor([tree[1]]))[0]
    for node, parent in enumerate(tree[1]):
        seen = set(visible[node].nonzero().flatten().tolist())
        above = set() if parent < 0 else set(visible[parent].nonzero().flatten().tolist())
        assert seen == above | {node}


def test_bad_proposers():
    for changes in ({"topk": 0}, {"draft_token_num": 1}, {"steps": 0}, {"min_ngram": 0}):
        with pytest.raises(InvalidInput):
            NgramProposer(**changes)


def test_drawn_tokens_have_the_distribution_of_the_model():
    """Chi-square of 40,000 requests' first two tokens over a toy vocabulary, for a good draft tree
    and for one whose drafts are unlikely."""
    num, size = 40_000, 5
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(size + 1, size, generator=generator)  # after the root, after each token
    first, second = logits[0].softmax(-1), logits[1:].softmax(-1)
    order = first.argsort(descending=True)
    samplers = [Sampler(SamplingParams(temperature=1.0, seed=seed)) for seed in range(num)]
    for drafts in (order[:3].tolist(), order[-2:].tolist()):
        tokens = torch.tensor([[0, *drafts]]).expand(num, -1)
        parents = torch.tensor([[-1, *[0] * len(drafts)]]).expand(num, -1)
        after = torch.tensor([0, *(token + 1 for token in drafts)])
        draws = [Upcoming(each, min(node, 1)) for each in samplers for node in range(len(after))]
        predict = sample(logits[after].repeat(num, 1), draws).view(num, -1)
        found = verify_tree_greedy(DraftTree.of(tokens, parents, topk=3), predict)
        check_distribution(found.predict[:, 0].bincount(minlength=size), first)
        accepted = found.accept_token_num == 1
        assert torch.equal(accepted, torch.isin(found.predict[:, 0], torch.tensor(drafts)))
        for token in drafts:
            rows = found.predict[accepted & (found.predict[:, 0] == token), 1]
            check_distribution(rows.bincount(minlength=size), second[token])


def check_distribution(counts, probabilities):
    """99.9% of chi-square with 4 degrees of freedom lies below 18.5."""
    expected = probabilities * counts.sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5


def test_random_trees_are_accepted_as_in_core() -> None:
    rng = random.Random(8)
    for _ in range(300):
        size, width = rng.randrange(1, 4), rng.randrange(1, 10)
        parents = [[-1, *(rng.randrange(node) for node in range(1, width))] for _ in range(size)]
        tokens = torch.randint(0, 3, (size, width))
        tree = DraftTree.of(tokens, torch.tensor(parents), topk=rng.choice([1, 2]))
        tree = tree.padded(width + rng.randrange(3))
        target_predict = torch.randint(-1, 3, tree.draft_tokens.shape)
        expected = verify_tree_greedy(tree, target_predict)
        paths, answers = HostTrees.of(tree).accepted(target_predict.tolist())
        for place, length in enumerate((expected.accept_token_num + 1).tolist()):
            assert list(paths[place]) == expected.accept_index[place, :length].tolist()
            assert answers[place] == expected.predict[place, :length].tolist()
