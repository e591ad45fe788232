"""Print the size and the import structure of packages, from their sources.

    python tools/structure.py attnmux.core attnmux.nvidia

Lines, modules and classes; arrows, which are imports from one module to another of the package; and
circles, which are groups of modules that import each other. Imports under TYPE_CHECKING count. The
packages have to be importable, and `grimp` installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table


def sources(package: str) -> list[Path]:
    """The Python files of an importable package. Raises SystemExit for an unknown one."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package}: expected an installed package")
    return sorted(Path(spec.origin).parent.rglob("*.py"))


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Groups of modules, each of which imports all others of its group, over however many steps."""
    reached = {
        module: graph.find_downstream_modules(module) & graph.find_upstream_modules(module)
        for module in graph.modules
    }
    found = {frozenset({module, *others}) for module, others in reached.items() if others}
    return sorted(sorted(group) for group in found if len(group) > 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("packages", nargs="+")
    table = Table("package", "lines", "modules", "classes", "arrows", "circles")
    for package in parser.parse_args().packages:
        texts = [path.read_text() for path in sources(package)]
        nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
        graph = grimp.build_graph(package, cache_dir=None)
        groups = circles(graph)
        table.add_row(
            package,
            str(sum(len(text.splitlines()) for text in texts)),
            str(len(texts)),
            str(sum(isinstance(node, ast.ClassDef) for node in nodes)),
            str(graph.count_imports()),
            "; ".join(", ".join(group) for group in groups) or "0",
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
