"""Drafts by a second model: greedy text is what each prompt gets alone, whatever it guesses."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from attnmux.core import GraphUnsupported, InvalidInput, Offer
from attnmux.parts import AcceptThresholds
from attnmux.testing import RecordingGraphs, fake_card, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    ModelProposer,
    Prompt,
    RunnerOptions,
    SamplingParams,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.engine import scheduler
from attnmux.transformers.requests.sequence import SequenceState

NUM = 13
"""New tokens of a prompt: the first, and those of three rounds in which all drafts are right."""
VOCABULARY = 97


@pytest.fixture(scope="module")
def sure(tiny, tmp_path_factory):
    """A model whose likeliest token is far likelier than all others together."""
    folder = tmp_path_factory.mktemp("sure")
    model = AutoModelForCausalLM.from_pretrained(tiny("llama")[1], attn_implementation="eager")
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    return model.eval(), folder


def texts_of(engine, prompts, num=NUM, ways=()):
    asked = [
        Prompt(token_ids=ids, max_new_tokens=num, **({"sampling": ways[place]} if ways else {}))
        for place, ids in enumerate(prompts)
    ]
    results = run_prompts(engine, asked).results
    engine.clear_cache()
    assert engine.memory.free == engine.runner.steps.allocator.size
    return [one.token_ids for one in results]


def some_prompts(num=6):
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))] for _ in range(num)]
    return [*prompts, *([*ids[:9], 4] for ids in prompts[:2])]


def a_proposer(runner, topk):
    num = 8 if topk > 1 else 4
    given = {"vocabulary_size": VOCABULARY, "steps": 3, "topk": topk, "draft_token_num": num}
    return ModelProposer(runner, **given)


def all_free(runner):
    allocator = runner.steps.allocator
    return allocator.available_size() == allocator.size


def graph_runner(folder, **changes):
    """A runner on a backend that graphs can record."""
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    given = {"max_batch_size": 6, "max_context_len": 48, "max_total_tokens": 1024, **changes}
    options = RunnerOptions(draft_tokens=4, graph=False, **given)
    return load_runner(open_checkpoint(folder), fake_platform(), [offer], options)


def counting(graphs):
    """The sizes of the steps that graphs replay from now on."""
    sizes, replay = [], graphs.replay

    def counted(batch, inputs, *, size=None):
        sizes.append(batch.batch_size)
        return replay(batch, inputs, size=size)

    graphs.replay = counted
    return sizes


@pytest.mark.parametrize(
    ("target", "draft", "page_size", "topk"),
    [
        ("llama", "qwen3", 1, 1),
        ("llama", "mistral", 4, 4),
        ("deepseek-v3", "llama", 16, 4),
        ("llama", "qwen3", 16, 1),
        ("llama", "qwen3", 1, 4),
        ("llama", "qwen3", 16, 4),
        ("deepseek-v3", "llama", 1, 4),
    ],
)
@pytest.mark.turns(8)
def test_greedy_text_is_that_of_each_prompt_alone(
    tiny, run_on, target, draft, page_size, topk, monkeypatch, alone
):
    """Prompts in chunks, shared prefixes, and pools in which requests wait and are retracted."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(target)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM)
    runner = run_on(
        folder, page_size=page_size, draft_tokens=8, draft_topk=topk, max_total_tokens=128
    )
    drafter = run_on(tiny(draft)[1], page_size=page_size, max_total_tokens=640, **NO_WINDOWS)
    drafts = a_proposer(drafter, topk)
    for options in ({}, {"prefill_tokens": 5, "prefix_cache": False}):
        engine = Engine(runner, drafts=drafts, **options)
        assert texts_of(engine, prompts) == expected
        assert engine.stats.drafts.requests > 10
        assert all_free(drafter)


NO_WINDOWS = {"window_step_tokens": None}


