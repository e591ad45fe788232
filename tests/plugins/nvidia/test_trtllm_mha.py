from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import (
    ForwardMode,
    InvalidInput,
    Platform,
)
from attnmux.emulators.candidates import GENERATED as EMULATED
from attnmux.nvidia.cards.trtllm_mha import TRTLLM_MHA
from attnmux.nvidia.trtllm_mha import TRTLLMMHABackend, TRTLLMMHAKernels, make
from attnmux.nvidia.trtllm_mha.decode import chain_mask
from attnmux.testing import (
    AttentionBackendTests,
    Case,
    Step,
    decode,
    extend,
    prepare_step,
    run_case,
    verify,
)
from attnmux.testing.adapters.checks import check_large_queries_saturate
from attnmux.testing.adapters.tests import (
    AdapterTests,
    AdapterWorld,
    assert_passes,
    check_graphs_side_by_side,
    outputs,
    recorded,
)

OPTIONS = {"workspace_bytes": 64 << 20}
SETTINGS: dict[str, Any] = {"max_context_len": 256, "page_size": 16}


def small(context: Any, options: Any, kernels: TRTLLMMHAKernels) -> TRTLLMMHABackend:
    """The adapter with a workspace that the emulators have to clear in little time."""
    return TRTLLMMHABackend(context, {**OPTIONS, **options}, kernels)


WORLDS = {
    arch: AdapterWorld(
        library=replace(make, backend=small),
        kernels=EMULATED,
        platform=Platform.parse(f"nvidia:{arch},cuda=13.0"),
        settings=SETTINGS,
    )
    for arch in ("sm90", "sm100", "sm120")
}
HOPPER = WORLDS["sm90"]
CANDIDATES = {
    arch: world.candidate(TRTLLM_MHA, core_count=8, workspace_bytes=16 << 20)
    for arch, world in WORLDS.items()
}
"""On devices of few processors, whose partial results take little memory."""


@pytest.mark.turns(32)
class TestOnHopper(AttentionBackendTests):
    backend = CANDIDATES["sm90"]
    page_sizes = (16,)


class TestOnDatacenterBlackwell(AttentionBackendTests):
    backend = CANDIDATES["sm100"]
    page_sizes = (128,)


@pytest.mark.turns(32)
class TestOnDesktopBlackwell(AttentionBackendTests):
    backend = CANDIDATES["sm120"]
    page_sizes = (64,)


class TestTiledAdapter(AdapterTests):
    adapter = HOPPER


class TestTiledPrefillAdapter(AdapterTests):
    adapter = HOPPER
    step = extend((20, 3), (0, 9))


class TestGeneratedAdapter(AdapterTests):
    adapter = WORLDS["sm100"]


class TestGeneratedPrefillAdapter(AdapterTests):
    adapter = WORLDS["sm100"]
    step = extend((20, 3), (0, 9))


def passes(arch: str, step: Step, **settings: Any) -> None:
    assert_passes(CANDIDATES[arch], step, **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("arch", "functions"),
    [
        ("sm90", ["xqa_batch_decode_with_kv_cache", "trtllm_fmha_v2_prefill"]),
        ("sm100", ["trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"]),
        ("sm120", ["xqa_batch_decode_with_kv_cache", "trtllm_fmha_v2_prefill"]),
    ],
)
def test_kernels_by_platform(arch, functions):
    for step in decode(5), verify(2, 5), extend((3, 4)):
        expected = functions[step.mode is ForwardMode.EXTEND]
        assert {call.name for call in WORLDS[arch].calls(step, spec_topk=1)} == {expected}


@pytest.mark.parametrize("arch", CANDIDATES)
@pytest.mark.parametrize("step", [decode(45, 3, 17), extend((0, 9), (20, 5))])
def test_windows_of_nothing_and_of_more_than_all_keys(arch, step):
    windows = (0, 1, 200) if arch != "sm120" or step.mode.is_decode() else (None,)
    passes(arch, step, windows=windows)


