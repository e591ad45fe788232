"""The import rules between packages, read from the sources."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tools.structure import all_packages, circles, listed, private_imports

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = [
    ROOT / "core",
    ROOT / "parts",
    ROOT / "distributed",
    ROOT / "advisories",
    *sorted((ROOT / "plugins").iterdir()),
    ROOT / "integrations/transformers",
]
CORE = ROOT / "core/src/attnmux/core"
WITHOUT_TORCH = ("facts", "cards", "find", "choosing", "measured")
RANKS = ROOT / "integrations/transformers/src/attnmux/transformers/parallel"
"""Loaded where a model runs on several ranks, which attnmux-distributed is needed for."""
WITH_PARTS = ("distributed", "transformers", "triton")
"""What stands on attnmux-parts. A vendor's plugin needs core alone."""
VENDORS = {"nvidia", "amd", "rocm", "intel", "ascend", "npu", "xpu", "hip", "cann", "oneapi"}


def sources(member: Path) -> list[Path]:
    return sorted((member / "src").rglob("*.py"))


def packages(member: Path) -> list[Path]:
    """The folders of what the member ships: `attnmux.cpu`; `attnmux.core` and `attnmux.configs`."""
    return [path for path in (member / "src/attnmux").iterdir() if path.is_dir()]


def imports(path: Path) -> set[str]:
    """Modules that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def inside(module: str, parent: str) -> bool:
    return module == parent or module.startswith(f"{parent}.")


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_member_imports_only_core_and_itself(member: Path) -> None:
    for folder in packages(member):
        allowed = [f"attnmux.{folder.name}", "attnmux.core"]
        if folder.name != "core":
            allowed.append("attnmux.configs")
        if folder.name in WITH_PARTS:
            allowed.append("attnmux.parts")
        for path in folder.rglob("*.py"):
            ranks = ["attnmux.distributed"] if path.is_relative_to(RANKS) else []
            for module in imports(path):
                served = any(inside(module, name) for name in allowed + ranks)
                assert served or not inside(module, "attnmux"), f"{path}: {module}"


def test_no_distribution_imports_a_private_module_of_another() -> None:
    """A package's public modules are itself and its sub-packages that list names."""
    graph = grimp.build_graph(*all_packages(), cache_dir=None)
    assert [pair for package in all_packages() for pair in private_imports(graph, package)] == []


def test_no_modules_import_each_other() -> None:
    graph = grimp.build_graph(*all_packages(), cache_dir=None)
    assert [group for package in all_packages() for group in circles(graph, package)] == []


def test_no_folder_has_more_modules_than_a_reader_scans() -> None:
    folders = {path.parent for path in ROOT.glob("**/src/attnmux/**/*.py")}
    sizes = {folder: len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert len(sizes) > 60
    assert {folder: size for folder, size in sizes.items() if size > 25} == {}


def test_the_example_imports_from_faces() -> None:
    for path in (ROOT / "examples/vendor-plugin/src").rglob("*.py"):
        ours = {module for module in imports(path) if inside(module, "attnmux")}
        assert ours <= {"attnmux.core", "attnmux.core.plugin", "attnmux.testing"}, path


def test_choosing_and_plugin_modules_import_no_torch() -> None:
    files = [
        *(path for room in WITHOUT_TORCH for path in (CORE / room).rglob("*.py")),
        *ROOT.glob("plugins/*/src/attnmux/*/plugin.py"),
        *ROOT.glob("plugins/*/src/attnmux/*/cards/*.py"),
    ]
    assert len(files) > 60
    for path in files:
        assert not any(inside(module, "torch") for module in imports(path)), path


def test_no_distribution_owns_the_namespace() -> None:
    assert not list(ROOT.glob("**/src/attnmux/__init__.py"))
    spec = importlib.util.find_spec("attnmux")
    assert spec is not None
    assert spec.origin is None


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_member_is_typed(member: Path) -> None:
    assert all((folder / "py.typed").is_file() for folder in packages(member))


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_member_ships_the_licence(member: Path) -> None:
    """The build takes it from the member's own folder."""
    assert (member / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_core_names_no_vendor_outside_the_table() -> None:
    """Identifiers and string constants of core; prose in docstrings and comments is free."""
    for path in sources(ROOT / "core"):
        if path.name == "vendors.py" or "testing" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in prose:
                words = set(re.findall(r"[a-z0-9]+", node.value.lower()))
                assert not words & VENDORS, f"{path}: {node.value!r}"


def test_importing_core_imports_no_torch() -> None:
    code = (
        "import sys; import attnmux.core, attnmux.core.choosing.solver, attnmux.core.cli;"
        "import attnmux.core.plugin, attnmux.core.verbs;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_needs_torch_says_what_installs_it() -> None:
    code = "import sys; sys.modules['torch'] = None; from attnmux.core import AttentionBackend"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    last = run.stderr.splitlines()[-1]
    remedy = "attnmux.core.AttentionBackend needs torch: pip install 'attnmux-core[torch]'"
    assert last == f"ModuleNotFoundError: {remedy}"


@pytest.mark.parametrize("face", ["attnmux.core", "attnmux.core.plugin", "attnmux.core.verbs"])
def test_every_public_name_resolves(face: str) -> None:
    module = importlib.import_module(face)
    assert module.__all__ == sorted(listed(Path(module.__file__ or "").parent))
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Backends'"):
        _ = module.Backends
