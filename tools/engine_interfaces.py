"""Print how an engine's interfaces, as an integration lists them, differ between two releases.

Each release is a folder that holds the engine's package, or a version that pip downloads. Nothing
of the engine is imported. Exits with 1 if the newer release lacks an interface.

    python -m tools.engine_interfaces attnmux.vllm.interfaces vllm==0.32.0 vllm==0.33.0
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from attnmux.core import Interface
from attnmux.core.engines.engine_interfaces import Function, Sources, missing


def signature(interface: Interface, sources: Sources) -> str | None:
    """The interface as the sources write it, on one line; None if they have no such name."""
    node = sources.find(interface.module, interface.name)
    if isinstance(node, Function):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){returned}"
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(map(ast.unparse, node.bases))})"
    return None if node is None else ""


def differences(interfaces: Iterable[Interface], old: Path, new: Path) -> list[str]:
    """A text for each interface that is written otherwise below the folder `new`."""
    before, after, found = Sources(old), Sources(new), []
    for interface in dict.fromkeys(interfaces):
        was, now = signature(interface, before), signature(interface, after)
        if was != now:
            found.append(f"{interface}\n  - {was or 'absent'}\n  + {now or 'absent'}")
    return found


def unpacked(release: str, folder: Path) -> Path:
    """The folder that holds the release: `release` itself, or the Python sources of its wheel."""
    if "==" not in release:
        return Path(release)
    target = folder / release
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(target), release], check=True)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("interfaces", help="the module that has INTERFACES")
    parser.add_argument("old", help="a folder, or DISTRIBUTION==VERSION")
    parser.add_argument("new", help="as `old`")
    given = parser.parse_args()
    interfaces: tuple[Interface, ...] = import_module(given.interfaces).INTERFACES
    with tempfile.TemporaryDirectory() as temporary:
        old, new = (unpacked(each, Path(temporary)) for each in (given.old, given.new))
        for text in differences(interfaces, old, new):
            print(text)
        gaps = missing(interfaces, new)
    print(f"{len(interfaces)} interfaces, {len(gaps)} missing in {given.new}")
    for gap in gaps:
        print(f"  {gap}")
    return bool(gaps)


if __name__ == "__main__":
    sys.exit(main())