def test_verify_steps_with_a_window_have_no_kernel_on_hopper():
    case = Case(name="w", steps=(verify(2, 9),), windows=(8, None), spec_topk=1, **SETTINGS)
    assert run_case(CANDIDATES["sm90"], case).status == "refused"
    assert run_case(CANDIDATES["sm100"], case).status == "passed"
    with pytest.raises(InvalidInput, match="a window in a verify step"):
        HOPPER.prepared(verify(2, 9), spec_topk=1, windows=(8, None))


@pytest.mark.parametrize("arch", CANDIDATES)
def test_drafts_of_different_numbers(arch):
    step = extend((20, 3), (0, 1), (33, 0), (5, 4), mode=ForwardMode.DRAFT_EXTEND, trailing=2)
    passes(arch, step, page_size=32, spec_topk=1)


@pytest.mark.parametrize("host_lens", [True, False])
@pytest.mark.parametrize("arch", CANDIDATES)
def test_rows_of_no_request_become_zeros(arch, host_lens):
    step = extend((4, 9), (0, 20), trailing=3)
    backend, prepared = WORLDS[arch].prepared(step, host_lens=host_lens)
    first = replace(prepared, inputs=prepared.inputs[:1])
    out = torch.full_like(prepared.inputs[0].q, torch.nan)
    assert outputs(backend, first, out=out)[0] is out
    assert out[:29].isfinite().all()
    assert not out[29:].any()


@pytest.mark.parametrize("arch", CANDIDATES)
@pytest.mark.parametrize("step", [decode(9, 30), extend((0, 9), (3, 4))])
def test_rows_of_a_wider_tensor(arch, step):
    backend, prepared = WORLDS[arch].prepared(step)
    given = prepared.inputs[0]
    expected = outputs(backend, prepared)[0]
    width = given.q[0].numel()
    wide = torch.empty(len(given.q), 2 * width + 3, dtype=given.q.dtype)
    for start in (0, 8):
        q = wide[:, start : start + width].view(given.q.shape).copy_(given.q)
        part = replace(prepared, inputs=(replace(given, q=q),))
        assert torch.equal(outputs(backend, part)[0], expected)
    out = torch.full_like(given.q, 7)
    assert outputs(backend, part, out=out)[0] is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({}, [0, 7]),
        ({"sinks": True}, [0, 7]),
        ({"kv_dtype": "fp8_e4m3"}, [1, 7]),
        ({"arch": "sm100"}, [1, 7]),
    ],
)
def test_lengths_are_the_batchs_own_where_no_request_is_empty(settings, given):
    """Where one is, kernels that write no 0 for it are given a key of it."""
    kernels, calls = recorded(EMULATED)
    settings = {"arch": "sm90", **settings, "host_lens": True}
    world = WORLDS[settings.pop("arch")]
    backend, prepared = world.prepared(decode(40, 7), kernels=kernels, **settings)
    outputs(backend, prepared)
    assert calls[0].args[4] is prepared.batch.seq_lens
    outputs(*world.prepared(decode(0, 7), kernels=kernels, **settings))
    assert calls[-1].args[4].tolist() == given


@pytest.mark.parametrize("sinks", [False, True])
def test_requests_without_keys_cost_xqa_no_launch(sinks):
    """A sink makes their rows 0: a layer's own, or one below every logit."""
    made, calls = HOPPER.captured(decode(40, 7), sinks=sinks)
    for call, given in zip(calls, made.inputs, strict=True):
        assert call.args[4] is made.batch.seq_lens
        assert (call.kwargs["sinks"] is given.layer.sinks) == sinks
        assert sinks or call.kwargs["sinks"].tolist() == [-9e4] * given.layer.tp_q_head_num


