"""`attnmux matrix`, and the page that it generates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.core import Offer, Platform, Plugins, Request
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.core.facts.values import PHASES
from attnmux.core.find.plugin import PluginFailure
from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Verified,
    emulated,
    multiple_of,
    one_of,
    versions,
)
from attnmux.core.verbs import Question
from attnmux.testing.matrix.command import markdown
from attnmux.testing.matrix.rows import COLUMNS, Row, rows_of

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(sorted(path.name for path in (ROOT / "plugins").iterdir() if path.is_dir()))

PLAIN = {
    "vendor": ANY,
    "phase": one_of("extend", "decode"),
    "kind": one_of("mha"),
    "dtype": one_of("bfloat16", "float16"),
    "kv_dtype": one_of("bfloat16", "float16"),
    "page_size": ANY,
    "head_dim": ANY,
}


def offer(*clauses: dict, name: str = "a", plugin: str = "fake", **card: object) -> Offer:
    made = tuple(Clause(**{**PLAIN, **conditions}) for conditions in clauses or ({},))
    card.setdefault("factory", "a:b")
    return Offer(card=BackendCard(name=name, summary=name, clauses=made, **card), plugin=plugin)


def cell(row: Row, title: str) -> tuple[str, str]:
    (found,) = [
        cell for column, cell in zip(COLUMNS, row.cells, strict=True) if column.title == title
    ]
    return found.served, found.where


def only(*clauses: dict) -> Row:
    (row,) = rows_of([offer(*clauses)])
    return row


def test_every_axis_of_a_feature_has_a_column() -> None:
    """A new ability that a card can state is a column too."""
    optional = {
        name for name, field in Clause.__dataclass_fields__.items() if field.default is NONE
    }
    dims = {"v_head_dim", "kv_lora_rank", "qk_rope_head_dim"}
    assert optional - dims == {column.axis.name for column in COLUMNS} - {"kv_dtype", "phase"}


def test_what_is_not_declared_is_not_served() -> None:
    row = only({})
    assert {each.served for each in row.cells} == {"no"}
    assert (row.machines, row.phases, row.page_sizes) == (("any",), ("extend", "decode"), "any")


def test_what_every_clause_serves() -> None:
    row = only({"sinks": ANY, "spec_topk": ANY, "kv_dtype": ANY})
    assert cell(row, "sinks") == ("yes", "")
    assert cell(row, "topk > 1") == ("yes", "")
    assert cell(row, "fp8 KV") == cell(row, "fp4 KV") == ("yes", "")


def test_a_feature_of_some_values() -> None:
    row = only({"spec_topk": one_of(1), "kv_dtype": one_of("fp8_e4m3"), "head_dim": ANY})
    assert cell(row, "topk 1") == ("yes", "")
    assert cell(row, "topk > 1") == ("no", "")
    assert cell(row, "fp8 KV") == ("some", "fp8_e4m3")
    assert cell(only({"sliding_window": multiple_of(128)}), "window") == (
        "some",
        "a multiple of 128",
    )


def test_values_that_not_every_clause_takes() -> None:
    e4m3, both = one_of("fp8_e4m3"), one_of("fp8_e4m3", "fp8_e5m2")
    more = {"kv_dtype": both, "version": versions(">=10")}
    older = {"kv_dtype": e4m3, "version": versions(">=9,<10")}
    assert cell(only(older, more), "fp8 KV") == ("some", "version >=10, elsewhere in part")
    apart = {"kv_dtype": one_of("fp8_e5m2"), "version": versions(">=10")}
    where = "not in every combination, elsewhere in part"
    assert cell(only(older, apart), "fp8 KV") == ("some", where)


@pytest.mark.parametrize(
    ("clauses", "where"),
    [
        (({}, {"sinks": ANY, "dtype": one_of("bfloat16")}), "dtype bfloat16"),
        (({}, {"sinks": ANY, "page_size": one_of(1)}), "page size 1"),
        (
            (
                {"vendor": one_of("cpu")},
                {"vendor": one_of("nvidia"), "version": versions(">=9"), "sinks": ANY},
            ),
            "vendor nvidia",
        ),
        (({"graph": ANY}, {"sinks": ANY}), "without graph"),
        (
            (
                {},
                {"sinks": ANY, "page_size": one_of(1)},
                {"sinks": ANY, "dtype": one_of("float16")},
            ),
            "page size 1 or dtype float16",
        ),
        # One clause serves all that the other does
        (({"sinks": ANY}, {"page_size": one_of(16)}), ""),
    ],
)
def test_a_feature_of_some_clauses(clauses, where) -> None:
    assert cell(only(*clauses), "sinks") == ("some" if where else "yes", where)


def test_a_clause_is_not_asked_for_what_its_phases_do_not_have() -> None:
    row = only({"phase": one_of("extend")}, {"phase": one_of("decode"), "graph": ANY})
    assert cell(row, "graphs") == ("yes", "")


def test_sections_by_kind() -> None:
    both = offer(
        {"phase": one_of("extend", "encoder"), "page_size": one_of(64, 16)},
        {"kind": one_of("mla"), "page_size": emulated(1), "phase": ANY},
        name="both",
    )
    mha, mla = rows_of([both])
    assert (mha.kind, mha.phases, mha.page_sizes) == ("mha", ("extend", "encoder"), "16 or 64")
    assert cell(mha, "encoder") == ("yes", "")
    # An encoder has no latent
    assert (mla.kind, mla.page_sizes) == ("mla", "any (1 natively)")
    assert mla.phases == ("extend", "decode", "verify", "draft")
    assert cell(mla, "encoder") == ("no", "")


def test_machines() -> None:
    row = only(
        {"vendor": one_of("nvidia"), "version": versions(">=10,<11")},
        {"vendor": one_of("nvidia"), "version": versions(">=9,<10")},
        {"vendor": one_of("amd"), "arch": one_of("gfx942", "gfx950")},
    )
    assert row.machines == ("nvidia version >=9,<10 or >=10,<11", "amd gfx942 or gfx950")


def test_what_holds_of_two_backends_together() -> None:
    """The rule is on one card and holds for both, in the kinds that both serve."""
    mha, mla = {"phase": one_of("extend")}, {"phase": one_of("extend"), "kind": one_of("mla")}
    half = offer(mha, mla, name="half", excludes=("foe",), companions=("whole", "other"))
    cards = [half, offer(name="foe"), offer({"kind": one_of("mla")}, name="latent")]
    rows = {(row.kind, row.backend): row for row in rows_of(cards)}
    assert rows["mha", "half"].excludes == ("foe",)
    assert rows["mha", "foe"].excludes == ("half",)
    assert rows["mla", "half"].excludes == rows["mla", "latent"].excludes == ()
    assert rows["mla", "half"].companions == ("whole", "other")
    assert rows["mha", "foe"].companions == ()
    page = markdown(tuple(rows.values()))
    apart = "- `foe` and `half` never share a KV cache, one for extend and one for decode."
    beside = "- Where `half` alone is named, `whole` or `other` serves decode."
    assert (page.count(apart), page.count(beside)) == (1, 2)
    assert set(rows["mha", "half"].to_dict()) >= {"excludes", "companions"}


def test_what_a_backend_was_run_on() -> None:
    """A kind's proof goes by the machines that it is served on; all runs are listed below."""
    device = {"platform": "nvidia:sm90", "libraries": (), "date": "2026-11-21"}
    emulator = Verified(on="a library", libraries=(), date="2026-11-21")
    clauses = ({"vendor": one_of("nvidia")}, {"kind": one_of("mla"), "vendor": one_of("cpu")})
    runs = (Verified(on="H200", **device), emulator)
    mha, mla = rows_of([offer(*clauses, verified_on=runs)])
    assert (mha.proven.word, mla.proven.word) == ("hardware", "other device")
    assert mha.to_dict()["proof"] == "hardware"
    assert [run["proof"] for run in mha.to_dict()["verified_on"]] == ["hardware", "emulated"]
    page, _, below = markdown((mha, mla)).partition("## Runs")
    (first, second) = [line for line in page.splitlines() if line[:3] == "| `"]
    assert "| any | hardware: H200 (2026-11-21) |" in first
    assert "| any | other device: H200 (2026-11-21) |" in second
    assert [line for line in below.splitlines() if line[:3] == "| `"] == [
        "| `a` | hardware | H200 |  |  | 2026-11-21 |",
        "| `a` | emulated | an emulator of a library |  |  | 2026-11-21 |",
    ]


