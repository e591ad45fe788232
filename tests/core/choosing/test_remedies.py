"""Hints that hold only together with those for other phases."""

from __future__ import annotations

import pytest

from attnmux.core import NoBackend, Request, solve
from attnmux.core.plugin import ANY, one_of


def hints(request: Request, platform, cards) -> dict[tuple[str, str], set[str]]:
    with pytest.raises(NoBackend) as caught:
        solve(request, platform, cards)
    return {
        (verdict.backend, verdict.phase): {reason.hint for reason in verdict.reasons}
        for verdict in caught.value.candidates
    }


def test_a_served_phase_needs_no_change_for_an_unserved_one(offer, clause, cpu) -> None:
    """`pre` extends as it is, and verifies where graphs are not asked for."""
    spec = {"spec_topk": ANY, "graph": ANY}
    followers = one_of("verify", "draft")
    cards = [
        offer("gen", phase=one_of("decode"), page_size=one_of(64), **spec),
        offer(
            "pre",
            clauses=(
                clause(phase=one_of("extend"), spec_topk=ANY),
                clause(phase=followers, spec_topk=ANY),
            ),
        ),
    ]
    request = Request(page_size=16, graph=True, spec_topk=1)
    told = hints(request, cpu, cards)
    assert told["gen", "decode"] == {"page_size=64"}
    assert told["pre", "verify"] == told["pre", "draft"] == {"graph=none"}
    both = request.replace(page_size=64, graph=False)
    assert solve(both, cpu, cards).phases["verify"].backend == "pre"


def test_no_hint_where_the_other_phases_would_need_the_same_field_changed(offer, cpu) -> None:
    cards = [
        offer("gen", phase=one_of("decode"), page_size=one_of(64)),
        offer("pre", phase=one_of("extend"), page_size=one_of(128)),
    ]
    told = hints(Request(page_size=16), cpu, cards)
    assert told["gen", "decode"] == told["pre", "extend"] == {""}
