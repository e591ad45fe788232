"""Finding the backend on trial, and the points beyond its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core import InvalidInput, Platform
from attnmux.core.facts.errors import UnknownBackend
from attnmux.core.facts.values import DTYPES
from attnmux.core.plugin import ANY, NONE, Clause, Option, at_most, multiple_of, one_of
from attnmux.testing import (
    Candidate,
    FakeBackend,
    fake_card,
    fake_platform,
    find_candidate,
    make_setup,
    outside_points,
    try_point,
)


def points_of(**conditions: object) -> dict[str, set[str]]:
    candidate = Candidate(card=fake_card(**conditions), platform=fake_platform())
    found: dict[str, set[str]] = {}
    for point in outside_points(candidate):
        found.setdefault(point.axis, set()).add(point.value)
        assert try_point(candidate, point).status == "refused", point.name
    return found


def test_points_lie_one_step_beyond_each_limit() -> None:
    found = points_of(
        page_size=one_of(16, 64),
        head_dim=multiple_of(64, most=256),
        group_size=at_most(8),
        dtype=one_of("bfloat16"),
        sinks=NONE,
        sliding_window=NONE,
    )
    assert found["page_size"] == {"15", "17", "63", "65"}
    assert found["head_dim"] == {"63", "65", "255", "257"}
    assert found["group_size"] == {"9"}
    assert found["dtype"] == set(DTYPES) - {"bfloat16"}
    assert found["sinks"] == {"True"}
    assert found["sliding_window"] == {"8"}
    assert found["vendor"] == {"nobody"}


def test_what_another_clause_serves_is_no_outside_point() -> None:
    wide, narrow = fake_card(page_size=ANY).clauses[0], fake_card(page_size=one_of(1)).clauses[0]
    card = fake_card()
    both = type(card)(
        name=card.name, summary=card.summary, factory=card.factory, clauses=(narrow, wide)
    )
    points = outside_points(Candidate(card=both, platform=fake_platform()))
    assert "page_size" not in {point.axis for point in points}


@pytest.mark.parametrize(
    ("axis", "condition", "unproven"),
    [
        ("dtype", one_of("bfloat16", "fp8_e4m3"), "dtype=fp8_e4m3"),
    ],
)
def test_a_value_that_no_case_can_ask_for_fails(axis, condition, unproven) -> None:
    wide = Candidate(card=fake_card(**{axis: condition}), platform=fake_platform())
    outcomes = [try_point(wide, point) for point in outside_points(wide)]
    failed = {outcome.case: outcome.message for outcome in outcomes if outcome.status == "failed"}
    assert failed == {
        unproven: f"the card of fake serves {unproven}, and no case of the suite can ask for it: "
        f"list only proven values in the clause's {axis}"
    }


def test_a_selector_that_admits_too_much_is_found_out() -> None:
    """`try_point` fails where the refusal is missing or about something else."""
    narrow = Candidate(card=fake_card(page_size=one_of(16)), platform=fake_platform())
    point = next(point for point in outside_points(narrow) if point.name == "page_size=17")
    wide = Candidate(card=fake_card(), platform=fake_platform())
    assert try_point(wide, point).status == "failed"
    elsewhere = Candidate(card=fake_card(vendor=one_of("other")), platform=fake_platform())
    outcome = try_point(elsewhere, point)
    assert outcome.status == "failed"
    assert "vendor" in outcome.message


def test_cases_come_in_the_page_sizes_of_the_card() -> None:
    candidate = Candidate(card=fake_card(page_size=one_of(128)), platform=fake_platform())
    admitted = {
        case.page_size
        for case in candidate.cases()
        if candidate.admits(case) and not case.is_encoder
    }
    assert admitted == {128}


def test_options_are_completed_with_defaults() -> None:
    tile = Option(name="tile", type=int, default=2)
    split = Option(name="split", type=int, default=8)
    candidate = Candidate(
        card=replace(fake_card(), options=(tile, split)),
        platform=fake_platform(),
        options={"tile": 4},
        factory=FakeBackend,
    )
    setup = make_setup(candidate.cases()[0], fake_platform(), "cpu")
    assert candidate.build(setup.context).options == {"tile": 4, "split": 8}


def test_finds_an_installed_backend() -> None:
    candidate = find_candidate("torch_native", device="cpu")
    assert candidate.card.name == "torch_native"
    assert candidate.plugin == "cpu"
    assert candidate.platform.vendor == "cpu"
    assert find_candidate("cpu/torch_native", device="cpu").card == candidate.card


def test_refuses_what_is_not_there() -> None:
    with pytest.raises(UnknownBackend, match="torch_native"):
        find_candidate("torch_nativ")
    with pytest.raises(InvalidInput, match="device: expected one of cpu, got 'npu:1'"):
        find_candidate("torch_native", device="npu:1", platforms=[Platform.parse("cpu:x86_64")])
    with pytest.raises(InvalidInput, match="option"):
        find_candidate("torch_native", options={"speed": 11})


def test_the_platform_is_one_that_the_card_admits() -> None:
    """An accelerator comes first, unless the card does not serve it."""
    here = [Platform.parse("nobody:x1,device=cuda"), Platform.parse("cpu:x86_64")]
    assert find_candidate("torch_native", platforms=here).device == "cuda"
    assert find_candidate("torch_native", platforms=here, device="cpu").device == "cpu"


def test_every_limit_of_a_clause_is_walked() -> None:
    """An axis that nobody offers is tried, whichever it is."""
    optional = {
        name
        for name, item in Clause.__dataclass_fields__.items()
        if item.default == NONE and name not in ("v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
    }
    assert optional <= set(points_of(**dict.fromkeys(optional, NONE)))