def test_one_machine_has_a_proof_of_its_own() -> None:
    h200, rtx = Platform.parse("nvidia:sm90"), Platform.parse("nvidia:sm86")
    ran = Verified(on="H200", platform="nvidia:sm90", libraries=(), date="2026-11-21")
    compiled = Verified(
        on="cc", platform="nvidia:sm86", compiled=True, libraries=("cc 1",), date="2026-11-22"
    )
    offers = [offer({"vendor": one_of("nvidia")}, verified_on=(compiled, ran))]
    words = [rows_of(offers, device)[0].proven.word for device in (None, h200, rtx)]
    assert words == ["hardware", "hardware", "compiled"]
    below = markdown(rows_of(offers)).partition("## Runs")[2]
    assert "| `a` | compiled | cc for nvidia:sm86 | cc 1 |  | 2026-11-22 |" in below


def test_what_never_ran_is_listed_as_such() -> None:
    emulator = Verified(on="a library", libraries=("lib 1",), date="2026-11-21", cases=7)
    rows = rows_of([offer(name="b"), offer(verified_on=(emulator,))])
    below = markdown(rows).partition("## Runs")[2]
    assert [line for line in below.splitlines() if line[:3] == "| `"] == [
        "| `a` | emulated | an emulator of a library | lib 1 | 7 | 2026-11-21 |",
        "| `b` | nothing |  |  |  |  |",
    ]


