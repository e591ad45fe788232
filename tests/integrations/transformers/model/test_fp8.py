"""Models over a KV cache of 8-bit or 4-bit floats, in all layers or in some."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnmux.core import InvalidInput, KVPool, Offer, SWAKVPool, torch_dtype
from attnmux.testing import CanaryBackend, RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    MemoryBudget,
    NgramProposer,
    Prompt,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
    recall,
    run_prompts,
)

IDS = [5, 9, 3, 7, 11, 2, 40, 41, 8, 60, 22, 19]


def logits_of(runner, ids):
    """After the sixth token, and after each one that follows."""
    state = SequenceState(token_ids=ids[:6])
    steps = [runner.extend([state])]
    for token in ids[6:]:
        state.token_ids.append(token)
        steps.append(runner.decode([state]).clone())  # a graph writes its own again
    return torch.cat(steps)


def round_what_is_written(pool, dtype, monkeypatch, *, kept=()):
    """Have a pool of float32 hold what one of few bits gives back; in kept layers, all."""

    def read_back(row):
        stored = KVPool.stored_parts(row, dtype, None)
        return (KVPool.unpack_rows(*stored) if len(stored) > 1 else stored[0]).to(row.dtype)

    for method in ("set_kv_buffer", "set_mla_kv_buffer"):
        write = getattr(pool, method)

        def rounded(layer, loc, *rows, write=write):
            is_kept = layer.layer_id in kept
            write(layer, loc, *(rows[:2] if is_kept else map(read_back, rows[:2])))

        monkeypatch.setattr(pool, method, rounded)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        *product(("llama", "gemma3", "gpt-oss", "deepseek-v3"), ("fp8_e4m3", "fp8_e5m2")),
        *product(("gemma3", "gpt-oss"), ("fp4_e2m1",)),
    ],
)
@pytest.mark.turns(2)
def test_a_cache_of_few_bits_rounds_k_and_v_and_nothing_else(
    tiny, run_on, name, kv_dtype, monkeypatch
):
    folder, ids = tiny(name)[1], IDS
    stored = run_on(folder, page_size=4, kv_dtype=kv_dtype)
    assert stored.decision.kv_dtype == kv_dtype
    exact = run_on(folder, page_size=4, kv_dtype="float32")
    unrounded = logits_of(exact, ids)
    round_what_is_written(exact.context.token_to_kv_pool, torch_dtype(kv_dtype), monkeypatch)
    ours = logits_of(stored, ids)
    torch.testing.assert_close(ours, logits_of(exact, ids), atol=1e-4, rtol=1e-3)
    assert float((ours - unrounded).abs().max()) > 1e-2


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_shipped_model_answers_from_a_cache_of_few_bits(run_on, kv_dtype, page_size):
    tokenizer = AutoTokenizer.from_pretrained(recall.PATH)
    runner = run_on(
        recall.PATH,
        page_size=page_size,
        kv_dtype=kv_dtype,
        max_context_len=256,
        max_total_tokens=1024,
    )
    asked = [recall.make_prompt(random.Random(seed), 200) for seed in range(6)]
    prompts = [Prompt(token_ids=tokenizer.encode(text), max_new_tokens=8) for text, _ in asked]
    stop_ids = open_checkpoint(recall.PATH).stop_ids(runner.model)
    engine = Engine(runner, tokenizer=tokenizer, stop_ids=stop_ids)
    results = run_prompts(engine, prompts).results
    assert [one.text for one in results] == [answer for _, answer in asked]


SKIPS = [
    ("llama", "0,2", {0, 2}),
    ("gemma3", "sliding_window", {0, 2}),
    ("gemma3", "full_attention", {1}),
    ("gpt-oss", "0-1", {0, 1}),
]
"""A model of three layers, `kv_dtype_skip`, and the layers that it names."""


@pytest.mark.parametrize(
    ("name", "skip", "kept", "kv_dtype"),
    [*((*each, "fp8_e4m3") for each in SKIPS), (*SKIPS[1], "fp4_e2m1")],
)
@pytest.mark.turns(2)
def test_skipped_layers_hold_what_was_written(
    tiny, run_on, monkeypatch, name, skip, kept, kv_dtype
):
    """And the others round. A canary compares each step with the float64 reference."""
    folder, findings = tiny(name)[1], []
    stored = run_on(
        folder,
        page_size=4,
        kv_dtype=kv_dtype,
        kv_dtype_skip=skip,
        wrap=lambda backend, decision: CanaryBackend(
            backend, share=1.0, on_finding=findings.append
        ),
    )
    assert [each.kv_dtype for each in stored.decision.groups] == [kv_dtype, "float32"]
    pool, low = stored.context.token_to_kv_pool, torch_dtype(kv_dtype)
    for layer_id in pool.layer_ids:
        expected = torch.float32 if layer_id in kept else low
        assert pool.get_key_buffer(layer_id).dtype == expected
    exact = run_on(folder, page_size=4, kv_dtype="float32")
    unrounded = logits_of(exact, IDS)
    round_what_is_written(exact.context.token_to_kv_pool, low, monkeypatch, kept=kept)
    ours = logits_of(stored, IDS)
    torch.testing.assert_close(ours, logits_of(exact, IDS), atol=1e-4, rtol=1e-3)
    assert float((ours - unrounded).abs().max()) > 1e-3
    assert not findings


def test_without_a_layer_whose_rounding_counts_nothing_changes(tiny, run_on, tmp_path):
    """Layer 1, which alone has 8 bits, adds nothing to the text."""
    model = AutoModelForCausalLM.from_pretrained(tiny("llama")[1])
    torch.nn.init.zeros_(model.model.layers[1].self_attn.o_proj.weight)
    model.save_pretrained(tmp_path)
    mixed = run_on(tmp_path, kv_dtype="fp8_e4m3", kv_dtype_skip="0,2")
    assert torch.equal(logits_of(mixed, IDS), logits_of(run_on(tmp_path), IDS))
    rounded = run_on(tmp_path, kv_dtype="fp8_e4m3")
    assert not torch.equal(logits_of(rounded, IDS), logits_of(run_on(tmp_path), IDS))


@pytest.mark.parametrize("backend", ["torch_native", "native"])
@pytest.mark.parametrize(("name", "skip", "kept"), SKIPS)
@pytest.mark.turns(4)
def test_texts_with_shared_prefixes_windows_and_drafts(tiny, run_on, name, skip, kept, backend):
    """Those of requests that run alone, in one pool without drafts."""
    folder, generator = tiny(name)[1], torch.Generator().manual_seed(1)
    long = torch.randint(97, (36,), generator=generator).tolist()
    asked = [
        Prompt(token_ids=ids, max_new_tokens=8)
        for ids in (long, long[:33], long[:20] + long[:4], long[:1], [5, 17, 3, 44] * 4)
    ]
    given = {"kv_dtype": "fp8_e4m3", "kv_dtype_skip": skip, "page_size": 4}
    alone = Engine(run_on(folder, backend, **given, window_step_tokens=None), max_running=1)
    plain = run_prompts(alone, asked)
    runner = run_on(folder, backend, **given, window_step_tokens=8, draft_tokens=4)
    assert isinstance(runner.context.token_to_kv_pool, SWAKVPool) == (name != "llama")
    engine = Engine(runner, prefill_tokens=7, drafts=NgramProposer(draft_token_num=4))
    drafted = run_prompts(engine, asked)
    texts = [[one.token_ids for one in each.results] for each in (plain, drafted)]
    assert texts[0] == texts[1]
    assert drafted.stats.reused_tokens > 0


def test_pools_of_a_budget_count_each_layer_in_its_dtype(tiny, run_on):
    folder = tiny("llama")[1]
    whole, mixed, low = (
        run_on(
            folder, page_size=4, max_total_tokens=None, memory=MemoryBudget(nbytes=2**16), **each
        )
        for each in ({}, {**FP8, "kv_dtype_skip": "0"}, FP8)
    )
    layer = whole.context.layers[0]
    values = layer.tp_k_head_num * (layer.qk_head_dim + layer.v_head_dim)
    for runner, token in ((whole, 12), (mixed, 4 + 1 + 1), (low, 3)):
        assert runner.context.token_to_kv_pool.nbytes == (runner.kv_tokens + 4) * values * token
        assert 2**16 - 4 * values * token < runner.context.token_to_kv_pool.nbytes <= 2**16


FP8 = {"kv_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("llama", {"kv_dtype_skip": "0"}, "kv_dtype_skip: expected a kv_dtype with it"),
        ("llama", {**FP8, "kv_dtype_skip": "3"}, "from 0 to 2, or full_attention, got '3'"),
        ("llama", {**FP8, "kv_dtype_skip": "sliding_window"}, "got 'sliding_window'"),
        ("llama", {**FP8, "kv_dtype_skip": "0-2"}, "expected a layer left for fp8_e4m3"),
        ("llama", {**FP8, "kv_dtype_skip": 1}, 'expected a str, such as "0-1,sliding_window"'),
        ("deepseek-v3", {**FP8, "kv_dtype_skip": "0"}, "got mla layers"),
    ],
)
def test_layers_that_cannot_be_skipped(tiny, run_on, name, given, said):
    with pytest.raises(InvalidInput, match=said):
        run_on(tiny(name)[1], **given)


def test_one_graph_holds_layers_of_both_dtypes(tiny):
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    options = RunnerOptions(
        max_batch_size=2,
        max_context_len=64,
        max_total_tokens=64,
        kv_dtype="fp8_e4m3",
        kv_dtype_skip="sliding_window",
    )
    eager, captured = (
        load_runner(open_checkpoint(tiny("gemma3")[1]), fake_platform(), [offer], options)
        for _ in range(2)
    )
    captured.capture_graphs(batch_sizes=[1], devices=RecordingGraphs())
    ours, theirs = logits_of(captured, IDS), logits_of(eager, IDS)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_layers_of_other_kinds_keep_their_numbers(tiny, run_hybrid, monkeypatch):
    """Jamba's attention layers are 1 and 3."""
    folder = tiny("jamba")[1]
    mixed = run_hybrid(folder, **FP8, kv_dtype_skip="0-2")
    pool = mixed.context.token_to_kv_pool
    assert [pool.get_key_buffer(number).itemsize for number in (1, 3)] == [4, 1]
    exact = run_hybrid(folder)
    round_what_is_written(
        exact.context.token_to_kv_pool, torch.float8_e4m3fn, monkeypatch, kept={1}
    )
    torch.testing.assert_close(logits_of(mixed, IDS), logits_of(exact, IDS), atol=1e-4, rtol=1e-3)
    with pytest.raises(InvalidInput, match=r"layers from 1 to 3, .* got '2'"):
        run_hybrid(folder, **FP8, kv_dtype_skip="2")
