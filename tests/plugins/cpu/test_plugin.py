"""The offers of attnmux-cpu."""

from __future__ import annotations

import pytest

from attnmux.core import Offer, Platform, Request, solve
from attnmux.cpu.plugin import attnmux_cards


@pytest.fixture
def offers() -> list[Offer]:
    return [Offer(card=card, plugin="cpu") for card in attnmux_cards()]


@pytest.mark.parametrize("platform", ["cpu:x86_64", "cpu:aarch64", "nvidia:sm90", "intel:xe2"])
@pytest.mark.parametrize(
    "asked",
    [
        "dtype=bf16",
        "dtype=fp32,page_size=7,sliding_window=127,sinks=true,logit_cap=30,lse=true",
        "dtype=fp16,spec_topk=4,custom_mask=true,deterministic=true",
        "kind=mla,dtype=bf16,kv_lora_rank=512,qk_rope_head_dim=64,page_size=64",
        "num_q_heads=32,num_kv_heads=8,head_dim=192,v_head_dim=128,cross_attention=true",
    ],
)
def test_there_is_always_a_backend(offers, platform, asked) -> None:
    decision = solve(Request.parse(asked), Platform.parse(platform), offers)
    assert {choice.plugin for choice in decision.phases.values()} == {"cpu"}


def test_plain_torch_is_the_last_resort_on_an_accelerator(offers) -> None:
    def rank(platform: str) -> int:
        decision = solve(Request(), Platform.parse(platform), offers)
        return min(v.rank for v in decision.candidates if v.rank is not None)

    assert rank("cpu:x86_64") < 100 < rank("nvidia:sm90")
