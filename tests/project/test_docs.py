"""The documentation's code and commands work as they stand."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnmux.core.cli.verbs import verbs
from attnmux.core.plugin import Verified
from tools.site.files import MADE

pytestmark = pytest.mark.usefixtures("no_trial")

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
READMES = sorted(
    page
    for folder in (
        *("core", "testing", "distributed", "advisories", "plugins", "integrations"),
        *("examples", "benchmarks", "tests", "tools"),
    )
    for page in (ROOT / folder).glob("**/*.md")
    if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
NEWCOMERS = [ROOT / "README.md", ROOT / "docs/start.md"]
COMMANDS = [
    line.strip()
    for page in NEWCOMERS
    for line in page.read_text().splitlines()
    # The conformance suite has tests of its own, which take longer than the rest of this page.
    if line.startswith("    attnmux ") and "verify" not in line
]
MUST_READ = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        *("start", "fleet", "troubleshooting", "contract-in-short", "one-request", "why"),
        "architecture",
        *("writing-a-plugin", "writing-an-adapter", "testing-a-plugin", "mla-for-vendors"),
        *("engine", "kv-memory", "engine-steps", "engines", "vllm", "sglang", "transformers"),
        *("bring-up", "speculation", "several-devices"),
    )
]
BRING_UP = re.findall(
    r"^    (attnmux .*)$", (ROOT / "docs/bring-up.md").read_text(), flags=re.MULTILINE
)
MODEL = ROOT / "tests/core/data/qwen3-0.6b"
SHORTER = {
    "verify": (
        *("--device", "cpu", "--page-size", "16", "--budget", "1", "-k", "uneven|sampled-0-"),
        *("--jobs", "0"),
    ),
    "bench": (
        *("--backend", "torch_native", "--workload", "decode:bs=2,ctx=64", "--seconds", "0.01"),
        *("--check-seconds", "1", "--platform", "cpu"),
    ),
}
"""Arguments that come after those of the page, so that minutes become seconds."""
OF_NEWCOMERS = {"bench": ("--backend", "torch_native", "--backend", "native", "--seconds", "0.01")}
"""The same for the first pages: flex_attention would compile each step."""


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples/vendor-plugin/src")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_pages_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        path = (page.parent / target).resolve()
        is_made = page.parent == ROOT / "docs" and path.relative_to(ROOT).as_posix() in MADE
        assert "://" in target or is_made or path.exists(), target


def test_the_first_pages_have_commands() -> None:
    assert len(COMMANDS) >= 8


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 450


@pytest.mark.parametrize("page", MUST_READ, ids=lambda page: page.name)
def test_a_page_that_a_newcomer_must_read_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= 1200


def run(words: list[str]) -> Result:
    """In this process, which has imported the libraries."""
    return CliRunner().invoke(verbs, words, prog_name="attnmux")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_first_pages_succeeds(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    done = run([*words, *OF_NEWCOMERS.get(words[0], ())])
    assert done.exit_code == 0, done.stderr
    if "?S" in command:
        assert done.stdout.strip() == "3051"


def test_the_commands_of_bring_up_lead_to_a_report(tmp_path, monkeypatch) -> None:
    """In the order of the page, in one folder, on a CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    verbs = []
    for command in BRING_UP:
        asked = command.replace("NAME", "torch_native").replace("MODEL", str(MODEL))
        words = shlex.split(asked, comments=True)[1:]
        verbs.append(words[0])
        done = run([*words, *SHORTER.get(words[0], ())])
        assert done.exit_code == 0, (command, done.stderr)
    assert verbs == ["doctor", "verify", "verify", "verify", "bench", "report"]
    (backend,) = json.loads((tmp_path / "attnmux-report.json").read_text())["backends"]
    assert backend["verify"]["failures"] == 0 < sum(backend["verify"]["agreed"].values())
    assert backend["measurements"]


def test_the_entry_on_the_bring_up_page_is_one() -> None:
    """As `attnmux report` prints it."""
    page = (ROOT / "docs/bring-up.md").read_text()
    (entry,) = re.findall(r"^    (Verified\(.*?\))$", page, flags=re.MULTILINE | re.DOTALL)
    shown = eval(entry, {"Verified": Verified})
    assert repr(shown) == " ".join(entry.split())
