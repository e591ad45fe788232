"""Tokens per second of SGLang or vLLM with attnmux, and with the engine's own attention.

    python -m benchmarks.engines sglang [--batch 64 ...] [--length 1024] [--new 128] [--rounds 5]
                                        [--backend NAME ...] [--own NAME ...] [--only speed|texts]
                                        [--argument NAME=JSON ...] [--tiny] [--json FILE]

Each side is an engine in a process of its own, and sides run one after the other: the engine with
its default attention, with each backend of its own that `--own` names, with attnmux, and with each
backend that `--backend` names to attnmux. The model is a Llama of 3 billion parameters, whose
weights the engine draws. Figures are medians of the rounds, of prompts and new tokens together; a
ratio is the tokens per second over those of the engine's default. Random weights prove nothing
about texts, so a second engine of each side answers prompts of the shipped model, greedily: the
table counts the right answers, and those that equal the default's token for token.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import json_option, rounds_option
from transformers import LlamaConfig

from attnmux.testing.bench import Report, facts
from attnmux.transformers import recall

Prompts = list[list[int]]
Generate = Callable[[Prompts, Sequence[int]], list[list[int]]]
"""Greedy tokens of each prompt, as many as asked."""
Start = Callable[..., AbstractContextManager[Generate]]
NAMES = {"sglang": "attnmux", "vllm": "ATTNMUX"}
"""The value of `attention_backend` that means attnmux."""
TEXTS = 24
SECONDS = 400.0
"""Until an engine must have answered, its start included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One configuration of an engine."""

    label: str
    attention: str | None
    """None for the engine's default."""
    backend: str | None = None
    """The backend that attnmux must take; None lets it choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Batches that are timed, and a checkpoint's prompts."""

    folder: Path
    batches: Sequence[int]
    length: int
    new: int
    rounds: int
    arguments: Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class Found:
    """Results of one side."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    """By batch, one figure a round."""
    texts: list[list[int]] = field(default_factory=list)
    error: str = ""


@contextmanager
def sglang(folder: Path, side: Side, work: Work, *, random_weights: bool) -> Iterator[Generate]:
    import sglang as engines  # noqa: PLC0415  # one engine is installed

    given: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "max_running_requests": max(work.batches),
        "cuda_graph_max_bs_decode": max(work.batches),
        "log_level": "info",
    }
    if random_weights:
        given["load_format"] = "dummy"
    if side.attention:
        given["attention_backend"] = side.attention
    engine = engines.Engine(**{**given, **work.arguments})

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        params = [
            {"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths
        ]
        return [
            list(each["output_ids"])
            for each in engine.generate(input_ids=prompts, sampling_params=params)
        ]

    try:
        yield generate
    finally:
        engine.shutdown()


@contextmanager
def vllm(folder: Path, side: Side, work: Work, *, random_weights: bool) -> Iterator[Generate]:
    from vllm import LLM, SamplingParams  # noqa: PLC0415  # as above

    given: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_num_seqs": max(work.batches),
        "max_model_len": 2048,
        "seed": 0,
    }
    if random_weights:
        given["load_format"] = "dummy"
    if side.attention:
        given["attention_backend"] = side.attention
    engine = LLM(**{**given, **work.arguments})

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(asked, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in answers]

    try:
        yield generate
    finally:
        engine.llm_engine.engine_core.shutdown()


Task = Callable[[Connection, Start, Side, Work], None]
ENGINES: dict[str, Start] = {"sglang": sglang, "vllm": vllm}


@click.command(context_settings={"show_default": True})
@click.argument("engine", type=click.Choice(sorted(ENGINES)))
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 16, 64))
@click.option("--length", type=int, default=1024, help="Tokens of a prompt.")
@click.option("--new", type=int, default=128, help="Tokens to generate for each prompt.")
@rounds_option(5)
@click.option("--backend", "backends", multiple=True, help="Of attnmux, besides its own choice.")
@click.option("--own", multiple=True, help="Of the engine, besides its default.")
@click.option("--only", type=click.Choice(["speed", "texts"]), default=None)
@click.option("--argument", "arguments", multiple=True, help="NAME=JSON for the engine.")
@click.option("--tiny", is_flag=True, help="Two layers of the model, for a CPU.")
@json_option
def main(
    engine: str,
    batches: tuple[int, ...],
    length: int,
    new: int,
    rounds: int,
    backends: tuple[str, ...],
    own: tuple[str, ...],
    only: str | None,
    arguments: tuple[str, ...],
    tiny: bool,
    path: Path | None,
) -> None:
    """Print each side's tokens per second, and whether its texts are the engine's own."""
    ours = NAMES[engine]
    sides = [
        Side(label=engine, attention=None),
        *(Side(label=f"{engine} {name}", attention=name) for name in own),
        Side(label="attnmux", attention=ours),
        *(Side(label=f"attnmux {name}", attention=ours, backend=name) for name in backends),
    ]
    pairs = (argument.split("=", 1) for argument in arguments)
    about = facts(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        *(engine, f"attnmux-{engine}", "attnmux-core", "transformers"),
        **{"prompt_tokens": length, "new_tokens": new, "rounds": rounds},
    )
    columns = {"": "", "batch": "d", "tokens/s": ",.0f", "ratio": ".3f", "right": "", "equal": ""}
    title = f"{engine}, {length} tokens of prompt and {new} new ones; medians of {rounds} rounds"
    with (
        tempfile.TemporaryDirectory() as made,
        Report(columns, about, path, title=title) as report,
    ):
        config(tiny=tiny).save_pretrained(made)
        work = Work(
            folder=Path(made),
            batches=batches,
            length=length,
            new=new,
            rounds=rounds,
            arguments={name: json.loads(value) for name, value in pairs},
        )
        every: dict[str, Task] = {"speed": measure, "texts": answer}
        tasks = [task for name, task in every.items() if only in (None, name)]
        first: Found | None = None
        for side in sides:
            found = in_children(engine, side, work, tasks)
            first = first or found
            add(report, side, work, found, first)


def config(*, tiny: bool) -> LlamaConfig:
    """Heads and widths of Llama 3.2 3B."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=2 if tiny else 28,
        hidden_size=256 if tiny else 3072,
        intermediate_size=512 if tiny else 8192,
        num_attention_heads=4 if tiny else 24,
        num_key_value_heads=2 if tiny else 8,
        head_dim=64 if tiny else 128,
        vocab_size=128256,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def questions() -> tuple[Prompts, list[bytes]]:
    """Prompts of the shipped model, whose tokens are bytes, and their right answers."""
    rng = random.Random(0)
    pairs = [recall.make_prompt(rng, rng.randrange(100, 900)) for _ in range(TEXTS)]
    return [list(prompt.encode()) for prompt, _ in pairs], [answer.encode() for _, answer in pairs]


