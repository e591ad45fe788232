"""The cards can say what the field's kernels need: rules of real backends, as data.

The cards here are sketches with the real limits, not the shipped ones.
"""

from __future__ import annotations

import pytest

from attnmux.core import NoBackend, Platform, Policy, Request, solve
from attnmux.core.plugin import (
    ANY,
    Clause,
    Prior,
    at_least,
    at_most,
    emulated,
    one_of,
    runtimes,
    versions,
)

ALL = one_of("extend", "decode", "verify", "draft")
HOPPER, BLACKWELL = versions(">=9.0,<10"), versions(">=10.0,<11")
TOP = at_most(1)


def unspeculated(rank: int, version) -> tuple[Prior, ...]:
    """First choice without speculation, or drafting a chain at page size 1; else far behind."""
    return (
        Prior(rank=rank, when=Clause.when(version=version, spec_topk=at_most(0)), source="x"),
        Prior(
            rank=rank,
            when=Clause.when(version=version, spec_topk=TOP, page_size=one_of(1)),
            source="x",
        ),
        Prior(rank=60, source="x"),
    )


@pytest.fixture
def cards(offer, clause):
    def nvidia(**conditions):
        return clause(vendor=one_of("nvidia"), phase=ALL, **conditions)

    latent = {"kind": one_of("mla"), "kv_lora_rank": one_of(512), "qk_rope_head_dim": one_of(64)}
    fp8 = one_of("bfloat16", "fp8_e4m3")
    return [
        offer(
            "fa3",
            requires=(("sgl-kernel", "sglang-kernel"),),
            priors=(
                Prior(rank=10, when=Clause.when(version=HOPPER, kind=one_of("mla")), source="x"),
                *unspeculated(10, HOPPER),
            ),
            clauses=(
                nvidia(version=HOPPER, runtime=runtimes("cuda>=12.3"), spec_topk=ANY, sinks=ANY),
                nvidia(version=HOPPER, spec_topk=TOP, **latent),
                nvidia(version=HOPPER, spec_topk=ANY, page_size=one_of(1), **latent),
            ),
        ),
        offer(
            "trtllm_mha",
            priors=unspeculated(10, BLACKWELL),
            clauses=(
                nvidia(
                    version=versions(">=10.0,<11"),
                    page_size=one_of(64, 32, 16),
                    kv_dtype=fp8,
                    spec_topk=TOP,
                    sinks=ANY,
                ),
                nvidia(version=BLACKWELL, page_size=one_of(128), group_size=at_least(2)),
            ),
        ),
        offer(
            "flashinfer",
            rank=20,
            requires=("flashinfer-python",),
            clauses=(nvidia(version=versions(">=7.5"), spec_topk=ANY, kv_dtype=fp8),),
        ),
        offer(
            "flashinfer_mla",
            aliases=("flashinfer",),
            requires=("flashinfer-python",),
            clauses=(nvidia(page_size=emulated(1), **latent),),
            priors=(
                Prior(rank=10, when=Clause.when(version=BLACKWELL), source="x"),
                Prior(rank=60, source="x"),
            ),
        ),
        offer(
            "flashmla",
            rank=70,
            companions=("flashinfer_mla",),
            clauses=(
                clause(
                    vendor=one_of("nvidia"),
                    phase=one_of("decode", "verify", "draft"),
                    page_size=one_of(64),
                    kv_dtype=fp8,
                    spec_topk=TOP,
                    **latent,
                ),
            ),
        ),
        offer(
            "fa4",
            rank=80,
            clauses=(
                clause(
                    vendor=one_of("nvidia"),
                    version=BLACKWELL,
                    phase=one_of("extend"),
                    page_size=one_of(128),
                ),
            ),
        ),
        offer(
            "triton",
            rank=40,
            clauses=(
                clause(phase=ALL, page_size=emulated(1), spec_topk=ANY, sinks=ANY),
                clause(phase=ALL, page_size=emulated(1), spec_topk=TOP, **latent),
                clause(phase=ALL, page_size=one_of(1), spec_topk=ANY, **latent),
            ),
        ),
    ]


def names(decision) -> dict[str, str]:
    return {phase: choice.backend for phase, choice in decision.phases.items()}


MLA = "kind=mla,kv_lora_rank=512,qk_rope_head_dim=64"