@pytest.mark.parametrize(
    ("graphs", "page_size", "topk"), [*product((False, True), (1, 16), (1, 4))]
)
@pytest.mark.turns(8)
def test_the_target_itself_guesses_right(sure, run_on, page_size, topk, graphs, alone):
    """Each round accepts as many tokens as it has steps."""
    model, folder = sure
    prompts = some_prompts(4)
    runner = run_on(
        folder, page_size=page_size, draft_tokens=8, draft_topk=topk, max_batch_size=6,
        max_total_tokens=512,
    )  # fmt: skip
    drafter = graph_runner(folder, page_size=page_size)
    drafts = a_proposer(drafter, topk)
    if graphs:
        drafts.capture_graphs(batch_sizes=[1, 4, 6], devices=RecordingGraphs())
        loops, catch_ups = counting(drafts._loop.graphs), counting(drafter.catch_up_graphs)
    engine = Engine(runner, drafts=drafts)
    assert texts_of(engine, prompts) == alone(model, prompts, NUM)
    stats = engine.stats.drafts
    assert stats.requests == 3 * len(prompts)
    assert stats.accepted_tokens == 3 * stats.requests
    assert engine.stats.decode.parts["draft"] > 0
    if graphs:
        assert len(loops) >= 3
        assert {size % topk for size in loops} == {0}
        assert len(catch_ups) >= 2


@pytest.mark.parametrize(("page_size", "topk"), [(1, 1), (16, 4)])
@pytest.mark.turns(2)
def test_scores_are_those_of_the_paths(tiny, page_size, topk):
    """With graphs and without: the log-probability that the model has for each path alone."""
    model, folder = tiny("llama")
    drafter = graph_runner(folder, page_size=page_size)
    rng = random.Random(topk)
    states = [
        SequenceState(token_ids=[rng.randrange(VOCABULARY) for _ in range(length)])
        for length in (5, 16, 21)
    ]
    for graphs in (False, True):
        drafts = a_proposer(drafter, topk)
        if graphs:
            drafts.capture_graphs(batch_sizes=[4], devices=RecordingGraphs())
        for _ in range(2):
            found = drafts._draft(states, 3)
            for row, state in enumerate(states):
                check_paths(model, state.token_ids, found, row)
            for state in states:
                state.token_ids += [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
        drafts.keep_only([])
        assert all_free(drafter)


def check_paths(model, ids, found, row):
    scores, tokens, parents = (
        each[row].tolist() for each in (found.scores, found.tokens, found.parents)
    )
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    for path, score in zip(paths, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *path]])).logits[0]
        chances = torch.log_softmax(logits[len(ids) - 1 : -1].float(), dim=-1)
        own = chances.gather(1, torch.tensor(path)[:, None]).sum()
        assert abs(float(own) - score) < 1e-3


def test_sampled_text_is_the_same(tiny, run_on):
    folder = tiny("llama")[1]
    prompts = some_prompts()
    ways = [SamplingParams(temperature=0.7, seed=seed) for seed in range(len(prompts))]
    runner = run_on(folder, page_size=4, draft_tokens=8, draft_topk=4, max_total_tokens=256)
    plain = texts_of(Engine(runner), prompts, ways=ways)
    drafter = run_on(folder, page_size=4, max_total_tokens=1024)
    for topk in (2, 4):
        engine = Engine(runner, drafts=a_proposer(drafter, topk))
        assert texts_of(engine, prompts, ways=ways) == plain
        assert engine.stats.drafts.accepted_tokens > 10


@pytest.mark.parametrize("page_size", [1, 16])
def test_stop_ids_and_aborted_requests(sure, run_on, page_size, alone):
    """A stop id inside an accepted run ends the text there."""
    model, folder = sure
    prompts = some_prompts()
    expected = alone(model, prompts, NUM)
    runner = run_on(folder, page_size=page_size, draft_tokens=8, draft_topk=4)
    drafter = run_on(folder, page_size=page_size, max_total_tokens=640)
    drafts = a_proposer(drafter, 4)
    new = expected[1]
    stop = next(token for place, token in enumerate(new) if place > 1 and token not in new[:place])
    engine = Engine(runner, drafts=drafts, stop_ids={stop})
    victims = [engine.add(prompts[place], max_new_tokens=NUM) for place in (0, 2)]
    kept = engine.add(prompts[1], max_new_tokens=NUM)
    results = {}
    while engine.has_work:
        for output in engine.step():
            if output.result is not None:
                results[output.request_id] = output.result
        if victims:
            engine.abort(victims.pop())
    assert results[kept].token_ids == new[: new.index(stop) + 1]
    assert results[kept].finish_reason == "stop"
    assert texts_of(Engine(runner, drafts=drafts), prompts) == expected
    assert all_free(drafter)


