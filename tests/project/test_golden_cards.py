"""What holds for the cards of every plugin of this project, adapters written or not."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from attnmux.core import (
    MHATokenToKVPool,
    Offer,
    Platform,
    Plugins,
    Request,
    torch_dtype,
)
from attnmux.core.facts.request import parse_fields
from attnmux.core.facts.values import DTYPES
from attnmux.core.plugin import ANY, NONE, Clause
from attnmux.core.verbs import check

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OFFERS: tuple[Offer, ...] = Plugins.load().offers()
CARDS = {offer.address: offer for offer in OFFERS}
KNOWN = json.loads(
    files("attnmux.core.cards").joinpath("known_backends.json").read_text(encoding="utf-8")
)
FIELD = {
    "flashinfer",
    "flashinfer_mla",
    "fa3",
    "fa4",
    "flashmla",
    "cutlass_mla",
    "trtllm_mha",
    "trtllm_mla",
    "nsa",
    "dsa",
    "dual_chunk_flash_attn",
    "flex_attention",
    "triton",
    "aiter",
    "wave",
    "intel_amx",
    "intel_xpu",
    "ascend",
    "torch_native",
}


def test_every_backend_of_the_field_has_a_card() -> None:
    assert {word for o in OFFERS for word in (o.card.name, *o.card.aliases)} >= FIELD


def test_the_pip_lines_name_exactly_what_the_plugins_offer() -> None:
    offered: dict[str, set[str]] = {}
    for offer in OFFERS:
        offered.setdefault(f"attnmux-{offer.plugin}", set()).add(offer.card.name)
    aliases = {alias for offer in OFFERS for alias in offer.card.aliases}
    assert {name: set(known) - aliases for name, known in KNOWN.items()} == {
        name: cards - aliases for name, cards in offered.items()
    }


@pytest.mark.parametrize("address", CARDS)
def test_a_card_says_where_its_ranks_come_from_and_what_it_needs(address) -> None:
    card = CARDS[address].card
    assert card.priors
    assert all(prior.source for prior in card.priors)
    assert ("torch>=2.11",) in card.requirements()
    assert all(option.summary for option in card.options)


@pytest.mark.parametrize("address", CARDS)
def test_every_limit_says_where_it_comes_from(address) -> None:
    card = CARDS[address].card
    limits = {
        axis
        for clause in card.clauses
        for axis in Clause.__dataclass_fields__
        if getattr(clause, axis) not in (ANY, NONE)
    }
    # What the backend is: whose devices, which attention, which half
    assert set(card.sources) == limits - {"vendor", "kind", "phase"}
    # Those that point to another axis point to one with a source of its own
    for source in card.sources.values():
        assert source.strip()
        other = re.match(r"as (\w+)", source)
        assert not other or not card.sources[other[1]].startswith("as ")


@pytest.mark.parametrize("address", CARDS)
def test_a_pool_stores_every_kv_dtype_that_a_card_admits(address) -> None:
    admitted = {
        dtype
        for clause in CARDS[address].card.clauses
        for dtype in DTYPES
        if clause.kv_dtype.admits(dtype)
    }
    assert admitted
    for dtype in admitted:
        MHATokenToKVPool(
            **{"size": 4, "page_size": 4, "dtype": torch_dtype(dtype), "layer_ids": [0]},
            **{"num_kv_heads": 1, "head_dim": 16, "device": "cpu"},
        )


@pytest.mark.parametrize("address", [a for a, offer in CARDS.items() if offer.card.extra])
def test_an_extra_brings_what_the_card_requires(address) -> None:
    offer = CARDS[address]
    project = tomllib.loads((ROOT / f"plugins/{offer.plugin}/pyproject.toml").read_text("utf-8"))
    extra = project["project"]["optional-dependencies"][offer.card.extra]
    for alternatives in offer.card.requirements():
        assert set(alternatives) & set(extra)


@pytest.mark.parametrize("address", CARDS)
def test_companions_are_backends_that_serve_the_phases_left_out(address) -> None:
    card = CARDS[address].card
    by_name = {offer.card.name: offer.card for offer in OFFERS}
    served = {p for c in card.clauses for p in ("extend", "decode") if c.phase.admits(p)}
    if served == {"extend", "decode"}:
        assert not card.companions
        return
    for name in card.companions:
        for phase in {"extend", "decode"} - served:
            assert any(clause.phase.admits(phase) for clause in by_name[name].clauses)
    assert card.companions


LATENT = "dtype=bf16,num_q_heads=16,kv_lora_rank=512,qk_rope_head_dim=64"
SHAPES = {
    "gqa": "dtype=bf16,head_dim=128,num_q_heads=32,num_kv_heads=8",
    "mla": f"kind=mla,{LATENT}",
    "nsa": f"kind=nsa,{LATENT}",
    "gdn": "kind=gdn,dtype=bf16,head_dim=128,v_head_dim=128,num_q_heads=32,num_kv_heads=16",
    "conv": "kind=conv,dtype=bf16",
    "chunks": "kind=dual_chunk,dtype=bf16,head_dim=128,num_q_heads=40,num_kv_heads=8",
}
LIMITS = """
nvidia/fa3 nvidia:sm90 decode gqa head_dim=80 HEAD_DIM
nvidia/fa3 nvidia:sm90 decode gqa head_dim=192,v_head_dim=128 served
nvidia/fa3 nvidia:sm90 decode gqa head_dim=192,v_head_dim=64 V_HEAD_DIM
nvidia/fa3 nvidia:sm90 decode gqa logit_cap=30 served
nvidia/fa3 nvidia:sm90 decode gqa dtype=fp16,sinks=1 DTYPE+KV_DTYPE
nvidia/fa3_mla nvidia:sm90 decode mla dtype=fp16 served
nvidia/fa3_mla nvidia:sm90 decode mla kv_lora_rank=256 KV_LORA_RANK
nvidia/fa3_mla nvidia:sm90 decode mla kv_dtype=fp8_e4m3 KV_DTYPE
nvidia/fa3_mla nvidia:sm90 encoder gqa multimodal=1 KIND+PHASE
nvidia/fa4 nvidia:sm103 extend gqa head_dim=192,v_head_dim=128 served
nvidia/fa4 nvidia:sm100 extend gqa head_dim=256 HEAD_DIM
nvidia/fa4 nvidia:sm100 extend gqa kv_dtype=fp8_e4m3 KV_DTYPE
nvidia/flashinfer nvidia:sm80,cuda=12.6 decode gqa kv_dtype=fp8_e5m2 served
nvidia/flashinfer nvidia:sm80,cuda=12.4 decode gqa dtype=bf16 RUNTIME
nvidia/flashinfer nvidia:sm75 decode gqa dtype=fp16 VERSION
nvidia/flashinfer nvidia:sm80 decode gqa head_dim=96 HEAD_DIM
nvidia/flashinfer nvidia:sm80 verify gqa custom_mask=1,spec_topk=4,page_size=64 served
nvidia/flashinfer_mla nvidia:sm80 decode mla page_size=64 served
nvidia/flashinfer_mla nvidia:sm80 decode mla kv_lora_rank=256 KV_LORA_RANK
nvidia/flashinfer_mla nvidia:sm80 verify mla spec_topk=4 SPEC_TOPK
nvidia/flashmla nvidia:sm90 verify mla spec_topk=1,page_size=64,kv_dtype=fp8_e4m3 served
nvidia/flashmla nvidia:sm90 decode mla kv_dtype=fp8_e5m2 KV_DTYPE
nvidia/flashmla nvidia:sm90 decode mla qk_rope_head_dim=32 QK_ROPE_HEAD_DIM
nvidia/trtllm_mla nvidia:sm100 decode mla num_q_heads=128 served
nvidia/trtllm_mla nvidia:sm100 decode mla num_q_heads=96 NUM_Q_HEADS
nvidia/trtllm_mla nvidia:sm120 decode mla num_q_heads=96 served
nvidia/trtllm_mla nvidia:sm100 verify mla spec_topk=1 served
nvidia/trtllm_mla nvidia:sm120 verify mla spec_topk=1 VERSION
nvidia/trtllm_mla nvidia:sm120 draft mla spec_topk=1 VERSION
nvidia/trtllm_mla nvidia:sm120,cuda=12.4 decode mla page_size=64 RUNTIME
nvidia/trtllm_mla nvidia:sm100 decode mla page_size=16 PAGE_SIZE
nvidia/trtllm_mla nvidia:sm100 decode mla dtype=fp16,kv_dtype=bf16 DTYPE
nvidia/trtllm_mha nvidia:sm100 decode gqa head_dim=96 HEAD_DIM
nvidia/trtllm_mha nvidia:sm90 extend gqa page_size=64 served
nvidia/trtllm_mha nvidia:sm90 extend gqa page_size=128 PAGE_SIZE
nvidia/trtllm_mha nvidia:sm90,cuda=12.4 decode gqa page_size=64 RUNTIME
nvidia/trtllm_mha nvidia:sm90 extend gqa sliding_window=127 served
nvidia/trtllm_mha nvidia:sm90 extend gqa kv_dtype=fp8_e4m3 KV_DTYPE
nvidia/trtllm_mha nvidia:sm90 decode gqa kv_dtype=fp8_e4m3 served
nvidia/trtllm_mha nvidia:sm120 extend gqa sliding_window=127 SLIDING_WINDOW
nvidia/trtllm_mha nvidia:sm120 decode gqa sliding_window=127 served
nvidia/trtllm_mha nvidia:sm100 extend gqa sliding_window=127,kv_dtype=fp8_e4m3 served
nvidia/trtllm_mha nvidia:sm100 encoder gqa multimodal=1 PHASE
nvidia/trtllm_mha nvidia:sm100 decode gqa logit_cap=30 LOGIT_CAP
nvidia/cutlass_mla nvidia:sm100 decode mla num_q_heads=144 NUM_Q_HEADS
nvidia/cutlass_mla nvidia:sm100 decode mla page_size=64 PAGE_SIZE
nvidia/cutlass_mla nvidia:sm100 decode mla kv_dtype=fp8_e4m3 KV_DTYPE
nvidia/nsa nvidia:sm100 extend nsa page_size=64 served
nvidia/nsa nvidia:sm120 extend nsa page_size=64 VERSION
nvidia/nsa nvidia:sm90 decode nsa spec_topk=1 SPEC_TOPK
nvidia/nsa_fa3 nvidia:sm90 extend nsa page_size=1|16|64 served
nvidia/nsa_fa3 nvidia:sm100 extend nsa page_size=64 VERSION
nvidia/nsa_fa3 nvidia:sm90 decode nsa spec_topk=1 SPEC_TOPK
nvidia/dual_chunk_flash_attn nvidia:sm80 decode chunks page_size=64 served
nvidia/dual_chunk_flash_attn nvidia:sm100 decode chunks page_size=64 VERSION
nvidia/dual_chunk_flash_attn nvidia:sm90 decode chunks head_dim=80 HEAD_DIM
nvidia/flashinfer_gdn nvidia:sm90 decode gdn graph=1 served
nvidia/flashinfer_gdn nvidia:sm100 decode gdn graph=1 VERSION
nvidia/flashinfer_gdn nvidia:sm90 extend gdn dtype=fp16 served
nvidia/flashinfer_gdn nvidia:sm90 decode gdn dtype=fp16 DTYPE+KV_DTYPE
nvidia/flashinfer_gdn nvidia:sm90 verify gdn spec_topk=1,spec_draft_tokens=4 served
nvidia/flashinfer_gdn nvidia:sm90 verify gdn spec_topk=4 SPEC_TOPK
nvidia/flashinfer_gdn nvidia:sm90 extend gdn head_dim=64 HEAD_DIM
nvidia/flashinfer_gdn nvidia:sm90 extend gdn v_head_dim=64 V_HEAD_DIM
nvidia/flashinfer_gdn nvidia:sm90 decode gdn kind=kda KIND
nvidia/sgl_conv nvidia:sm90 extend conv dtype=bf16|fp16|fp32 served
nvidia/sgl_conv nvidia:sm90 verify conv spec_topk=1,graph=1 served
nvidia/sgl_conv nvidia:sm90 verify conv spec_topk=4 SPEC_TOPK
nvidia/sgl_conv nvidia:sm80 decode conv graph=1 VERSION
nvidia/sgl_conv nvidia:sm90 decode gdn graph=1 KIND
amd/aiter amd:gfx942 decode mla num_q_heads=48 served
amd/aiter amd:gfx942 decode mla num_q_heads=8 served
amd/aiter amd:gfx942 decode mla num_q_heads=144 served
amd/aiter amd:gfx950 decode gqa head_dim=96 HEAD_DIM
amd/aiter amd:gfx90a decode gqa head_dim=128 ARCH
amd/aiter amd:gfx942 decode gqa sliding_window=127 served
amd/aiter amd:gfx942 extend gqa custom_mask=1 CUSTOM_MASK
amd/aiter_mla amd:gfx942 decode mla num_q_heads=16|128 served
amd/aiter_mla amd:gfx942 decode mla num_q_heads=8|40|144 NUM_Q_HEADS
amd/aiter_mla amd:gfx942 decode mla num_q_heads=32|64|112,graph=1 served
amd/aiter_mla amd:gfx950 decode mla num_q_heads=32|64,kv_dtype=fp8_e4m3 served
amd/aiter_mla amd:gfx942 decode mla num_q_heads=32|112,kv_dtype=fp8_e4m3fnuz served
amd/aiter_mla amd:gfx942 decode mla num_q_heads=64,kv_dtype=fp8_e4m3fnuz KV_DTYPE
amd/aiter_mla amd:gfx942 decode mla num_q_heads=64,page_size=64,kv_dtype=fp8_e4m3fnuz KV_DTYPE
amd/aiter_mla amd:gfx942 verify mla num_q_heads=32,spec_topk=1 NUM_Q_HEADS
amd/aiter_mla amd:gfx942 decode mla num_q_heads=16,page_size=64,graph=1 served
amd/aiter_mla amd:gfx942 decode mla num_q_heads=16,kv_dtype=fp8_e4m3fnuz served
amd/aiter_mla amd:gfx942 decode mla num_q_heads=16,kv_dtype=fp8_e4m3 KV_DTYPE
amd/aiter_mla amd:gfx950 decode mla num_q_heads=16,kv_dtype=fp8_e4m3 served
amd/aiter_mla amd:gfx950 decode mla num_q_heads=16,kv_dtype=fp8_e4m3fnuz KV_DTYPE
amd/aiter_mla amd:gfx942 decode mla num_q_heads=16,dtype=fp16 DTYPE+KV_DTYPE
amd/aiter_mla amd:gfx942 extend mla num_q_heads=16 PHASE
amd/aiter_mla amd:gfx942 verify mla num_q_heads=16,spec_topk=1,spec_draft_tokens=7 served
amd/aiter_mla amd:gfx942 verify mla num_q_heads=16,spec_topk=2 SPEC_TOPK
amd/aiter_mla amd:gfx950 verify mla kv_dtype=fp8_e4m3,spec_topk=1,spec_draft_tokens=4 served
amd/aiter_mla amd:gfx950 verify mla kv_dtype=fp8_e4m3,spec_topk=1,spec_draft_tokens=3 KV_DTYPE
amd/aiter_mla amd:gfx950 draft mla kv_dtype=fp8_e4m3,spec_topk=1 KV_DTYPE
amd/aiter_mla_prefill amd:gfx950 extend mla num_q_heads=16|128 served
amd/aiter_mla_prefill amd:gfx942 extend mla num_q_heads=32 NUM_Q_HEADS
amd/aiter_mla_prefill amd:gfx942 extend mla kv_dtype=fp8_e4m3fnuz KV_DTYPE
amd/aiter_mla_prefill amd:gfx942 decode mla num_q_heads=16 PHASE
amd/aiter_mla amd:gfx90a decode mla num_q_heads=16 ARCH
amd/wave amd:gfx950 extend gqa head_dim=96 served
amd/wave amd:gfx942 extend gqa head_dim=256 HEAD_DIM
amd/wave amd:gfx90a decode gqa head_dim=128 ARCH
ascend/ascend ascend:910_93 extend gqa page_size=512 served
ascend/ascend ascend:910b extend gqa page_size=640 PAGE_SIZE
ascend/ascend ascend:310p extend gqa page_size=128 ARCH
ascend/ascend ascend:910b decode gqa sliding_window=127 SLIDING_WINDOW
ascend/ascend ascend:910b decode mla num_q_heads=128 served
ascend/ascend ascend:910b decode mla num_q_heads=144 NUM_Q_HEADS
intel/intel_xpu intel:xe2 decode gqa num_q_heads=128,num_kv_heads=4 GROUP_SIZE
intel/intel_xpu intel:xe2 decode gqa head_dim=80 HEAD_DIM
intel/intel_xpu intel:xe2 decode mla page_size=16 served
intel/intel_xpu intel:xe2 decode mla page_size=8 PAGE_SIZE
intel/vllm_xpu intel:xe2 decode gqa page_size=32 PAGE_SIZE
intel/vllm_xpu intel:xe2 decode gqa num_q_heads=128,num_kv_heads=8,head_dim=128|64|256 served
intel/vllm_xpu intel:xe2 decode gqa num_q_heads=128,num_kv_heads=8,head_dim=96|192|512 HEAD_DIM
intel/intel_amx cpu:x86_64,features=amx extend gqa head_dim=80 HEAD_DIM
intel/intel_amx cpu:x86_64,features=amx extend gqa head_dim=320 served
intel/intel_amx cpu:x86_64,features=amx extend gqa head_dim=192,v_head_dim=128 served
intel/intel_amx cpu:x86_64,features=amx extend gqa head_dim=96,v_head_dim=80 V_HEAD_DIM
intel/intel_amx cpu:x86_64,features=amx decode gqa head_dim=80 HEAD_DIM
intel/intel_amx cpu:x86_64,features=amx decode gqa logit_cap=30 LOGIT_CAP
intel/intel_amx cpu:aarch64,features=amx decode gqa head_dim=128 ARCH
triton/triton nvidia:sm80 decode gqa head_dim=512,kv_dtype=fp8_e5m2 served
triton/triton nvidia:sm80 decode gqa head_dim=576 HEAD_DIM
triton/triton nvidia:sm80 decode mla kv_dtype=fp8_e4m3 KV_DTYPE
triton/triton amd:gfx942 decode gqa kv_dtype=fp8_e4m3fnuz|fp8_e4m3 served
triton/triton amd:gfx950 decode gqa kv_dtype=fp8_e4m3fnuz KV_DTYPE
triton/triton nvidia:sm90 extend gqa kv_dtype=fp8_e4m3fnuz KV_DTYPE
amd/aiter amd:gfx942 decode gqa kv_dtype=fp8_e4m3fnuz|fp8_e4m3 KV_DTYPE
triton/triton ascend:910b decode gqa head_dim=128 VENDOR
triton/triton nvidia:sm80 extend gqa attention_chunk=8192 served
nvidia/fa3 nvidia:sm90 decode gqa head_dim=64|96|128|192|256 served
nvidia/fa3 nvidia:sm90 extend gqa dtype=fp16,lse=1,graph=1 served
nvidia/fa3_mla nvidia:sm90 decode mla dtype=fp16,lse=1,graph=1 served
nvidia/fa3_mla nvidia:sm90 decode mla kv_lora_rank=512,qk_rope_head_dim=32 QK_ROPE_HEAD_DIM
nvidia/fa4 nvidia:sm100 extend gqa head_dim=64|96|128 served
nvidia/fa4 nvidia:sm100 extend gqa dtype=fp16,lse=1,logit_cap=30 served
nvidia/fa4 nvidia:sm100 extend mla dtype=fp16,kv_lora_rank=512 served
nvidia/flashinfer nvidia:sm80 decode gqa head_dim=64|128|256 served
nvidia/flashinfer nvidia:sm80 decode gqa dtype=fp16,lse=1,graph=1,logit_cap=30 served
nvidia/flashinfer nvidia:sm80 decode gqa sliding_window=127 served
nvidia/flashinfer nvidia:sm80 extend gqa cross_attention=1,dtype=fp16 served
nvidia/flashinfer nvidia:sm80 decode gqa head_dim=192,v_head_dim=128 HEAD_DIM+V_HEAD_DIM
nvidia/flashinfer_mla nvidia:sm80 decode mla dtype=fp16,lse=1,graph=1 served
nvidia/flashmla nvidia:sm90 decode mla dtype=fp16,lse=1,graph=1 served
nvidia/flashmla nvidia:sm90 decode mla page_size=32 PAGE_SIZE
nvidia/trtllm_mla nvidia:sm100 decode mla page_size=32|64 served
nvidia/trtllm_mla nvidia:sm100 decode mla graph=1 served
nvidia/trtllm_mha nvidia:sm100 decode gqa head_dim=64|128|256 served
nvidia/trtllm_mha nvidia:sm100 decode gqa dtype=fp16,graph=1 served
nvidia/trtllm_mha nvidia:sm90 decode gqa dtype=fp16,graph=1,page_size=128 served
nvidia/trtllm_mha nvidia:sm120 extend gqa dtype=bf16,sinks=1 served
nvidia/cutlass_mla nvidia:sm100 decode mla dtype=fp16,graph=1 served
nvidia/nsa nvidia:sm90 decode nsa graph=1 served
nvidia/nsa nvidia:sm90 decode nsa dtype=fp16,kv_dtype=bf16 DTYPE
nvidia/nsa_fa3 nvidia:sm90 decode nsa graph=1,lse=1,deterministic=1 served
nvidia/nsa_fa3 nvidia:sm90 decode nsa dtype=fp16,kv_dtype=fp16 served
nvidia/nsa_fa3 nvidia:sm90 decode nsa kv_dtype=fp8_e4m3 KV_DTYPE
nvidia/dual_chunk_flash_attn nvidia:sm90 decode chunks head_dim=64|96|128|192|256 served
nvidia/dual_chunk_flash_attn nvidia:sm90 decode chunks dtype=fp16,graph=1 served
amd/aiter amd:gfx942 decode gqa head_dim=64|128|256 served
amd/aiter amd:gfx950 decode gqa head_dim=192,v_head_dim=128 HEAD_DIM+V_HEAD_DIM
amd/aiter amd:gfx950 decode gqa dtype=fp16,graph=1,logit_cap=30,sinks=1 served
amd/aiter amd:gfx950 decode mla dtype=fp16,graph=1 served
amd/wave amd:gfx942 decode gqa dtype=fp16,graph=1,logit_cap=30 served
ascend/ascend ascend:910c decode gqa lse=1 served
ascend/ascend ascend:910b decode gqa sinks=1,head_dim=64 served
ascend/ascend ascend:910b decode gqa graph=1 served
ascend/ascend ascend:910b decode gqa graph=1,sinks=1 served
ascend/ascend ascend:910b verify gqa graph=1,spec_topk=1 served
ascend/ascend ascend:910b decode mla graph=1 GRAPH
ascend/ascend ascend:910b decode gqa deterministic=1 DETERMINISTIC
ascend/ascend ascend:910b decode gqa dtype=fp16 DTYPE+KV_DTYPE
ascend/ascend ascend:910b verify gqa spec_topk=1 served
ascend/ascend ascend:910b decode gqa head_dim=72 HEAD_DIM
ascend/ascend ascend:910b decode mla lse=1 LSE
ascend/ascend ascend:910b verify mla spec_topk=1,page_size=16 served
intel/intel_xpu intel:xe2 decode gqa head_dim=64|96|128|192|256|512 served
intel/intel_xpu intel:xe2 decode gqa dtype=fp16,sliding_window=127,deterministic=1 served
intel/intel_xpu intel:xe2 decode gqa logit_cap=30 LOGIT_CAP
intel/intel_xpu intel:xe2 decode gqa lse=1 LSE
intel/intel_xpu intel:xe2 decode gqa graph=1 GRAPH
intel/intel_xpu intel:xe2 decode gqa sinks=1 SINKS
intel/vllm_xpu intel:xe2 verify gqa dtype=fp16,sliding_window=127,spec_topk=1 served
intel/vllm_xpu intel:xe2 verify gqa spec_topk=1,deterministic=1 DETERMINISTIC
intel/vllm_xpu intel:xe2 decode gqa sliding_window=127,head_dim=192 SLIDING_WINDOW
intel/vllm_xpu intel:xe2 decode gqa sinks=1,deterministic=1 served
intel/intel_xpu intel:xe2 decode mla dtype=fp16 served
intel/intel_xpu intel:xe2 decode mla num_q_heads=144 NUM_Q_HEADS
intel/intel_xpu intel:xe2 decode mla lse=1 LSE
intel/intel_amx cpu:x86_64,features=amx extend gqa dtype=bf16,sinks=1 served
intel/intel_amx cpu:x86_64,features=amx decode mla dtype=fp16 DTYPE+KV_DTYPE
intel/intel_amx cpu:x86_64,features=amx extend mla kv_lora_rank=500 KV_LORA_RANK
triton/triton nvidia:sm80 extend gqa dtype=fp16,lse=1,logit_cap=30,custom_mask=1 served
triton/triton nvidia:sm80 decode gqa head_dim=192,v_head_dim=576 V_HEAD_DIM
triton/triton nvidia:sm80 decode mla dtype=fp16,lse=1,graph=1 served
triton/triton nvidia:sm80 decode mla qk_rope_head_dim=128 QK_ROPE_HEAD_DIM
cpu/torch_native cpu:aarch64 extend gqa dtype=fp16|bf16|fp32 served
cpu/torch_native cpu:aarch64 extend gqa kv_dtype=fp8_e4m3|fp8_e5m2,v_head_dim=80,lse=1 served
cpu/torch_native cpu:aarch64 verify mla spec_topk=4,page_size=16 served
cpu/torch_native nvidia:sm80 verify mla spec_topk=4,page_size=16 PAGE_SIZE
cpu/flex_attention nvidia:sm80 decode gqa head_dim=16|80|256 served
cpu/flex_attention nvidia:sm80 decode gqa head_dim=512|8 HEAD_DIM
cpu/flex_attention nvidia:sm75 decode gqa head_dim=128 VERSION
cpu/flex_attention nvidia:sm80 decode gqa graph=1,page_size=8 GRAPH
cpu/flex_attention cpu:x86_64,features=avx2 decode gqa head_dim=128 FEATURES
nvidia/fa3 nvidia:sm90 decode gqa kv_dtype=fp8_e4m3 served
nvidia/fa3 nvidia:sm90 extend gqa dtype=fp16,kv_dtype=fp8_e4m3 served
nvidia/fa4 nvidia:sm100 extend gqa kv_dtype=fp4_e2m1,dtype=bf16|fp16 KV_DTYPE
nvidia/fa4 nvidia:sm100 extend mla kv_dtype=fp4_e2m1,dtype=bf16|fp16 KV_DTYPE
nvidia/fa4 nvidia:sm100 extend gqa head_dim=192,v_head_dim=128,dtype=bf16|fp16 served
nvidia/fa3 nvidia:sm90 extend gqa head_dim=192,v_head_dim=128,dtype=bf16|fp16 served
nvidia/trtllm_mha nvidia:sm100 extend gqa page_size=128,dtype=bf16|fp16 served
nvidia/trtllm_mha nvidia:sm120 decode gqa page_size=128,dtype=bf16|fp16 served
nvidia/trtllm_mha nvidia:sm120 extend gqa page_size=64,dtype=fp16 DTYPE+KV_DTYPE
nvidia/trtllm_mha nvidia:sm90 extend gqa page_size=64,dtype=fp16 DTYPE+KV_DTYPE
nvidia/trtllm_mha nvidia:sm100 extend gqa page_size=16|32|64 served
nvidia/trtllm_mha nvidia:sm90 verify gqa spec_topk=1,page_size=64,dtype=bf16|fp16 served
nvidia/flashinfer nvidia:sm80 extend gqa kv_dtype=fp8_e4m3|fp8_e5m2 served
nvidia/flashinfer nvidia:sm80 extend gqa dtype=fp16,kv_dtype=fp8_e4m3|fp8_e5m2 served
nvidia/flashinfer_mla nvidia:sm80 extend mla kv_dtype=fp8_e4m3 served
nvidia/flashinfer_mla nvidia:sm80 extend mla kv_dtype=fp4_e2m1 KV_DTYPE
nvidia/flashinfer_mla nvidia:sm80 extend mla dtype=fp16,kv_dtype=fp8_e4m3 served
nvidia/flashinfer_mla nvidia:sm80 extend mla dtype=fp16,kv_dtype=fp4_e2m1 KV_DTYPE
nvidia/flashmla nvidia:sm90 decode mla dtype=fp16,kv_dtype=fp8_e4m3 served
nvidia/trtllm_mha nvidia:sm100 extend gqa kv_dtype=fp8_e4m3 served
nvidia/trtllm_mha nvidia:sm100 extend gqa kv_dtype=fp4_e2m1 KV_DTYPE
nvidia/trtllm_mha nvidia:sm120 decode gqa kv_dtype=fp8_e4m3 served
nvidia/trtllm_mha nvidia:sm120 decode gqa kv_dtype=fp4_e2m1 KV_DTYPE
nvidia/trtllm_mha nvidia:sm90 decode gqa kv_dtype=fp4_e2m1 KV_DTYPE
nvidia/trtllm_mla nvidia:sm120 decode mla kv_dtype=fp8_e4m3 served
nvidia/nsa nvidia:sm100 decode nsa kv_dtype=fp8_e4m3 served
triton/triton nvidia:sm80 decode gqa kv_dtype=fp8_e5m2 served
triton/triton nvidia:sm80 decode gqa kv_dtype=fp8_e4m3 KV_DTYPE
triton/triton nvidia:sm75 decode gqa head_dim=512 served
triton/triton nvidia:sm75 extend mla head_dim=192 ARCH
triton/triton nvidia:sm75 decode nsa head_dim=192 ARCH
triton/triton nvidia:sm86 extend gqa kv_dtype=fp8_e4m3 KV_DTYPE
triton/triton nvidia:sm89 decode gqa kv_dtype=fp8_e4m3 served
triton/triton nvidia:sm80 decode gqa kv_dtype=fp4_e2m1 served
triton/triton amd:gfx942 decode gqa kv_dtype=fp8_e4m3 served
triton/triton nvidia:sm80 decode gqa dtype=fp16,kv_dtype=fp8_e5m2 served
triton/triton nvidia:sm89 extend gqa dtype=fp16,kv_dtype=fp8_e4m3 served
triton/triton nvidia:sm80 decode gqa dtype=fp16,kv_dtype=fp4_e2m1 served
nvidia/fa3 amd:gfx942 decode gqa head_dim=128 VENDOR
nvidia/trtllm_mha nvidia:sm100 decode gqa num_q_heads=16|32|64|128|256,page_size=128 served
nvidia/trtllm_mha nvidia:sm100 decode gqa num_q_heads=512|1024,page_size=128 served
nvidia/trtllm_mha nvidia:sm90 verify gqa kv_dtype=fp8_e4m3,spec_topk=1,page_size=32 served
intel/intel_xpu intel:xe2 decode gqa sinks=1,head_dim=64,dtype=bf16|fp16 served
nvidia/trtllm_mha nvidia:sm100 decode gqa num_q_heads=8|24|2048,page_size=128 PAGE_SIZE
cpu/torch_native cpu:aarch64 extend gqa custom_mask=1,multi_item=1,sinks=1,logit_cap=30,lse=1 served
cpu/torch_native cpu:aarch64 extend gqa cross_attention=1,attention_chunk=64,deterministic=1 served
cpu/torch_native cpu:aarch64 decode gqa sliding_window=127 served
cpu/torch_native cpu:aarch64 decode gqa graph=1 GRAPH
cpu/flex_attention nvidia:sm80 extend gqa custom_mask=1,sinks=1,logit_cap=30,lse=1 served
cpu/flex_attention nvidia:sm80 extend gqa multi_item=1 served
cpu/flex_attention nvidia:sm80 extend gqa cross_attention=1,attention_chunk=64 served
cpu/flex_attention nvidia:sm80 decode gqa sliding_window=127,dtype=bf16|fp16|fp32 served
cpu/flex_attention nvidia:sm80 decode gqa graph=1,page_size=16,dtype=bf16|fp16|fp32 served
cpu/flex_attention nvidia:sm80 decode mla dtype=bf16 KIND+KV_LORA_RANK+QK_ROPE_HEAD_DIM
nvidia/fa3 nvidia:sm90 verify gqa spec_topk=1,page_size=64 served
nvidia/fa3 nvidia:sm90 draft gqa spec_topk=1,page_size=64 served
nvidia/flashinfer nvidia:sm80 verify gqa spec_topk=1,page_size=64 served
nvidia/flashinfer nvidia:sm80 draft gqa spec_topk=1,page_size=64 served
nvidia/trtllm_mha nvidia:sm100 verify gqa spec_topk=1,page_size=64 served
nvidia/trtllm_mha nvidia:sm100 draft gqa spec_topk=1,page_size=64 served
triton/triton nvidia:sm80 verify gqa spec_topk=1,page_size=64 served
triton/triton nvidia:sm80 draft gqa spec_topk=1,page_size=64 served
amd/aiter amd:gfx942 verify gqa spec_topk=1,page_size=64 served
amd/aiter amd:gfx942 draft gqa spec_topk=1,page_size=64 served
nvidia/fa3_mla nvidia:sm90 verify mla spec_topk=1,page_size=64 served
nvidia/fa3_mla nvidia:sm90 draft mla spec_topk=1,page_size=64 served
nvidia/flashinfer_mla nvidia:sm80 verify mla spec_topk=1,page_size=64 served
nvidia/flashinfer_mla nvidia:sm80 draft mla spec_topk=1,page_size=64 served
nvidia/flashmla nvidia:sm90 verify mla spec_topk=1,page_size=64 served
nvidia/flashmla nvidia:sm90 draft mla spec_topk=1,page_size=64 served
nvidia/trtllm_mla nvidia:sm100 verify mla spec_topk=1,page_size=64 served
nvidia/trtllm_mla nvidia:sm100 draft mla spec_topk=1,page_size=64 served
triton/triton nvidia:sm80 verify mla spec_topk=1,page_size=64 served
triton/triton nvidia:sm80 draft mla spec_topk=1,page_size=64 served
amd/aiter amd:gfx942 verify mla spec_topk=1,page_size=64 served
amd/aiter amd:gfx942 draft mla spec_topk=1,page_size=64 served
cpu/torch_native cpu:aarch64 verify gqa spec_topk=1,page_size=64 served
cpu/torch_native cpu:aarch64 draft gqa spec_topk=1,page_size=64 served
cpu/flex_attention nvidia:sm80 verify gqa spec_topk=1,page_size=64 served
cpu/flex_attention nvidia:sm80 draft gqa spec_topk=1,page_size=64 served
nvidia/fa3 nvidia:sm90 encoder gqa multimodal=1,dtype=bf16|fp16 served
nvidia/flashinfer nvidia:sm80 encoder gqa multimodal=1,dtype=bf16|fp16 served
triton/triton nvidia:sm80 encoder gqa multimodal=1,dtype=bf16|fp16 served
amd/aiter amd:gfx942 encoder gqa multimodal=1,dtype=bf16|fp16 served
ascend/ascend ascend:910b encoder gqa multimodal=1,dtype=bf16 served
cpu/torch_native cpu:aarch64 encoder gqa multimodal=1,dtype=bf16|fp16 served
cpu/flex_attention nvidia:sm80 encoder gqa multimodal=1,dtype=bf16|fp16 served
intel/intel_amx cpu:x86_64,features=amx extend gqa dtype=bf16 served
cpu/flex_attention cpu:x86_64,features=avx2+cxx_compiler extend gqa dtype=bf16|fp16|fp32 served
ascend/ascend ascend:910b extend gqa dtype=bf16 served
intel/intel_xpu intel:xe2 extend gqa dtype=bf16|fp16 served
intel/intel_amx cpu:x86_64,features=amx extend mla dtype=bf16 served
cpu/flex_attention cpu:x86_64,features=avx2+cxx_compiler extend mla dtype=bf16|fp16|fp32 served
ascend/ascend ascend:910b extend mla dtype=bf16|fp16 served
intel/intel_xpu intel:xe2 extend mla dtype=bf16|fp16 served
intel/intel_amx cpu:x86_64,features=amx decode gqa dtype=bf16 served
cpu/flex_attention cpu:x86_64,features=avx2+cxx_compiler decode gqa dtype=bf16|fp16|fp32 served
ascend/ascend ascend:910b decode gqa dtype=bf16 served
intel/intel_xpu intel:xe2 decode gqa dtype=bf16|fp16 served
intel/intel_amx cpu:x86_64,features=amx decode mla dtype=bf16 served
cpu/flex_attention cpu:x86_64,features=avx2+cxx_compiler decode mla dtype=bf16|fp16|fp32 served
ascend/ascend ascend:910b decode mla dtype=bf16|fp16 served
intel/intel_xpu intel:xe2 decode mla dtype=bf16|fp16 served
nvidia/fa3_mla nvidia:sm90 verify mla spec_topk=4,page_size=1,dtype=bf16|fp16 served
nvidia/fa3_mla nvidia:sm90 verify mla spec_topk=1,page_size=64,dtype=bf16|fp16 served
nvidia/fa3_mla nvidia:sm90 verify mla spec_topk=4,page_size=64,dtype=bf16|fp16 PAGE_SIZE
triton/triton nvidia:sm80 verify mla spec_topk=4,page_size=1,dtype=bf16|fp16 served
triton/triton nvidia:sm80 verify mla spec_topk=1,page_size=64,dtype=bf16|fp16 served
triton/triton nvidia:sm80 verify mla spec_topk=4,page_size=64,dtype=bf16|fp16 PAGE_SIZE
triton/triton amd:gfx90a verify gqa spec_topk=4,page_size=1,dtype=bf16|fp16 served
triton/triton amd:gfx90a verify gqa spec_topk=1,page_size=64,dtype=bf16|fp16 served
triton/triton amd:gfx90a verify gqa spec_topk=4,page_size=64,dtype=bf16|fp16 PAGE_SIZE
amd/aiter amd:gfx942 verify mla spec_topk=4,page_size=1,dtype=bf16|fp16 served
amd/aiter amd:gfx942 verify mla spec_topk=1,page_size=64,dtype=bf16|fp16 served
amd/aiter amd:gfx942 verify mla spec_topk=4,page_size=64,dtype=bf16|fp16 served
amd/aiter amd:gfx942 verify gqa spec_topk=4,page_size=16,dtype=bf16|fp16 SPEC_TOPK
amd/aiter amd:gfx942 verify gqa spec_topk=1,page_size=64,dtype=bf16|fp16 served
amd/aiter amd:gfx942 verify gqa spec_topk=4,page_size=64,dtype=bf16|fp16 SPEC_TOPK
"""
"""Each row gives a card, a machine, a phase, a request (a shape and further fields), and `served`
or the refusal's codes. The cards give the sources of these limits. "64|96" makes a row for each
value."""


def every_value(row: str) -> list[str]:
    """The row once for each value of "64|96"."""
    several = re.search(r"\w+(?:\|\w+)+", row)
    return [row.replace(several[0], one) for one in several[0].split("|")] if several else [row]


@pytest.mark.parametrize(
    "row", [one for row in LIMITS.strip().splitlines() for one in every_value(row)]
)
def test_a_card_serves_what_its_kernels_do(row) -> None:
    address, platform, phase, shape, changes, said = row.split()
    request = Request.parse(SHAPES[shape]).replace(**parse_fields(changes))
    verdict = check(CARDS[address].card, phase, request, Platform.parse(platform))
    codes = "+".join(reason.code for reason in verdict.reasons)
    assert codes == ("" if said == "served" else said)


@pytest.mark.parametrize("brought", ["triton", "triton-rocm", "triton-xpu"])
def test_triton_is_found_under_the_name_that_torch_brings_it_by(brought) -> None:
    installed = {"torch": "2.11.0", brought: "3.7.0"}
    verdict = check(
        CARDS["triton/triton"].card,
        "decode",
        Request.parse("dtype=bf16,head_dim=128"),
        Platform.parse("intel:xe2"),
        libraries=installed.get,
    )
    assert "LIBRARY" not in {reason.code for reason in verdict.reasons}
    without = check(
        CARDS["triton/triton"].card,
        "decode",
        Request.parse("dtype=bf16,head_dim=128"),
        Platform.parse("intel:xe2"),
        libraries={"torch": "2.11.0"}.get,
    )
    assert "LIBRARY" in {reason.code for reason in without.reasons}


@pytest.mark.parametrize("address", sorted(CARDS))
def test_every_number_among_the_options_has_bounds(address) -> None:
    for option in CARDS[address].card.options:
        if option.type in (int, float) and not option.choices:
            assert option.least is not None, option.name
            assert option.most is not None, option.name
