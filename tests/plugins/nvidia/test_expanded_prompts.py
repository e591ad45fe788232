"""Long MLA prompts with the heads of the expanded latent on FlashAttention 3, emulated."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import (
    Platform,
    Plugins,
    Policy,
    Request,
    UpProjection,
    build,
    solve,
)
from attnmux.emulators.candidates import SGL_FLASH_ATTN as FA3
from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.mla import make as make_fa3_mla
from attnmux.parts.chunked_prefix import ChunkedPrefixBackend, expanded_context
from attnmux.testing import Case, extend, make_setup
from attnmux.testing.adapters.tests import LATENT, AdapterWorld

HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
DEEPSEEK = Request.parse(
    "kind=mla,dtype=bf16,num_q_heads=16,num_kv_heads=1,head_dim=192,v_head_dim=128,"
    "kv_lora_rank=512,qk_rope_head_dim=64,chunked_prefix=true"
)
SETTINGS = {**LATENT, "num_q_heads": 4, "max_context_len": 1024, "page_size": 16}
WORLD = AdapterWorld(library=make_fa3_mla, kernels=FA3, platform=HOPPER, settings=SETTINGS)


@pytest.mark.parametrize(
    "step",
    [
        extend((600, 190), (0, 7), (300, 200)),
        extend((0, 200), (0, 3)),
        extend((400, 250), padding=2, trailing=3),
    ],
)
def test_the_answer_is_that_of_absorbed_attention(step) -> None:
    world = WORLD.world(step)
    absorbed, expanded = WORLD.backend(world.context), expanded_context(world.context)
    ours = ChunkedPrefixBackend(
        absorbed=absorbed,
        expanded=[FA3Backend(expanded, {"num_splits": 0}, FA3) for _ in range(3)],
        chunk_bytes=128 * 4 * (192 + 256) * 2,
    )
    prepared = WORLD.prepare(world, step)
    projection = UpProjection.of(world.random(4 * 256, 512) / 512**0.5, num_heads=4, v_head_dim=128)
    for given in prepared.inputs:
        q = world.random(prepared.batch.num_tokens, 4, 192)
        answers = []
        for backend in (absorbed, ours):
            backend.init_forward_metadata(prepared.batch)
            answers.append(
                backend.forward_latent(
                    q, given.k, given.k_rope, given.layer, prepared.batch, projection
                )[: prepared.num_real_tokens]
            )
        assert ours.runs_expanded
        torch.testing.assert_close(answers[1], answers[0], atol=2e-2, rtol=2e-2)


def test_build_rehearses_the_layers_that_no_pool_holds(benchmark) -> None:
    """With the libraries' own loaders, as on a GPU."""
    request = {**SETTINGS, "v_head_dim": 128}
    world = make_setup(Case(name="prompts", steps=(extend((9, 4)),), **request), HOPPER, "cpu")
    asked = world.context.request.replace(chunked_prefix=True, phases=("extend", "decode"))
    decision = solve(asked, HOPPER, Plugins.load().offers())
    with importlib.import_module("benchmarks.emulated").emulated_libraries():
        backend = build(decision, replace(world.context, request=decision.request))
    assert isinstance(backend, ChunkedPrefixBackend)
    assert {type(each).__name__ for each in backend.expanded} == {"FA3Backend"}


@pytest.mark.parametrize("named", [None, "flashmla", "flashinfer_mla", "triton"])
def test_fa3_expands_the_prompts_of_every_mla_backend_on_hopper(named) -> None:
    policy = Policy(backend=named)
    decision = solve(DEEPSEEK, HOPPER, Plugins.load().offers(), policy)
    assert decision.answer("expanded_prompts", "prompts", "extend") is not None
    assert decision.answer("expanded_prompts", "prompts", "extend").address == "nvidia/fa3"


@pytest.mark.parametrize(
    "changes", [{"chunked_prefix": False}, {"kind": "nsa"}, {"deterministic": True}]
)
def test_other_requests_have_no_expanded_prompts(changes) -> None:
    decision = solve(DEEPSEEK.replace(**changes), HOPPER, Plugins.load().offers())
    assert decision.answer("expanded_prompts", "prompts", "extend") is None


@pytest.fixture
def benchmark(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    return importlib.import_module("benchmarks.long_prompts")


def test_the_benchmark_runs_on_a_cpu(benchmark, tmp_path) -> None:
    path = tmp_path / "figures.json"
    given = ["--dry-run", "--rounds", "1", "--json", str(path)]
    result = CliRunner().invoke(benchmark.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == len(benchmark.TINY)


@pytest.mark.parametrize(
    ("gains", "crossing"),
    [
        ((0.5, 0.8, 1.25, 2.0), 90.5),
        ((1.1, 1.5, 2.0, 2.5), 32.0),
        ((0.5, 0.6, 0.7, 0.8), None),
    ],
)
def test_a_crossing_lies_between_the_measured_lengths(benchmark, gains, crossing) -> None:
    decision = solve(DEEPSEEK, HOPPER, Plugins.load().offers())
    rows = [
        benchmark.Row(
            case=benchmark.extend(1, new, benchmark.LONG, kind="mla", q_heads=16),
            decision=decision,
            gain=gain,
            expanded_us=9.0,
        )
        for new, gain in zip((32, 64, 128, 256), gains, strict=True)
    ]
    found = [dict(each.values) for each in benchmark.crossings(rows)]
    assert found == ([] if crossing is None else [{"crossing": crossing}])
