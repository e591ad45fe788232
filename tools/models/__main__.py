"""Run every decoder and encoder-decoder model of the installed transformers on attnmux, each as a
small random model.

    python -m tools.models [--jobs 2] [--seed 0] [--platform cpu] [--dtype float32]
                           [--dims small] [NAME…]

A decoder has the name of its config's class, an encoder-decoder model that of its own class. Each
gets random heads, groups, dims and windows, and random weights. attnmux's engine must give the
logits and the text of eager attention in float32; with a 16-bit --dtype, as far as rounding lets
the model itself.
Exits with 1 where one is wrong or fails with an error that is not typed.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import click
from rich.console import Console
from rich.table import Table

from attnmux.core import AttnmuxError, InvalidInput
from attnmux.core.plugin import Files
from attnmux.core.verbs import FiniteRange
from tools.models.children import all_names, context_of_children, machine_of, run_all
from tools.models.outcome import Outcome, as_json, as_markdown, counts, reasons
from tools.models.recipe import DimsKind, Recipe

STYLES = {"served": "green", "refused": "yellow", "wrong": "red", "failed": "red"}


FILE = click.Path(dir_okay=False, path_type=Path)


def part_of(context: click.Context, option: click.Parameter, value: str) -> tuple[int, int]:
    """The part that --shard names, and the number of parts."""
    found = re.fullmatch(r"(\d+)/(\d+)", value)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise click.BadParameter(f"expected I/N with I from 1 to N, got {value!r}")
    return part, parts


def in_folder(context: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    """The file. It must be one, in a folder that is there, before minutes of work."""
    if value is not None:
        try:
            Files.check_replaceable(str(option.name), value)
        except InvalidInput as error:
            raise click.BadParameter(str(error)) from None
    return value


def known(asked: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that are asked for; all, if there are none."""
    for name in asked:
        if name not in names:
            near = ", ".join(get_close_matches(name, names))
            hint = f"; did you mean {near}?" if near else ""
            raise click.UsageError(f"transformers has no architecture {name!r}{hint}")
    return list(asked or names)


@click.command(help=__doc__)
@click.argument("configs", nargs=-1, metavar="[NAME]...")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Architectures at a time.",
)
@click.option("--seed", default=0, show_default=True, help="Of dims, weights and prompts.")
@click.option(
    "--timeout",
    type=FiniteRange(0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds for an architecture.",
)
@click.option("--platform", "device", default="cpu", show_default=True, help="Of attnmux.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of weights and activations.",
)
@click.option(
    "--dims",
    type=click.Choice(get_args(DimsKind)),
    default="small",
    show_default=True,
    help="Small ones, or those that kernels are written for.",
)
@click.option("--backend", help="Only this backend; as a rule the solver chooses.")
@click.option(
    "--shard",
    default="1/1",
    show_default=True,
    callback=part_of,
    metavar="I/N",
    help="Which part of all to run.",
)
@click.option("--progress", is_flag=True, help="Print each stage of an architecture as it begins.")
@click.option("--json", "path", type=FILE, callback=in_folder, help="Write the outcomes here.")
@click.option("--markdown", type=FILE, callback=in_folder, help="Write the tables here.")
def main(
    configs: tuple[str, ...],
    jobs: int,
    seed: int,
    timeout: float,
    device: str,
    dtype: str,
    dims: DimsKind,
    backend: str | None,
    shard: tuple[int, int],
    progress: bool,
    path: Path | None,
    markdown: Path | None,
) -> None:
    context = context_of_children(device)
    part, parts = shard
    names = known(configs, all_names(context))[part - 1 :: parts]
    if not names:
        raise click.UsageError(f"--shard {part}/{parts} has no architecture")
    try:
        machine, offers = machine_of(device, backend)
    except AttnmuxError as error:
        raise click.UsageError(str(error)) from error
    recipe = Recipe(seed=seed, dtype=dtype, dims=dims)
    console, outcomes, start = Console(), [], time.monotonic()

    def say(name: str, stage: str) -> None:
        if progress:
            console.print(f"{time.monotonic() - start:6.0f} s  {name}: {stage}", style="dim")

    for outcome in run_all(
        context,
        names,
        recipe,
        jobs=jobs,
        timeout=timeout,
        platform=machine,
        offers=offers,
        say=say,
    ):
        outcomes.append(outcome)
        style = STYLES.get(outcome.status, "dim")
        console.print(f"{outcome.config}: [{style}]{outcome.status}[/] ", end="")
        console.print(outcome.reason, markup=False, highlight=False)
    facts: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "transformers", "attnmux-core")},
        "platform": device,
        **asdict(recipe),
        "seconds": round(time.monotonic() - start),
    }
    _show(console, outcomes)
    if path is not None:
        path.write_text(json.dumps(as_json(outcomes, facts), indent=1) + "\n")
    if markdown is not None:
        markdown.write_text(as_markdown(outcomes, facts))
    found = counts(outcomes)
    sys.exit(1 if found["wrong"] or found["failed"] else 0)


def _show(console: Console, outcomes: list[Outcome]) -> None:
    served = [each for each in outcomes if each.status == "served"]
    columns = ("config", "backend", "worst logit", "of bound", "dims", "seconds")
    table = Table(*columns, title="Served")
    for each in sorted(served, key=lambda each: each.config):
        table.add_row(
            each.config,
            each.backend,
            f"{each.worst:.1e}",
            f"{each.of_bound:.2f}",
            each.dims,
            f"{each.seconds:.1f}",
        )
    console.print(table)
    for status, count in counts(outcomes).items():
        console.print(f"[bold]{status}: {count}")
        for reason, names in reasons(outcomes, status) if status != "served" else ():
            console.print(f"  {len(names)}: {reason}", markup=False, highlight=False)
            console.print(f"     {', '.join(names)}", style="dim")


if __name__ == "__main__":
    main()
