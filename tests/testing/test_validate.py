"""`attnmux validate` on a distribution that is well made, and on one that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnmux.core.cli.verbs import verbs

PLUGIN = """
from attnmux.core.plugin import ANY, BackendCard, Clause, Figures, hookimpl

CARD = BackendCard(
    name="odd",
    summary="odd",
    factory="odd_attnmux.nowhere:make",
    contract=">=9",
    extra="kernels",
    requires=("odd-kernels<2",),
    clauses=(Clause(**dict.fromkeys(Clause.__slots__, ANY)),),
)


@hookimpl
def attnmux_cards():
    return [CARD]


@hookimpl
def attnmux_figures():
    from pathlib import Path

    return Figures.in_folder(Path(__file__).parent)
"""


def validate(name: str) -> Result:
    return CliRunner().invoke(verbs, ["validate", name, "--json"])


def problems(result: Result) -> dict[str, str]:
    checks = json.loads(result.stdout)["checks"]
    return {each["check"]: each["text"] for each in checks if each["verdict"] != "ok"}


@pytest.mark.parametrize("name", ["attnmux-cpu", "Attnmux_CPU"])
def test_our_own_plugin_is_well_made(name: str) -> None:
    result = validate(name)
    assert (result.exit_code, problems(result)) == (0, {})


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed plugin with a fault for each check."""
    package, metadata = tmp_path / "odd_attnmux", tmp_path / "odd_attnmux-1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(PLUGIN)
    (package / "acme-m1-m1.json").write_text("[]")
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: odd-attnmux\nVersion: 1\nRequires-Dist: attnmux-core\n"
    )
    (metadata / "entry_points.txt").write_text("[attnmux]\nodd = odd_attnmux.plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_each_check_finds_its_fault(odd: Path) -> None:
    result = validate("odd-attnmux")
    assert result.exit_code == 1
    found = problems(result)
    assert set(found) == {"name", "bounds", "contract", "cards", "figures"}
    text = result.stdout
    for said in (
        "attnmux-core: expected a lower bound",
        "odd-kernels<2: bound it only",
        "no module odd_attnmux.nowhere",
        "no extra 'kernels'",
        "acme-m1-m1.json",
    ):
        assert said in text


def test_what_is_no_plugin_is_refused() -> None:
    assert validate("no-such-distribution").exit_code == 2
    assert "entry point" in problems(validate("msgspec"))
