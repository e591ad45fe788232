"""The README's first command and the tests' packages, for each version of Python."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.installs.pip_runs import ROOT, Environment, constraints_for

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TESTED = (
    *("attnmux-testing[html]", "attnmux-emulators", "attnmux-transformers[ranks]"),
    *("attnmux-triton[triton]", "attnmux-vllm", "attnmux-sglang", "attnmux-advisories"),
)
TOOLS = (
    *("hatchling", "hypothesis", "pillow", "psutil", "pytest", "pytest-xdist"),
    *("mkdocs-material>=9.6", "mkdocstrings[python]>=0.30"),
)
"""Packages as `nox -s tests` installs them."""
SHOWN = ("torch", "triton", "transformers", "numpy")


def check_pythons(environment: Environment, wheels: Path) -> int:
    """Print what pip would install; returns how many did not resolve."""
    demo = ["attnmux-core", "attnmux-parts", "attnmux-cpu", "attnmux-transformers"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch, "constraints.txt")
        for python in PYTHONS:
            constraints.write_text("\n".join(constraints_for(python, lines)))
            options = ["--only-binary=:all:", "--python-version", python, "--target", scratch]
            options += ["--find-links", str(wheels)]
            tests = ["-c", str(constraints), *TESTED, *TOOLS]
            for name, wanted in (("demo", demo), ("tests", tests)):
                answer = environment.resolve(*options, *wanted)
                failures += bool(answer.conflict)
                said = answer.conflict or shown(answer.versions)
                print(f"Python {python}, {name:<5}  {said}", flush=True)
    return failures


def shown(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
