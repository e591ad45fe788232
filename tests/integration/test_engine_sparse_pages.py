"""The engine over chosen pages: whole texts, prefixes, refusals, and what a decision says."""

from __future__ import annotations

import random

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import (
    Platform,
    Policy,
    Request,
    SparseAttnBackend,
    detect,
    load_plugins,
    solve,
)
from attnmux.core.cli.verbs import verbs
from attnmux.transformers import (
    Engine,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    recall,
    run_prompts,
)

OFFERS = load_plugins().offers()
PAGE = 16


def runner_of(budget, **options):
    checkpoint = open_checkpoint(recall.PATH)
    platform = next(one for one in detect(load_plugins()).platforms if one.device_type == "cpu")
    asked = RunnerOptions(
        max_batch_size=3,
        max_context_len=512,
        max_total_tokens=1024,
        page_size=PAGE,
        sparse=budget and "quest",
        sparse_budget=budget,
        dtype="float32",
        device="cpu",
        policy=Policy(backend="torch_native"),
        **options,
    )
    return checkpoint, load_runner(checkpoint, platform, OFFERS, asked)


@pytest.fixture(scope="module")
def asked():
    rng = random.Random()
    pairs = [recall.make_prompt(rng, 300) for _ in range(4)]
    begun = pairs[0][0]
    letters = [each for each in recall.KEYS if begun.count(each + "") and each != begun[-1]]
    return [*pairs, (begun[:-1] + letters[0], None), pairs[1]]


def run(budget, asked):
    checkpoint, runner = runner_of(budget)
    engine = Engine(
        runner,
        tokenizer=checkpoint.require_tokenizer(),
        stop_ids=checkpoint.stop_ids(runner.model),
        prefill_tokens=128,
    )
    prompts = [Prompt(token_ids=list(text.encode()), max_new_tokens=8) for text, _ in asked]
    done = run_prompts(engine, prompts)
    return runner, [one.token_ids for one in done.results]


def test_a_budget_of_all_keys_has_the_texts_of_dense_attention(asked) -> None:
    _, dense = run(None, asked)
    runner, sparse = run(512, asked)
    assert isinstance(runner.backend, SparseAttnBackend)
    assert sparse == dense


def test_bounds_are_those_of_the_pool_after_the_engine_ran(asked) -> None:
    runner, _ = run(64, asked)
    backend = runner.backend
    pool = runner.context.token_to_kv_pool
    for layer in runner.context.layers:
        keys = pool.get_key_buffer(layer.layer_id).unflatten(0, (-1, PAGE))
        lower, upper = backend.bounds.of(layer.layer_id)
        # Pages that were written once and whole: no former owner's keys are left in them
        full = (keys != 0).flatten(2).any(-1).all(-1)
        full[0] = False
        assert int(full.sum()) > 5
        inside = (keys >= lower.unsqueeze(1)) & (keys <= upper.unsqueeze(1))
        tight = (keys.amin(1) == lower) & (keys.amax(1) == upper)
        assert bool(torch.where(inside.all(1), tight, True)[full].all())
        assert float(tight[full].float().mean()) > 0.5


def test_a_decision_says_what_is_approximate() -> None:
    request = Request.parse(
        "dtype=bf16,head_dim=128,num_q_heads=8,num_kv_heads=2,page_size=16,"
        "sparse=quest,sparse_budget=256"
    )
    decision = solve(request, Platform.parse("cpu:x86_64"), OFFERS, Policy(hypothetical=True))
    assert "decode reads 256 tokens" in decision.summary()
    plain = solve(
        request.replace(sparse=None, sparse_budget=None),
        decision.platform,
        OFFERS,
        Policy(hypothetical=True),
    )
    assert {phase: one.address for phase, one in plain.choices} == {
        phase: one.address for phase, one in decision.choices
    }
    assert "approximation" not in plain.summary()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sparse", "quest"], "sparse_budget"),
        (["--sparse-budget", "64"], "sparse"),
        (["--sparse", "quest", "--sparse-budget", "40"], "sparse_budget"),
        (["--sparse", "quest", "--sparse-budget", "64", "--page-size", "1"], "page_size"),
        (["--sparse", "quest", "--sparse-budget", "64", "--draft", "ngram"], "sparse"),
        (["--sparse", "quest", "--sparse-budget", "64", "--canary", "1"], "--canary"),
        (["--sparse", "h2o"], "quest"),
    ],
)
def test_the_command_refuses_what_excludes_each_other(options, said) -> None:
    result = CliRunner().invoke(verbs, ["generate", "k417, ?k", "--device", "cpu", *options])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_answers_over_chosen_pages() -> None:
    given = ["generate", "k417, x90 ?k", "--device", "cpu", "--sparse", "quest"]
    result = CliRunner().invoke(verbs, [*given, "--sparse-budget", "64"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == "417"
    assert "an approximation" in result.stderr
