"""The README's first command and the tests' packages, for each version of Python."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from datetime import date
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


def check_pythons(environment: Environment, wheels: Path, text: str = "") -> int:
    """Print what would be installed; returns how many did not resolve.

    text: "today" asks pip, which takes ten times as long, about one version of Python each day, and
    uv about the others. pip answers for all in as many days as there are versions.
    """
    of_today = PYTHONS[date.today().toordinal() % len(PYTHONS)]
    demo = ["attnmux-core", "attnmux-parts", "attnmux-cpu", "attnmux-transformers"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch, "constraints.txt")
        for python in PYTHONS:
            constraints.write_text("\n".join(constraints_for(python, lines)))
            options = ["--python-version", python]
            tests = [*TESTED, *TOOLS]
            for name, wanted, pins in (
                ("demo", demo, []),
                ("tests", tests, ["-c", str(constraints)]),
            ):
                if text == "today" and python != of_today:
                    by = "uv"
                    answer = environment.compile(wheels, *wanted, options=[*options, *pins])
                else:
                    by = "pip"
                    own = ["--only-binary=:all:", "--target", scratch, "--find-links", str(wheels)]
                    answer = environment.resolve(*own, *options, *pins, *wanted)
                failures += bool(answer.conflict)
                said = answer.conflict or shown(answer.versions)
                print(f"Python {python}, {name:<5}  by {by:<3}  {said}", flush=True)
    return failures


def shown(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
