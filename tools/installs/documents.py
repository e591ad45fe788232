"""Every `pip install` line of the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.installs.pip_runs import ROOT

DOCUMENTS = sorted(
    page
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "*/README.md", "*/*/README.md")
    for page in ROOT.glob(pattern)
    if page.is_relative_to(ROOT) and not page.relative_to(ROOT).parts[0].startswith(".")
)
LINE = re.compile(r"^ {4}(pip install (?:.*\\\n)*.*)$|`(pip install [^`]*)`", flags=re.MULTILINE)
"""A line of an indented block, which a backslash continues, or code in a sentence."""
NOT_RUN = {
    "git+https://github.com/sgl-project/sgl-kernel-xpu": "builds with oneAPI's compiler",
    "download.pytorch.org": "asks an index that a machine may not reach",
}
"""By what a line names."""


@dataclass(frozen=True, kw_only=True)
class DocumentedLine:
    page: Path
    """From the root."""
    command: str
    """For a shell, up to `&&`."""

    @property
    def names_folders(self) -> bool:
        """Whether it installs from a clone: then it must name every member that it needs."""
        return "./" in self.command

    @property
    def not_run(self) -> str:
        """Why nobody runs it, if nobody does."""
        return next((why for name, why in NOT_RUN.items() if name in self.command), "")


def documented_lines() -> Iterator[DocumentedLine]:
    """Raises SystemExit for a page that names `pip install` in another form, which nobody would
    run."""
    for page in DOCUMENTS:
        text = page.read_text()
        lines = [indented or quoted for indented, quoted in LINE.findall(text)]
        place = page.relative_to(ROOT)
        if len(lines) != text.count("pip install "):
            raise SystemExit(
                f"{place}: expected each `pip install` on an indented line of its own or in "
                f"backticks, got {text.count('pip install ')} of them, {len(lines)} in these forms"
            )
        for line in lines:
            command = re.sub(r"\\\n\s*", "", line).partition("&&")[0].strip()
            yield DocumentedLine(page=place, command=command)
