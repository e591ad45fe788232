"""What the distributions' metadata promise: one version, pins that follow it, and where to look."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
PUBLISHED = sorted(
    path.parent
    for pattern in ("*", "plugins/*", "integrations/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
    if path.parent.name != "emulators"
)
OWN = {"attnmux-core", *(f"attnmux-{path.name}" for path in PUBLISHED)}


def project(member: Path) -> dict[str, Any]:
    return tomllib.loads((member / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("member", PUBLISHED, ids=lambda path: path.name)
def test_metadata_tell_where_to_look_and_pin_the_same_release(member: Path) -> None:
    told = project(member)
    assert told["dynamic"] == ["version"]
    assert told["urls"] == project(ROOT / "core")["urls"]
    assert "attention" in told["keywords"]
    assert "Typing :: Typed" in told["classifiers"]
    extras = told.get("optional-dependencies", {}).values()
    every = [Requirement(text) for some in (told["dependencies"], *extras) for text in some]
    release = ".".join(map(str, Version(VERSION).release[:2]))
    for one in every:
        if one.name in OWN and one.specifier:
            assert str(one.specifier) == f"~={release}.0"


def test_an_sdist_builds_the_same_wheel_without_the_repository(tmp_path: Path) -> None:
    """VERSION is outside of each distribution; an sdist carries its content as metadata."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path / "dist")]
    subprocess.run([*build, "--target", "sdist"], cwd=ROOT / "plugins/amd", check=True)
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        # Python 3.11.2 has no filters, and 3.14 wants one
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **safely)
    (source,) = tmp_path.glob("attnmux_amd-*")
    subprocess.run([*build, "--target", "wheel"], cwd=source, check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert HeaderParser().parsestr(archive.read(name).decode())["Version"] == VERSION


def test_the_changelog_is_assembled_for_that_version() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["towncrier"]["version"] == VERSION
    assert f"## {VERSION} " in (ROOT / "CHANGELOG.md").read_text()
