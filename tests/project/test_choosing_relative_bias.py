"""Who serves models with relative position biases, and why the others do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnmux.configs import request_from_model
from attnmux.core import NoBackend, Platform, Plugins, Policy, Request, solve

OFFERS = Plugins.load().offers()
HEADS = "dtype=bf16,head_dim=64,num_q_heads=16,num_kv_heads=16"
CPU = "cpu:x86_64,features=avx2+cxx_compiler"
HOPPER = "nvidia:sm90,cuda=13.0"
SERVING = ["torch_native", "flex_attention", "triton"]
OTHERS = [
    (CPU, "native"),
    (HOPPER, "fa3"),
    (HOPPER, "flashinfer"),
    ("nvidia:sm100", "trtllm_mha"),
    ("amd:gfx942", "aiter"),
    ("amd:gfx942", "wave"),
    ("ascend:910b", "ascend"),
    ("intel:xe2", "intel_xpu"),
    ("cpu:x86_64,features=amx", "intel_amx"),
]


def served(platform: str, asked: str, **named: Any) -> str:
    decision = solve(
        Request.parse(f"{HEADS},{asked}"), Platform.parse(platform), OFFERS, Policy(**named)
    )
    (backend,) = {choice.backend for choice in decision.phases.values()}
    return backend


@pytest.mark.parametrize("model_type", ["t5", "mt5", "umt5", "switch_transformers", "mpnet"])
@pytest.mark.parametrize(
    ("platform", "backend"), [(HOPPER, "triton"), ("amd:gfx942", "triton"), (CPU, None)]
)
def test_models(tmp_path: Path, model_type: str, platform: str, backend: str | None) -> None:
    heads = {"num_attention_heads": 16, "hidden_size": 1024} if model_type == "mpnet" else {}
    config = {"model_type": model_type, "dtype": "bfloat16", **heads}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    request = request_from_model(tmp_path)
    assert request.relative_bias
    decision = solve(request, Platform.parse(platform), OFFERS, Policy())
    chosen = {choice.backend for choice in decision.phases.values()}
    assert chosen == {backend} if backend else chosen <= {"torch_native", "flex_attention"}


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize(
    "more",
    ["", ",cross_attention=true", ",sliding_window=127", ",spec_topk=1", ",attention_chunk=64"],
)
def test_by_name_on_a_gpu(backend: str, more: str) -> None:
    assert served(HOPPER, f"relative_bias=true{more}", backend=backend) == backend


@pytest.mark.parametrize("backend", SERVING)
def test_encoders(backend: str) -> None:
    asked = "encoder_head_dim=64,phases=encoder,relative_bias=true"
    assert served(HOPPER, asked, mm_backend=backend) == backend
    with pytest.raises(NoBackend) as refusal:
        served(HOPPER, asked, mm_backend="fa3")
    assert "relative_bias: not served" in str(refusal.value)


def test_in_graphs() -> None:
    asked = "relative_bias=true,graph=true"
    assert served(HOPPER, asked) == "triton"
    assert served(HOPPER, asked, backend="flex_attention") == "flex_attention"


@pytest.mark.parametrize(("platform", "backend"), OTHERS)
def test_no_other_card_offers_it(platform: str, backend: str) -> None:
    with pytest.raises(NoBackend) as refusal:
        served(platform, "relative_bias=true", backend=backend)
    assert "relative_bias: not served" in str(refusal.value)


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize(
    "more",
    [
        *("spec_topk=4", "spec_topk=4,spec_draft_tokens=8", "custom_mask=true", "logit_cap=30"),
        *("alibi=true", "multi_item=true"),
    ],
)
def test_what_does_not_go_together(backend: str, more: str) -> None:
    """Draft trees too: their nodes' places in the row are not their positions."""
    with pytest.raises(NoBackend):
        served(HOPPER, f"relative_bias=true,{more}", backend=backend)