@pytest.mark.parametrize("arch", CANDIDATES)
def test_heads_of_a_group_that_xqa_compiles_for(arch):
    assert WORLDS[arch].calls(decode(3), num_q_heads=32, num_kv_heads=2)
    more = {"num_q_heads": 34, "num_kv_heads": 2}
    if arch == "sm100":
        assert WORLDS[arch].calls(decode(3), **more)
    else:
        with pytest.raises(InvalidInput, match="17 query heads of one KV head"):
            WORLDS[arch].calls(decode(3), **more)


@pytest.mark.parametrize(
    ("group", "drafts", "is_served"), [(3, 10, True), (3, 11, False), (8, 5, True), (16, 3, True)]
)
def test_sinks_of_drafts_are_those_of_their_heads(group, drafts, is_served):
    step = verify(drafts, 9, 20)
    shape = {"num_q_heads": 2 * group, "num_kv_heads": 2, "sinks": True, "spec_topk": 1}
    case = Case(name="sinks", steps=(step,), **SETTINGS, **shape)
    outcome = run_case(CANDIDATES["sm90"], case)
    assert outcome.status == ("refused" if 32 % group else "passed"), outcome.message
    if is_served:
        HOPPER.prepared(step, **shape)
    else:
        with pytest.raises(InvalidInput, match=f"groups of {group} heads"):
            HOPPER.prepared(step, **shape)


def test_the_decode_kernels_memory_is_their_own():
    """fmha_v2 leaves a count where they want zeros."""
    kernels, calls = recorded(EMULATED)
    steps = extend((0, 30), (5, 3)), decode(31, 9)
    world = HOPPER.world(*steps, kv_in_pool=True)
    backend = HOPPER.backend(world.context, kernels=kernels)
    for step in steps:
        prepared = prepare_step(world, step)
        backend.init_forward_metadata(prepared.batch)
        outputs(backend, prepared)
    by_function = {call.name: call.args[2] for call in calls}
    counts, counters = by_function.values()
    places = {memory.untyped_storage().data_ptr() for memory in (counts, counters)}
    assert len(places) == 2
    assert counts[:4].any()
    assert not counters.any()


def test_staged_keys_are_those_of_the_step_alone():
    calls = HOPPER.calls(extend((16, 5), (0, 3)), windows=(None, 8), host_lens=True)
    first, second = (call.args[0][1] for call in calls)
    assert first.shape == (3, 2, 16, 2, 128)
    assert first.data_ptr() == second.data_ptr()
    assert calls[0].kwargs["block_tables"].tolist() == [[0, 1], [2, 2]]
    assert [call.kwargs["mask_mode"] for call in calls] == ["causal", "sliding_window"]


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_queries_beyond_the_range_of_fp8_saturate(arch):
    check_large_queries_saturate(WORLDS[arch], kv_dtype="fp8_e4m3")


@pytest.mark.parametrize("drafts", [2, 16, 17, 33])
def test_masks_of_chains(drafts):
    mask = chain_mask(2, drafts, torch.device("cpu"))
    words = -(-drafts // 32) * 2
    assert (mask.dtype, mask.shape) == (torch.uint16, (2, drafts, words))
    assert mask.is_contiguous()
    bits = torch.tensor(mask.tolist()).unsqueeze(-1) >> torch.arange(16) & 1
    seen = torch.zeros(drafts, 16 * words, dtype=torch.int64)
    seen[:, :drafts] = torch.ones(drafts, drafts, dtype=torch.int64).tril()
    assert torch.equal(bits.flatten(2), seen.expand(2, -1, -1))


@pytest.mark.parametrize("arch", CANDIDATES)
def test_graphs_of_several_modes_live_side_by_side(arch):
    check_graphs_side_by_side(WORLDS[arch], decode(40, 7), verify(3, 9, 21, 30, 5), spec_topk=1)


@pytest.mark.parametrize("arch", CANDIDATES)
def test_prefill_is_not_captured(arch):
    WORLDS[arch].captures_no("EXTEND runs without a graph", extend((0, 3)))


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"kv_dtype": "float16"}, "token_to_kv_pool"),
        ({"kv_dtype": "fp8_e5m2"}, "token_to_kv_pool"),
        ({"logit_cap": 2.0}, "layer 1"),
        ({"attention_chunk": 16}, "layer 1"),
        ({"head_dim": 192}, "layer 1"),
        (
            {"kind": "mla", "num_kv_heads": 1, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
            "layer 1",
        ),
    ],
)
def test_pools_and_layers_that_are_refused(settings, argument):
    HOPPER.refuses(f"^{argument}: ", decode(3), **settings)


