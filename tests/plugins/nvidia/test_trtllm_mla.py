from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardMode
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.emulators.nvidia.flashinfer import trtllm_mla
from attnmux.nvidia.cards.trtllm_mla import TRTLLM_MLA
from attnmux.nvidia.trtllm.trial import try_backend
from attnmux.nvidia.trtllm_mla import Kernels, TRTLLMMLABackend
from attnmux.nvidia.trtllm_mla.padding import Padding
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    World,
    make_world,
    prepare_step,
    run_case,
)
from attnmux.testing.cases import Step, decode, extend, verify

EMULATED = Kernels(
    trtllm_batch_decode_with_kv_cache_mla=trtllm_mla.trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla=trtllm_mla.xqa_batch_decode_with_kv_cache_mla,
)
LATENT: dict[str, Any] = {
    "kind": "mla",
    "num_q_heads": 16,
    "num_kv_heads": 1,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def candidate(arch: str) -> Candidate:
    return Candidate(
        card=replace(TRTLLM_MLA, status="available", requires=()),
        platform=Platform.parse(f"nvidia:{arch},cuda=13.0"),
        device="cpu",
        factory=lambda context, options: TRTLLMMLABackend(context, options, EMULATED),
    )


CANDIDATES = {arch: candidate(arch) for arch in ("sm100", "sm120")}


class TestOnDatacenterBlackwell(AttentionBackendTests):
    backend = CANDIDATES["sm100"]
    page_sizes = (32, 64)


class TestOnDesktopBlackwell(AttentionBackendTests):
    backend = CANDIDATES["sm120"]
    page_sizes = (64,)


class Spy:
    """Kernels that note what they are called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        noting = {field.name: self._noting(field.name) for field in fields(Kernels)}
        self.kernels = Kernels(**noting)

    def _noting(self, name: str):
        function = getattr(EMULATED, name)

        def called(*args, **kwargs):
            self.calls.append({"function": name, "args": args, **kwargs})
            return function(*args, **kwargs)

        return called


def world_of(*steps: Step, arch: str = "sm100", **case_settings: Any) -> World:
    settings = {**LATENT, "max_context_len": 256, "page_size": 32, "kv_in_pool": True}
    case = Case(name="of-this-test", steps=steps, **{**settings, **case_settings})
    return make_world(case, CANDIDATES[arch].platform, "cpu")


def backend_of(world: World, kernels: Kernels = EMULATED) -> TRTLLMMLABackend:
    return TRTLLMMLABackend(world.context, {}, kernels)


def run(world: World, backend: TRTLLMMLABackend, step: Step, **prepared: Any) -> None:
    made = prepare_step(world, step, **prepared)
    backend.init_forward_metadata(made.batch)
    for given in made.inputs:
        backend.forward(given.q, None, None, given.layer, made.batch, q_rope=given.q_rope)


def passes(arch: str, step: Step, **settings: Any) -> None:
    case = Case(name="of-this-test", steps=(step,), **{**LATENT, "page_size": 32, **settings})
    outcome = run_case(CANDIDATES[arch], case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("arch", CANDIDATES)
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
    """The last one's keys end where a request's may: what its queries are said to see is behind."""
    passes("sm100", step, spec_topk=1, kv_dtype=kv_dtype, kv_scales=(0.5, 3.0), max_context_len=128)


@pytest.mark.parametrize("heads", [1, 96, 128])
def test_xqa_takes_fewer_heads_padded(heads):
    passes("sm120", decode(9, 33), num_q_heads=heads)


@pytest.mark.parametrize(("page_size", "multiple"), [(32, 4), (64, 2)])
@pytest.mark.parametrize("longest", [5, 129, 250])
def test_tables_are_whole_tiles(page_size, multiple, longest):
    spy, step = Spy(), decode(longest, 3)
    world = world_of(step, page_size=page_size, max_context_len=250)
    run(world, backend_of(world, spy.kernels), step, host_lens=True)
    width = spy.calls[0]["args"][6].shape[1]
    assert width == -(-longest // 128) * multiple


def test_scales_by_kernel():
    """XQA multiplies logits by the scale of the keys itself."""
    factors = {}
    for arch in CANDIDATES:
        spy, world = Spy(), world_of(decode(5), arch=arch, kv_dtype="fp8_e4m3", kv_scales=(0.5, 3))
        run(world, backend_of(world, spy.kernels), decode(5))
        call = spy.calls[0]
        factors[arch] = call["bmm1_scale"] / world.context.layers[0].scaling, call["bmm2_scale"]
        assert call["args"][0].dtype == torch.float8_e4m3fn
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
    spy, world = Spy(), world_of(step, spec_topk=1)
    backend, made = backend_of(world, spy.kernels), prepare_step(world, step)
    backend.init_forward_metadata(made.batch)
    given = made.inputs[0]

    def forward(out=None):
        return backend.forward(
            given.q, None, None, given.layer, made.batch, q_rope=given.q_rope, out=out
        )

    expected = forward()
    out = torch.full_like(expected, 7)
    assert forward(out) is out
    assert spy.calls[-1]["out"].data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    wide = torch.full((len(out), 16, 1024), 7, dtype=out.dtype)[..., :512]
    assert torch.equal(forward(wide), expected)


def test_expanded_layers_are_not_its_own():
    step = decode(5)
    world = world_of(step)
    heads = {"tp_k_head_num": 16, "tp_v_head_num": 16, "qk_head_dim": 192, "v_head_dim": 128}
    expanded = replace(world.context.layers[0], layer_id=99, kind="mha", **heads)
    context = replace(world.context, layers=(*world.context.layers, expanded))
    backend = TRTLLMMLABackend(context, {}, EMULATED)
    batch = prepare_step(world, step).batch
    backend.init_forward_metadata(batch)
    with pytest.raises(InvalidInput, match="99, mha"):
        backend.forward(torch.zeros(1, 16, 192, dtype=torch.bfloat16), None, None, expanded, batch)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"kv_dtype": "fp8_e5m2"}, "token_to_kv_pool"),
        ({"dtype": "float16"}, "token_to_kv_pool"),
        ({"page_size": 48}, "page_size"),
        ({"sinks": True}, "layer 1"),
        ({"qk_rope_head_dim": 32}, "layer 1"),
    ],
)
def test_pools_and_layers_that_are_refused(settings, argument):
    world = world_of(decode(3), **settings)
    with pytest.raises(InvalidInput) as refusal:
        backend_of(world)
    assert refusal.value.argument == argument


def test_a_platform_without_kernels():
    case = Case(name="old", steps=(decode(3),), page_size=32, max_context_len=256, **LATENT)
    world = make_world(case, Platform.parse("nvidia:sm90,cuda=13.0"), "cpu")
    with pytest.raises(InvalidInput, match="sm90"):
        backend_of(world)


def test_a_workspace_that_is_too_small():
    world = world_of(decode(3))
    with pytest.raises(InvalidInput, match="too few"):
        TRTLLMMLABackend(world.context, {"workspace_bytes": 64 << 20}, EMULATED)


def test_prefill_is_another_backends():
    world = world_of(extend((0, 3)))
    with pytest.raises(InvalidInput, match="forward_mode"):
        backend_of(world).init_forward_metadata(prepare_step(world, extend((0, 3))).batch)


def test_drafts_have_no_kernel_on_desktop_blackwell():
    step = verify(3, 9)
    world = world_of(step, arch="sm120", spec_topk=1)
    with pytest.raises(InvalidInput, match="3 queries a request"):
        run(world, backend_of(world), step)


def test_calls_that_are_refused():
    step = decode(3)
    world = world_of(step)
    backend, made = backend_of(world), prepare_step(world, step)
    given = made.inputs[0]

    def forward(**more: Any):
        return backend.forward(given.q, None, None, given.layer, made.batch, **more)

    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        forward(q_rope=given.q_rope)
    backend.init_forward_metadata(made.batch)
    with pytest.raises(InvalidInput, match="lse"):
        forward(q_rope=given.q_rope, lse=torch.empty(given.q.shape[:2]))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (decode(5, 6), "init_cuda_graph_state"),
        (extend((5, 1), mode=ForwardMode.DRAFT_EXTEND), "runs without a graph"),
    ],
)
def test_captures_that_are_refused(step, words):
    world = world_of(step, spec_topk=1)
    backend = backend_of(world)
    backend.init_cuda_graph_state(1, 1)
    with pytest.raises(GraphUnsupported, match=words):
        backend.init_forward_metadata_out_graph(prepare_step(world, step).batch, in_capture=True)


def test_the_trial_launches_what_is_served():
    steps = decode(3), verify(3, 5), extend((0, 3))
    spy, world = Spy(), world_of(*steps, spec_topk=1)
    try_backend("nvidia/trtllm_mla", backend_of(world, spy.kernels))
    assert [call["args"][0].shape[1] for call in spy.calls] == [1, 3]


def test_kernels_that_do_not_run_here():
    def fails(*args, **kwargs):
        raise RuntimeError("Missing TRTLLM-GEN kernel\nmore lines")

    world = world_of(decode(3))
    kernels = replace(EMULATED, trtllm_batch_decode_with_kv_cache_mla=fails)
    with pytest.raises(BackendFailed, match=r"nvidia/trtllm_mla .*Missing TRTLLM-GEN kernel; "):
        try_backend("nvidia/trtllm_mla", backend_of(world, kernels))
