"""Runs of pip, or of uv, in a fresh environment, which resolve and install nothing.

pip gets `--isolated`, so that variables and files of this machine's user do not hide what another
user gets. A dry run downloads metadata; libraries of gigabytes stay where they are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = sorted(
    path.parent
    for pattern in ("*", "tests/*", "plugins/*", "integrations/*", "examples/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
)
SHIM = """#!/bin/sh
command=$1
shift
[ "$command" = install ] && set -- --quiet {options} "$@"
exec {python} -m pip --isolated "$command" "$@"
"""
"""`pip` on a shell's path."""


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """`versions` by normalised name, or pip's reason for having none."""

    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    conflict: str = ""


def build_wheels(folder: Path) -> None:
    """Build every member by the hatchling of this environment, without compiled kernels. Raises
    CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(folder), *map(str, MEMBERS)]
    subprocess.run(command, check=True)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment with the newest pip, and nothing else."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def resolve(self, *arguments: str) -> Resolution:
        """What `pip install` would install with these arguments."""
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch, "report.json")
            pip = [str(self.python), "-m", "pip", "install", "--isolated", "--dry-run", "--quiet"]
            command = [*pip, "--report", str(report), *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                return Resolution(conflict=reason(done.stderr))
            installs = json.loads(report.read_text())["install"]
        found = [each["metadata"] for each in installs]
        return Resolution(versions={canonicalize_name(m["name"]): m["version"] for m in found})

    def compile(self, wheels: Path, *requirements: str, options: Sequence[str] = ()) -> Resolution:
        """What fits together, by uv, which answers in seconds what takes pip up to an hour.

        wheels: a folder of further wheels. options: of `uv pip compile`. Nothing is built from
        sources. Raises CalledProcessError if uv cannot be installed.
        """
        pip = [str(self.python), "-m", "pip", "install", "--isolated", "--quiet", "uv"]
        subprocess.run(pip, check=True)
        uv = [str(self.python), "-m", "uv", "pip", "compile", "--no-config", "--no-build"]
        command = [*uv, "--no-header", "--no-annotate", "--find-links", str(wheels), *options]
        wanted = "\n".join(requirements)
        done = subprocess.run(
            [*command, "-"], cwd=ROOT, input=wanted, capture_output=True, text=True
        )
        if done.returncode:
            return Resolution(conflict=conclusion(done.stderr))
        pinned = (Requirement(line) for line in done.stdout.splitlines() if "==" in line)
        found = [(canonicalize_name(r.name), str(r.specifier).lstrip("=")) for r in pinned]
        return Resolution(versions=dict[str, str](found))

    def run_line(self, line: str, *options: str) -> str:
        """Run a documented line by the shell, from the root, with further options for
        `pip install`. Returns pip's reason if it failed."""
        with tempfile.TemporaryDirectory() as scratch:
            shim = Path(scratch, "pip")
            shim.write_text(SHIM.format(python=self.python, options=" ".join(options)))
            shim.chmod(0o755)
            env = {**os.environ, "PATH": f"{scratch}:{self.folder / 'bin'}:{os.environ['PATH']}"}
            done = subprocess.run(
                ["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True
            )
        return reason(done.stderr) if done.returncode else ""


def make_environment(folder: Path) -> Environment:
    """A fresh environment. Raises CalledProcessError."""
    # pip before 23.3 downloads whole wheels in a dry run
    venv = [sys.executable, "-m", "venv", "--clear", "--upgrade-deps", str(folder)]
    subprocess.run(venv, check=True)
    return Environment(folder=folder)


def reason(stderr: str) -> str:
    """The lines of pip's error that name what conflicts, or else its last errors."""
    if found := re.search(r"The conflict is caused by:\n(.*?)\n\s*\n", stderr, flags=re.DOTALL):
        return "; ".join(line.strip() for line in found[1].splitlines())
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return "; ".join(line.removeprefix("ERROR: ") for line in errors) or stderr.strip()[-500:]


def conclusion(stderr: str) -> str:
    """uv's explanation in one line."""
    said = " ".join(stderr.partition("cause:")[2].split()) or stderr.strip()[-500:]
    return said.removesuffix("your requirements are unsatisfiable.").rstrip()


def constraints_for(python: str, lines: Sequence[str]) -> list[str]:
    """Requirements of a constraints file that hold on a version of Python, without their markers.

    pip reads markers for the Python that runs it, whatever `--python-version` says.
    """
    known = (Requirement(text) for line in lines if (text := line.partition("#")[0].strip()))
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    holding = [one for one in known if one.marker is None or one.marker.evaluate(environment)]
    return [f"{one.name}{one.specifier}" for one in holding]
