"""Run every decoder and encoder-decoder model of the installed transformers on attnmux, each as a
small random model.

    python -m tools.models [--jobs 2] [--seed 0] [--platform cpu] [--json FILE] [NAME…]

A decoder has the name of its config's class, an encoder-decoder model that of its own class. Each
gets random heads, groups, dims and windows, and random float32 weights. attnmux's engine must give
the logits and the text of eager attention.
Exits with 1 where one is wrong or fails with an error that is not typed.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tools.models.children import all_names, context_of_children, run_all
from tools.models.outcome import Outcome, as_json, as_markdown, counts, reasons

STYLES = {"served": "green", "refused": "yellow", "wrong": "red", "failed": "red"}


@click.command(help=__doc__)
@click.argument("configs", nargs=-1, metavar="[NAME]...")
@click.option("--jobs", default=2, show_default=True, help="Architectures at a time.")
@click.option("--seed", default=0, show_default=True, help="Of dims, weights and prompts.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds for an architecture.")
@click.option("--platform", "device", default="cpu", show_default=True, help="Of attnmux.")
@click.option("--backend", help="Only this backend; as a rule the solver chooses.")
@click.option("--shard", default="1/1", show_default=True, help="Which part of all to run.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the outcomes here.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the tables here.")
def main(
    configs: tuple[str, ...],
    jobs: int,
    seed: int,
    timeout: float,
    device: str,
    backend: str | None,
    shard: str,
    path: Path | None,
    markdown: Path | None,
) -> None:
    context = context_of_children(device)
    part, parts = map(int, shard.split("/"))
    names = list(configs or all_names(context))[part - 1 :: parts]
    console, outcomes, start = Console(), [], time.monotonic()
    for outcome in run_all(
        context, names, seed=seed, jobs=jobs, timeout=timeout, device=device, backend=backend
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
        "seed": seed,
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
    table = Table("config", "backend", "worst logit", "dims", "seconds", title="Served")
    for each in sorted(served, key=lambda each: each.config):
        table.add_row(
            each.config, each.backend, f"{each.worst:.1e}", each.dims, f"{each.seconds:.1f}"
        )
    console.print(table)
    for status, count in counts(outcomes).items():
        console.print(f"[bold]{status}: {count}")
        for reason, names in reasons(outcomes, status) if status != "served" else ():
            console.print(f"  {len(names)}: {reason}", markup=False, highlight=False)
            console.print(f"     {', '.join(names)}", style="dim")


if __name__ == "__main__":
    main()
