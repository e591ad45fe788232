"""`attnmux explain`, and that every code which a reason can carry has a meaning."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import attnmux.core
from attnmux.core.cli.explain import MEANINGS, meanings
from attnmux.core.cli.verbs import verbs
from attnmux.core.facts.values import KINDS
from attnmux.core.verbs import AXES

CORE = Path(attnmux.core.__file__).parent


def call(*args: str):
    return CliRunner().invoke(verbs, ["explain", *args], prog_name="attnmux")


def test_every_code_of_the_sources_is_explained() -> None:
    sources = "\n".join(path.read_text() for path in CORE.rglob("*.py"))
    codes = set(re.findall(r'(?:code=|bar\()"([A-Z_]+)"', sources))
    assert len(codes) >= 9
    assert codes == set(MEANINGS)
    assert set(meanings()) == {*MEANINGS, *(axis.name.upper() for axis in AXES)}


def test_one_code_or_all() -> None:
    one = json.loads(call("page_size", "--json").stdout)
    assert set(one) == {"PAGE_SIZE"}
    assert "--allow-coercion" in one["PAGE_SIZE"]
    assert json.loads(call("--json").stdout) == meanings()
    assert all(kind in meanings()["KIND"] for kind in KINDS)
    out = call("LIBRARY").stdout
    assert out.splitlines()[0].split() == ["code", "meaning"]
    assert "missing" in out


@pytest.mark.parametrize(("code", "near"), [("PAGESIZE", "such as PAGE_SIZE"), ("%", "lists them")])
def test_an_unknown_code_is_refused(code, near) -> None:
    result = call(code)
    assert result.exit_code == 2
    assert near in result.stderr