def in_children(engine: str, side: Side, work: Work, tasks: Sequence[Task]) -> Found:
    """The side's results, each task's from a process and an engine of its own."""
    found = Found()
    for task in tasks:
        with child(engine, side, work, task) as results:
            try:
                while results.poll(SECONDS):
                    name, value = results.recv()
                    if name == "done":
                        break
                    setattr(found, name, value)
                else:
                    found.error = f"no answer within {SECONDS:.0f} s"
            except EOFError:
                found.error = found.error or "the engine ended its process: see its log above"
    return found


@contextmanager
def child(engine: str, side: Side, work: Work, task: Task) -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    # Engines start processes of their own, which a daemon may not
    process = multiprocessing.get_context("spawn").Process(
        target=run, args=(theirs, engine, side, work, task)
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()


def run(results: Connection, engine: str, side: Side, work: Work, task: Task) -> None:
    """Runs in the child, which sends pairs of a field of `Found` and its value."""
    if side.backend is not None:
        os.environ["ATTNMUX_BACKEND"] = side.backend
    try:
        task(results, ENGINES[engine], side, work)
    except Exception:
        results.send(("error", traceback.format_exc()))
    results.send(("done", None))


def measure(results: Connection, start: Start, side: Side, work: Work) -> None:
    seconds: dict[int, list[float]] = {batch: [] for batch in work.batches}
    rng = random.Random(0)
    with start(work.folder, side, work, random_weights=True) as generate:
        for turn in range(1 + work.rounds):  # the first warms up
            for batch in work.batches:
                prompts = [rng.choices(range(1, 100_000), k=work.length) for _ in range(batch)]
                began = time.perf_counter()
                generate(prompts, [work.new] * batch)
                if turn:
                    seconds[batch].append(time.perf_counter() - began)
            results.send(("seconds", seconds))


def answer(results: Connection, start: Start, side: Side, work: Work) -> None:
    prompts, answers = questions()
    with start(recall.PATH, side, work, random_weights=False) as generate:
        results.send(("texts", generate(prompts, [len(answer) for answer in answers])))


def add(report: Report, side: Side, work: Work, found: Found, first: Found) -> None:
    """One row for each batch; the default's figures are the first side's."""
    right = sum(
        bytes(text) == answer for text, answer in zip(found.texts, questions()[1], strict=False)
    )
    equal = sum(text == other for text, other in zip(found.texts, first.texts, strict=False))
    for batch in work.batches:
        taken, other = found.seconds.get(batch), first.seconds.get(batch)
        speed = batch * (work.length + work.new) / statistics.median(taken) if taken else None
        ratio = statistics.median(other) / statistics.median(taken) if taken and other else None
        cells = (side.label, batch, speed, ratio, f"{right}/{TEXTS}", f"{equal}/{TEXTS}")
        record = dict(zip(("side", "batch", "tokens_per_second", "ratio"), cells, strict=False))
        report.add(
            *cells, record={**record, "right": right, "equal": equal, "seconds": taken or []}
        )
    if found.error:
        report.note(f"{side.label}: {found.error}")


if __name__ == "__main__":
    main()
