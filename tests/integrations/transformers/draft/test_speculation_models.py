"""Drafts on real models: greedy text is what each prompt gets alone, whatever the drafts."""

from __future__ import annotations

import random
from functools import partialmethod

import pytest
import torch

from attnmux.core import NoBackend, Offer, Plugins
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import NONE, one_of
from attnmux.cpu.flex_attention import FlexAttentionBackend
from attnmux.emulators.flex_attention import emulated
from attnmux.parts import DraftTree
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    NgramProposer,
    Prompt,
    RunnerOptions,
    encode_prompts,
    load_runner,
    open_checkpoint,
    recall,
    run_prompts,
)
from attnmux.transformers.engine import scheduler

NUM = 12
WINDOW_POOL = {"max_total_tokens": 1024, "window_step_tokens": 16}


class HalfRight:
    """Trees that hold the right continuation, with wrong tokens from a random depth on."""

    draft_token_num = 6

    def __init__(self, prompts, answers, topk):
        self.texts = [[*ids, *answer] for ids, answer in zip(prompts, answers, strict=True)]
        self.topk, self.rng = topk, random.Random(1)

    def propose(self, states, num_tokens):
        num = min(num_tokens, self.draft_token_num)
        rows, links = zip(*(self._tree(state.token_ids, num) for state in states), strict=True)
        if self.topk == 1:
            return DraftTree.chains(torch.tensor(rows))
        return DraftTree.of(torch.tensor(rows), torch.tensor(links), topk=self.topk)

    def keep_only(self, states):
        """Nothing is held."""

    def _tree(self, ids, num):
        text = next(text for text in self.texts if text[: len(ids)] == ids)
        tokens, parents, last = [ids[-1]], [-1], 0
        right, going = iter(text[len(ids) :]), True
        for node in range(1, num):
            going = going and self.rng.random() < 0.9
            if self.topk > 1 and self.rng.random() < 0.4:  # a wrong branch
                tokens.append(self.rng.randrange(97))
                parents.append(self.rng.randrange(node))
                continue
            tokens.append(next(right, 0) if going else self.rng.randrange(97))
            parents.append(last)
            last = node
        return tokens, parents


def texts_of(engine, prompts):
    asked = [Prompt(token_ids=ids, max_new_tokens=NUM) for ids in prompts]
    results = run_prompts(engine, asked).results
    engine.clear_cache()
    assert engine.memory.free == engine.runner.steps.allocator.size
    return [one.token_ids for one in results]


def some_prompts():
    rng = random.Random(5)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 20))] for _ in range(6)]
    return [*prompts, *([*ids[:9], 4] for ids in prompts[:2])]


@pytest.mark.parametrize(
    ("architecture", "topk", "page_size"),
    [
        ("llama", 1, 1),
        ("llama", 1, 64),
        ("llama", 4, 1),
        ("llama", 4, 16),
        ("gemma3", 1, 16),
        ("gpt-oss", 1, 64),
        ("deepseek-v3", 1, 1),
        ("deepseek-v3", 1, 16),
    ],
)
@pytest.mark.turns(3)
def test_greedy_text_is_that_of_each_prompt_alone(
    tiny, run_on, architecture, topk, page_size, monkeypatch, alone
):
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(architecture)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM)
    drafts = HalfRight(prompts, expected, topk)
    runner = run_on(
        folder,
        page_size=page_size,
        draft_tokens=6,
        draft_topk=topk,
        max_total_tokens=128,
        max_batch_size=6,
    )
    for options in ({}, {"prefill_tokens": 5, "prefix_cache": False}):
        engine = Engine(runner, drafts=drafts, **options)
        assert texts_of(engine, prompts) == expected
        assert engine.stats.drafts.accepted_tokens > 20
    engine = Engine(runner, drafts=NgramProposer(draft_token_num=6, topk=topk))
    assert texts_of(engine, prompts) == expected


@pytest.mark.parametrize(
    ("architecture", "page_size"), [("gemma3", 16), ("gpt-oss", 1), ("mistral", 16)]
)
def test_greedy_text_is_the_same_with_a_window_pool(tiny, run_on, architecture, page_size, alone):
    model, folder = tiny(architecture)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM)
    runner = run_on(
        folder,
        page_size=page_size,
        draft_tokens=6,
        max_total_tokens=1024,
        window_step_tokens=16,
    )
    assert runner.sizes.swa is not None
    for options in ({}, {"prefill_tokens": 5, "prefix_cache": False}):
        engine = Engine(runner, drafts=HalfRight(prompts, expected, 1), **options)
        assert texts_of(engine, prompts) == expected
        assert engine.stats.drafts.accepted_tokens > 20


def graph_runner(folder, *, card=None, **changes):
    """A runner on a backend that graphs can record."""
    card = card or graph_card()
    offer = Offer(card=card, plugin="fake", distribution="attnmux-fake", version="1.0")
    given = {"max_batch_size": 6, "max_context_len": 48, "max_total_tokens": 256, **changes}
    options = RunnerOptions(draft_tokens=6, **given)
    return load_runner(open_checkpoint(folder), fake_platform(), [offer], options)


def counting(graphs):
    """The sizes of the steps that graphs replay from now on."""
    sizes, replay = [], graphs.replay

    def counted(batch, inputs, *, size):
        sizes.append(batch.batch_size)
        return replay(batch, inputs, size=size)

    graphs.replay = counted
    return sizes


