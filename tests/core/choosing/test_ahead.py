"""Work that decided backends begin before weights are loaded."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from attnmux.core import Plugins, Request, solve
from attnmux.core.find.cpu import probe_cpu

ASKED = Request.parse("num_q_heads=8,num_kv_heads=2,head_dim=64,dtype=bf16")


@pytest.mark.parametrize("fails", [False, True])
def test_only_decided_backends_begin_and_errors_are_left_to_their_factories(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    calls: list[object] = []

    def begin(platform: object) -> None:
        calls.append(platform)
        if fails:
            raise OSError("no process")

    monkeypatch.setitem(sys.modules, "beginner", SimpleNamespace(begin=begin, other=None))  # type: ignore[arg-type]  # stands in for a module
    platform = replace(probe_cpu(), features=frozenset())
    offers = [
        replace(offer, card=replace(offer.card, ahead=f"beginner:{what}"))
        for offer in Plugins.load().offers()
        if offer.plugin == "cpu"
        for what in ["begin" if offer.card.name == "torch_native" else "other"]
    ]
    decision = solve(ASKED, platform, offers)
    decision.begin_ahead(offers)
    assert calls == [platform]
