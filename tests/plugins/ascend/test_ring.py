"""Prompts with expanded heads on `npu_ring_mla`, emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.ascend.ascend import make
from attnmux.ascend.cards.ascend import ASCEND
from attnmux.ascend.ring import AscendRingBackend
from attnmux.ascend.ring_parts import RingPart, prefix_parts
from attnmux.core import (
    ForwardMode,
    InvalidInput,
    Platform,
    Plugins,
    Policy,
    UpProjection,
    build,
    solve,
)
from attnmux.emulators.ascend import KERNELS
from attnmux.parts.chunked_prefix import ChunkedPrefixBackend
from attnmux.testing import AttentionBackendTests, Case, decode, extend, make_setup
from attnmux.testing.adapters.tests import LATENT, AdapterWorld, EagerAdapterTests, assert_passes

HEADS = {"num_q_heads": 16, "num_kv_heads": 16, "head_dim": 192, "v_head_dim": 128}
WORLD = AdapterWorld(
    library=make,
    kernels=KERNELS,
    platform=Platform.parse("ascend:910b"),
    host_lens=True,
    settings=HEADS,
)
CLAUSES = tuple(each for each in ASCEND.clauses if each.v_head_dim.admits(128))
CANDIDATE = WORLD.candidate(replace(ASCEND, clauses=CLAUSES))
CPU = torch.device("cpu")


class TestRingEmulated(AttentionBackendTests):
    """The suite over the clause of the expanded heads alone."""

    backend = CANDIDATE
    page_sizes = (1, 128)
    sampled = 6


class TestRingAdapter(EagerAdapterTests):
    adapter = WORLD
    step = extend((20, 3), (0, 18))
    no_graphs = "lengths"


@pytest.mark.parametrize(
    "step",
    [
        extend((300, 5), (9, 40), (0, 3), (3, 0)),
        extend((2, 50), (0, 3), trailing=2),
        extend((64, 64), (1, 9), mode=ForwardMode.MIXED),
    ],
)
@pytest.mark.parametrize("chunk_keys", [7, 100, 1 << 20])
def test_prefixes_in_parts(step, chunk_keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmux.ascend.ring.CHUNK_BYTES", chunk_keys * 16 * 320 * 2)
    assert_passes(CANDIDATE, step, lse=True, max_context_len=512, **HEADS)
    crossed = replace(step, encoder=(9,) * len(step.lens))
    assert_passes(CANDIDATE, crossed, lse=True, max_context_len=512, **HEADS)


def test_wider_v_takes_two_calls() -> None:
    settings = {**HEADS, "v_head_dim": 192}
    step = extend((40, 5), (0, 3), trailing=1)
    assert_passes(CANDIDATE, step, lse=True, **settings)
    values = [call.kwargs["value"].shape[-1] for call in WORLD.calls(step, **settings)]
    assert values == [128] * len(values)
    assert len(values) == 2 * len(WORLD.calls(step))


def test_the_operator_merges_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmux.ascend.ring.CHUNK_BYTES", 20 * 16 * 320 * 2)
    calls = WORLD.calls(extend((45, 5), (0, 3)), kv_in_pool=True)
    calls = calls[: len(calls) // 2]
    assert [call.name for call in calls] == ["ring_mla"] * 4
    kinds = [(call.kwargs["mask_type"], call.kwargs["calc_type"]) for call in calls]
    assert kinds == [
        ("mask_type_triu", "calc_type_first_ring"),
        *[("no_mask", "calc_type_default")] * 3,
    ]
    assert [call.kwargs["seqlen"].tolist() for call in calls] == [
        [[5, 3], [5, 3]],
        *[[[5], [20]]] * 2,
        [[5], [5]],
    ]
    assert calls[0].kwargs["pre_out"] is None
    assert calls[1].kwargs["pre_out"].shape == (5, 16, 128)
    assert calls[1].kwargs["prev_lse"].shape == (16, 5)


def test_requests_with_fewer_keys_than_queries_are_cut() -> None:
    part = RingPart.of((5, 2, 0, 3), (0,) * 4, (2, 0, 4, 3), CPU)
    assert part is not None
    assert part.seqlen.tolist() == [[2, 2, 1, 3], [2, 2, 2, 3]]
    assert part.rows.tolist() == [0, 1, 2, 3, 4, 7, 8, 9]
    assert part.places.tolist() == [0, 1] * 3 + [6, 7, 8]
    assert RingPart.of((3, 0), (0, 0), (0, 3), CPU) is None
    whole = RingPart.of((2, 1), (0, 0), (2, 7), CPU)
    assert whole.rows is None
    assert whole.places is None


def test_the_parts_of_a_prefix_begin_where_the_last_ended() -> None:
    parts = list(prefix_parts((1, 1, 1), (4, 0, 0), (7, 0, 3), most=6, device=CPU))
    assert [(part.starts, part.lens) for part in parts] == [
        ((4, 0, 0), (3, 0, 3)),
        ((7, 3, 3), (3, 0, 0)),
        ((10, 6, 6), (1, 0, 0)),
    ]
    assert [part.lens for part in prefix_parts((1,), (0,), (20,), most=1, device=CPU)] == [
        *[(3,)] * 6,
        (2,),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_kv_heads": 8},
        {"num_q_heads": 256, "num_kv_heads": 256},
        {"sinks": True},
        {"windows": (3,)},
        {"logit_cap": 30.0},
        {"dtype": "float16"},
    ],
)
def test_what_the_operator_does_not_serve_is_refused(settings: dict[str, Any]) -> None:
    world = WORLD.world(extend((0, 5)), **settings)
    with pytest.raises(InvalidInput):
        WORLD.backend(world.context)


def test_other_steps_than_prompts_are_refused() -> None:
    with pytest.raises(InvalidInput, match="forward_mode: expected EXTEND, got DECODE"):
        WORLD.prepared(decode(5))


@pytest.mark.parametrize(
    "step", [extend((600, 190), (0, 7), (300, 200)), extend((0, 200), (0, 3), trailing=3)]
)
def test_long_prompts_of_mla_run_expanded(step, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model with latents is decided and built, against absorbed attention."""
    library = replace(make, providers={"emulated": lambda: KERNELS})
    monkeypatch.setattr("attnmux.ascend.ascend.make", library)
    monkeypatch.setattr("attnmux.parts.part_attention.PartAttention.MOST_LANES", 2)
    settings = {**LATENT, "num_q_heads": 4, "v_head_dim": 128, "max_context_len": 1024}
    case = Case(name="prompts", steps=(step,), page_size=128, **settings)
    world = make_setup(case, WORLD.platform, "cpu")
    asked = world.context.request.replace(chunked_prefix=True, phases=("extend", "decode"))
    policy = Policy(backend="ascend")
    decision = solve(asked, WORLD.platform, Plugins.load().offers(), policy)
    assert decision.answer("expanded_prompts", "prompts", "extend") is not None
    assert decision.answer("expanded_prompts", "prompts", "extend").address == "ascend/ascend"
    backend = build(decision, replace(world.context, request=decision.request))
    assert isinstance(backend, ChunkedPrefixBackend)
    assert {type(each) for each in backend.expanded} == {AscendRingBackend}
    prepared = WORLD.prepare(world, step)
    weight = world.random(4 * 256, 512) / 512**0.5
    projection = UpProjection.of(weight, num_heads=4, v_head_dim=128)
    for given in prepared.inputs:
        q = world.random(prepared.batch.num_tokens, 4, 192)
        answers = []
        for each in (backend.absorbed, backend):
            each.init_forward_metadata(prepared.batch)
            out = each.forward_latent(
                q, given.k, given.k_rope, given.layer, prepared.batch, projection
            )
            answers.append(out[: prepared.num_real_tokens])
        assert backend.runs_expanded
        torch.testing.assert_close(answers[1], answers[0], atol=2e-2, rtol=2e-2)
