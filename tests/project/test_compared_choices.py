"""Choices for published models differ from SGLang's and vLLM's for reasons that were looked at."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from attnmux.core import Platform, Plugins

NUM_SHARES = 7
"""No divisor of the number of platforms, which come one after another."""


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("tools.compare_choices.__main__")


@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
def test_each_difference_has_a_reason(tool, engine, full, day):
    offers, asked = Plugins.load().offers(), [*tool.questions()]
    assert len({one.model for one in asked}) >= 100
    assert {one.tp for one in asked} == {1, 8}
    assert len({one.platform for one in asked}) == 8
    share = asked if full else asked[day % NUM_SHARES :: NUM_SHARES]
    unknown, same = set(), 0
    for one in share:
        theirs = tool.ENGINES[engine](one.request, Platform.parse(one.platform))
        answer = tool.compared(one, offers, theirs)
        same += not answer[2]
        if answer[2] and not tool.because(engine, answer):
            unknown.add((one.platform, *answer))
    assert not unknown
    assert same > 0.4 * len(share)


def test_counterparts_and_reasons_name_what_there_is(tool):
    names = {offer.card.name for offer in Plugins.load().offers()}
    assert {one for ours in tool.COUNTERPARTS.values() for one in ours} <= names | {"vllm_xpu"}
    assert {engine for engine, _, _ in tool.LOOKED_AT} == {"SGLang", "vLLM"}
