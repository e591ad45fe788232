"""The documentation's code and commands work as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
READMES = sorted(
    page
    for folder in ("core", "plugins", "integrations", "examples", "benchmarks", "tools")
    for page in (ROOT / folder).glob("**/*.md")
    if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
COMMANDS = [
    line.strip()
    for line in (ROOT / "README.md").read_text().splitlines()
    # The conformance suite has tests of its own, which take longer than the rest of this page.
    if line.startswith("    attnmux ") and "verify" not in line
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples/vendor-plugin/src")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_pages_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_succeeds(command: str) -> None:
    program = [sys.executable, "-c", "from attnmux.core.cli import main; main()"]
    words = shlex.split(command, comments=True)
    done = subprocess.run([*program, *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if "?S" in command:
        assert done.stdout.strip() == "3051"