@pytest.mark.parametrize(
    ("platform", "asked", "without", "expected", "page_size"),
    [
        ("nvidia:sm90,cuda=12.8", "", "", "fa3", 1),
        ("nvidia:sm90,cuda=12.8", "page_size=64", "", "fa3", 64),
        ("nvidia:sm90,cuda=12.8", "spec_topk=1", "", "fa3", 1),
        ("nvidia:sm90,cuda=12.8", "spec_topk=1,page_size=64", "", "flashinfer", 64),
        ("nvidia:sm90,cuda=12.8", "spec_topk=4", "", "flashinfer", 1),
        ("nvidia:sm90,cuda=12.8", "spec_topk=4", "flashinfer-python", "triton", 1),
        ("nvidia:sm90,cuda=12.8", "spec_topk=4,sinks=true", "", "triton", 1),
        ("nvidia:sm90,cuda=12.8", "sinks=true", "", "fa3", 1),
        ("nvidia:sm90,cuda=12.2", "", "", "flashinfer", 1),
        ("nvidia:sm100,cuda=13.0", "", "", "trtllm_mha", 64),
        ("nvidia:sm103,cuda=13.0", "page_size=32", "", "trtllm_mha", 32),
        ("nvidia:sm100,cuda=13.0", "spec_topk=4", "", "flashinfer", 1),
        (
            "nvidia:sm100,cuda=13.0",
            "page_size=128,num_q_heads=8,num_kv_heads=2",
            "",
            "trtllm_mha",
            128,
        ),
        (
            "nvidia:sm100,cuda=13.0",
            "page_size=128,num_q_heads=8,num_kv_heads=8",
            "",
            "flashinfer",
            128,
        ),
        ("nvidia:sm120,cuda=13.0", "", "", "flashinfer", 1),
        ("nvidia:sm80,cuda=12.4", "", "flashinfer-python", "triton", 1),
        ("nvidia:sm90,cuda=12.8", MLA, "", "fa3", 1),
        ("nvidia:sm90,cuda=12.8", f"{MLA},spec_topk=4", "", "fa3", 1),
        ("nvidia:sm100,cuda=13.0", MLA, "", "flashinfer_mla", 1),
        ("nvidia:sm80,cuda=12.4", MLA, "", "triton", 1),
        ("amd:gfx942,rocm=6.4", "", "", "triton", 1),
    ],
)
def test_defaults(cards, platform, asked, without, expected, page_size) -> None:
    policy = Policy(without=frozenset(filter(None, [without])))
    decision = solve(Request.parse(asked), Platform.parse(platform), cards, policy)
    assert set(names(decision).values()) == {expected}
    assert decision.page_size == page_size


def test_a_base_name_for_decode_alone_brings_its_companion(cards) -> None:
    policy = Policy(backend="flashmla")
    platform = Platform.parse("nvidia:sm90,cuda=12.8")
    decision = solve(Request.parse(f"{MLA},kv_dtype=bf16"), platform, cards, policy)
    assert names(decision) == {"extend": "flashinfer_mla", "decode": "flashmla"}
    assert decision.page_size == 64


def test_an_alias_that_two_kinds_share(cards) -> None:
    policy = Policy(backend="flashinfer")
    platform = Platform.parse("nvidia:sm90,cuda=12.8")
    assert names(solve(Request.parse(MLA), platform, cards, policy))["decode"] == "flashinfer_mla"
    assert names(solve(Request(), platform, cards, policy))["decode"] == "flashinfer"


def test_two_page_sizes_that_exclude_each_other(cards) -> None:
    policy = Policy(prefill_backend="fa4", decode_backend="trtllm_mha")
    platform = Platform.parse("nvidia:sm100,cuda=13.0")
    heads = "num_q_heads=8,num_kv_heads={}"
    together = solve(Request.parse(heads.format(2)), platform, cards, policy)
    assert together.page_size == 128
    with pytest.raises(NoBackend) as caught:
        solve(Request.parse(heads.format(8)), platform, cards, policy)
    assert "one page size and KV dtype for decode, extend" in str(caught.value)
    with pytest.raises(NoBackend, match="page_size=128"):
        solve(Request.parse(f"page_size=32,{heads.format(2)}"), platform, cards, policy)


def test_a_tree_of_drafts_over_pages_has_a_hint(cards) -> None:
    platform = Platform.parse("nvidia:sm90,cuda=12.8")
    with pytest.raises(NoBackend) as caught:
        solve(Request.parse(f"{MLA},spec_topk=4,page_size=64"), platform, cards)
    first = str(caught.value).splitlines()[1]
    assert "fa3" in first
    assert "page_size=1" in first
    assert "spec_topk=1" not in first