@pytest.mark.parametrize("topk", [1, 4])
def test_triton_drafts(sure, topk, alone):
    pytest.importorskip("triton")
    from attnmux.emulators import triton_interpreter  # noqa: PLC0415  # where there is a Triton
    from attnmux.triton.attention.backend import TritonBackend  # noqa: PLC0415  # as above

    model, folder = sure
    prompts = [[5, 9, 2, 44, 7], [11, 80]]
    card = replace(fake_card(), name="triton", factory="attnmux.triton.attention.factory:triton")
    offers = [Offer(card=card, plugin="triton", distribution="attnmux-triton", version="1.0")]
    given = {"max_batch_size": 2, "max_context_len": 24, "max_total_tokens": 96}
    given |= {"spare_pages": 2 * topk * 2, "page_size": 16, "draft_tokens": 4}
    options = RunnerOptions(dtype="float32", graph=False, **given)
    with triton_interpreter.interpreted():
        drafter = load_runner(open_checkpoint(folder), fake_platform(), offers, options)
        assert isinstance(drafter.backend, TritonBackend)
        target = replace(options, spare_pages=0, draft_tokens=8, draft_topk=topk)
        runner = load_runner(open_checkpoint(folder), fake_platform(), offers, target)
        engine = Engine(runner, drafts=a_proposer(drafter, topk))
        assert texts_of(engine, prompts, num=5) == alone(model, prompts, 5)
    stats = engine.stats.drafts
    assert stats.accepted_tokens == 3 * stats.requests == 6


def test_a_draft_model_of_latents(tiny, run_on, alone):
    model, folder = tiny("deepseek-v3")
    prompts = some_prompts(3)
    runner = run_on(folder, page_size=16, draft_tokens=8, draft_topk=4)
    drafter = run_on(folder, page_size=16, max_total_tokens=1024)
    assert drafter.decision.request.latent
    engine = Engine(runner, drafts=a_proposer(drafter, 4))
    assert texts_of(engine, prompts) == alone(model, prompts, NUM)
    assert engine.stats.drafts.accepted_tokens > 10


def test_a_draft_model_with_a_window_pool_is_refused(run_on, tiny):
    runner = run_on(tiny("mistral")[1], max_total_tokens=1024, window_step_tokens=16)
    with pytest.raises(InvalidInput, match="draft: expected window_step_tokens=None"):
        ModelProposer(runner, vocabulary_size=VOCABULARY)


def test_a_draft_pool_that_is_too_small_leaves_plain_steps(tiny, run_on, alone):
    model, folder = tiny("llama")
    prompts = some_prompts()[:3]
    runner = run_on(folder, draft_tokens=8, draft_topk=4)
    drafter = run_on(folder, max_total_tokens=24)
    for topk in (1, 4):
        engine = Engine(runner, drafts=a_proposer(drafter, topk))
        assert texts_of(engine, prompts) == alone(model, prompts, NUM)
        assert all_free(drafter)


def test_spare_pages_have_room_for_all_branches(tiny, run_on):
    """On every page size, for as many requests of as many tokens as the pool is made for."""
    for page_size in (1, 4, 16):
        for steps in (2, 3, 5):
            spare = 4 * 3 * (steps - 1)
            given = {"max_batch_size": 4, "max_total_tokens": 40, "spare_pages": spare}
            drafter = run_on(tiny("llama")[1], page_size=page_size, **given)
            numbers = {"vocabulary_size": VOCABULARY, "steps": steps, "topk": 3}
            drafts = ModelProposer(drafter, draft_token_num=steps + 1, **numbers)
            for lens in ((10, 10, 10, 10), (15, 15, 7, 3), (1, 1, 1, 37)):
                states = [SequenceState(token_ids=[3] * length) for length in lens]
                assert drafts.propose(states, steps + 1) is not None


