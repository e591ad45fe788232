"""Mixed steps that are taken as two: prompts in tiles, decoding requests in shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import ForwardBatch, ForwardMode, Platform, Plugins, SpecInput
from attnmux.testing import Candidate
from attnmux.testing.cases.case import extend
from attnmux.testing.run.runner import run_case
from attnmux.transformers import (
    Engine,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    recall,
    run_prompts,
)
from attnmux.triton.plugin import TRITON

pytest.importorskip("triton")

from attnmux.emulators.gluon import emulated
from attnmux.triton.attention import backend, step_parts
from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.attention.step_parts import StepCosts, parts_of
from attnmux.triton.launches import dispatch

HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
MIXED = ForwardMode.MIXED
PROMPTS_FIRST = ((0, 21), (17, 8), (40, 1), (5, 1))
PROMPTS_LAST = ((40, 1), (5, 1), (9, 1), (17, 8), (0, 21))
IN_TURNS = ((17, 8), (40, 1), (5, 3))


def step_of(*requests, in_capture=False, host=True, hides=False, trailing=0):
    cached, new = (torch.tensor(each, dtype=torch.int32) for each in zip(*requests, strict=True))
    count, tokens = len(requests), int(new.sum()) + trailing
    spec = SpecInput(draft_token_num=1, custom_mask=torch.ones(9, dtype=torch.bool))
    batch = ForwardBatch(
        forward_mode=MIXED,
        batch_size=count,
        req_pool_indices=torch.arange(count),
        seq_lens=cached + new,
        seq_lens_cpu=cached + new if host else None,
        out_cache_loc=torch.arange(tokens),
        positions=torch.zeros(tokens, dtype=torch.int64),
        extend_seq_lens=new,
        extend_seq_lens_cpu=new if host else None,
        extend_prefix_lens=cached,
        extend_num_tokens=tokens,
        spec_info=spec if hides else None,
    )
    return TritonStep.of(batch, in_capture=in_capture)


LONG = 9_000
"""Keys of a decoding request that is worth a launch of its own beside a few tiles."""
COSTS = StepCosts(group=4, kv_heads=8, columns=256, bits=16, height=192, units=1, most_keys=1 << 20)


def costs(heads: str, columns: int, *, height: int, **changed: Any) -> StepCosts:
    """heads: of queries and of keys, as in "32/8"."""
    q_heads, kv_heads = map(int, heads.split("/"))
    fields = {"group": q_heads // kv_heads, "kv_heads": kv_heads, "columns": columns}
    return replace(COSTS, units=132, height=height, **fields, **changed)


MEASURED = {
    "63 on 8,192": (((0, 2048), *[(8191, 1)] * 63), costs("32/8", 256, height=192), True),
    "16 on 2,000": (((0, 4096), *[(1999, 1)] * 16), costs("32/8", 256, height=192), True),
    "30 on 3,000": (((4096, 1024), *[(2999, 1)] * 30), costs("16/4", 128, height=192), False),
    "8 on 1,000": (((0, 512), *[(999, 1)] * 8), costs("32/8", 256, height=192), False),
    "8 bits": (
        (*[(1211, 1563)] * 2, *[(680, 1)] * 18),
        costs("32/8", 320, height=128, bits=8, widens=True),
        True,
    ),
    "50 on 10,850": (((356, 2956), *[(10849, 1)] * 50), costs("32/2", 192, height=192), True),
    "7 on 1,094": ((*[(0, 1525)] * 2, *[(1093, 1)] * 7), costs("64/32", 160, height=192), True),
    "7 on 12,175": (((5049, 1241), *[(12174, 1)] * 7), costs("32/4", 512, height=128), False),
    "a window of 4,095": (
        ((409, 2452), *[(13807, 1)] * 6),
        costs("8/4", 512, height=128, most_keys=4096),
        True,
    ),
    "6 on 7,240": (((0, 1167), *[(7239, 1)] * 6), costs("56/8", 512, height=128), True),
    "24 on 10,898": (
        (*[(3889, 1275)] * 2, *[(10897, 1)] * 24),
        costs("40/8", 160, height=192),
        True,
    ),
    "19 on 273, 8 bits": (
        (*[(0, 1612)] * 2, *[(272, 1)] * 19),
        costs("64/8", 192, height=192, bits=8, widens=True),
        True,
    ),
    "6 on 9,695": (((7328, 2929), *[(9694, 1)] * 6), costs("7/1", 224, height=192), False),
}
"""Steps of an H200, and whether two launches were faster: benchmarks/results/grid-h200.md."""


@pytest.mark.parametrize("name", MEASURED)
def test_the_faster_way_is_taken(name):
    requests, costs, is_parted = MEASURED[name]
    assert bool(parts_of(step_of(*requests), costs)) == is_parted


PARTS = {
    "decoding last": (((0, 21), (17, 8), (LONG, 1), (5, 1)), slice(2, 4), slice(29, 31)),
    "decoding first": (((LONG, 1), (5, 1), (17, 8)), slice(0, 2), slice(0, 2)),
    "decoding at both ends": (((5, 1), (17, 8), (LONG, 1)), slice(2, 3), slice(9, 10)),
    "prompts of one token are no decoding": (
        ((0, 1), (17, 8), (LONG, 1)),
        slice(2, 3),
        slice(9, 10),
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_mixed_step(name):
    requests, decoding_requests, decoding_tokens = PARTS[name]
    prompts, decoding = parts_of(step_of(*requests), COSTS)
    assert (decoding.requests, decoding.tokens) == (decoding_requests, decoding_tokens)
    assert (decoding.step.queries, prompts.step.queries) == (1, None)
    tokens = prompts.step.batch.num_tokens + decoding.step.batch.num_tokens
    assert tokens == sum(new for _, new in requests)
    lens = [cached + 1 for cached, _ in requests[decoding_requests]]
    assert (decoding.step.lens.tolist(), decoding.step.lens_shift) == (lens, -1)


WHOLE = {
    "few keys": dict(requests=((0, 21), (30, 1))),
    "a window leaves few keys": dict(requests=((0, 21), (LONG, 1)), most_keys=31),
    "decoding in the middle": dict(requests=((0, 21), (LONG, 1), (0, 21))),
    "decoding alone": dict(requests=((LONG, 1), (LONG, 1))),
    "decoding and a request without new tokens": dict(requests=((9, 0), (LONG, 1), (LONG, 1))),
    "prompts alone": dict(requests=((LONG, 2), (LONG, 3))),
    "in a graph": dict(requests=((0, 21), (LONG, 1)), in_capture=True),
    "lengths on the device": dict(requests=((0, 21), (LONG, 1)), host=False),
    "a mask": dict(requests=((0, 21), (LONG, 1)), hides=True),
    "padding's tokens": dict(requests=((0, 21), (LONG, 1)), trailing=2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_steps_that_stay_whole(name):
    given = dict(WHOLE[name])
    most_keys = given.pop("most_keys", COSTS.most_keys)
    step = step_of(*given.pop("requests"), **given)
    assert parts_of(step, replace(COSTS, most_keys=most_keys)) == ()


CASES = {
    "plain": {},
    "window pool": {"windows": (8, None), "window_pool": True, "sinks": True, "lse": True},
    "chunks": {"attention_chunk": 16},
    "8 bits": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
    "dims": {"head_dim": 192, "v_head_dim": 128},
    "padded": {"head_dim": 80, "v_head_dim": 80, "lse": True},
}


@pytest.mark.parametrize("requests", [PROMPTS_FIRST, PROMPTS_LAST, IN_TURNS])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.turns(2)
def test_agrees_with_reference(name, requests, run_mixed):
    parted = run_mixed(CASES[name], extend(*requests, mode=MIXED))
    assert bool(parted) == (requests != IN_TURNS)


def test_a_call_with_its_own_kv_takes_the_step_whole(run_mixed):
    assert run_mixed({"save_kv_cache": False}, extend((0, 21), (0, 1), mode=MIXED)) == []


@pytest.fixture
def run_mixed(monkeypatch, parted):
    """Runs a step of the suite's plain layers on emulated kernels for Hopper; the parts that its
    metadata had."""
    monkeypatch.setattr(dispatch, "can_compile", lambda address: True)
    candidate = Candidate(
        card=replace(TRITON, requires=(), factory="attnmux.triton.attention.factory:triton"),
        platform=HOPPER,
        device="cpu",
        factory=lambda context, options: TritonBackend(context, options, compute_units=3),
    )
    plain = next(case for case in candidate.cases((16,)) if case.name.startswith("mixed-page16"))

    def run(changes, step):
        with emulated():
            outcome = run_case(candidate, replace(plain, steps=(step,), host_lens=True, **changes))
        assert outcome.status == "passed", outcome.message or outcome.reasons
        return parted

    return run


ANSWERS = {
    "The red door opens with R417, the blue one with B92. ?R": "417",
    "k417 x9 k22 z1 ?z": "1",
    "a1 b2 ?b": "2",
}


def test_an_engine_answers_from_parted_steps(parted):
    """Prompts run in chunks, of which later ones run beside the decoding of earlier prompts."""
    checkpoint = open_checkpoint(recall.PATH)
    (offer,) = (one for one in Plugins.load(("triton",), ()).offers() if one.card.name == "triton")
    card = replace(offer.card, requires=(), factory="attnmux.triton.attention.factory:triton")
    options = RunnerOptions(
        max_batch_size=4, max_context_len=128, max_total_tokens=512, device="cpu", graph=False
    )
    runner = load_runner(checkpoint, HOPPER, [replace(offer, card=card)], options)
    tokenizer = checkpoint.require_tokenizer()
    engine = Engine(
        runner, tokenizer=tokenizer, stop_ids=checkpoint.stop_ids(runner.model), prefill_tokens=24
    )
    prompts = [Prompt(token_ids=tokenizer(text)["input_ids"], max_new_tokens=6) for text in ANSWERS]
    found = run_prompts(engine, prompts)
    assert [each.text for each in found.results] == list(ANSWERS.values())
    assert parted


@pytest.fixture
def parted(monkeypatch):
    """Lets every mixed step be parted; the parts that metadata had."""
    monkeypatch.setattr(step_parts, "LEAST_VALUES", 1)
    monkeypatch.setattr(step_parts, "SECOND_LAUNCH_US", -1e9)
    parts = []

    def noted(*given):
        found = parts_of(*given)
        parts.extend(found)
        return found

    monkeypatch.setattr(backend, "parts_of", noted)
    return parts
