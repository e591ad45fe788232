"""The template of a vendor's plugin gives one that installs, is well made, and passes the suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

copier = pytest.importorskip("copier")
pytest.importorskip("hatchling")
TEMPLATE = Path(__file__).resolve().parents[2] / "examples"
COMMAND = [sys.executable, "-c", "from attnmux.core.cli import main; main()"]


def generate(folder: Path, **answers: str) -> Path:
    options = {"defaults": True, "unsafe": True, "quiet": True}
    copier.run_copy(str(TEMPLATE), folder, data=answers, **options)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed plugin of a vendor called Zenith."""
    source = generate(tmp_path_factory.mktemp("made") / "plugin", vendor="zenith")
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, *offline, str(source)], check=True)
    return folder


def call(site: Path, *args: str) -> tuple[int, dict[str, Any]]:
    paths = filter(None, [str(site), os.environ.get("PYTHONPATH")])
    environ = {"PYTHONPATH": os.pathsep.join(paths), "ZENITH_SIMULATOR": "m2"}
    done = subprocess.run(
        [*COMMAND, *args, "--json"],
        env={**os.environ, **environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, json.loads(done.stdout)


def test_nothing_is_left_of_the_example(tmp_path: Path) -> None:
    made = generate(tmp_path / "plugin", vendor="zenith", name="Zenith Labs", author="Ada")
    files = [path for path in made.rglob("*") if path.is_file()]
    assert len(files) == 13
    for path in files:
        assert "acme" not in f"{path} {path.read_text()}".lower()
        assert "../" not in path.read_text()


def test_the_plugin_is_well_made(site: Path) -> None:
    code, told = call(site, "validate", "attnmux-zenith")
    assert (code, {each["verdict"] for each in told["checks"]}) == (0, {"ok"})


def test_the_plugin_passes_the_suite(site: Path) -> None:
    """A few cases: it is the example by another name, and `.ci/wheels` verifies that one."""
    code, told = call(site, "verify", "zenith_paged", "--quick", "--budget", "3")
    assert code == 0
    assert told["passed"] > 0


@pytest.mark.parametrize("vendor", ["Zenith", "9th", "a b"])
def test_a_name_that_no_package_can_have_is_refused(tmp_path: Path, vendor: str) -> None:
    with pytest.raises(ValueError, match="lower-case"):
        generate(tmp_path / "plugin", vendor=vendor)