@pytest.mark.parametrize(
    ("architecture", "topk", "options", "page_size"),
    [
        ("llama", 1, {}, 1),
        ("llama", 4, {}, 16),
        ("mistral", 1, WINDOW_POOL, 1),
        ("llama", 4, {}, 1),
        ("gemma3", 1, WINDOW_POOL, 16),
    ],
)
@pytest.mark.turns(3)
def test_steps_replayed_from_graphs_give_the_same_text(
    tiny, architecture, topk, options, page_size, alone
):
    """Trees of all sizes, a stop id inside an accepted run, and a request that is aborted."""
    model, folder = tiny(architecture)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM)
    runner = graph_runner(folder, page_size=page_size, draft_topk=topk, **options)
    assert (runner.sizes.swa is not None) == bool(options)
    runner.capture_graphs(
        batch_sizes=[1, 4, 6], draft_tokens=6, draft_topk=topk, devices=RecordingGraphs()
    )
    verified = counting(runner.verify_graphs)
    drafts = HalfRight(prompts, expected, topk)
    engine = Engine(runner, drafts=drafts)
    victim = engine.add(prompts[0], max_new_tokens=NUM)
    for _ in range(2):
        engine.step()
    engine.abort(victim)
    assert texts_of(engine, prompts) == expected
    engine = Engine(runner, drafts=NgramProposer(draft_token_num=5, topk=topk))
    assert texts_of(engine, prompts) == expected
    assert max(verified) > 4
    assert min(verified) == 1
    stop = expected[1][3]
    engine = Engine(runner, drafts=drafts, stop_ids={stop})
    engine.add(prompts[1], max_new_tokens=NUM)
    (result,) = (one.result for one in steps_of(engine) if one.result)
    new = expected[1]
    assert result.token_ids == new[: new.index(stop) + 1]
    assert result.finish_reason == "stop"
    engine.clear_cache()
    assert engine.memory.free == runner.steps.allocator.size


@pytest.mark.parametrize(("architecture", "page_size"), [("llama", 16), ("deepseek-v3", 1)])
@pytest.mark.turns(2)
def test_trees_on_a_backend_without_masks_give_the_same_text(tiny, architecture, page_size, alone):
    model, folder = tiny(architecture)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM)
    maskless = graph_card(phase=one_of("extend", "decode"), spec_topk=NONE, custom_mask=NONE)
    runner = graph_runner(folder, card=maskless, page_size=page_size, draft_topk=4)
    assert runner.decision.answer("draft_trees", "prefixes", "decode") is not None
    for graphs in (False, True):
        if graphs:
            runner.capture_graphs(draft_tokens=6, draft_topk=4, devices=RecordingGraphs())
        engine = Engine(runner, drafts=HalfRight(prompts, expected, 4), prefill_tokens=5)
        assert texts_of(engine, prompts) == expected
        assert engine.stats.drafts.accepted_tokens > 20


def steps_of(engine):
    while engine.has_work:
        yield from engine.step()


@pytest.mark.parametrize("page_size", [1, 16])
def test_windows_count_positions_of_nodes(tiny, run_on, page_size, alone):
    model, folder = tiny("gemma3")
    prompts = some_prompts()
    expected = alone(model, prompts, NUM)
    runner = run_on(folder, page_size=page_size, draft_tokens=6, draft_topk=3)
    engine = Engine(runner, drafts=HalfRight(prompts, expected, 3), prefill_tokens=5)
    assert texts_of(engine, prompts) == expected
    assert engine.stats.drafts.accepted_tokens > 10


def test_trees_with_windows_need_a_backend_that_serves_them(tiny):
    folder = tiny("gemma3")[1]
    by_places = graph_card(tree_windows=NONE)
    with pytest.raises(NoBackend, match="tree_windows: not served"):
        graph_runner(folder, card=by_places, draft_topk=3)


@pytest.fixture(scope="module")
def shipped():
    options = RunnerOptions(
        max_batch_size=4,
        max_context_len=256,
        max_total_tokens=800,
        dtype="float32",
        draft_tokens=8,
        draft_topk=3,
        page_size=16,
    )
    offers = Plugins.load().offers()
    return load_runner(open_checkpoint(recall.PATH), probe_cpu(), offers, options)


@pytest.mark.parametrize("topk", [1, 3])
def test_the_shipped_model_answers_alike(shipped, topk):
    checkpoint, rng = open_checkpoint(recall.PATH), random.Random(topk)
    asked = [recall.make_prompt(rng, length)[0] for length in (60, 90, 120, 150)]
    asked += [f"{one} {one}" for one in asked[:2]]
    prompts = [
        Prompt(token_ids=ids, max_new_tokens=12)
        for ids in encode_prompts(checkpoint, asked, max_context_len=256)
    ]
    plain = run_prompts(Engine(shipped), prompts)
    drafted = run_prompts(Engine(shipped, drafts=NgramProposer(topk=topk)), prompts)
    assert [one.token_ids for one in drafted.results] == [one.token_ids for one in plain.results]
    assert drafted.stats.drafts.accepted_tokens > 0


@pytest.mark.parametrize(
    ("backend", "topk", "page_size"),
    [
        ("flex_attention", 4, 16),
        pytest.param("flex_attention", 1, 1, marks=pytest.mark.full),
    ],
)
def test_other_backends(tiny, run_on, backend, topk, page_size, alone, monkeypatch):
    """With an emulator of the kernel, which takes a minute to compile and has tests of its own."""
    monkeypatch.setattr(
        FlexAttentionBackend,
        "__init__",
        partialmethod(FlexAttentionBackend.__init__, kernels=emulated),
    )
    model, folder = tiny("llama")
    prompts = some_prompts()[:3]
    expected = alone(model, prompts, NUM)
    runner = run_on(folder, backend, page_size=page_size, draft_tokens=6, draft_topk=topk)
    engine = Engine(runner, drafts=HalfRight(prompts, expected, topk))
    assert texts_of(engine, prompts) == expected
    assert engine.stats.drafts.accepted_tokens > 5
