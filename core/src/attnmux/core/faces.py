"""Public faces of packages: `__init__.pyi` lists names, which are imported on first use."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path


def lazy_face(
    package: str, *, needs: str = "", first: str = ""
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose `__init__.pyi` has its public names, a line
    each: `from module import name as name`.

    needs: the requirement that installs torch, for the error of a name that needs torch without it.
    first: a module that is imported before the first name.
    """

    @cache
    def modules() -> dict[str, str]:
        """The module of each name."""
        listed = Path(str(sys.modules[package].__file__)).with_suffix(".pyi")
        lines = re.findall(
            r"^from (\S+) import (\w+) as", listed.read_text(encoding="utf-8"), re.MULTILINE
        )
        return {name: module for module, name in lines}

    def get(name: str) -> object:
        if name == "__all__":
            value: object = sorted(modules())
        elif name.startswith("_") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            if first:
                importlib.import_module(first)
            try:
                value = getattr(importlib.import_module(modules()[name]), name)
            except ModuleNotFoundError as error:
                if error.name != "torch" or not needs:
                    raise
                message = f"{package}.{name} needs torch: pip install '{needs}'"
                raise ModuleNotFoundError(message, name="torch") from error
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules()})
