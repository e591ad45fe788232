"""Cost of an answer of the command from a cold start, as a ratio to `python -c pass`.

Every round starts every process once, so that a disturbance hits all of them; the medians of the
rounds' times and ratios are printed. Measure where wheels are installed, as users install them.
Bars: `attnmux select --json` at most 26 where it asks the probes, and at most 14 about another
machine. Nothing is cached but bytecode. The last rows split the time: the package without a verb,
the libraries alone, and parsers with as many options as `select` has.

    python -m benchmarks.cold_start [--rounds N] [--json FILE]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import json_option, rounds_option

from attnmux.testing.bench import Report, facts, interleave, wall_meter
from attnmux.testing.bench.timing import Meter

CPU = torch.device("cpu")
COLUMNS = {"command": "", "ms": ".1f", "ratio": ".1f", "at most": "g"}
NOTHING = "python -c pass"
LIBRARIES = "import click, importlib.metadata, packaging.requirements, platformdirs, pluggy"
MANY = "attnmux select --json, another machine, 40 more plugins"
OPTIONS = 19
"""Of `attnmux select`."""
CLICK = f"""
import click
options = [click.Option([f"--option{{n}}"]) for n in range({OPTIONS})]
verb = click.Command("select", params=options, callback=lambda **given: click.echo("{{}}"))
click.Group(commands=[verb])()
"""
ARGPARSE = f"""
import argparse
parser = argparse.ArgumentParser()
verb = parser.add_subparsers().add_parser("select")
for n in range({OPTIONS}):
    verb.add_argument(f"--option{{n}}")
parser.parse_args()
print("{{}}")
"""
PLUGIN = """
from attnmux.core.plugin import BackendCard, Clause, hookimpl, one_of

@hookimpl
def attnmux_cards():
    clauses = tuple(Clause.when(vendor=one_of("acme"), page_size=one_of(n)) for n in range(1, 9))
    return [BackendCard(name="{name}", summary="", clauses=clauses, factory="a:b")]
"""


def commands() -> Mapping[str, tuple[list[str], float | None]]:
    """Each command by name, with its bar where it has one."""
    script = shutil.which("attnmux", path=sysconfig.get_path("scripts"))
    if script is None:
        raise click.ClickException("attnmux-core is not installed for this Python")
    other = ["--platform", "nvidia:sm90,cuda=12.8"]
    return {
        NOTHING: ([sys.executable, "-c", "pass"], None),
        "attnmux select --json": ([script, "select", "--json"], 26),
        "attnmux select --json, another machine": ([script, "select", "--json", *other], 14),
        MANY: ([script, "select", "--json", *other], None),
        "attnmux select": ([script, "select"], None),
        "attnmux --help": ([script, "--help"], None),
        "import attnmux.core": ([sys.executable, "-c", "import attnmux.core"], None),
        "the libraries alone": ([sys.executable, "-c", LIBRARIES], None),
        "import click": ([sys.executable, "-c", "import click"], None),
        "click with as many options": ([sys.executable, "-c", CLICK, "select"], None),
        "argparse with as many options": ([sys.executable, "-c", ARGPARSE, "select"], None),
    }


def install(folder: Path, name: str) -> None:
    """A plugin with one card of eight clauses, as pip would install it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(PLUGIN.format(name=name))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
    (info / "entry_points.txt").write_text(f"[attnmux]\n{name} = {name}\n")


def start(command: list[str], folder: str, **environment: str) -> Meter:
    """Wall time of one process in the folder, which has no configuration file."""
    # Sources that are installed as a link are compiled in the first round, as pip compiles others
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {"XDG_CACHE_HOME": folder, **environment}
    run = partial(
        subprocess.run, command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL
    )
    return wall_meter(run, CPU)


@click.command()
@rounds_option(20)
@json_option
def main(rounds: int, path: Path | None) -> None:
    """Print each command's wall time as a ratio to an interpreter that does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        plugins = Path(folder, "plugins")
        for number in range(40):
            install(plugins, f"acme{number}")
        meters = {
            name: start(command, folder, **({"PYTHONPATH": str(plugins)} if name == MANY else {}))
            for name, (command, _) in commands().items()
        }
        # The first round fills the caches of bytecode and of the file system
        times = interleave(meters, rounds, warm_up=1)
    about, title = facts(CPU, "attnmux-core"), f"medians of {rounds} rounds"
    with Report(COLUMNS, about, path, title=title) as report:
        for name, (_, most) in commands().items():
            ratio = times.ratio(name, NOTHING)
            missed = most is not None and ratio > most
            report.add(name, times.median(name) / 1e3, ratio, most, missed=missed)


if __name__ == "__main__":
    main()
