"""Command lines that users of other engines type, each on its own hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnmux.configs import request_from_model
from attnmux.core import Decision, NoBackend, Offer, Platform, Plugins, Policy, Request, solve

MODELS = Path(__file__).parents[1] / "core" / "data"
LLAMA = request_from_model(MODELS / "llama-3.1-8b")
DEEPSEEK = request_from_model(MODELS / "deepseek-v3", tp=8)
DEEPSEEK_V32 = request_from_model(MODELS / "deepseek-v3.2-exp", tp=8)
QWEN_1M = request_from_model(MODELS / "qwen2.5-14b-1m")
HOPPER, BLACKWELL, MI300 = "nvidia:sm90,cuda=13.0", "nvidia:sm100,cuda=13.0", "amd:gfx942"
FP8, FNUZ = "fp8_e4m3", "fp8_e4m3fnuz"


@pytest.fixture(scope="module")
def offers() -> tuple[Offer, ...]:
    return Plugins.load().offers()


def launch(offers, platform: str, request: Request, **policy) -> Decision:
    kv_dtype = policy.pop("kv_dtype", None)
    if kv_dtype is not None:
        request = request.replace(kv_dtype=kv_dtype)
    return solve(request, Platform.parse(platform), offers, Policy(**policy))


@pytest.mark.parametrize(
    ("platform", "request_", "flags", "extend", "decode", "page_size"),
    [
        (HOPPER, LLAMA, {"backend": "flashinfer"}, "flashinfer", "flashinfer", 1),
        (HOPPER, LLAMA, {"backend": "fa3"}, "fa3", "fa3", 1),
        (HOPPER, LLAMA, {"backend": "triton"}, "triton", "triton", 1),
        (HOPPER, DEEPSEEK, {"backend": "flashinfer"}, "flashinfer_mla", "flashinfer_mla", 1),
        (HOPPER, DEEPSEEK, {"backend": "fa3"}, "fa3_mla", "fa3_mla", 1),
        (HOPPER, DEEPSEEK, {"backend": "triton"}, "triton", "triton", 1),
        (HOPPER, DEEPSEEK, {"backend": "flashmla"}, "flashinfer_mla", "flashmla", 64),
        (
            HOPPER,
            DEEPSEEK,
            {"backend": "flashmla", "kv_dtype": FP8},
            "flashinfer_mla",
            "flashmla",
            64,
        ),
        (BLACKWELL, DEEPSEEK, {"backend": "trtllm_mla"}, "flashinfer_mla", "trtllm_mla", 64),
        (
            BLACKWELL,
            DEEPSEEK,
            {"backend": "trtllm_mla", "kv_dtype": FP8},
            "flashinfer_mla",
            "trtllm_mla",
            64,
        ),
        (BLACKWELL, DEEPSEEK, {"backend": "cutlass_mla"}, "flashinfer_mla", "cutlass_mla", 128),
        (MI300, DEEPSEEK, {"backend": "aiter_mla"}, "aiter", "aiter_mla", 1),
        (
            MI300,
            DEEPSEEK,
            {"backend": "aiter_mla_prefill"},
            "aiter_mla_prefill",
            "aiter_mla",
            1,
        ),
        (
            MI300,
            DEEPSEEK,
            {"backend": "aiter_mla", "kv_dtype": FNUZ},
            "torch_native",
            "aiter_mla",
            1,
        ),
        (MI300, DEEPSEEK, {}, "aiter", "aiter", 1),
        (BLACKWELL, DEEPSEEK, {"prefill_backend": "fa4"}, "fa4", "flashinfer_mla", 1),
        (
            BLACKWELL,
            DEEPSEEK,
            {"backend": "trtllm_mla", "prefill_backend": "fa4"},
            "fa4",
            "trtllm_mla",
            64,
        ),
        (
            HOPPER,
            LLAMA,
            {"prefill_backend": "fa3", "decode_backend": "flashinfer"},
            "fa3",
            "flashinfer",
            1,
        ),
        (
            HOPPER,
            DEEPSEEK,
            {"prefill_backend": "flashinfer", "decode_backend": "flashmla"},
            "flashinfer_mla",
            "flashmla",
            64,
        ),
        (HOPPER, DEEPSEEK_V32, {"backend": "dsa"}, "nsa", "nsa", 64),
        (HOPPER, DEEPSEEK_V32, {"backend": "nsa_fa3"}, "nsa_fa3", "nsa_fa3", 1),
        ("ascend:910b", LLAMA, {"backend": "ascend"}, "ascend", "ascend", 128),
        ("intel:xe2", LLAMA, {"backend": "intel_xpu"}, "intel_xpu", "intel_xpu", 128),
        (MI300, LLAMA, {"backend": "wave"}, "wave", "wave", 1),
        (HOPPER, LLAMA, {"backend": "flex_attention"}, "flex_attention", "flex_attention", 1),
        (HOPPER, LLAMA, {"backend": "torch_native"}, "torch_native", "torch_native", 1),
        (
            HOPPER,
            QWEN_1M,
            {"backend": "dual_chunk_flash_attn"},
            "dual_chunk_flash_attn",
            "dual_chunk_flash_attn",
            1,
        ),
    ],
)
def test_a_launch_line_decides(
    offers, platform, request_, flags, extend, decode, page_size
) -> None:
    decision = launch(offers, platform, request_, **flags)
    backends = {phase: choice.backend for phase, choice in decision.phases.items()}
    assert backends == {"extend": extend, "decode": decode}
    assert decision.page_size == page_size
    assert decision.kv_dtype == flags.get("kv_dtype", "bfloat16")


def test_triton_keeps_its_parts_in_fp32_where_asked(offers) -> None:
    options = {"triton": {"reduce_in_fp32": True}}
    decision = launch(offers, HOPPER, LLAMA, backend="triton", options=options)
    assert decision.phases["decode"].options["reduce_in_fp32"] is True


@pytest.mark.parametrize("name", ["flashmla", "cutlass_mla", "trtllm_mla"])
def test_a_companion_is_recorded_as_a_change(offers, name) -> None:
    platform = HOPPER if name == "flashmla" else BLACKWELL
    decision = launch(offers, platform, DEEPSEEK, backend=name)
    [change] = decision.coercions
    assert (change.field, change.old, change.new, change.origin) == (
        "backend for extend",
        name,
        "flashinfer_mla",
        "user",
    )


def test_a_one_sided_flag_leaves_the_other_side_to_the_base_name_or_the_choice(offers) -> None:
    automatic = launch(offers, HOPPER, LLAMA, prefill_backend="triton")
    assert automatic.phases["extend"].backend == "triton"
    assert automatic.phases["decode"].backend == "fa3"
    base = launch(offers, HOPPER, LLAMA, prefill_backend="triton", backend="flashinfer")
    assert base.phases["decode"].backend == "flashinfer"


@pytest.mark.parametrize("name", ["fa3", "flashinfer", "triton"])
def test_one_name_for_both_phases_is_the_base_name(offers, name) -> None:
    whole = launch(offers, HOPPER, LLAMA, backend=name)
    halves = launch(offers, HOPPER, LLAMA, prefill_backend=name, decode_backend=name)
    assert halves.phases == whole.phases
    assert (halves.page_size, halves.kv_dtype) == (whole.page_size, whole.kv_dtype)


@pytest.mark.parametrize(
    ("platform", "request_", "flags", "said"),
    [
        # Both have pages of 128, and still do not go together; nor at 32, where prefill has none.
        (BLACKWELL, LLAMA, {"prefill_backend": "fa4", "decode_backend": "trtllm_mha"}, "fa4"),
        (
            BLACKWELL,
            LLAMA.replace(page_size=32),
            {"prefill_backend": "fa4", "decode_backend": "trtllm_mha"},
            "serves 128; backend: .*never shares a KV cache with trtllm_mha",
        ),
        # A name holds for a phase's own flag too, and nothing is snapped in silence.
        (HOPPER, DEEPSEEK.replace(page_size=16), {"decode_backend": "flashmla"}, "page_size=64"),
        (HOPPER, DEEPSEEK, {"prefill_backend": "flashmla"}, "phase: asked for extend"),
        (
            HOPPER,
            LLAMA.replace(deterministic=True),
            {"decode_backend": "flex_attention"},
            "deterministic",
        ),
        (HOPPER, LLAMA, {"prefill_backend": "fa3", "kv_dtype": "fp8_e5m2"}, "kv_dtype"),
        (HOPPER, LLAMA, {"backend": "trtllm_mla"}, "kind: asked for mha"),
        (BLACKWELL, DEEPSEEK, {"backend": "trtllm_mha"}, "kind: asked for mla"),
        ("nvidia:sm90,cuda=12.2", LLAMA, {"backend": "fa3"}, "runtime"),
        (BLACKWELL, LLAMA, {"backend": "fa3"}, "version"),
        ("nvidia:sm120", LLAMA, {"backend": "trtllm_mha", "kv_dtype": FP8}, "extend"),
        ("amd:gfx1100", LLAMA, {"backend": "aiter"}, "arch"),
        ("cpu:x86_64,features=avx2", LLAMA, {"backend": "intel_amx"}, "features"),
        (BLACKWELL, LLAMA.replace(spec_topk=4), {"backend": "trtllm_mha"}, "spec_topk=1"),
        # A hybrid that speculates: the decode backend must fit, and the prefill backend too if it
        # verifies.
        (
            BLACKWELL,
            LLAMA.replace(spec_topk=4),
            {"prefill_backend": "flashinfer", "decode_backend": "trtllm_mha"},
            "spec_topk=1",
        ),
        (
            HOPPER,
            LLAMA.replace(spec_topk=4, page_size=16),
            {"prefill_backend": "triton", "decode_backend": "flashinfer"},
            "page_size=1",
        ),
        (HOPPER, LLAMA.replace(sinks=True, logit_cap=30.0), {"backend": "flashinfer"}, "logit_cap"),
        (HOPPER, LLAMA.replace(multi_item=True), {"backend": "fa3"}, "multi_item"),
        (HOPPER, LLAMA.replace(cross_attention=True), {"backend": "fa4"}, "cross_attention"),
        (
            HOPPER,
            LLAMA.replace(spec_topk=4, page_size=16),
            {"backend": "triton"},
            "page_size=1",
        ),
    ],
)
def test_a_line_that_cannot_run_is_refused_with_its_reason(
    offers, platform, request_, flags, said
) -> None:
    with pytest.raises(NoBackend, match=said):
        launch(offers, platform, request_, **flags)


@pytest.mark.parametrize(
    ("platform", "verdict"),
    [(HOPPER, "fits"), (BLACKWELL, "fits"), (MI300, "rejected"), ("intel:xe2", "rejected")],
)
def test_llama_4_is_not_given_to_flashinfer(offers, platform, verdict) -> None:
    """SGLang rules it out by the model's name. Here flashinfer serves chunks by virtual requests,
    and others are better."""
    llama4 = request_from_model(MODELS / "llama-4-scout", tp=8)
    decision = launch(offers, platform, llama4)
    # The encoder of its images has no chunks: there it may.
    said = [v for v in decision.candidates if v.backend == "flashinfer" and v.phase != "encoder"]
    assert {v.phase for v in said} == {"extend", "decode"}
    assert {v.verdict for v in said} == {verdict}
    assert "flashinfer" not in {decision.phases[phase].backend for phase in ("extend", "decode")}
