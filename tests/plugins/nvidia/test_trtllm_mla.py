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
from attnmux.emulators.candidates import GENERATED_LATENT as EMULATED
from attnmux.nvidia.cards.trtllm_mla import TRTLLM_MLA
from attnmux.nvidia.latent.trtllm_mla import Padding, make
from attnmux.testing import (
    AttentionBackendTests,
    Step,
    decode,
    extend,
    verify,
)
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterWorld,
    LatentDecodeTests,
    assert_passes,
    check_graphs_side_by_side,
    outputs,
    recorded,
)

SETTINGS: dict[str, Any] = {**LATENT, "max_context_len": 256, "page_size": 32}
WORLDS = {
    arch: AdapterWorld(
        library=make,
        kernels=EMULATED,
        platform=Platform.parse(f"nvidia:{arch},cuda=13.0"),
        settings=SETTINGS,
    )
    for arch in ("sm100", "sm120")
}
GENERATED, XQA = WORLDS.values()
CANDIDATES = {
    arch: world.candidate(TRTLLM_MLA, core_count=8, workspace_bytes=16 << 20)
    for arch, world in WORLDS.items()
}
"""On devices of few processors, whose partial results take little memory."""


class TestOnDatacenterBlackwell(AttentionBackendTests):
    backend = CANDIDATES["sm100"]
    page_sizes = (32, 64)


class TestOnDesktopBlackwell(AttentionBackendTests):
    backend = CANDIDATES["sm120"]
    page_sizes = (64,)


class TestGeneratedAdapter(LatentDecodeTests):
    adapter = GENERATED


class TestXQAAdapter(LatentDecodeTests):
    adapter = XQA


def test_graphs_of_several_modes_live_side_by_side() -> None:
    check_graphs_side_by_side(GENERATED, decode(40, 7), verify(3, 9, 21, 30, 5), spec_topk=1)


def passes(arch: str, step: Step, **settings: Any) -> None:
    assert_passes(CANDIDATES[arch], step, **{**LATENT, "page_size": 32, **settings})


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("arch", WORLDS)
def test_requests_without_keys(arch, graph):
    passes(arch, decode(9, 0, 70), graph=graph)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize(
    "step",
    [
        extend((20, 3), (64, 1), (9, 4), mode=ForwardMode.DRAFT_EXTEND),
        extend((0, 1), (31, 0), (0, 5), mode=ForwardMode.DRAFT_EXTEND, padding=1, trailing=3),
        extend((124, 4), (3, 2), mode=ForwardMode.DRAFT_EXTEND),
    ],
)
def test_drafts_of_different_numbers(step, kv_dtype):
    """The last one's keys end where a request's may: its padding sees keys beyond the limit."""
    passes("sm100", step, spec_topk=1, kv_dtype=kv_dtype, kv_scales=(0.5, 3.0), max_context_len=128)


@pytest.mark.parametrize("heads", [1, 96, 128])
def test_xqa_takes_fewer_heads_padded(heads):
    passes("sm120", decode(9, 33), num_q_heads=heads)


@pytest.mark.parametrize(("page_size", "multiple"), [(32, 4), (64, 2)])
@pytest.mark.parametrize("longest", [5, 129, 250])
def test_tables_are_whole_tiles(page_size, multiple, longest):
    settings = {"page_size": page_size, "max_context_len": 250, "host_lens": True}
    calls = GENERATED.calls(decode(longest, 3), **settings)
    assert calls[0].args[6].shape[1] == -(-longest // 128) * multiple


def test_graphs_of_a_context_that_is_no_whole_tile():
    passes("sm100", decode(9, 200), graph=True, max_context_len=250)


def test_scales_by_kernel():
    """XQA multiplies logits by the scale of the keys itself."""
    factors = {}
    for arch, world in WORLDS.items():
        kernels, calls = recorded(EMULATED)
        stored = {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3)}
        backend, prepared = world.prepared(decode(5), kernels=kernels, **stored)
        outputs(backend, prepared)
        scales = calls[0].kwargs
        scaling = prepared.inputs[0].layer.scaling
        factors[arch] = scales["bmm1_scale"] / scaling, scales["bmm2_scale"]
        assert calls[0].args[0].dtype == torch.float8_e4m3fn
    assert factors == {"sm100": (0.5, 0.5), "sm120": (1.0, 0.5)}


def test_where_padded_drafts_lie():
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    lens = torch.tensor([9, 4, 7], dtype=torch.int32)
    padding = Padding.of(bounds, lens, each=3, num_tokens=6)
    assert padding.rows.tolist() == [0, 1, 6, 7, 8, 9]
    assert padding.kv_lens.tolist() == [10, 7, 7]
    tokens = torch.arange(1.0, 7)[:, None]
    spread = padding.spread(tokens)
    assert spread.flatten().tolist() == [1, 2, 0, 0, 0, 0, 3, 4, 5]
    assert padding.gather(spread).flatten().tolist() == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("step", [decode(9, 30), verify(3, 9, 30)])
def test_out_is_written_where_it_lies(step):
    kernels, calls = recorded(EMULATED)
    backend, prepared = GENERATED.prepared(step, kernels=kernels, spec_topk=1)
    expected = outputs(backend, prepared)[0]
    first = replace(prepared, inputs=prepared.inputs[:1])
    out = torch.full_like(expected, 7)
    assert outputs(backend, first, out=out)[0] is out
    assert calls[-1].kwargs["out"].data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    wide = torch.full((len(out), 16, 1024), 7, dtype=out.dtype)[..., :512]
    assert torch.equal(outputs(backend, first, out=wide)[0], expected)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"kv_dtype": "fp8_e5m2"}, "token_to_kv_pool"),
        ({"dtype": "float16"}, "token_to_kv_pool"),
        ({"page_size": 48}, "page_size"),
    ],
)
def test_pools_that_are_refused(settings, argument):
    GENERATED.refuses(f"^{argument}: ", decode(3), **settings)


def test_a_platform_without_kernels():
    old = replace(GENERATED, platform=Platform.parse("nvidia:sm90,cuda=13.0"))
    old.refuses("capability 10 or 12, got sm90", decode(3))


def test_a_workspace_that_is_too_small():
    GENERATED.refuses("too few", decode(3), options={"workspace_bytes": 64 << 20})


def test_drafts_have_no_kernel_on_desktop_blackwell():
    with pytest.raises(InvalidInput, match="3 queries a request"):
        outputs(*XQA.prepared(verify(3, 9), spec_topk=1))


def test_there_is_no_lse():
    with pytest.raises(InvalidInput, match="lse"):
        outputs(*GENERATED.prepared(decode(3)), lse=torch.empty(1, 16))


def test_drafts_of_different_numbers_are_not_captured():
    step = extend((5, 1), mode=ForwardMode.DRAFT_EXTEND)
    GENERATED.captures_no("DRAFT_EXTEND eagerly", step, spec_topk=1)


def test_the_trial_launches_what_is_served():
    calls = GENERATED.rehearsed(decode(3), verify(3, 5), extend((0, 3)), spec_topk=1)
    assert [call.args[0].shape[1] for call in calls] == [1, 3]


def test_kernels_that_do_not_run_here():
    error = RuntimeError("Missing TRTLLM-GEN kernel\nmore lines")
    said = str(GENERATED.fails(error, "trtllm_batch_decode_with_kv_cache_mla", step=decode(3)))
    assert re.search(r"nvidia/trtllm_mla .*Missing TRTLLM-GEN .*nvcc", said)
