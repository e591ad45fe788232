"""The site: the pages that are made from the code, its links, and the README's table of proofs."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnmux.core import Offer, Plugins
from attnmux.core.cli.explain import meanings
from attnmux.core.facts.axes import AXES
from attnmux.core.find.settings import READERS
from tools.site import data
from tools.site.api import FACES, api_page, names_of
from tools.site.files import MADE, ROOT, outside, relinked

PAGES = outside()


@pytest.fixture(scope="module")
def offers() -> tuple[Offer, ...]:
    plugins = Plugins.load(data.OURS, ())
    missing = set(data.OURS).difference(plugin.name for plugin in plugins.loaded)
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    return tuple(plugins.offers())


def test_the_site_builds_and_all_its_links_lead_somewhere(tmp_path: Path) -> None:
    """mkdocs ends with 1 for a link or an anchor that is not there, and for a page outside of the
    navigation."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    listed = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    for place in re.findall(r"\]\(([^)]+)\)", listed):
        assert (tmp_path / place / "index.html").exists(), place
    assert listed.startswith("# attnmux\n\n> ")
    for page in tmp_path.rglob("index.html"):
        assert not unread(page.read_text(encoding="utf-8")), page
    for page in MADE:
        place = page.removeprefix("docs/").removesuffix(".md")
        assert (tmp_path / place / "index.html").exists(), page


def unread(page: str) -> list[str]:
    """Lines that Markdown took for text: items, rows of tables, fences, commands."""
    (article,) = re.findall(r"<article.*?</article>", page, re.DOTALL)
    text = re.sub(r"<(pre|code|table)\b.*?</\1>", "", article, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.findall(
        r"^\s*(?:- |\||```|attnmux [a-z]+ -|attnmux generate|pip install).*", text, re.MULTILINE
    )


def test_reference_pages_have_a_line_for_each_row_of_their_table(offers: tuple[Offer, ...]) -> None:
    for page, names in (
        (data.axes(), [axis.name for axis in AXES]),
        (data.reason_codes(), list(meanings())),
        (data.setting_names(), list(READERS)),
        (data.support_matrix(), [offer.card.name for offer in offers]),
    ):
        for name in names:
            assert f"| `{name}` |" in page


def test_each_result_has_its_last_day() -> None:
    lines = [line for line in data.results().splitlines() if line.startswith("| [")]
    assert len(lines) == len([*ROOT.glob("benchmarks/results/*.md")])
    days = [re.findall(r" (\d{4}-\d\d-\d\d) ", line)[-1] for line in lines]
    assert days == sorted(days, reverse=True)


def test_each_verb_has_its_help() -> None:
    page = data.verb_pages()
    for verb in ("select", "verify", "generate"):
        assert f"## {verb}\n\n```text\nUsage: attnmux {verb} " in page


@pytest.mark.parametrize("page", FACES)
def test_each_public_name_has_an_entry(page: str) -> None:
    face, _ = FACES[page]
    names = [*names_of(face)]
    assert len(names) > 10
    for module, name in names:
        assert f"\n::: {module}.{name}\n" in api_page(page)


@pytest.mark.parametrize(
    ("link", "page", "there"),
    [
        ("[a](docs/engine.md#build)", "index.md", "[a](engine.md#build)"),
        ("[a](../benchmarks/results/chips.md)", "parity.md", "[a](results/chips.md)"),
        ("[a](../README.md)", "results/index.md", "[a](../index.md)"),
        ("[a](axes.md)", "cards.md", "[a](axes.md)"),
        ("[files.py](../tools/site/files.py)", "cards.md", "files.py (`tools/site/files.py`)"),
        ("[`noxfile.py`](../noxfile.py)", "cards.md", "`noxfile.py`"),
        ("[a](nowhere.py)", "cards.md", "[a](nowhere.py)"),
        ("[a](https://example.org/b.md)", "cards.md", "[a](https://example.org/b.md)"),
        ("```\n[a](../noxfile.py)\n```", "cards.md", "```\n[a](../noxfile.py)\n```"),
    ],
)
def test_a_link_leads_where_the_site_has_the_file(link: str, page: str, there: str) -> None:
    assert relinked(link, page, PAGES) == there


def test_the_readme_s_table_of_proofs_is_the_cards(offers: tuple[Offer, ...]) -> None:
    rows = re.findall(
        r"^\| (\w[\w ]*) \| (.*?) \| (.*?) \| (\d{4}-\d\d-\d\d) \|$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    last = {(word, devices): day for word, devices, _, day in rows}
    runs = [(offer.card.name, run) for offer in offers for run in offer.card.verified_on]
    ran = {
        "NVIDIA H200": [each for each in runs if each[1].on == "NVIDIA H200"],
        "Intel Xeon, AMD EPYC": [
            each for each in runs if "Xeon" in each[1].on or "EPYC" in each[1].on
        ],
    }
    for devices, found in ran.items():
        assert last["hardware", devices] == max(run.date for _, run in found)
    (on_h200,) = [what for _, devices, what, _ in rows if devices == "NVIDIA H200"]
    others = {name for name, run in ran["NVIDIA H200"] if name != "aiter"}
    assert len(others) == 16, "four names and twelve more"
    assert {*re.findall(r"`(\w+)`", on_h200)} <= others
    compiled = [run.date for _, run in runs if run.compiled]
    # A part of the chore may have run again since.
    assert last["compiled", "SM75 to SM120, gfx90a to gfx1201"] >= max(compiled)
