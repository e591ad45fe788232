"""The JSON schemas in docs/schemas are what the code writes, and refuse what it would not read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attnmux.core import Decision, Platform, Plugins, Request, solve
from tools.schemas import FOLDER, schemas

jsonschema = pytest.importorskip("jsonschema")
MODELS = (
    *("num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bf16,spec_topk=4,spec_draft_tokens=8",),
    *("num_q_heads=16,num_kv_heads=4,head_dim=64,dtype=bf16,linear_layers=gdn:36",),
    *(
        "num_q_heads=8,num_kv_heads=8,head_dim=64,dtype=bf16,page_size=16,sparse=quest,sparse_budget=512",
    ),
)


def problems(name: str, data: Any) -> list[str]:
    schema = json.loads((FOLDER / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = jsonschema.Draft202012Validator(schema).iter_errors(json.loads(json.dumps(data)))
    return [f"{each.json_path}: {each.message}" for each in found]


def test_the_files_are_made_from_the_code() -> None:
    for name, text in schemas().items():
        assert (FOLDER / name).read_text() == text, "python -m tools.schemas"


def test_every_card_fits() -> None:
    for offer in Plugins.load().offers():
        assert problems("card", offer.card.to_dict()) == []


@pytest.mark.parametrize("asked", MODELS)
def test_decisions_fit_and_are_read_again(asked: str) -> None:
    offers = Plugins.load().offers()
    decision = solve(Request.parse(asked), Platform.parse("nvidia:sm90,cuda=13.0"), offers)
    told = decision.to_dict()
    assert problems("decision", told) == []
    assert Decision.from_json(json.dumps(told)) == decision


@pytest.mark.parametrize(
    ("name", "change"),
    [("card", {"clauses": {}}), ("card", {"options": [{"name": 1}]}), ("decision", {"phases": []})],
)
def test_what_is_none_does_not_fit(name: str, change: dict[str, Any]) -> None:
    offers = Plugins.load().offers()
    request = Request.parse(MODELS[0])
    decision = solve(request, Platform.parse("nvidia:sm90,cuda=13.0"), offers)
    told = {"card": offers[0].card.to_dict(), "decision": decision.to_dict()}[name]
    assert problems(name, {**told, **change})
