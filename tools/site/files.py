"""Files outside of docs/ that are pages of the site, and where links between pages lead."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE = frozenset(
    {
        "docs/axes.md",
        "docs/reason-codes.md",
        "docs/results-by-date.md",
        "docs/settings.md",
        "docs/support-matrix.md",
        "docs/verbs.md",
        "docs/api/core.md",
        "docs/api/plugin.md",
        "docs/api/verbs.md",
    }
)
"""Pages that exist in the site alone: `data.py` and `api.py` make them."""
LINK = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])+)\]\(([^)\s]+)\)")
"""[text](target), not of an image."""
CODE = re.compile(r"(```.*?```|~~~.*?~~~)", re.DOTALL)


def outside() -> dict[str, str]:
    """The page of the site for each file that lies elsewhere, both by path: from the root of the
    repository, and from the root of the site."""
    pages = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
    pages["CONTRIBUTING.md"] = "contributing.md"
    pages["SECURITY.md"] = "security.md"
    pages["benchmarks/README.md"] = "results/index.md"
    pages["benchmarks/STATUS.md"] = "results/status.md"
    for result in sorted(ROOT.glob("benchmarks/results/*.md")):
        pages[result.relative_to(ROOT).as_posix()] = f"results/{result.name}"
    for readme in sorted(_readmes()):
        path = readme.relative_to(ROOT).as_posix()
        pages[path] = f"packages/{readme.parent.name}.md"
    return pages


def _readmes() -> Iterator[Path]:
    """The page of every distribution and of the tools."""
    for project in (*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")):
        readme = project.parent / "README.md"
        if readme.exists() and not project.relative_to(ROOT).parts[0].startswith("."):
            yield readme
    yield ROOT / "tools/README.md"


def source_of(page: str, pages: Mapping[str, str]) -> str:
    """The path in the repository of a page of the site."""
    for source, target in pages.items():
        if target == page:
            return source
    return f"docs/{page}"


def relinked(text: str, page: str, pages: Mapping[str, str]) -> str:
    """A page's text with its links as the site has them.

    Links to files that are no page, such as modules, become the file's path in code. Links that
    lead nowhere stay as they are, so that the strict build refuses them.
    """
    source = source_of(page, pages)

    def relink(match: re.Match[str]) -> str:
        words, (target, mark, anchor) = match[1], match[2].partition("#")
        if "://" in target or not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = pages.get(path) or path.removeprefix("docs/")
        if path in pages or path in MADE or path.startswith("docs/"):
            return f"[{words}]({posixpath.relpath(place, posixpath.dirname(page))}{mark}{anchor})"
        if (ROOT / path).exists():
            return words if path in words or words.startswith("`") else f"{words} (`{path}`)"
        return match[0]

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(relink, part) for part in parts[::2]]
    return "".join(parts)
