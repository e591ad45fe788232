"""The classes of transformers that the integration knows by name, in each supported release.

It replaces their functions, or refuses their models. A class that transformers renames would be
taken for another.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.version import Version

from tools.installs.pip_runs import ROOT

SOURCES = ROOT / "integrations/transformers/src/attnmux/transformers"
TABLES: Mapping[str, str] = MappingProxyType(
    {
        "model/sparse/compressor.py": "OVERLAPPING",
        "model/own_attention.py": "ADAPTERS",
        "model/mixers/own_recurrences.py": "ADAPTERS",
        "model/unserved_attention.py": "UNSERVED",
    }
)
"""Mappings by the names of classes."""
FIRST: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV4CSACompressor": "5.8",
        "DeepseekV4HCACompressor": "5.8",
        "MistralLarge4TextIndexer": "5.22",
        "Qwen4ExpTextPLELayer": "5.16",
        "ZayaCCAProjection": "5.13",
    }
)
"""The first release with the model; all supported releases have the others."""


def known_names() -> Iterator[str]:
    """Read from the sources, without torch."""
    for file, table in TABLES.items():
        for node in ast.parse((SOURCES / file).read_text()).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and table in ast.unparse(node):
                mapping = next(part for part in ast.walk(node) if isinstance(part, ast.Dict))
                yield from (ast.literal_eval(key) for key in mapping.keys if key is not None)


def missing(version: str, sources: Iterable[str]) -> list[str]:
    """The known names that no class of these files has, although the release has their models."""
    classes = {name for text in sources for name in re.findall(r"^ *class (\w+)", text, flags=re.M)}
    release = Version(version)
    wanted = {name for name in known_names() if release >= Version(FIRST.get(name, "0"))}
    return sorted(wanted - classes)


def supported_minors() -> list[str]:
    """The newest release of each minor, from the lower bound of attnmux-transformers on."""
    text = (SOURCES.parents[2] / "pyproject.toml").read_text()
    found = re.search(r'"(transformers[<>=!~][^"]*)"', text)
    assert found is not None
    requirement = Requirement(found[1])
    pip = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
    listing = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    line = next(row for row in listing.splitlines() if row.startswith("Available versions:"))
    versions = sorted(map(Version, line.partition(":")[2].replace(",", " ").split()))
    minors = {one.release[:2]: one for one in versions if one in requirement.specifier}
    return [str(one) for one in minors.values()]


def check_classes(scratch: Path) -> int:
    """Download each release without its requirements; returns how many lack a name."""
    failures = 0
    for version in supported_minors():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "-d", str(scratch), f"transformers=={version}"], check=True)
        (file,) = scratch.glob(f"transformers-{version}-*.whl")
        with ZipFile(file) as wheel:
            paths = [n for n in wheel.namelist() if n.startswith("transformers/models/")]
            lacking = missing(version, (wheel.read(n).decode() for n in paths if "/modeling_" in n))
        file.unlink()
        failures += bool(lacking)
        said = f"FAILED: no class is named {', '.join(lacking)}" if lacking else "has all classes"
        print(f"transformers {version:<7} {said}", flush=True)
    return failures
