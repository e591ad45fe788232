"""Steps draft only while drafts pay, by a clock that the runner moves."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hashing import DrawingRunner, check_all_free

from attnmux.parts import AcceptThresholds, DraftTree
from attnmux.transformers import Engine, NgramProposer, SamplingParams, SequenceState
from attnmux.transformers.ranks import Ranks
from attnmux.transformers.run import stats

NEW = 200
"""Tokens of an answer."""
COST = 2.0
"""Of a step that verifies 8 tokens of each request, in plain steps."""


@pytest.fixture(autouse=True)
def _drafts_in_every_step():
    """Not here."""


class ClockedRunner(DrawingRunner):
    """Says what `says` returns after a text; steps take a second, and more with drafts."""

    def __init__(self, says):
        super().__init__(rows=4, context=NEW + 60, size=4 * NEW + 500)
        self.says, self.now = says, 0.0

    def forward(self, step, indices, laps=None):
        drafts = len(step.input_ids) / step.batch.batch_size - 1
        self.now += 1 + (COST - 1) * drafts / 7 if step.batch.spec_info else 1
        return super().forward(step, indices, laps)

    def logits(self, seen):
        if self.says is None:
            return super().logits(seen)
        return torch.nn.functional.one_hot(torch.tensor(list(map(self.says, seen))), 50).float()


def noise(ids):
    return random.Random(len(ids) * 10_007 + ids[0]).randrange(50)


def period(ids):
    return ids[-20] if len(ids) > 40 else noise(ids)


def turning(ids):
    """Noise, which then repeats."""
    return ids[-20] if len(ids) > NEW // 2 else noise(ids)


class Planted:
    """Chains that are right about texts which `right` admits."""

    draft_token_num, topk = 8, 1

    def __init__(self, says, right):
        self.says, self.right = says, right

    def propose(self, states, num_tokens):
        return DraftTree.chains(
            torch.tensor([self._chain(state.token_ids, num_tokens) for state in states])
        )

    def _chain(self, token_ids, num_tokens):
        ids, wrong = list(token_ids), int(not self.right(token_ids))
        while len(ids) < len(token_ids) + num_tokens - 1:
            ids.append((self.says(ids) + wrong) % 50)
        return ids[len(token_ids) - 1 :]

    def look_back(self, state, begin):
        return None

    def keep_only(self, states):
        """Nothing is held."""


def answered(monkeypatch, says, drafts, *, num=1, ranks=None, sampling=None, **options):
    """The seconds of the answers, their tokens, and the counts of drafts."""
    runner = ClockedRunner(says)
    runner.ranks = ranks or runner.ranks
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: runner.now))
    engine = Engine(runner, drafts=drafts, **options)
    for first in range(num):
        given = {} if sampling is None else {"sampling": sampling}
        engine.add([first, *range(30)], max_new_tokens=NEW, **given)
    results = {}
    while engine.has_work:
        outputs = engine.step()
        results |= {each.request_id: each.result for each in outputs if each.result is not None}
    check_all_free(engine)
    return runner.now, [results[one].token_ids for one in range(num)], engine.stats.drafts


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_is_always_wrong_stops(monkeypatch, num, overlap):
    plain, texts, _ = answered(monkeypatch, noise, None, num=num)
    drafts = Planted(noise, lambda ids: False)
    seconds, found, counts = answered(monkeypatch, noise, drafts, num=num, overlap=overlap)
    assert found == texts
    assert plain / seconds > 0.98
    assert 0 < counts.requests < 6 * num < counts.rested
    fixed, _, counts = answered(monkeypatch, noise, drafts, num=num, draft_always=True)
    assert fixed > 1.9 * plain
    assert counts.rested == 0


def test_a_drafter_that_is_always_right_goes_on(monkeypatch):
    drafts = Planted(noise, lambda ids: True)
    fixed, texts, _ = answered(monkeypatch, noise, drafts, draft_always=True)
    seconds, found, counts = answered(monkeypatch, noise, drafts)
    assert found == texts
    assert seconds < 1.05 * fixed
    assert counts.rested < 8  # at the end, where few tokens are wanted


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num", [1, 3])
def test_a_text_that_starts_to_repeat_is_drafted_again(monkeypatch, num, overlap):
    drafts = NgramProposer()
    fixed, texts, _ = answered(monkeypatch, turning, drafts, num=num, draft_always=True)
    seconds, found, counts = answered(monkeypatch, turning, drafts, num=num, overlap=overlap)
    assert found == texts
    assert seconds < fixed
    assert counts.rested > 50 * num
    assert counts.accepted_tokens > 60 * num


def test_a_drafter_that_gets_right_is_tried_again(monkeypatch):
    drafts = Planted(noise, lambda ids: len(ids) > 100)
    monkeypatch.setattr("attnmux.transformers.draft.pace.SHARE", 0.05)
    plain, texts, _ = answered(monkeypatch, noise, None)
    seconds, found, _ = answered(monkeypatch, noise, drafts)
    assert found == texts
    assert seconds < 0.8 * plain


def test_a_text_that_repeats_from_the_start_loses_nothing(monkeypatch):
    fixed, texts, _ = answered(monkeypatch, period, NgramProposer(), draft_always=True)
    seconds, found, _ = answered(monkeypatch, period, NgramProposer())
    assert found == texts
    assert seconds < 1.05 * fixed


@pytest.mark.parametrize("overlap", [False, True])
def test_drawn_texts_are_the_same(monkeypatch, overlap):
    """A token's random number follows from its place, whatever steps draw it."""
    sampling = SamplingParams(seed=3, temperature=0.3, top_p=0.5)
    _, texts, _ = answered(monkeypatch, None, None, num=3, sampling=sampling)
    _, found, counts = answered(
        monkeypatch, None, NgramProposer(), num=3, sampling=sampling, overlap=overlap
    )
    assert found == texts
    assert counts.requests
    assert counts.rested


def test_several_ranks_and_thresholds_draft_in_every_step(monkeypatch):
    drafts = Planted(noise, lambda ids: False)
    _, _, counts = answered(monkeypatch, noise, drafts, ranks=Ranks(size=2))
    assert counts.rested == 0
    assert counts.requests > 190
    accept = AcceptThresholds(single=0.9)
    _, _, counts = answered(monkeypatch, noise, drafts, accept=accept)
    assert counts.rested == 0


def test_what_a_lookup_would_have_guessed():
    state = SequenceState(token_ids=[1, 2, 3, 4, 1, 2, 3, 5, 1])
    assert NgramProposer().look_back(state, 3) == [False, False, True, True, False, False]
