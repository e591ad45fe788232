"""Shared prefixes of models with linear layers: begun only where their states were kept."""

from __future__ import annotations

import random

import pytest

from attnmux.core import InvalidInput
from attnmux.transformers import Engine, MemoryBudget, Prompt, run_prompts
from attnmux.transformers.engine import scheduler

NUM = 6
WHOLE = {"num": NUM, "use_cache": False}
"""Without transformers' caches: with its own, MiniMax with windows says something else."""


def said(engine, prompts, num=NUM):
    asked = [Prompt(token_ids=ids, max_new_tokens=num) for ids in prompts]
    return run_prompts(engine, asked).results


def tokens(engine, prompts, num=NUM):
    return [result.token_ids for result in said(engine, prompts, num)]


def drawn(rng, num):
    return [rng.randrange(97) for _ in range(num)]


def of_families(rng):
    """Prompts that share parts of each other; some come twice."""
    stems = [drawn(rng, num) for num in (9, 17, 26)]
    stems.append(stems[1] + drawn(rng, 8))
    prompts = [rng.choice(stems) + drawn(rng, rng.randrange(1, 6)) for _ in range(10)]
    return prompts + prompts[3:6]


@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3-next", "kimi-linear", "falcon-h1", "jamba", "lfm2", "minimax", "mamba2"),
        *("bamba", "nemotron-h"),
    ],
)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.turns(6)
def test_the_third_prompt_begins_where_the_second_parted(
    tiny, run_hybrid, architecture, page_size, alone
) -> None:
    """The first prompt leaves no states amid itself, the second ends a step there."""
    model, folder = tiny(architecture)
    engine = Engine(run_hybrid(folder, page_size=page_size))
    rng = random.Random(3)
    shared = drawn(rng, 20)
    prompts = [shared + drawn(rng, num) for num in (5, 3, 7, 1)]
    reused = []
    for ids, expected in zip(prompts, alone(model, prompts, **WHOLE), strict=True):
        (result,) = said(engine, [ids])
        assert result.token_ids == expected
        reused.append(result.reused_tokens)
    assert reused == [0, 0, 20, 20]


def test_a_conversation_goes_on_from_its_last_token(tiny, run_hybrid, alone) -> None:
    model, folder = tiny("qwen3-next")
    engine = Engine(run_hybrid(folder, page_size=1))
    rng = random.Random(4)
    ids, turns = [], []
    for _ in range(4):
        ids = ids + drawn(rng, 4)
        (result,) = said(engine, [ids])
        assert [result.token_ids] == alone(model, [ids], **WHOLE)
        turns.append((len(ids), result.reused_tokens))
        ids = ids + list(result.token_ids)
    # All but the last generated token and the user's new ones
    assert [reused for _, reused in turns] == [0, *(length - 5 for length, _ in turns[1:])]


