"""`attnmux select` for click."""

from __future__ import annotations

from typing import Any

import click

from attnmux.core.choosing.machine.platform import GRAMMAR
from attnmux.core.cli import select as answering
from attnmux.core.cli.run import Run, common_options, pass_run

PLATFORM = f"A machine, present or not, as {GRAMMAR}; or a vendor here. Several are compared."
SET = "An option of a backend; `attnmux backends --json` lists them."


@click.command(help=answering.select.__doc__)
@click.option("--platform", "platforms", multiple=True, help=PLATFORM)
@click.option("--request", "fields", default="", help="FIELD=VALUE,…: page_size=16,spec_topk=4")
@click.option("--model", help="A folder with a Hugging Face config.json.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Ranks that share the heads.")
@click.option("--backend", help="The backend for extend and decode.")
@click.option("--prefill-backend", help="The backend for extend.")
@click.option("--decode-backend", help="The backend for decode.")
@click.option("--mm-backend", help="The backend for a multimodal encoder.")
@click.option("--linear-backend", help="The backend for layers without softmax attention.")
@click.option(
    "--speculative-attention-mode",
    type=click.Choice(["prefill", "decode"]),
    help="Which of the two verifies and drafts.",
)
@click.option("--set", "assignments", multiple=True, metavar="BACKEND.OPTION=VALUE", help=SET)
@click.option("--without", multiple=True, metavar="DIST", help="Count a library as not installed.")
@click.option("--allow-coercion", is_flag=True, help="Allow changes to values that you set.")
@click.option("--no-measurements", is_flag=True, help="Ignore the measurements of this machine.")
@click.option("--engine", metavar="NAME", help="Also print the line that starts it: vllm, sglang.")
@click.option("--explain", is_flag=True, help="Say why each other lost, and who set each value.")
@click.option("--all", "every", is_flag=True, help="Like --explain, with every reason.")
@common_options
@pass_run
def select(run: Run, /, **given: Any) -> None:  # noqa: ANN401  # the options' values
    answering.select(run, **given)
