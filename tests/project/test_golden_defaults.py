"""The defaults that users know, over every architecture: what is promised, or a listed reason."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from attnmux.core import NoBackend, Offer, Platform, Plugins, Policy, Request, solve

ELSEWHERE = json.loads(
    (Path(__file__).parent / "golden" / "defaults-elsewhere.json").read_text(encoding="utf-8")
)
PLATFORMS = (
    *(f"nvidia:sm{number}" for number in (70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121)),
    "nvidia:sm90,cuda=12.2",
    "amd:gfx90a",
    "amd:gfx942",
    "amd:gfx950",
    "amd:gfx1100",
    "intel:xe1",
    "intel:xe2",
    "ascend:910b",
    "ascend:910_93",
    "cpu:x86_64,features=amx",
    "cpu:x86_64,features=avx2",
    "cpu:aarch64",
    "apple:m3,device=mps",
    "mthreads:mp_31,device=musa",
    "acme:one,device=acme",
)
SHAPES = {
    "mha": "num_q_heads=32,num_kv_heads=8,head_dim=128",
    "mla": "num_q_heads=16,num_kv_heads=1,head_dim=192,v_head_dim=128,kv_lora_rank=512,"
    "qk_rope_head_dim=64",
}
CELLS = tuple(product(PLATFORMS, SHAPES, (0, 1, 4), (1, 16, 64), (True, False)))


@pytest.fixture(scope="module")
def offers() -> tuple[Offer, ...]:
    return Plugins.load().offers()


def promised_on_nvidia(platform: str, kind: str, plain: bool, flashinfer: bool) -> str:
    general = "flashinfer" if flashinfer else "triton"
    if platform == "nvidia:sm90":
        return "fa3" if kind == "mla" or plain else general
    if platform in ("nvidia:sm100", "nvidia:sm103"):
        if kind == "mla":
            return "flashinfer_mla"
        return "trtllm_mha" if plain else "flashinfer"
    return "triton" if kind == "mla" else general


def promised(platform: str, kind: str, topk: int, page: int, flashinfer: bool) -> str:
    """The table of the documentation, word for word."""
    vendor = platform.partition(":")[0]
    if vendor == "nvidia":
        plain = topk == 0 or (topk == 1 and page == 1)
        return promised_on_nvidia(platform, kind, plain, flashinfer)
    if vendor == "cpu":
        return "intel_amx" if "amx" in platform else "torch_native"
    made = {"amd": "aiter", "intel": "intel_xpu", "ascend": "ascend"}
    return made.get(vendor, "triton")


def listed(platform: str, kind: str, topk: int, page: int, flashinfer: bool) -> list[int]:
    cell = {
        "platforms": platform,
        "kinds": kind,
        "topk": topk,
        "pages": page,
        "flashinfer": flashinfer,
    }
    return [
        place
        for place, row in enumerate(ELSEWHERE)
        if all(value in row[name] for name, value in cell.items())
    ]


def decided(offers, platform, kind, topk, page, flashinfer) -> set[str]:
    """The names, aliases included, that the winner of every phase answers to; none if refused."""
    cards = {offer.card.name: offer.card for offer in offers}
    without = frozenset() if flashinfer else frozenset({"flashinfer-python"})
    asked = f"{SHAPES[kind]},dtype=bf16,kind={kind},spec_topk={topk},page_size={page}"
    policy = Policy(without=without)
    try:
        decision = solve(Request.parse(asked), Platform.parse(platform), offers, policy)
    except NoBackend:
        return {""}
    winners = {choice.backend for choice in decision.phases.values()}
    return set.intersection(*({name, *cards[name].aliases} for name in winners))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_cell_is_as_promised_or_listed(offers, platform) -> None:
    wrong = []
    for cell in (cell for cell in CELLS if cell[0] == platform):
        rows = listed(*cell)
        expected = ELSEWHERE[rows[0]]["decided"] if rows else promised(*cell)
        got = decided(offers, *cell)
        if expected not in got:
            wrong.append((cell, expected, got))
    assert not wrong


def test_each_listed_default_is_unique_and_differs_from_the_promise() -> None:
    rows = [listed(*cell) for cell in CELLS]
    assert all(len(found) <= 1 for found in rows)
    assert {place for found in rows for place in found} == set(range(len(ELSEWHERE)))
    for cell, found in zip(CELLS, rows, strict=True):
        for place in found:
            assert ELSEWHERE[place]["decided"] != promised(*cell), cell
            assert ELSEWHERE[place]["because"]


@pytest.mark.parametrize("platform", ["nvidia:sm90", "nvidia:sm100"])
def test_sparse_models_get_their_own_backend(offers, platform) -> None:
    request = Request.parse(f"{SHAPES['mla']},dtype=bf16,kind=nsa")
    decision = solve(request, Platform.parse(platform), offers)
    assert {choice.backend for choice in decision.phases.values()} == {"nsa"}
    assert decision.page_size == 64


def test_a_draft_tree_over_latent_pages_is_refused_and_page_1_is_the_hint(offers) -> None:
    asked = f"{SHAPES['mla']},dtype=bf16,kind=mla,spec_topk=4,page_size=64"
    hopper = Platform.parse("nvidia:sm90")
    with pytest.raises(NoBackend, match=r"fa3_mla .*\(page_size=1\)"):
        solve(Request.parse(asked), hopper, offers)
    followed = solve(Request.parse(asked).replace(page_size=1), hopper, offers)
    assert {choice.backend for choice in followed.phases.values()} == {"fa3_mla"}
