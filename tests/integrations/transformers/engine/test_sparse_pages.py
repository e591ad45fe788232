"""The engine over chosen pages: whole texts, prefixes, refusals, and what a decision says."""

from __future__ import annotations

import random

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import Platform, Plugins, Policy, Request, solve
from attnmux.core.cli.verbs import verbs
from attnmux.parts import sparse_pages
from attnmux.parts.sparse_pages import SparseAttnBackend
from attnmux.transformers import (
    Engine,
    MemoryBudget,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    recall,
    run_prompts,
)

OFFERS = Plugins.load().offers()
PAGE = 16


def runner_of(budget, **options):
    checkpoint = open_checkpoint(recall.PATH)
    platform = next(one for one in Plugins.load().detect().platforms if one.device_type == "cpu")
    given = {
        "max_batch_size": 3,
        "max_context_len": 512,
        "max_total_tokens": 1024,
        "page_size": PAGE,
        "sparse": budget and "quest",
        "sparse_budget": budget,
        "dtype": "float32",
        "device": "cpu",
        "policy": Policy(backend="torch_native"),
    }
    asked = RunnerOptions(**{**given, **options})
    return checkpoint, load_runner(checkpoint, platform, OFFERS, asked)


@pytest.fixture(params=["plain", "kernels"])
def kernels(request, monkeypatch):
    """None, or those that a GPU's runner gets, interpreted; the names that were asked for."""
    if request.param == "plain":
        yield None
        return
    pytest.importorskip("triton")
    from attnmux.emulators import triton_interpreter  # noqa: PLC0415  # where there is a Triton
    from attnmux.triton.functions.chosen_pages import make_kernels  # noqa: PLC0415  # as above

    names = []

    def offered(name, context):
        names.append(name)
        return make_kernels(context)

    monkeypatch.setattr(sparse_pages, "shared_kernel", offered)
    with triton_interpreter.interpreted():
        yield names


@pytest.fixture(scope="module")
def asked():
    rng = random.Random()
    pairs = [recall.make_prompt(rng, 200) for _ in range(2)]
    # Another question about the first text, whose pages are reused, and a text asked twice
    return [*pairs, (pairs[0][0][:-1] + "a", None), pairs[1]]


@pytest.mark.parametrize("budget", [64, 512])
def test_a_memory_budget_holds_bounds_and_copies_too(budget) -> None:
    nbytes = 2 * 10**6
    given = {"max_total_tokens": None, "memory": MemoryBudget(nbytes=nbytes)}
    _, dense = runner_of(None, **given)
    _, runner = runner_of(budget, **given)
    backend, pool = runner.backend, runner.context.token_to_kv_pool
    copies = backend.chosen.context.token_to_kv_pool
    page = (pool.nbytes + backend.bounds.nbytes) // (pool.num_slots // PAGE)
    assert nbytes - page < pool.nbytes + backend.bounds.nbytes + copies.nbytes <= nbytes
    assert pool.size < dense.context.token_to_kv_pool.size


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


@pytest.mark.turns(2)
def test_a_budget_of_all_keys_has_the_texts_of_dense_attention(asked, kernels) -> None:
    _, dense = run(None, asked)
    runner, sparse = run(512, asked)
    assert kernels in (None, ["chosen_pages"])
    assert isinstance(runner.backend, SparseAttnBackend)
    assert sparse == dense


@pytest.mark.turns(2)
def test_the_bounds_of_every_decode_step_are_those_of_the_pool(monkeypatch, asked, kernels) -> None:
    plain, seen = SparseAttnBackend.forward_decode, []

    def checked(self, call, batch):
        layer_id = call.layer.layer_id
        keys = self.context.token_to_kv_pool.get_key_buffer(layer_id)
        table = self.context.req_to_token_pool.req_to_token
        lower, upper = self.bounds.of(layer_id)
        for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens, strict=True):
            for slots in table[row, :length].long().split(PAGE):
                page = int(slots[0]) // PAGE
                assert torch.equal(lower[page], keys[slots].amin(0))
                assert torch.equal(upper[page], keys[slots].amax(0))
                seen.append(page)
        return plain(self, call, batch)

    monkeypatch.setattr(SparseAttnBackend, "forward_decode", checked)
    run(64, asked)
    assert len(seen) > len(set(seen)) > 5


def test_a_decision_says_what_is_approximate() -> None:
    request = Request.parse(
        "dtype=bf16,head_dim=128,num_q_heads=8,num_kv_heads=2,page_size=16,"
        "sparse=quest,sparse_budget=256"
    )
    decision = solve(request, Platform.parse("cpu:x86_64"), OFFERS)
    assert "decode reads 256 tokens" in decision.summary()
    plain = solve(request.replace(sparse=None, sparse_budget=None), decision.platform, OFFERS)
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
