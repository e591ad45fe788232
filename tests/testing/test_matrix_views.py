"""The views of `attnmux matrix`: in a terminal, of one backend, and filtered."""

from __future__ import annotations

import pytest
from click import unstyle
from click.testing import CliRunner

from attnmux.core import Offer, Platform, Request
from attnmux.core.cli.verbs import verbs
from attnmux.core.plugin import ANY, BackendCard, Clause, at_most, one_of
from attnmux.testing.matrix.command import TITLES
from attnmux.testing.matrix.rows import narrowed, rows_of
from attnmux.testing.matrix.view import show

PLAIN = {
    "phase": one_of("extend", "decode"),
    "kind": one_of("mha"),
    "dtype": one_of("bfloat16"),
    "kv_dtype": one_of("bfloat16"),
    "page_size": ANY,
    "head_dim": ANY,
}


def offer(name: str, vendor: str, *changes: dict, **card: object) -> Offer:
    clauses = tuple(
        Clause(vendor=one_of(vendor), **{**PLAIN, **change}) for change in changes or ({},)
    )
    made = BackendCard(name=name, summary=name, clauses=clauses, factory="a:b", **card)
    return Offer(card=made, plugin="fake")


SINKS = offer(
    "with_sinks",
    "acme",
    {"sinks": ANY, "sliding_window": ANY},
    {"page_size": one_of(64), "logit_cap": ANY},
    sources={"sinks": "acme.h: <sinks> & more"},
)
PLAINER = offer("plainer", "other", {"sliding_window": at_most(4096)})
OFFERS = (SINKS, PLAINER)


def shown(capsys, *, offers=OFFERS, by_feature: bool = False, in_full: bool = False) -> str:
    show(rows_of(offers), TITLES, by_feature=by_feature, in_full=in_full)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("view", [{}, {"by_feature": True}, {"in_full": True}])
def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch, width, view) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = unstyle(shown(capsys, **view))
    assert max(map(len, out.splitlines())) <= width
    assert "with_sinks" in out.replace("\n", "")


def test_by_backend_limits_are_marked(capsys) -> None:
    out = shown(capsys)
    assert "with_sinks" in out
    assert "plainer" in out
    assert "sinks*" in out  # in one of two clauses
    assert "within limits" in out


def test_by_feature_lists_the_backends(capsys) -> None:
    lines = {line.split("  ")[0]: line for line in shown(capsys, by_feature=True).splitlines()}
    assert "with_sinks*" in lines["sinks"]
    assert "plainer" not in lines["sinks"]
    assert "none" in lines["LSE"]


def test_in_full_gives_limits_and_sources(capsys) -> None:
    out = shown(capsys, offers=(SINKS,), in_full=True)
    assert "<sinks>" in out
    assert "acme.h" in out
    assert "no" in out.split("LSE")[1]


def test_nothing_left_is_said(capsys) -> None:
    assert "no installed backend" in shown(capsys, offers=())


def names(request: Request | None = None, platform: str | None = None) -> list[str]:
    machine = None if platform is None else Platform.parse(platform)
    return [each.card.name for each in narrowed(OFFERS, request, machine)]


def test_narrowed_to_a_machine_or_a_request() -> None:
    assert names() == ["with_sinks", "plainer"]
    assert names(platform="other:v1,device=cuda") == ["plainer"]
    assert names(Request(sinks=True, dtype="bfloat16")) == ["with_sinks"]
    assert names(Request(sliding_window=8192)) == ["with_sinks"]
    assert names(Request(sliding_window=4096)) == ["with_sinks", "plainer"]
    assert names(Request(sinks=True), "other:v1,device=cuda") == []
    assert names(Request(kind="mla")) == []


def test_narrowed_keeps_the_clauses_that_count() -> None:
    (left,) = narrowed(OFFERS, Request(sinks=True))
    assert left.card.clauses == SINKS.card.clauses[:1]
    (row,) = rows_of([left])
    assert [cell.where for cell in row.cells if cell.where] == []


def test_an_unknown_backend_is_refused() -> None:
    result = CliRunner().invoke(verbs, ["matrix", "nonsense"], prog_name="attnmux")
    assert result.exit_code == 2
    assert "'nonsense'" in result.stderr
