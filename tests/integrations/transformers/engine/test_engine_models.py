"""The engine on real models: greedy text is what each prompt gets alone, eagerly and in graphs."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product

import pytest
import torch
from transformers import AutoTokenizer

from attnmux.core import GraphUnsupported, InvalidInput, Offer
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    MemoryBudget,
    Prompt,
    RunnerOptions,
    SamplingParams,
    load_runner,
    open_checkpoint,
    recall,
    run_prompts,
)
from attnmux.transformers.engine import scheduler


def random_prompts(seed, num):
    """Of 1 to 40 tokens; the later half begin as one of the first."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 41))] for _ in range(num // 2)]
    for stem in list(prompts):
        tail = [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
        prompts.append(stem[: rng.randrange(len(stem) + 1)] + tail)
    return prompts


def results(engine, prompts, num, on_text=None):
    asked = [Prompt(token_ids=ids, max_new_tokens=num) for ids in prompts]
    try:
        return run_prompts(engine, asked, on_text=on_text).results
    finally:
        engine.clear_cache()
        assert engine.memory.free == engine.runner.steps.allocator.size
        if engine.window_memory is not None:
            assert engine.window_memory.free == engine.runner.sizes.swa


def tokens(engine, prompts, num):
    return [result.token_ids for result in results(engine, prompts, num)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt-oss", "deepseek-v3"])
@pytest.mark.turns(2)
def test_tokens_are_those_of_each_prompt_alone(tiny, run_on, architecture, monkeypatch, alone):
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(architecture)
    prompts = random_prompts(3, 10)
    expected = alone(model, prompts, 9)
    roomy = run_on(folder, page_size=4, max_total_tokens=1024, max_batch_size=8)
    for options in ({}, {"prefill_tokens": 5}, {"prefix_cache": False}):
        assert tokens(Engine(roomy, **options), prompts, 9) == expected
    tight = run_on(folder, page_size=4, max_total_tokens=44, max_batch_size=6)
    engine = Engine(tight, prefill_tokens=11)
    assert tokens(engine, prompts, 9) == expected
    assert engine.stats.retractions > 0
    assert engine.stats.evicted_tokens > 0


@pytest.mark.parametrize(
    ("architecture", "page_size"),
    [*product(("gpt-oss", "llama4", "gemma3", "gemma2", "mistral"), (1, 16))],
)
@pytest.mark.turns(12)
def test_tokens_are_the_same_with_a_window_pool(
    tiny, run_on, architecture, page_size, monkeypatch, alone
):
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(architecture)
    prompts = random_prompts(4, 10)
    expected = alone(model, prompts, 20)
    options = {"page_size": page_size, "window_step_tokens": 16}
    roomy = run_on(folder, max_total_tokens=1024, **options)
    assert roomy.sizes.swa < roomy.sizes.full / 2
    assert roomy.sizes.gain > 1.2
    for given in ({}, {"prefill_tokens": 5}, {"prefix_cache": False}):
        assert tokens(Engine(roomy, **given), prompts, 20) == expected
    if page_size == 1:
        tight = run_on(folder, max_total_tokens=90, max_batch_size=6, **options)
        assert tight.sizes.swa < tight.sizes.full
        engine = Engine(tight, prefill_tokens=11)
        assert tokens(engine, prompts, 20) == expected
        assert engine.stats.retractions > 0
        assert engine.stats.evicted_tokens > 0


@pytest.mark.parametrize("architecture", ["gpt-oss", "mistral"])
def test_graphs_read_the_window_pool(tiny, architecture, alone):
    model, folder = tiny(architecture)
    prompts = random_prompts(4, 8)
    runner = graph_runner(folder, max_total_tokens=512, window_step_tokens=16)
    assert runner.sizes.swa is not None
    runner.capture_graphs(batch_sizes=[1, 2, 4], devices=RecordingGraphs())
    assert tokens(Engine(runner, prefill_tokens=9), prompts, 12) == alone(model, prompts, 12)


def test_the_same_memory_holds_more_tokens_with_a_window_pool(tiny, run_on):
    """Two layers of three have windows; a pool for all of them would hold a third of the rest."""
    _, folder = tiny("gpt-oss")
    budget = MemoryBudget(nbytes=2**20)
    sizes = run_on(folder, max_total_tokens=None, memory=budget, window_step_tokens=16).sizes
    one = run_on(folder, max_total_tokens=None, memory=budget, window_step_tokens=None).sizes
    assert (one.swa, one.full) == (None, sizes.one_pool)
    assert sizes.full > 2.4 * one.full


@pytest.mark.parametrize(
    "backend", ["torch_native", pytest.param("flex_attention", marks=pytest.mark.full)]
)
def test_a_request_with_nan_leaves_nothing_to_others(tiny, run_on, backend, alone):
    """A page is zeroed before another request gets it: its rest is loaded with weight 0."""
    model, folder = tiny("llama")
    prompts = [[index, 5, 6, 7] for index in range(3)]
    expected = alone(model, prompts, 6)
    runner = run_on(folder, backend, page_size=16, max_total_tokens=64, max_batch_size=4)
    with torch.no_grad():
        runner.model.get_input_embeddings().weight[96] = torch.nan
    engine, pool = Engine(runner, prefill_tokens=40), runner.context.token_to_kv_pool
    for bad in ([96] * 20, [*range(50), 96, 1]):
        spoilt = engine.add(bad, max_new_tokens=3)
        while engine.has_work:
            for output in engine.step():
                assert output.request_id == spoilt
                assert output.result.finish_reason == "error"
        assert tokens(engine, prompts, 6) == expected
    for layer in runner.context.layers:
        assert all(buffer.isfinite().all() for buffer in pool.get_kv_buffer(layer.layer_id))


def test_soak(tiny, run_on, monkeypatch, alone, full):
    """Arrivals and aborts at random; what ends has said what it says alone."""
    num = 300 if full else 120
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    rng = random.Random(12)
    model, folder = tiny("llama")
    prompts = random_prompts(6, 12)
    expected = alone(model, prompts, 12)
    runner = run_on(folder, page_size=4, max_total_tokens=40, max_batch_size=5)
    engine = Engine(runner, prefill_tokens=13)
    live = {}
    finished = events = 0
    while events < num or live:
        kind = rng.random() if events < num else 1
        if kind < 0.3 and len(live) < 9:
            index, num = rng.randrange(len(prompts)), rng.randrange(6, 13)
            live[engine.add(prompts[index], max_new_tokens=num)] = index, num
            events += 1
        elif kind < 0.35 and live:
            index, _ = live.pop(victim := rng.choice(sorted(live)))
            said = engine.abort(victim).token_ids
            assert said == expected[index][: len(said)]
            events += 1
        else:
            for output in engine.step():
                if output.result is not None:
                    index, num = live.pop(output.request_id)
                    assert output.result.token_ids == expected[index][:num]
                    finished += 1
        memory = engine.memory
        assert memory.free + memory.cached + memory.held == runner.steps.allocator.size
    engine.clear_cache()
    assert (engine.memory.held, engine.memory.cached) == (0, 0)
    assert min(finished, engine.stats.retractions, engine.stats.evicted_tokens) > num // 30


def test_samples_are_those_of_each_prompt_alone(tiny, run_on):
    runner = run_on(tiny("llama")[1], page_size=4, max_total_tokens=60)
    prompts = random_prompts(5, 8)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7).for_each(len(prompts))
    asked = [
        Prompt(token_ids=ids, max_new_tokens=7, sampling=one)
        for ids, one in zip(prompts, params, strict=True)
    ]
    engine = Engine(runner, prefill_tokens=9)
    together = [one.token_ids for one in run_prompts(engine, asked).results]
    assert together == [run_prompts(engine, [one]).results[0].token_ids for one in asked]


def test_the_shipped_model_answers_many_questions_about_one_text(run_on):
    tokenizer = AutoTokenizer.from_pretrained(recall.PATH)
    text, _ = recall.make_prompt(random.Random(4), 600)
    stem = text[:-2]
    pairs = [word for word in stem.replace(".", " ").replace(",", " ").replace(";", " ").split()]
    asked = {word[0]: word[1:] for word in pairs if word[1:].isdigit()}
    runner = run_on(
        recall.PATH, page_size=16, max_batch_size=8, max_context_len=640, max_total_tokens=2000,
        dtype="float32",
    )  # fmt: skip
    said = {}
    engine = Engine(runner, tokenizer=tokenizer, stop_ids={tokenizer.eos_token_id})
    prompts = [tokenizer(f"{stem}?{key}")["input_ids"] for key in asked]

    def hear(index, piece, last):
        said.setdefault(index, []).append((piece, last))

    answers = results(engine, prompts, 8, on_text=hear)
    plain = Engine(
        runner, tokenizer=tokenizer, stop_ids={tokenizer.eos_token_id}, prefix_cache=False
    )
    assert [one.text for one in answers] == [one.text for one in results(plain, prompts, 8)]
    assert sum(one.text == value for one, value in zip(answers, asked.values(), strict=True)) >= 10
    assert [one.reused_tokens for one in answers[1:]] == [592] * (len(asked) - 1)
    assert engine.stats.extend.prompt_tokens + engine.stats.mixed.prompt_tokens < 900
    for index, answer in enumerate(answers):
        assert "".join(piece for piece, _ in said[index]) == answer.text
        assert [last for _, last in said[index]] == [False] * (len(said[index]) - 1) + [True]


def test_a_callback_may_abort_and_add(run_on):
    tokenizer = AutoTokenizer.from_pretrained(recall.PATH)
    engine = Engine(run_on(recall.PATH), tokenizer=tokenizer)
    heard = {0: "", 1: "", 2: ""}

    def hear(piece, last, index=0):
        heard[index] += piece
        if index == 0 and len(heard[0]) == 2 and not last:
            assert engine.abort(0).text == heard[0]
            engine.abort(1)
            assert engine.memory.held == 0
            engine.add(
                b"b52 ?b", max_new_tokens=2, on_text=lambda piece, last: hear(piece, last, 2)
            )

    engine.add(b"k417, x90 ?k", max_new_tokens=9, on_text=hear)
    engine.add(b"hm", max_new_tokens=9, on_text=lambda piece, last: hear(piece, last, 1))
    while engine.has_work:
        engine.step()
    assert (heard[0], heard[2]) == ("41", "52")
    assert len(heard[1]) <= 2


def test_an_error_in_a_callback_propagates_and_loses_nothing(run_on):
    tokenizer = AutoTokenizer.from_pretrained(recall.PATH)
    engine = Engine(run_on(recall.PATH), tokenizer=tokenizer)
    heard = []
    failures = []

    def fail(piece, last):
        failures.append(piece)
        raise ConnectionError("no listener")

    engine.add(b"k417, x90 ?k", max_new_tokens=3, on_text=fail)
    engine.add(b"k417, x90 ?x", max_new_tokens=2, on_text=lambda piece, last: heard.append(piece))
    while engine.has_work:
        with suppress(ConnectionError):
            engine.step()
    assert "".join(failures) == "417"
    assert "".join(heard) == "90"
    engine.clear_cache()
    assert engine.memory.free == engine.runner.steps.allocator.size


def test_a_model_that_fails_leaves_the_engine_in_order(tiny, run_on, monkeypatch, alone):
    runner = run_on(tiny("llama")[1], page_size=4)
    engine = Engine(runner)
    engine.add([1, 2, 3, 4, 5], max_new_tokens=5)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(runner.backend, "forward_decode", None)
        with pytest.raises(TypeError):
            engine.step()
    (dropped,) = engine.step()
    assert dropped.result.finish_reason == "abort"
    assert len(dropped.result.token_ids) == 1
    assert not engine.has_work
    assert engine.memory.held == 0
    assert engine.stats.aborted == 1
    model, _ = tiny("llama")
    assert tokens(engine, [[1, 2, 3, 4, 5]], 5) == alone(model, [[1, 2, 3, 4, 5]], 5)


def graph_runner(folder, **changes):
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    given = {"max_batch_size": 6, "max_context_len": 64, "max_total_tokens": 512, **changes}
    options = RunnerOptions(page_size=4, **given)
    return load_runner(open_checkpoint(folder), fake_platform(), [offer], options)


def test_decode_steps_replayed_from_graphs_give_the_same_tokens(tiny, alone):
    model, folder = tiny("llama")
    runner = graph_runner(folder)
    assert runner.graphs is None
    prompts = random_prompts(8, 12)
    lens = [3 + index for index in range(12)]
    asked = [
        Prompt(token_ids=ids, max_new_tokens=num) for ids, num in zip(prompts, lens, strict=True)
    ]
    eager = Engine(runner)
    expected = [one.token_ids for one in run_prompts(eager, asked).results]
    assert expected == [
        one for ids, num in zip(prompts, lens, strict=True) for one in alone(model, [ids], num)
    ]
    eager.clear_cache()
    runner.capture_graphs(batch_sizes=[1, 2, 4], devices=RecordingGraphs())
    assert runner.graphs.batch_sizes == (1, 2, 4)
    ran = []
    replay = runner.graphs.replay

    def counted(batch, inputs, *, size):
        ran.append(batch.batch_size)
        return replay(batch, inputs, size=size)

    runner.graphs.replay = counted
    engine = Engine(runner)
    assert [one.token_ids for one in run_prompts(engine, asked).results] == expected
    assert set(ran) >= {1, 2, 3}
    assert max(ran) <= 4
    assert len(ran) < engine.stats.decode.steps, "five and six requests decode eagerly"


def test_graphs_that_cannot_be_had(tiny, run_on):
    with pytest.raises(GraphUnsupported, match="cpu"):
        graph_runner(tiny("llama")[1], graph=True)
    runner = run_on(tiny("llama")[1])
    with pytest.raises(GraphUnsupported):
        runner.capture_graphs(devices=RecordingGraphs())
    assert runner.graphs is None


@pytest.mark.parametrize(
    ("text", "nbytes", "fraction"),
    [
        ("2GB", 2 * 10**9, None),
        ("512 MiB", 2**29, None),
        ("1.5g", 15 * 10**8, None),
        ("1000", 1000, None),
        ("80%", None, 0.8),
    ],
)
def test_memory_in_words(text, nbytes, fraction):
    assert MemoryBudget.parse(text) == MemoryBudget(nbytes=nbytes, fraction=fraction)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2 GBs", "101%", "0", "1e9", "80%B"])
def test_words_that_are_no_memory(text):
    with pytest.raises(InvalidInput, match="memory"):
        MemoryBudget.parse(text)


def test_a_budget_becomes_tokens(tiny, run_on):
    assert MemoryBudget(fraction=0.5).resolve(torch.device("cpu")) > 0
    with pytest.raises(InvalidInput, match="either"):
        MemoryBudget()
    folder = tiny("llama")[1]
    token_bytes = 3 * 2 * 2 * 8 * 4
    budget = MemoryBudget(nbytes=token_bytes * 103)
    runner = run_on(folder, page_size=4, max_total_tokens=None, memory=budget)
    assert runner.context.token_to_kv_pool.size == 96
    assert runner.context.token_to_kv_pool.nbytes <= budget.nbytes
    capped = run_on(folder, page_size=4, max_total_tokens=10_000, memory=budget)
    assert capped.context.token_to_kv_pool.size == 96
    with pytest.raises(InvalidInput, match="memory"):
        run_on(folder, max_total_tokens=None)
