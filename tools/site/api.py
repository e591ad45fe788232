"""The pages of core's three faces, a heading for each public name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.site.files import ROOT

FACES = {
    "core": ("attnmux.core", "Names for engines."),
    "plugin": ("attnmux.core.plugin", "Names for vendors: cards, hooks, adapters, indices."),
    "verbs": ("attnmux.core.verbs", "Names for authors of commands."),
}
"""By page: the module, and its readers."""


def api_page(page: str) -> str:
    """The names of a face in groups, as its stub lists them: by the module that defines each."""
    face, readers = FACES[page]
    parts = [f"# {face}", f"{readers} Import them from `{face}`; other modules are private."]
    group = ""
    for module, name in names_of(face):
        room = module.removeprefix("attnmux.core.").partition(".")[0]
        if room != group:
            group = room
            parts.append(f"## {room}")
        parts.append(f"::: {module}.{name}")
    return "\n\n".join(parts) + "\n"


def names_of(face: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each public name of a face."""
    stub = ROOT / "core/src" / face.replace(".", "/") / "__init__.pyi"
    for line in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(line, ast.ImportFrom) and line.module:
            for alias in line.names:
                yield line.module, alias.name
