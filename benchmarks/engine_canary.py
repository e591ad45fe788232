"""Cost of the canary inside vLLM or SGLang: decode steps of a served model, checked and not.

    python -m benchmarks.engine_canary vllm [--batch 1 ...] [--length 1024] [--new 64] [--rounds 5]
                                            [--every 1000] [--argument NAME=JSON ...] [--json FILE]

plain     milliseconds of a decode step without a canary
checked   milliseconds of a step with the canary in every step, its log line included
cost      (checked - plain) / every, as a part of `plain`. Bar: 1 % at 1,000.

Each side is an engine in a process of its own, one after the other, with a Llama of 135 million
parameters whose weights the engine draws. A step is the time of a batch with `new` tokens each less
the time with one, divided by the steps between them; figures are medians of the rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import json_option, rounds_option
from benchmarks.engines import NAMES, Side, Work, sglang, vllm
from transformers import LlamaConfig

from attnmux.bench import Report, facts

MAX_COST = 0.01
STARTS = {"sglang": sglang, "vllm": vllm}
COLUMNS = {"batch": "", "plain, ms": ".2f", "checked, ms": ".2f", "cost": ".3%", "bar": ""}
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
}
"""That of SmolLM2-135M."""


def _child(connection: Connection, engine: str, every: int, work: Work) -> None:
    """Send seconds of a decode step, by batch."""
    os.environ["ATTNMUX_CANARY"] = str(every)
    side = Side(label="", attention=NAMES[engine])
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, 49152) for _ in range(work.length)] for _ in range(max(work.batches))
    ]
    with STARTS[engine](work.folder, side, work, random_weights=True) as generate:

        def seconds(batch: int, new: int) -> float:
            started = time.perf_counter()
            generate(prompts[:batch], [new] * batch)
            return time.perf_counter() - started

        found: dict[int, float] = {}
        for batch in work.batches:
            seconds(batch, work.new)  # the engine keeps the prompts
            steps = [
                (seconds(batch, work.new) - seconds(batch, 1)) / (work.new - 1)
                for _ in range(work.rounds)
            ]
            found[batch] = statistics.median(steps)
        connection.send(found)


def measure(engine: str, every: int, work: Work) -> dict[int, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, engine, every, work))
    child.start()
    theirs.close()
    found: dict[int, float] = ours.recv()
    child.join(60)
    return found


@click.command()
@click.argument("engine", type=click.Choice(list(STARTS)))
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8), show_default=True)
@click.option("--length", default=1024, show_default=True, help="Tokens of a prompt.")
@click.option("--new", default=64, show_default=True, help="New tokens of each request.")
@click.option("--every", default=1000, show_default=True, help="Steps for one check.")
@click.option("--argument", "given", multiple=True, help="NAME=JSON of the engine.")
@rounds_option(5)
@json_option
def main(
    engine: str,
    batches: tuple[int, ...],
    length: int,
    new: int,
    every: int,
    given: tuple[str, ...],
    rounds: int,
    path: Path | None,
) -> None:
    """Print what a check of one request adds to decode steps."""
    arguments: dict[str, Any] = {}
    for each in given:
        name, _, value = each.partition("=")
        arguments[name] = json.loads(value)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaConfig(**SHAPE).save_pretrained(folder)
        work = Work(
            folder=folder,
            batches=batches,
            length=length,
            new=new,
            rounds=rounds,
            arguments=arguments,
        )
        plain, checked = measure(engine, 0, work), measure(engine, 1, work)
    title = f"{engine}, {length} keys, one check in {every:,} steps, medians of {rounds} rounds"
    with Report(
        COLUMNS, facts(torch.device("cpu"), "attnmux-core", engine), path, title=title
    ) as report:
        for batch in batches:
            cost = (checked[batch] - plain[batch]) / every / plain[batch]
            kept = cost <= MAX_COST
            word = "kept" if kept else "MISSED"
            values = batch, plain[batch] * 1000, checked[batch] * 1000, cost, word
            report.add(*values, missed=not kept)


if __name__ == "__main__":
    main()
