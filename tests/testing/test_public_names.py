"""`attnmux.testing`: its names, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

from attnmux import testing


def test_every_public_name_resolves() -> None:
    assert testing.__all__ == sorted(testing.__all__)
    for name in testing.__all__:
        assert getattr(testing, name) is not None


def test_no_module_hides_a_public_name() -> None:
    """An imported submodule becomes an attribute of its package."""
    code = (
        "import importlib, pkgutil, types; import attnmux.testing as t\n"
        "for each in pkgutil.iter_modules(t.__path__):\n"
        "    importlib.import_module(f'{t.__name__}.{each.name}')\n"
        "modules = [n for n in t.__all__ if isinstance(getattr(t, n), types.ModuleType)]\n"
        "assert modules == [], modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_it_imports_neither_torch_nor_pytest() -> None:
    code = (
        "import sys; import attnmux.testing; from attnmux.testing import Case, Step, decode;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'pytest', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
