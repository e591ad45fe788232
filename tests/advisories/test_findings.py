"""Each finding refuses its shape on a backend that uses its library, and nothing beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from attnmux.advisories.plugin import FINDINGS
from attnmux.core import NoBackend, Offer, Platform, Request, solve
from attnmux.core.plugin import ANY, Advisory, BackendCard, Clause, emulated, one_of
from attnmux.testing.cases.standard import in_graphs, standard_cases

ALL = Advisory.in_folder(FINDINGS)
PHASES = ("extend", "decode", "verify", "draft")
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_kv_heads": 1}
DEVICES = {"gfx942": "amd:gfx942", "gfx950": "amd:gfx950"}
SM = {"10.0": "sm100", "10.3": "sm103", "12.0": "sm120", "7.5": "sm75"}


def offering(advisory: Advisory, **more: Any) -> Offer:
    """A backend that takes every release of the library and serves all of its shapes."""
    clause = Clause(**{**dict.fromkeys(Clause.__slots__, ANY), **more.pop("limits", {})})
    card = BackendCard(
        name="old",
        summary="older than the finding",
        factory="old:make",
        clauses=(clause,),
        requires=more.pop("requires", (advisory.library,)),
    )
    return Offer(card=card, plugin="vendor", advisories=(advisory,), **more)


def affected(advisory: Advisory) -> str:
    """The oldest affected release that the range names."""
    ends = SpecifierSet(advisory.affected)
    return (
        min((end.version for end in ends if end.operator in (">=", "==")), key=Version)
        if (advisory.affected)
        else "0.1.18"
    )


def shape(advisory: Advisory) -> tuple[Request, Platform]:
    """A question that falls into the clause."""
    example = {name: getattr(advisory.clause, name).examples() for name in advisory.limits}
    version = advisory.clause.version
    sm = next((name for text, name in SM.items() if version.admits(text)), "sm90")
    arch = example.pop("arch", (f"nvidia:{sm},cuda=13.0",))[0]
    fields = {name: values[0] for name, values in example.items() if values and name != "vendor"}
    phase = fields.pop("phase", "decode")
    if fields["kind"] == "mla":
        fields |= LATENT
    if phase == "verify":
        fields = {"spec_topk": 1, "spec_draft_tokens": 4, **fields}
    fields = {"dtype": "bfloat16", "page_size": 16, "num_q_heads": 16, **fields}
    request = Request(phases=(phase,), **fields)
    return request, Platform.parse(DEVICES.get(arch, arch))


def decide(offer: Offer, request: Request, platform: Platform, version: str) -> None:
    solve(request, platform, [offer], libraries=lambda name: version)


@pytest.mark.parametrize("advisory", ALL, ids=lambda each: each.id)
def test_the_shape_is_refused_and_another_release_is_not(advisory: Advisory) -> None:
    request, platform = shape(advisory)
    with pytest.raises(NoBackend, match=advisory.id) as caught:
        decide(offering(advisory), request, platform, affected(advisory))
    (verdict,) = caught.value.candidates
    (reason,) = verdict.reasons
    assert reason.code == "ADVISORY"
    assert advisory.source in str(reason)
    decide(offering(advisory), request, platform, "")
    if advisory.affected:
        decide(offering(advisory), request, platform, "0.0.1")


BESIDE: dict[str, dict[str, Any]] = {
    "num_q_heads": {"num_q_heads": 8},
    "page_size": {},
    "spec_draft_tokens": {"spec_draft_tokens": 4},
    "sliding_window": {"sliding_window": None},
    "kv_dtype": {"kv_dtype": "bfloat16"},
    "graph": {"graph": False},
    "head_dim": {"head_dim": 128, "v_head_dim": None},
}


@pytest.mark.parametrize(
    ("advisory", "axis"),
    [(each, axis) for each in ALL for axis in each.limits if axis in BESIDE],
    ids=lambda each: getattr(each, "id", each),
)
def test_the_shape_beside_it_is_served(advisory: Advisory, axis: str) -> None:
    request, platform = shape(advisory)
    beside = BESIDE[axis]
    if axis == "page_size":
        beside = {"page_size": 1 if request.page_size != 1 else 64}
    if axis == "kv_dtype" and not getattr(advisory.clause, axis).examples()[0].startswith("fp8"):
        beside = {"kv_dtype": "fp8_e4m3"}
    decide(offering(advisory), request.replace(**beside), platform, affected(advisory))


@pytest.mark.parametrize("advisory", ALL, ids=lambda each: each.id)
def test_the_suite_has_a_case_of_the_kind(advisory: Advisory) -> None:
    cases = standard_cases((1, 16, 256))
    names = [case.name for case in (*cases, *in_graphs(cases))]
    assert any(re.search(advisory.case, name) for name in names)


def finding(**more: Any) -> Advisory:
    """A made-up finding, of pages of 64."""
    told = {
        "id": "AKA-1",
        "library": "kernels",
        "affected": ">=2,<3",
        "effect": "wrong",
        "summary": "wrong",
        "source": "https://kernels.dev/1",
        "clause": {"kind": "mha", "page_size": 64},
    }
    return Advisory.from_dict({**told, **more})


CPU = Platform.parse("cpu:x86_64")
ASKED = Request(phases=("decode",), dtype="bfloat16", page_size=64, num_q_heads=8, num_kv_heads=8)


def hint_of(offer: Offer, request: Request = ASKED, version: str = "2.5") -> str:
    with pytest.raises(NoBackend) as caught:
        decide(offer, request, CPU, version)
    return caught.value.candidates[0].reasons[0].hint


def test_the_hint_is_a_page_size_that_helps() -> None:
    offer = offering(finding(), limits={"page_size": one_of(64, 256)})
    assert hint_of(offer) == "page_size=256"
    decide(offer, ASKED.replace(page_size=256), CPU, "2.5")


@pytest.mark.parametrize(
    ("requires", "fixed", "hint"),
    [
        ("kernels>=1.5", "", "pip install 'kernels==1.5'"),
        ("kernels>=2,<4", "3.1", "pip install 'kernels>=3.1,<4'"),
        ("kernels>=2,<3", "3.1", ""),
        ("kernels>=2", "", ""),
    ],
)
def test_the_hint_is_a_release_that_the_card_takes(requires: str, fixed: str, hint: str) -> None:
    only = finding(fixed=fixed, clause={"kind": "mha"})
    offer = offering(only, requires=(requires,))
    assert hint_of(offer) == hint
    if hint:
        decide(offer, ASKED, CPU, re.findall(r"=([\d.]+)", hint)[0])


def test_the_solver_takes_another_page_size_if_none_is_asked() -> None:
    offer = offering(finding(), limits={"page_size": one_of(64, 32)})
    open_size = ASKED.replace(page_size=None)
    decision = solve(open_size, CPU, [offer], libraries=lambda name: "2.5")
    assert decision.page_size == 32


def test_the_finding_is_the_reason_if_no_page_size_avoids_it() -> None:
    offer = offering(finding(), limits={"page_size": one_of(64)})
    assert hint_of(offer, ASKED.replace(page_size=None)) == ""
    both = finding(clause={"kind": "mha", "page_size": [64, 128]})
    fixed = offering(replace(both, fixed="3"), limits={"page_size": one_of(64, 128)})
    assert hint_of(fixed, ASKED.replace(page_size=None)) == "pip install 'kernels>=3'"


def test_a_page_that_the_kernel_reads_by_token_is_a_page_of_one() -> None:
    by_token = {"page_size": emulated(1)}
    decide(offering(finding(), limits=by_token), ASKED, CPU, "2.5")
    of_tokens = finding(clause={"kind": "mha", "page_size": 1})
    assert hint_of(offering(of_tokens, limits=by_token)) == ""


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        (offering(finding(), ignored=frozenset({"AKA-1"})), "ignored: ignore_advisories"),
        (offering(finding(effect="slow")), "is slow here by AKA-1"),
    ],
    ids=["ignored", "slow"],
)
def test_what_does_not_refuse_is_a_note(offer: Offer, said: str) -> None:
    decision = solve(ASKED, CPU, [offer], libraries=lambda name: "2.5")
    assert said in "".join(decision.notes)
    assert not solve(ASKED.replace(page_size=32), CPU, [offer], libraries=lambda name: "2.5").notes


def test_a_backend_that_avoids_it_is_not_refused() -> None:
    decide(offering(finding(unaffected={"old": "it calls another kernel"})), ASKED, CPU, "2.5")


def test_of_alternatives_the_one_that_is_used_counts() -> None:
    offer = offering(finding(), requires=(("other>=1", "kernels>=1"),))
    decide(offer, ASKED, CPU, "2.5")
    with pytest.raises(NoBackend, match="AKA-1"):
        solve(ASKED, CPU, [offer], libraries={"kernels": "2.5"}.get)


def test_a_decision_of_another_process_is_checked_against_this_ones_findings() -> None:
    offer = offering(finding())
    decision = solve(ASKED, CPU, [replace(offer, advisories=())], libraries=lambda name: "2.5")
    decision.check(CPU, [offer], libraries=lambda name: "3")
    with pytest.raises(ValueError, match="AKA-1"):
        decision.check(CPU, [offer], libraries=lambda name: "2.5")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"affected": "new"}, "PEP 440 range"),
        ({"affected": 2}, "PEP 440 range"),
        ({"effect": "odd"}, "effect"),
        ({"source": "a friend"}, "an address"),
        ({"clause": {}}, "limits"),
        ({"clause": {"heads": 1}}, "heads"),
        ({"clause": {"page_size": {"below": 3}}}, "at_least"),
        ({"severity": 1}, "severity"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        finding(**more)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "AKA-1.toml").write_text('id = "AKA-1"\n[clause]\npage_size = "big"\n')
    with pytest.raises(ValueError, match=r"AKA-1\.toml"):
        Advisory.in_folder(tmp_path)
    (tmp_path / "AKA-1.toml").write_text("id =")
    with pytest.raises(ValueError, match=r"AKA-1\.toml.*TOML"):
        Advisory.in_folder(tmp_path)