@pytest.mark.parametrize(
    ("page_size", "kept_states", "given"),
    [
        (1, 1, {}),
        (4, 3, {}),
        (4, None, {"prefill_tokens": 7}),
        (1, 3, {"overlap": True}),
    ],
)
@pytest.mark.turns(4)
def test_random_families_of_prompts(
    tiny, run_hybrid, monkeypatch, page_size, kept_states, given, alone
) -> None:
    """Few states are kept, pages are evicted, and requests are retracted and begin again."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    monkeypatch.setattr(scheduler, "WORTH_WAITING", 4)
    model, folder = tiny("falcon-h1")
    sizes = {"page_size": page_size, "max_total_tokens": 104, "kept_states": kept_states}
    engine = Engine(run_hybrid(folder, **sizes), **given)
    rng = random.Random(page_size)
    prompts = of_families(rng)
    expected = alone(model, prompts, **WHOLE)
    for _ in range(2):
        assert tokens(engine, prompts) == expected
    stats = engine.stats
    assert stats.reused_tokens > 0
    assert stats.evicted_tokens > 0
    memory = engine.memory
    assert memory.held == 0
    assert memory.free + memory.cached == engine.runner.steps.allocator.size
    assert len(engine.runner.steps.state_tree._kept) <= (kept_states or 4)


@pytest.mark.parametrize("page_size", [1, 4])
def test_windows_and_states_are_shared_together(tiny, run_hybrid, page_size, alone) -> None:
    """Without the windows at its end, a prefix with states is not shared."""
    model, folder = tiny("minimax-windows")
    runner = run_hybrid(folder, page_size=page_size, window_step_tokens=16)
    tree = runner.steps.state_tree
    assert tree is runner.steps.window_tree is not None
    engine = Engine(runner)
    rng = random.Random(3)
    shared = drawn(rng, 20)
    prompts = [shared + drawn(rng, num) for num in (5, 3, 7, 1, 2, 4)]
    reused = []
    for ids, expected in zip(prompts, alone(model, prompts, **WHOLE), strict=True):
        if len(reused) == 4:
            tree.evict_windows(tree.evictable_window_tokens)
        (result,) = said(engine, [ids])
        assert result.token_ids == expected
        reused.append(result.reused_tokens)
    # The fifth runs up to where it parts, and gives that place its windows again
    assert reused == [0, 0, 20, 20, 0, 20]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.turns(6)
def test_random_families_with_windows(tiny, run_hybrid, monkeypatch, seed, alone) -> None:
    """States, windows and pages make room each for themselves."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    monkeypatch.setattr(scheduler, "WORTH_WAITING", 4)
    model, folder = tiny("minimax-windows")
    rng = random.Random(seed)
    sizes = {"page_size": rng.choice([1, 4]), "kept_states": rng.choice([2, 6])}
    sizes |= {"max_batch_size": 3, "window_step_tokens": rng.choice([4, 8])}
    runner = run_hybrid(folder, max_total_tokens=104, **sizes)
    engine = Engine(runner, prefill_tokens=rng.choice([7, 64]), overlap=rng.random() < 0.5)
    prompts = of_families(rng)
    expected = alone(model, prompts, **WHOLE)
    for _ in range(2):
        assert tokens(engine, prompts) == expected
    assert engine.stats.evicted_tokens > 0
    assert engine.stats.reused_tokens > 0 or sizes["kept_states"] == 2
    memory, windows = engine.memory, engine._cache.window_memory
    assert memory.held == windows.held == 0
    assert memory.free + memory.cached == runner.steps.allocator.size
    assert windows.free + windows.cached == runner.sizes.swa


def test_prompts_that_come_together_wait_for_the_states(
    tiny, run_hybrid, monkeypatch, alone
) -> None:
    """The second ends a step where the first had the same tokens; the others begin there."""
    monkeypatch.setattr(scheduler, "WORTH_WAITING", 8)
    model, folder = tiny("qwen3-next")
    engine = Engine(run_hybrid(folder, page_size=1))
    rng = random.Random(6)
    shared = drawn(rng, 30)
    prompts = [shared + drawn(rng, 3) for _ in range(4)]
    results = said(engine, prompts)
    assert [one.token_ids for one in results] == alone(model, prompts, **WHOLE)
    assert [one.reused_tokens for one in results] == [0, 0, 30, 30]


def test_without_kept_states_no_prefix_is_shared(tiny, run_hybrid) -> None:
    _, folder = tiny("lfm2")
    for given, options in (({"kept_states": 0}, {}), ({}, {"prefix_cache": False})):
        engine = Engine(run_hybrid(folder, **given), **options)
        for _ in range(3):
            tokens(engine, [[1, 2, 3, 4, 5, 6]] * 2, 2)
        assert engine.stats.reused_tokens == 0
        assert engine.memory.cached == 0
    with pytest.raises(InvalidInput, match="kept_states: expected at least 0, got -1"):
        run_hybrid(folder, kept_states=-1)


def test_kept_states_are_counted_into_the_memory(tiny, run_hybrid) -> None:
    _, folder = tiny("qwen3-next")
    given = {"max_total_tokens": None, "memory": MemoryBudget(nbytes=400_000)}
    few, many = (run_hybrid(folder, kept_states=num, **given).context for num in (0, 4))
    row = many.linear_states.nbytes - few.linear_states.nbytes
    assert row == 4 * few.linear_states.nbytes // 5
    assert many.token_to_kv_pool.nbytes + many.linear_states.nbytes <= 400_000
    assert many.token_to_kv_pool.nbytes < few.token_to_kv_pool.nbytes


def test_a_cleared_cache_forgets_states(tiny, run_hybrid, alone) -> None:
    model, folder = tiny("lfm2")
    engine = Engine(run_hybrid(folder, page_size=1))
    ids = drawn(random.Random(8), 12)
    for _ in range(3):
        tokens(engine, [ids])
    assert len(engine.runner.steps.state_tree._kept) > 0
    engine.clear_cache()
    assert len(engine.runner.steps.state_tree._kept) == 0
    (result,) = said(engine, [ids])
    assert result.reused_tokens == 0
    assert [result.token_ids] == alone(model, [ids], **WHOLE)
