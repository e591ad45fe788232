"""mkdocs' hook: adds the pages that are made, and leads links where the site has them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs loads this file by its path

from tools.site import data
from tools.site.api import FACES, api_page
from tools.site.files import ROOT, outside, relinked

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PAGES = outside()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415  # only the site needs mkdocs

    made = {
        "axes.md": data.axes(),
        "reason-codes.md": data.reason_codes(),
        "results-by-date.md": data.results(),
        "settings.md": data.setting_names(),
        "support-matrix.md": data.support_matrix(),
        "verbs.md": data.verb_pages(),
        **{f"api/{page}.md": api_page(page) for page in FACES},
        **{page: (ROOT / source).read_text(encoding="utf-8") for source, page in PAGES.items()},
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:  # noqa: ANN401  # of mkdocs
    return relinked(markdown, page.file.src_uri, PAGES)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write llms.txt: what the project is, and a line for each page of the navigation."""
    (Path(config.site_dir) / "llms.txt").write_text(llms(config.nav or []), encoding="utf-8")


def llms(nav: list[Any]) -> str:
    """The navigation as llmstxt.org has it: a heading for each section, a link for each page."""
    first, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n\n")
    lines = [first, "", f"> {rest.partition(chr(10) + chr(10))[0]}"]
    for section in nav:
        ((title, pages),) = section.items()
        lines += ["", f"## {title}", ""]
        lines += [line for entry in pages for line in _entries(entry)]
    return "\n".join(lines) + "\n"


def _entries(entry: Any) -> list[str]:  # noqa: ANN401  # of mkdocs
    ((title, page),) = entry.items()
    if isinstance(page, str):
        folder = page.removesuffix(".md").removesuffix("index")
        return [f"- [{title}]({folder.rstrip('/') or '.'}/)"]
    return [line for inner in page for line in _entries(inner)]
