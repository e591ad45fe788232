"""What holds for the cards of every plugin of this project, adapters written or not."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from attnmux.core.choosing.card import Offer
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import load_plugins
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.solver import Policy, check, solve

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OFFERS: tuple[Offer, ...] = load_plugins().offers()
CARDS = {offer.address: offer for offer in OFFERS}
KNOWN = json.loads(
    files("attnmux.core.choosing").joinpath("known_backends.json").read_text(encoding="utf-8")
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
    "double_sparsity",
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
    assert (card.factory is None) == (card.status == "planned")


@pytest.mark.parametrize("address", [a for a, offer in CARDS.items() if offer.card.extra])
def test_an_extra_brings_what_the_card_requires(address) -> None:
    offer = CARDS[address]
    if offer.card.extra == "torch":
        pytest.skip("torch is core's extra")
    project = tomllib.loads((ROOT / f"plugins/{offer.plugin}/pyproject.toml").read_text("utf-8"))
    extra = project["project"]["optional-dependencies"][offer.card.extra]
    brought = {Requirement(line).name for line in extra}
    for alternatives in offer.card.requirements():
        names = {Requirement(line).name for line in alternatives}
        assert names & brought or names == {"torch"}


@pytest.mark.parametrize("address", [a for a, o in CARDS.items() if o.card.status == "planned"])
def test_what_is_planned_never_runs_and_can_be_asked_about(address) -> None:
    card = CARDS[address].card
    platform = Platform.parse("nvidia:sm90,cuda=13.0")
    for phase in ("extend", "decode"):
        here = check(card, phase, Request(), platform, libraries=lambda _: "99")
        assert "PLANNED" in {reason.code for reason in here.reasons}
        there = check(card, phase, Request(), platform, policy=Policy(hypothetical=True))
        assert "PLANNED" not in {reason.code for reason in there.reasons}


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


def test_an_approximation_is_chosen_by_name_alone() -> None:
    platform, asked = Platform.parse("nvidia:sm90"), Request.parse("dtype=bf16,head_dim=128")
    approximate = CARDS["triton/double_sparsity"].card
    exact = CARDS["triton/triton"].card
    for field in ("head_dim", "page_size", "vendor", "kv_dtype"):
        for clause in approximate.clauses:
            for value in getattr(clause, field).examples():
                assert any(getattr(wider, field).admits(value) for wider in exact.clauses)
    policy = Policy(hypothetical=True, backend="double_sparsity")
    decision = solve(asked, platform, OFFERS, policy)
    assert decision.phases["decode"].backend == "double_sparsity"
    assert decision.phases["extend"].backend == "triton"
    assert [change.field for change in decision.coercions] == ["backend for extend"]


@pytest.mark.parametrize(
    ("address", "platform", "phase", "asked", "refused"),
    [
        ("intel/intel_amx", "cpu:x86_64,features=amx", "extend", "head_dim=80", ["HEAD_DIM"]),
        ("intel/intel_amx", "cpu:x86_64,features=amx", "extend", "head_dim=320", []),
        ("intel/intel_amx", "cpu:x86_64,features=amx", "extend", "head_dim=192,v_head_dim=128", []),
        (
            "intel/intel_amx",
            "cpu:x86_64,features=amx",
            "extend",
            "head_dim=96,v_head_dim=80",
            ["V_HEAD_DIM"],
        ),
        ("intel/intel_amx", "cpu:x86_64,features=amx", "decode", "head_dim=80", []),
        ("amd/wave", "amd:gfx942", "extend", "head_dim=96", []),
        ("amd/wave", "amd:gfx942", "extend", "head_dim=256", ["HEAD_DIM"]),
        ("triton/triton", "nvidia:sm80", "decode", "head_dim=512", []),
        ("triton/triton", "nvidia:sm80", "decode", "head_dim=576", ["HEAD_DIM"]),
        ("triton/double_sparsity", "nvidia:sm80", "decode", "head_dim=64", []),
        ("triton/double_sparsity", "nvidia:sm80", "decode", "head_dim=96", ["HEAD_DIM"]),
        ("triton/double_sparsity", "nvidia:sm80", "decode", "head_dim=256", ["HEAD_DIM"]),
    ],
)
def test_heads_are_taken_as_the_kernels_take_them(address, platform, phase, asked, refused) -> None:
    request, policy = Request.parse(f"dtype=bf16,{asked}"), Policy(hypothetical=True)
    verdict = check(CARDS[address].card, phase, request, Platform.parse(platform), policy=policy)
    assert [reason.code for reason in verdict.reasons] == refused


@pytest.mark.parametrize("brought", ["triton", "triton-rocm", "triton-xpu"])
@pytest.mark.parametrize("name", ["triton", "double_sparsity"])
def test_triton_is_found_under_the_name_that_torch_brings_it_by(name, brought) -> None:
    installed = {"torch": "2.11.0", brought: "3.7.0"}
    verdict = check(
        CARDS[f"triton/{name}"].card,
        "decode",
        Request.parse("dtype=bf16,head_dim=128"),
        Platform.parse("intel:xe2"),
        libraries=installed.get,
    )
    assert "LIBRARY" not in {reason.code for reason in verdict.reasons}
    without = check(
        CARDS[f"triton/{name}"].card,
        "decode",
        Request.parse("dtype=bf16,head_dim=128"),
        Platform.parse("intel:xe2"),
        libraries={"torch": "2.11.0"}.get,
    )
    assert "LIBRARY" in {reason.code for reason in without.reasons}