def test_the_page_numbers_its_limits_once() -> None:
    some = ({}, {"sinks": ANY, "lse": ANY, "page_size": one_of(1)})
    page = markdown(rows_of([offer(*some, name="b"), offer(*some)]))
    lines = page.partition("## Runs")[0].splitlines()
    (first, second) = [line for line in lines if line.startswith("| `")]
    assert first.startswith("| `a` | fake | any | extend, decode | any |")
    assert second.count("yes (1)") == 2
    assert [line for line in lines if line[:2] in ("1.", "2.")] == ["1. page size 1"]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


@pytest.fixture
def call(monkeypatch):
    def invoke(*args: str, offers: tuple[Offer, ...] | None = None):
        if offers is not None:

            class Given:
                loaded = (None,)
                failures = (
                    PluginFailure(
                        plugin="bad", distribution="bad", version="1", stage="load", error="no"
                    ),
                )

                def offers(self) -> tuple[Offer, ...]:
                    return offers

            monkeypatch.setattr(shared.Plugins, "load", lambda **_: Given())
        return CliRunner().invoke(verbs, ["matrix", *args], prog_name="attnmux")

    return invoke


def test_the_verb_takes_third_parties_as_they_come(call) -> None:
    third = offer({"vendor": one_of("acme"), "sinks": ANY}, name="acme_attn", plugin="acme")
    result = call("--markdown", offers=(third, offer()))
    assert result.exit_code == 0
    assert "| `acme_attn` | acme | acme |" in result.stdout
    assert "bad" in result.stderr
    data = json.loads(call("--json", offers=(third,)).stdout)
    assert set(data) == {"rows", "failures", "warnings"}
    (row,) = data["rows"]
    assert (row["backend"], row["plugin"], row["kind"]) == ("acme_attn", "acme", "mha")
    assert row["features"]["sinks"] == {"served": "yes", "where": ""}
    assert data["failures"][0]["plugin"] == "bad"
    misspelt = call("acme_atn", offers=(third,))
    assert misspelt.exit_code == 2
    assert "did you mean 'acme_attn'?" in misspelt.stderr


def test_json_has_what_markdown_has(call) -> None:
    pytest.importorskip("attnmux.cpu.plugin")
    data = json.loads(call("--json").stdout)
    page = call("--markdown").stdout.partition("## Runs")[0]
    assert len(data["rows"]) == sum(line.startswith("| `") for line in page.splitlines())
    for row in data["rows"]:
        assert f"| `{row['backend']}` | {row['plugin']} |" in page


HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16"}
LATENT = {
    "num_q_heads": 128,
    "num_kv_heads": 1,
    "head_dim": 192,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": "bfloat16",
}
MODELS = {"mla": (LATENT,), "nsa": (LATENT,)}
OTHERS = ({**HEADS, "head_dim": 128}, {**HEADS, "head_dim": 64})
MACHINES = tuple(
    map(
        Platform.parse,
        (
            "nvidia:sm80,cuda=12.8",
            "nvidia:sm90,cuda=12.8",
            "nvidia:sm100,cuda=12.8",
            "amd:gfx942,rocm=6.4",
            "ascend:910b,cann=8.1",
            "intel:xe2,oneapi=2025.1",
            "cpu:x86_64,features=amx+avx2+cxx_compiler",
        ),
    )
)


ASKED_IN = {
    "custom_mask": ("extend", "verify"),
    "multi_item": ("extend",),
    "tree_windows": ("verify",),
    "graph": ("decode", "verify", "draft"),
}


ASKED_BY = {"tree_windows": {"spec_topk": 4, "sliding_window": 127}}


def served_points(offer: Offer, kind: str, change: dict) -> set[tuple]:
    """The points of a small grid that the card serves."""
    return {
        (machine, number, page, phase)
        for number, model in enumerate(MODELS.get(kind, OTHERS))
        for page in (1, 16, 64, 128)
        for machine in MACHINES
        for request in [Request(kind=kind, page_size=page, **{**model, **change})]
        for phase in ("extend", "decode", "verify", "draft")
        if offer.card.serves(
            Question(request=request, platform=machine, phase=phase),
        )
    }


@pytest.mark.parametrize("offer", Plugins.load(OURS, ()).offers(), ids=lambda offer: offer.address)
@pytest.mark.turns(4)
def test_the_cells_are_what_the_cards_answer(offer) -> None:
    for row in rows_of([offer]):
        plain = served_points(offer, row.kind, {})
        assert plain, row
        assert {phase for *_, phase in plain} == set(row.phases) - {"encoder"}
        for column, cell in zip(COLUMNS, row.cells, strict=True):
            if column.axis.name == "phase":
                continue
            for value in column.values:
                change = ASKED_BY.get(column.axis.name, {column.axis.name: value})
                points = served_points(offer, row.kind, change)
                asking = ASKED_IN.get(column.axis.name, PHASES)
                asked = {point for point in plain if point[-1] in asking}
                if cell.served == "yes":
                    assert points >= asked, (column, asked - points)
                if cell.served == "no":
                    assert not points & asked, (column, points & asked)
