"""Print the size and the import structure of packages, from their sources.

    python tools/structure.py [--names] [PACKAGE…]

Without packages, all of this repository but the example. A line a package, and one for their sum:

- statements, without docstrings, and modules;
- rooms, which are the sub-packages and the modules next to them; floors, as each room lies above
  all that it imports; arrows, which are imports from one room to another;
- arrows up: the fewest, by imports of their modules, that must go so that no rooms form a circle;
- circles: groups of modules that import each other;
- public names, which `__all__` of the package and each `__init__.pyi` in it list;
- private: imports of its inner modules by modules of the other packages in the table.

Then a line for each public face, with the number of its names, and a line for each private import.
With --names the names themselves follow each face.

Imports under TYPE_CHECKING count. The packages have to be importable, and `grimp` installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
COLUMNS = (
    *("package", "statements", "modules", "rooms", "floors", "arrows", "arrows up", "circles"),
    *("public names", "private"),
)


def all_packages() -> list[str]:
    """The packages of every distribution of this repository, which share a namespace."""
    found = [
        path for path in ROOT.glob("**/src/attnmux/*/__init__.py") if "build" not in path.parts
    ]
    return [f"attnmux.{path.parent.name}" for path in sorted(found)]


def folder_of(package: str) -> Path:
    """Where an importable package lies. Raises SystemExit for an unknown one."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package}: expected an installed package")
    return Path(spec.origin).parent


def statements(folder: Path) -> int:
    nodes = (n for path in folder.rglob("*.py") for n in ast.walk(ast.parse(path.read_text())))
    return sum(isinstance(node, ast.stmt) and not is_text(node) for node in nodes)


def is_text(node: ast.stmt) -> bool:
    """Whether it is a docstring, of a field too."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def faces(package: str, folder: Path) -> dict[str, list[str]]:
    """The names of each module whose names are public: the package, and sub-packages with a list of
    names."""
    found = {package: listed(folder)}
    for path in sorted(folder.rglob("__init__.pyi")):
        parts = path.parent.relative_to(folder).parts
        found[".".join([package, *parts])] = listed(path.parent)
    return found


def listed(folder: Path) -> list[str]:
    """The names in a package's `__init__.pyi` or `__all__`."""
    stub = folder / "__init__.pyi"
    if stub.exists():
        imports = (node for node in ast.parse(stub.read_text()).body)
        return [a.name for node in imports if isinstance(node, ast.ImportFrom) for a in node.names]
    for node in ast.parse((folder / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            constants = (each for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            return [str(each.value) for each in constants]
    return []


def private_imports(graph: grimp.ImportGraph, package: str) -> list[tuple[str, str]]:
    """Modules of other packages, each with an inner module of this one that it imports."""
    modules = {package, *graph.find_descendants(package)}
    return sorted(
        (importer, module)
        for module in modules - faces(package, folder_of(package)).keys()
        for importer in graph.find_modules_that_directly_import(module) - modules
    )


def circles(graph: grimp.ImportGraph, package: str) -> list[list[str]]:
    """Groups of modules, each of which imports all others of its group, over however many steps."""
    modules = {package, *graph.find_descendants(package)}
    reached = {
        module: graph.find_downstream_modules(module) & graph.find_upstream_modules(module)
        for module in modules
    }
    groups = {frozenset({module, *others}) for module, others in reached.items() if others}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def arrows_between(graph: grimp.ImportGraph, package: str) -> dict[str, set[str]]:
    """For each room, the rooms that it imports."""
    depth = package.count(".") + 2
    room = {name: ".".join(name.split(".")[:depth]) for name in graph.find_descendants(package)}
    arrows: dict[str, set[str]] = {each: set() for each in room.values()}
    for module, here in room.items():
        imported = graph.find_modules_directly_imported_by(module)
        arrows[here] |= {room[each] for each in imported if each in room} - {here}
    return arrows


def upward(graph: grimp.ImportGraph, package: str) -> set[tuple[str, str]]:
    """The arrows whose removal leaves no circle of rooms."""
    depth = package.count(".") + 2
    broken = graph.nominate_cycle_breakers(package)
    pairs = [tuple(".".join(name.split(".")[:depth]) for name in pair) for pair in broken]
    return {(importer, imported) for importer, imported in pairs}


def num_floors(arrows: dict[str, set[str]], left_out: Iterable[tuple[str, str]]) -> int:
    below = {
        room: imported - {b for a, b in left_out if a == room} for room, imported in arrows.items()
    }
    floors: dict[str, int] = {}
    while len(floors) < len(below):
        ready = [room for room in below.keys() - floors.keys() if below[room] <= floors.keys()]
        floors |= {
            room: 1 + max((floors[each] for each in below[room]), default=0) for room in ready
        }
    return max(floors.values(), default=0)


def row(graph: grimp.ImportGraph, package: str, num_circles: int) -> list[int]:
    folder = folder_of(package)
    modules = {package, *graph.find_descendants(package)}
    arrows, up = arrows_between(graph, package), upward(graph, package)
    return [
        *(statements(folder), len(modules), len(arrows), num_floors(arrows, up)),
        *(sum(map(len, arrows.values())), len(up), num_circles),
        sum(map(len, faces(package, folder).values())),
        len(private_imports(graph, package)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--names", action="store_true")
    given = parser.parse_args()
    packages = given.packages or all_packages()
    graph = grimp.build_graph(*packages, cache_dir=None)
    groups = {package: circles(graph, package) for package in packages}
    rows = [row(graph, package, len(groups[package])) for package in packages]
    table = Table(*COLUMNS)
    for package, figures in zip(packages, rows, strict=True):
        table.add_row(package, *map(str, figures))
    table.add_section()
    table.add_row("sum", *(str(sum(column)) for column in zip(*rows, strict=True)))
    console = Console(width=200)
    console.print(table)
    for package in packages:
        for face, names in faces(package, folder_of(package)).items():
            console.print(f"face: {face}: {len(names)}", *sorted(names if given.names else ()))
        for importer, module in private_imports(graph, package):
            console.print(f"private: {importer} imports {module}")
    for group in chain.from_iterable(groups.values()):
        console.print("circle:", ", ".join(group))


if __name__ == "__main__":
    main()