def test_a_platform_without_kernels():
    old = replace(HOPPER, platform=Platform.parse("nvidia:sm80,cuda=13.0"))
    old.refuses("capability 9, 10 or 12, got sm80", decode(3))


def test_a_workspace_that_is_too_small():
    reason, options = (
        r"workspace_bytes: expected \d+ or more.* too few",
        {"workspace_bytes": 9 << 20},
    )
    HOPPER.refuses(reason, decode(3), options=options)


def test_many_drafts_take_more_workspace():
    step = verify(64, 5)
    settings = {"spec_topk": 1, "num_q_heads": 32}
    context = HOPPER.world(step, **settings).context
    assert context.request.spec_draft_tokens == 64
    least = (8 << 20) + 256 * 64 * 16 * (128 * 4 + 8)
    with pytest.raises(InvalidInput, match=f"expected {least} or more"):
        HOPPER.backend(context, {"workspace_bytes": least - 1})
    outputs(*HOPPER.prepared(step, options={"workspace_bytes": least}, **settings))


def test_the_usual_workspace():
    (first, *_) = HOPPER.calls(decode(3), options={"workspace_bytes": 0})
    assert first.args[2].numel() == 512 << 20


def test_calls_that_are_refused():
    backend, prepared = HOPPER.prepared(extend((0, 3)))
    given = prepared.inputs[0]
    with pytest.raises(InvalidInput, match="lse"):
        outputs(backend, prepared, lse=torch.empty(given.q.shape[:2]))
    k = torch.zeros(3, 2, 128, dtype=given.q.dtype)
    with pytest.raises(InvalidInput, match="save_kv_cache"):
        backend.forward(given.q, k, k, given.layer, prepared.batch, save_kv_cache=False)


@pytest.mark.parametrize("settings", [{"kv_dtype": "fp8_e4m3"}, {"dtype": "float16"}])
def test_prefill_over_anything_but_bfloat16_is_refused_on_hopper(settings):
    with pytest.raises(InvalidInput, match="fmha_v2"):
        HOPPER.prepared(extend((0, 3)), **settings)


def test_trees_are_refused():
    with pytest.raises(InvalidInput, match="custom_mask"):
        HOPPER.prepared(verify(3, 5), spec_topk=4)


def test_the_trial_launches_every_kernel_that_is_needed():
    calls = HOPPER.rehearsed(decode(3), verify(3, 5), extend((0, 3)), spec_topk=1)
    assert {(call.name, call.kwargs.get("q_len_per_req")) for call in calls} == {
        ("xqa_batch_decode_with_kv_cache", 1),
        ("xqa_batch_decode_with_kv_cache", 3),
        ("trtllm_fmha_v2_prefill", None),
    }
    calls = HOPPER.rehearsed(decode(3), windows=(None, 8, 21))
    assert [call.kwargs["window_left"] for call in calls] == [-1, 8]


def test_the_trial_leaves_out_what_another_backend_serves():
    calls = HOPPER.rehearsed(decode(3), extend((0, 3)), kv_dtype="fp8_e4m3")
    assert {call.name for call in calls} == {"xqa_batch_decode_with_kv_cache"}


def test_kernels_that_do_not_run_here():
    error = RuntimeError("Ninja build failed\nmore lines")
    said = str(HOPPER.fails(error, "xqa_batch_decode_with_kv_cache", step=decode(3)))
    assert re.search(r"nvidia/trtllm_mha .*Ninja build failed; .*nvcc", said)
