"""Models over a KV cache of 8-bit or 4-bit floats."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from transformers import AutoTokenizer

from attnmux.core import torch_dtype, unpack_rows
from attnmux.core.kv.quantise import stored_parts
from attnmux.transformers import (
    Engine,
    Prompt,
    SequenceState,
    open_checkpoint,
    recall,
    run_prompts,
)


def logits_of(runner, ids):
    """After the sixth token, and after each one that follows."""
    state = SequenceState(token_ids=ids[:6])
    steps = [runner.extend([state])]
    for token in ids[6:]:
        state.token_ids.append(token)
        steps.append(runner.decode([state]))
    return torch.cat(steps)


def round_what_is_written(pool, dtype, monkeypatch):
    """Have a pool of float32 hold what one of few bits gives back."""

    def read_back(row):
        stored = stored_parts(row, dtype, None)
        return (unpack_rows(*stored) if len(stored) > 1 else stored[0]).to(row.dtype)

    for method in ("set_kv_buffer", "set_mla_kv_buffer"):
        write = getattr(pool, method)

        def rounded(layer, loc, *rows, write=write):
            write(layer, loc, *map(read_back, rows[:2]))

        monkeypatch.setattr(pool, method, rounded)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        *product(("llama", "gemma3", "gpt-oss", "deepseek-v3"), ("fp8_e4m3", "fp8_e5m2")),
        *product(("gemma3", "gpt-oss"), ("fp4_e2m1",)),
    ],
)
def test_a_cache_of_few_bits_rounds_k_and_v_and_nothing_else(
    tiny, run_on, name, kv_dtype, monkeypatch
):
    folder, ids = tiny(name)[1], [5, 9, 3, 7, 11, 2, 40, 41, 8, 60, 22, 19]
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
