"""Cost of an answer of the command from a cold start, as a ratio to `python -c pass`.

Every round starts every process once, so that a disturbance hits all of them; medians are printed.
Bars: `attnmux select --json` at most 6, with 40 more plugins at most 8, the table at most 20. The
offers of every plugin are in the cache, which the first round fills. The last rows split the time:
the libraries alone, and the package without a verb.

    python -m benchmarks.cold_start [--rounds N]
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

NOTHING = "python -c pass"
LIBRARIES = "import click, dataclasses, hashlib, json, pathlib, platformdirs"
MANY = "attnmux select --json, 40 more plugins"
PLUGIN = """
from attnmux.core import BackendCard, hookimpl, one_of, when

@hookimpl
def attnmux_cards():
    clauses = tuple(when(vendor=one_of("acme"), page_size=one_of(n)) for n in range(1, 9))
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
        "attnmux select --json": ([script, "select", "--json"], 6),
        MANY: ([script, "select", "--json"], 8),
        "attnmux select --json, another machine": ([script, "select", "--json", *other], 6),
        "attnmux select": ([script, "select"], 20),
        "attnmux --help": ([script, "--help"], None),
        "import attnmux.core": ([sys.executable, "-c", "import attnmux.core"], None),
        "the libraries alone": ([sys.executable, "-c", LIBRARIES], None),
    }


def install(folder: Path, name: str) -> None:
    """A plugin with one card of eight clauses, as pip would install it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(PLUGIN.format(name=name))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
    (info / "entry_points.txt").write_text(f"[attnmux]\n{name} = {name}\n")


def measure(rounds: int) -> dict[str, float]:
    """Median wall time in seconds, by name."""
    timed: dict[str, list[float]] = {name: [] for name in commands()}
    # Sources that are installed as a link are compiled in the first round, as pip compiles others
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:  # no configuration file is found from here
        plugins = Path(folder, "plugins")
        for number in range(40):
            install(plugins, f"acme{number}")
        env["XDG_CACHE_HOME"] = folder
        envs = {MANY: {**env, "PYTHONPATH": str(plugins)}}
        for _ in range(rounds + 1):
            for name, (command, _) in commands().items():
                start = time.perf_counter()
                subprocess.run(
                    command,
                    cwd=folder,
                    env=envs.get(name, env),
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                timed[name].append(time.perf_counter() - start)
    # The first round fills the caches of bytecode and of the file system
    return {name: statistics.median(times[1:]) for name, times in timed.items()}


@click.command()
@click.option("--rounds", default=20, help="How often each command starts.")
def main(rounds: int) -> None:
    """Print each command's wall time as a ratio to an interpreter that does nothing."""
    medians = measure(rounds)
    table = Table("command", "ms", "ratio", "at most", title=f"Python {sys.version.split()[0]}")
    for name, (_, bar) in commands().items():
        ratio = medians[name] / medians[NOTHING]
        style = "red" if bar is not None and ratio > bar else None
        limit = "" if bar is None else f"{bar:g}"
        table.add_row(name, f"{medians[name] * 1e3:.1f}", f"{ratio:.1f}", limit, style=style)
    Console().print(table)


if __name__ == "__main__":
    main()
