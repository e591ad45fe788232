"""Builds the kernels of `native` into the wheel, for each level of this machine's architecture.

Off unless HATCH_BUILD_HOOKS_ENABLE=true, which is hatchling's own variable: an installation from
source takes seconds, and compiles the one level that it needs at first use. Without a compiler the
wheel is pure.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("attnmux", "cpu")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # of hatchling's wheel builder
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        levels = _load(Path(self.root, "src", PACKAGE, "levels.py"))
        compiler = levels.find_compiler()
        if version == "editable":
            return
        if compiler is None:
            self.app.display_warning(f"a pure wheel: none of {', '.join(levels.COMPILERS)} is here")
            return
        self.made = tempfile.TemporaryDirectory(prefix="attnmux-")
        platform = sysconfig.get_platform()
        arch = platform.rpartition("-")[2]

        def builds(level: Any) -> bool:  # noqa: ANN401  # a class of the loaded module
            command = level.command(compiler, Path(self.made.name, level.file_name))
            result = subprocess.run(command, capture_output=True, text=True, timeout=levels.SECONDS)
            if result.returncode:
                self.app.display_warning(f"without level {level.name}: {result.stderr}")
            return result.returncode == 0

        with ThreadPoolExecutor() as pool:
            tried = list(pool.map(builds, levels.levels_of(arch)))
        if not tried[-1]:
            self.app.display_warning("a pure wheel: the level that every CPU runs cannot be built")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
        build_data["force_include"] |= {
            str(Path(self.made.name, level.file_name)): str(PACKAGE / "native" / level.file_name)
            for level, done in zip(levels.levels_of(arch), tried, strict=True)
            if done
        }

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if made := getattr(self, "made", None):
            made.cleanup()


def _load(path: Path) -> Any:  # noqa: ANN401  # a module
    """The module of a package that is not installed while it is built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
