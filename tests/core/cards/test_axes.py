"""One table of axes: `Clause` and `Request` follow it, and a new row reaches all of its readers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import attnmux.core
import attnmux.testing
from attnmux.core import Platform, Request
from attnmux.core.plugin import ANY, NONE, Clause
from attnmux.core.verbs import AXES, Question

OF_SEVERAL = {"group_size", "phase", "tree_windows"}
"""Axes that follow from several fields of a request."""

ROW = """    Axis(
        name="toy",
        values="flag",
        wanted=_cached("toy"),
        meaning="It does not play.",
        is_feature=True,
        settable=True,
        columns={"playing": (True,)},
        samples=(False, True),
    ),
)
DECIDED ="""
READ = """
import json
from random import Random
from attnmux.core.plugin import ANY, Clause, one_of
from attnmux.testing.sampling.card_limits import outside_points
from attnmux.testing import find_candidate
from attnmux.testing.matrix.rows import COLUMNS
from attnmux.testing.sampling.levels import levels_of

found = find_candidate("torch_native", device="cpu")
clause = Clause.when(toy=ANY)
levels = next(levels_of(clause, Random(0), (), ()))
print(json.dumps({
    "columns": [column.title for column in COLUMNS],
    "sampled": levels["toy"],
    "outside": [point.name for point in outside_points(found)],
}))
"""


def test_a_clause_has_a_field_for_each_row() -> None:
    assert {field.name for field in fields(Clause)} == {axis.name for axis in AXES}
    for axis in AXES:
        default = Clause.__dataclass_fields__[axis.name].default
        assert default in (MISSING, NONE if axis.is_feature else ANY), axis.name


def test_a_request_or_a_platform_has_a_value_for_each_row() -> None:
    known = {field.name for field in fields(Request)} | set(Platform.__slots__)
    assert {axis.name for axis in AXES} - known == OF_SEVERAL


def test_every_settable_axis_is_a_field_of_the_request() -> None:
    names = {item.name for item in fields(Request)}
    assert {axis.name for axis in AXES if axis.settable or axis.droppable} <= names


def test_every_field_of_the_request_is_asked_by_an_axis() -> None:
    asked = {axis.name for axis in AXES} | {"origins", "phases", "multimodal", "encoder_head_dim"}
    asked |= {"max_error"}  # judged by bounds and measurements
    # asked of other backends, by `Request.groups` and `linear_request`
    asked |= {"other_layers", "linear_layers", "linear_head_dim", "linear_v_head_dim"}
    asked |= {"compressed_layers"}  # of which backends serve the windows alone
    asked |= {"index_topk"}  # which says when kind "nsa" is not needed
    asked |= {
        "chunked_prefix",
        "two_batches",
        "sparse",
        "sparse_budget",
        "index_block_size",
    }  # what `build` makes of the decision
    # multimodal asks for the phase "encoder", where head_dim asks for the encoder's; the mode says
    # who serves verify and draft
    assert {item.name for item in fields(Request)} - asked == {
        "speculative_attention_mode",
        "parts",
    }


def test_what_asks_for_an_axis_does() -> None:
    machine = Platform.parse("cpu:x86_64")
    for axis in (axis for axis in AXES if axis.asked_by):
        request = Request.parse(axis.asked_by)
        questions = (
            Question(request=request, platform=machine, phase=phase) for phase in request.phases
        )
        assert any(axis.wanted(question) for question in questions)


def with_a_toy(folder: Path) -> Path:
    """The sources of core and of the suite with one more row, and a field of a clause and of a
    request."""
    for module in (attnmux.core, attnmux.testing):
        source = Path(module.__file__).parent
        shutil.copytree(source, folder / "attnmux" / source.name)
    core = folder / "attnmux" / "core"
    for name, before, after in (
        ("facts/axes.py", ")\nDECIDED =", ROW),
        (
            "cards/clause.py",
            "    graph: Limit",
            "    toy: Limit = NONE\n    graph: Limit",
        ),
        ("facts/request.py", "    graph: Flag", "    toy: Flag = False\n    graph: Flag"),
    ):
        path = core / name
        text = path.read_text()
        assert text.count(before) == 1, name
        path.write_text(text.replace(before, after))
    return folder


def run(folder: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "ATTNMUX_ALLOW_PLUGINS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


def test_a_new_axis_is_a_row_and_two_fields(tmp_path) -> None:
    folder = with_a_toy(tmp_path)
    asked = "toy=1,num_q_heads=8,num_kv_heads=8,head_dim=64"
    verb = ("-m", "attnmux.core")
    refusal = json.loads(run(folder, *verb, "select", "--json", "--request", asked))
    reasons = [reason for each in refusal["candidates"] for reason in each["reasons"]]
    assert {"TOY"} < {reason["code"] for reason in reasons}
    assert json.loads(run(folder, *verb, "explain", "TOY", "--json")) == {
        "TOY": "It does not play. Change toy in --request, or choose another backend."
    }
    seen = json.loads(run(folder, "-c", READ))
    assert seen["columns"][-1] == "playing"
    assert seen["sampled"] == [False, True]
    assert "toy=True" in seen["outside"]
