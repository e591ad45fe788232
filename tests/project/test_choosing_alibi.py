"""Who serves models with ALiBi, and why the others do not."""

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
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {"model_type": "bloom", "n_head": 16, "hidden_size": 1024},
    "mpt": {"model_type": "mpt", "n_heads": 16, "d_model": 1024, "attn_config": {"alibi": True}},
    "falcon": {
        "model_type": "falcon",
        "num_attention_heads": 16,
        "hidden_size": 1024,
        "alibi": True,
        "multi_query": False,
    },
}


def served(platform: str, asked: str, **named: Any) -> str:
    decision = solve(
        Request.parse(f"{HEADS},{asked}"), Platform.parse(platform), OFFERS, Policy(**named)
    )
    assert len({choice.backend for choice in decision.phases.values()}) == 1
    return decision.phases["decode"].backend


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("platform", "backend"), [(CPU, "torch_native"), (HOPPER, "triton"), ("amd:gfx942", "triton")]
)
def test_models(tmp_path: Path, model: str, platform: str, backend: str) -> None:
    config = {**MODELS[model], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    request = request_from_model(tmp_path)
    assert request.alibi
    decision = solve(request, Platform.parse(platform), OFFERS, Policy())
    assert {choice.backend for choice in decision.phases.values()} == {backend}


@pytest.mark.parametrize("backend", ["torch_native", "flex_attention", "triton"])
@pytest.mark.parametrize("more", ["", ",sliding_window=127", ",spec_topk=1", ",attention_chunk=64"])
def test_by_name_on_a_gpu(backend: str, more: str) -> None:
    assert served(HOPPER, f"alibi=true{more}", backend=backend) == backend


def test_in_graphs() -> None:
    assert served(HOPPER, "alibi=true,graph=true") == "triton"
    assert served(HOPPER, "alibi=true,graph=true", backend="flex_attention") == "flex_attention"


@pytest.mark.parametrize(
    ("platform", "backend"),
    [
        (CPU, "native"),
        (HOPPER, "fa3"),
        (HOPPER, "flashinfer"),
        ("nvidia:sm100", "trtllm_mha"),
        ("amd:gfx942", "aiter"),
        ("amd:gfx942", "wave"),
        ("ascend:910b", "ascend"),
        ("intel:xe2", "intel_xpu"),
        ("cpu:x86_64,features=amx", "intel_amx"),
    ],
)
def test_no_other_card_offers_it(platform: str, backend: str) -> None:
    with pytest.raises(NoBackend) as refusal:
        served(platform, "alibi=true", backend=backend)
    assert "alibi: not served" in str(refusal.value)


@pytest.mark.parametrize("backend", ["torch_native", "flex_attention", "triton"])
@pytest.mark.parametrize(
    "more", ["spec_topk=4", "spec_topk=4,spec_draft_tokens=8", "custom_mask=true", "logit_cap=30"]
)
def test_what_does_not_go_together(backend: str, more: str) -> None:
    """Draft trees too: their nodes' places in the row are not their positions."""
    with pytest.raises(NoBackend):
        served(HOPPER, f"alibi=true,{more}", backend=backend)
    with pytest.raises(NoBackend):
        served(HOPPER, f"alibi=true,{more}")
    assert served(HOPPER, more, backend=backend) == backend
