"""Ask pip, or uv, whether this project installs: `lines`, `pythons`, `engines` or `classes`.

    python -m tools.installs lines [--install] [TEXT]   every documented `pip install` line
    python -m tools.installs pythons [today]            the demo and the tests, by version of Python
    python -m tools.installs engines [TEXT]             every extra next to the newest engines
    python -m tools.installs classes                    the names of transformers' classes

`lines`, `pythons` and `engines` install nothing: they are dry runs in a fresh environment, with
wheels built from this tree. `engines` asks uv, the others pip; `pythons today` asks pip about one
version of Python, another each day, and uv about the others. `lines --install` installs each line
in an environment of its own, where torch takes 5 GB. TEXT picks lines, or rows of `engines`, such
as "sglang attnmux-intel". The exit status is 1 if anything does not resolve.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tools.installs.classes import check_classes
from tools.installs.documents import documented_lines
from tools.installs.engines import check_engines
from tools.installs.pip_runs import build_wheels, make_environment
from tools.installs.pythons import check_pythons


def check_lines(wheels: Path, scratch: Path, *, text: str, install: bool) -> int:
    """Run every documented line that contains the text; returns how many failed."""
    environment = make_environment(scratch / "environment")
    failures = 0
    for line in documented_lines():
        if text not in line.command:
            continue
        if line.not_run:
            print(f"not run   {line.page}: {line.command} ({line.not_run})", flush=True)
            continue
        options = [] if install else ["--dry-run"]
        if not line.names_folders:
            options += ["--find-links", str(wheels)]
        why = environment.run_line(line.command, *options)
        failures += bool(why)
        said = f"FAILED    {line.page}: {line.command}\n    {why}"
        print(said if why else f"resolves  {line.page}: {line.command}", flush=True)
        if install:
            environment = make_environment(environment.folder)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("check", choices=["lines", "pythons", "engines", "classes"])
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--install", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attnmux-") as folder:
        scratch = Path(folder)
        wheels = scratch / "wheels"
        if arguments.check == "classes":
            failures = check_classes(scratch)
        else:
            build_wheels(wheels)
            if arguments.check == "lines":
                failures = check_lines(
                    wheels, scratch, text=arguments.text, install=arguments.install
                )
            elif arguments.check == "pythons":
                failures = check_pythons(
                    make_environment(scratch / "environment"), wheels, arguments.text
                )
            else:
                environment = make_environment(scratch / "environment")
                failures = check_engines(environment, wheels, arguments.text)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