def test_a_backend_without_graphs_drafts_eagerly(tiny, run_on):
    drafts = a_proposer(run_on(tiny("llama")[1], backend="fake", debug=False), 4)
    with pytest.raises(GraphUnsupported):
        drafts.capture_graphs(devices=RecordingGraphs())
    assert drafts.propose([SequenceState(token_ids=[1, 2])], 8) is not None


@pytest.mark.parametrize("lens", [(1, 2), (3, 40), (46, 2), (48, 5)])
def test_contexts_and_texts_too_short_for_graphs(tiny, lens):
    """The last steps of a full context, and a text of fewer tokens than a graph reads."""
    drafter = graph_runner(tiny("llama")[1], page_size=4)
    trees = []
    for graphs in (False, True):
        drafts = a_proposer(drafter, 4)
        if graphs:
            drafts.capture_graphs(batch_sizes=[2], devices=RecordingGraphs())
        states = [SequenceState(token_ids=list(range(1, length + 1))) for length in lens]
        trees.append(drafts.propose(states, 8))
        drafts.keep_only([])
    assert torch.equal(trees[0].draft_tokens, trees[1].draft_tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)
    depth = min(3, 48 - max(lens) + 1)
    assert int(trees[0].depths.max()) <= depth


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.turns(2)
def test_thresholds_accept_more_of_sampled_requests_alone(tiny, run_on, topk, alone):
    """Greedy requests of the same steps keep their texts; a text is the same each time."""
    model, folder = tiny("llama")
    prompts = some_prompts(4)
    greedy = range(0, len(prompts), 2)
    ways = [
        SamplingParams() if place in greedy else SamplingParams(temperature=1.0, seed=place)
        for place in range(len(prompts))
    ]
    runner = run_on(folder, page_size=4, draft_tokens=8, draft_topk=topk, max_total_tokens=256)
    drafter = run_on(folder, page_size=4, max_total_tokens=1024)
    found = {}
    for single in (1.0, 0.01, 0.01):
        accept = AcceptThresholds(single=single)
        engine = Engine(runner, drafts=a_proposer(drafter, topk), accept=accept)
        texts = texts_of(engine, prompts, ways=ways)
        wanted = alone(model, prompts, NUM)
        assert [texts[place] for place in greedy] == [wanted[place] for place in greedy]
        if single in found:
            assert texts == found[single][0]
        found[single] = texts, engine.stats.drafts.accepted_per_step
    assert found[0.01][1] > found[1.0][1] + 0.25
    assert found[0.01][0] != found[1.0][0]


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_kernels_for_trees_change_no_text(tiny, run_on, monkeypatch):
    """Those that build them, and those that sample them."""
    triton_trees = pytest.importorskip("attnmux.triton.functions.trees", exc_type=ImportError)
    _, folder = tiny("llama")
    prompts = some_prompts(3)
    ways = [SamplingParams(temperature=place % 2, seed=place) for place in range(len(prompts))]
    runner = run_on(folder, page_size=4, draft_tokens=8, draft_topk=4, max_total_tokens=256)
    drafter = run_on(folder, page_size=4, max_total_tokens=1024)
    texts, calls = [], []
    for kernels in (None, triton_trees.TritonTrees()):
        for each in (runner, drafter):
            each.tree_kernels = kernels
        for name in ("build", "sample") if kernels else ():
            call = getattr(kernels, name)
            monkeypatch.setattr(
                kernels, name, lambda *a, call=call, **k: calls.append(call) or call(*a, **k)
            )
        accept = AcceptThresholds(single=0.3)
        engine = Engine(runner, drafts=a_proposer(drafter, 4), accept=accept)
        texts.append(texts_of(engine, prompts, ways=ways))
    assert texts[0] == texts[1]
    assert len(set(calls)) == 2
