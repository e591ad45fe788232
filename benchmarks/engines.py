"""Tokens per second of SGLang or vLLM with attnmux, and with the engine's own attention.

    python -m benchmarks.engines sglang [--model llama|windows|latent] [--work 64x1024 ...]
                                        [--new 64] [--rounds 5] [--prompt-rounds 3]
                                        [--kv-dtype fp8_e4m3] [--backend NAME ...] [--own NAME ...]
                                        [--only speed|texts] [--argument NAME=JSON ...] [--tiny]
                                        [--json FILE]

Each side is an engine in a process of its own. All of them live at once, share the device's memory
and take turns: the engine with its default attention, with each backend of its own that `--own`
names, with attnmux, and with each backend that `--backend` names to attnmux. A side that fails is
left out. Their models (`engine_models.py`) have random weights, which the engine draws.

`prompts` is the time of a batch of fresh prompts, in fewer rounds if they are long. `tokens/s` is
of decode: the engine generates `--new` tokens after prompts that it keeps, and one token, and the
difference counts. Ratios are speeds over the default's: the median of the rounds' own, with the
least and the most. Random weights prove nothing about texts, so a second engine of each side
answers prompts of the shipped model, greedily: the table counts the right answers, and those that
equal the default's token for token.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import json_option, rounds_option
from benchmarks.engine_models import MODELS, cached_bytes
from benchmarks.engine_processes import NAMES, Drawn, Engine, EngineFailed, Model, Side
from transformers import AutoConfig

from attnmux.testing.bench import Report, facts
from attnmux.testing.bench.timing import Meter, Times, interleave
from attnmux.transformers import recall

TEXTS = 24
MOST_PROMPT_TOKENS = 200_000
"""The most tokens of prompts that a batch is given in all rounds together."""
ENDS = 512
"""Tokens of a request beyond its prompt and answer: the rest of its last pages."""
MEMORY = 0.9
"""Share of the device's memory that all sides take together."""
COLUMNS = {
    **{"": "", "work": "", "prompts, s": ".3f", "ratio": "", "tokens/s": ",.0f", "ratio ": ""},
    **{"right": "", "equal": ""},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A batch of prompts of one length."""

    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Work:
        batch, _, length = text.partition("x")
        return cls(batch=int(batch), length=int(length))

    def __str__(self) -> str:
        return f"{self.batch} x {self.length:,}"

    def tokens(self, new: int) -> int:
        """In the cache, with those that an earlier round left."""
        return self.batch * (self.length + 2 * new + ENDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    new: int
    rounds: int
    prompt_rounds: int

    def of(self, engines: Mapping[str, Engine], work: Work) -> tuple[Times, Times]:
        """Microseconds of a batch of prompts, and of a batch's decode steps, by side."""
        seeds = {label: itertools.count() for label in engines}
        known: dict[str, Drawn] = {}

        def prompts(label: str) -> Meter:
            def measure() -> float:
                known[label] = Drawn(next(seeds[label]), work.batch, work.length)
                return engines[label].ask(known[label], [1] * work.batch)[0] * 1e6

            return measure

        def steps(label: str) -> Meter:
            def measure() -> float:
                short, long = (
                    engines[label].ask(known[label], [1 + more] * work.batch)[0]
                    for more in (0, self.new)
                )
                return (long - short) * 1e6

            return measure

        most = MOST_PROMPT_TOKENS // (work.batch * work.length) - 1
        fill = interleave(
            {label: prompts(label) for label in engines},
            max(1, min(self.prompt_rounds, most)),
            warm_up=1 if most > 0 else 0,
            keep_going=True,
        )
        sound = [label for label in engines if label not in fill.failures]
        decode = interleave(
            {label: steps(label) for label in sound}, self.rounds, warm_up=1, keep_going=True
        )
        return fill, decode


@click.command(context_settings={"show_default": True})
@click.argument("engine", type=click.Choice(sorted(NAMES)))
@click.option("--model", "name", type=click.Choice(sorted(MODELS)), default="llama")
@click.option("--work", "works", multiple=True, default=("1x65536", "16x16384", "64x1024"))
@click.option("--new", type=int, default=64, help="Tokens to generate for each prompt.")
@rounds_option(5)
@click.option("--prompt-rounds", type=int, default=3)
@click.option("--kv-dtype", default="auto", help="In the engine's words.")
@click.option("--backend", "backends", multiple=True, help="Of attnmux, besides its own choice.")
@click.option("--own", multiple=True, help="Of the engine, besides its default.")
@click.option("--only", type=click.Choice(["speed", "texts"]), default=None)
@click.option("--argument", "arguments", multiple=True, help="NAME=JSON for the engine.")
@click.option("--tiny", is_flag=True, help="Two layers of the model, for a CPU.")
@json_option
def main(
    engine: str,
    name: str,
    works: tuple[str, ...],
    new: int,
    rounds: int,
    prompt_rounds: int,
    kv_dtype: str,
    backends: tuple[str, ...],
    own: tuple[str, ...],
    only: str | None,
    arguments: tuple[str, ...],
    tiny: bool,
    path: Path | None,
) -> None:
    """Print each side's times, and whether its texts are the engine's own."""
    # What the children import may ask for devices in another way, after which vLLM cannot fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # In another process vLLM's engine begins before all requests have come
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sides = sides_of(engine, own, backends)
    pairs = (argument.split("=", 1) for argument in arguments)
    given = {key: json.loads(value) for key, value in pairs}
    parsed, config = [Work.parse(text) for text in works], MODELS[name](tiny)
    itemsize = 1 if "fp8" in kv_dtype else 2
    timing = Timing(new=new, rounds=rounds, prompt_rounds=prompt_rounds)
    about = facts(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        *(engine, f"attnmux-{engine}", "attnmux-core", "transformers"),
        **{"model": name, "kv_dtype": kv_dtype, "new_tokens": new, "rounds": rounds},
    )
    title = f"{engine}, {name}, KV {kv_dtype}; {new} new tokens; medians of {rounds} rounds"
    with tempfile.TemporaryDirectory() as made, Report(COLUMNS, about, path, title=title) as report:
        # The engines read fields that `save_pretrained` leaves out, since they have their defaults
        config.to_json_file(Path(made) / "config.json", use_diff=False)
        model = Model(
            folder=Path(made),
            random_weights=True,
            most_requests=max(work.batch for work in parsed),
            longest=max(work.length for work in parsed) + new + ENDS,
            tokens=max(work.tokens(new) for work in parsed),
            cached_bytes=cached_bytes(config, itemsize),
            kv_dtype=kv_dtype,
            share=MEMORY / len(sides),
            arguments=given,
        )
        if only != "texts":
            with started(engine, model, sides, config.vocab_size, report) as engines:
                for work in parsed if engines else ():
                    tell(report, engine, work, new, *timing.of(engines, work))
        if only != "speed":
            tell_texts(report, engine, shipped(model, itemsize), sides)


def sides_of(engine: str, own: Sequence[str], backends: Sequence[str]) -> list[Side]:
    """The engine's default first, which has the engine's name."""
    ours = NAMES[engine]
    return [
        Side(label=engine, attention=None),
        *(Side(label=f"{engine} {each}", attention=each) for each in own),
        Side(label="attnmux", attention=ours),
        *(Side(label=f"attnmux {each}", attention=ours, backend=each) for each in backends),
    ]


@contextlib.contextmanager
def started(
    engine: str, model: Model, sides: Sequence[Side], vocabulary: int, report: Report
) -> Iterator[Mapping[str, Engine]]:
    """All sides' engines that started, by label; notes of the others."""
    every = {
        side.label: Engine(engine, model, replace(side, place=place), vocabulary)
        for place, side in enumerate(sides)
    }
    try:
        ready = {}
        for label, each in every.items():
            try:
                report.note(f"{label}: ready in {each.wait()[0]:.0f} s")
                ready[label] = each
            except EngineFailed as error:
                report.note(f"{label}: {error}")
        yield ready
    finally:
        for each in every.values():
            each.end()


def tell(report: Report, default: str, work: Work, new: int, fill: Times, decode: Times) -> None:
    """A row for each side. default: the label of the side that ratios are over."""
    for label in fill.us:
        cells: list[Any] = [label, str(work)]
        record: dict[str, Any] = {"side": label, "work": str(work)}
        for name, times in (("prompts", fill), ("decode", decode)):
            us = times.us.get(label) or []
            seconds = times.median(label) / 1e6 if us else None
            value = seconds if name == "prompts" or not seconds else work.batch * new / seconds
            cells += [value, speeds(times, label, default)]
            record[f"{name}_seconds"] = [each / 1e6 for each in us]
        report.add(*cells, None, None, record=record)
    for error in {**fill.failures, **decode.failures}.items():
        report.note("{}: {}".format(*error))


def speeds(times: Times, label: str, default: str) -> str | None:
    """The side's speed over the default's: the median of the rounds, the least and the most. None
    if one of them has no times."""
    mine, theirs = times.us.get(label), times.us.get(default)
    if not mine or not theirs or {label, default} & times.failures.keys():
        return None
    ratios = [other / own for other, own in zip(theirs, mine, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def shipped(model: Model, itemsize: int) -> Model:
    """The shipped model, in the same engine."""
    return replace(
        model,
        folder=recall.PATH,
        random_weights=False,
        most_requests=TEXTS,
        longest=1024,
        tokens=TEXTS * 1024,
        cached_bytes=cached_bytes(AutoConfig.from_pretrained(recall.PATH), itemsize),
    )


def questions() -> tuple[list[list[int]], list[bytes]]:
    """Prompts of the shipped model, whose tokens are bytes, and their right answers."""
    rng = random.Random(0)
    pairs = [recall.make_prompt(rng, rng.randrange(100, 900)) for _ in range(TEXTS)]
    return [list(prompt.encode()) for prompt, _ in pairs], [answer.encode() for _, answer in pairs]


def tell_texts(report: Report, engine: str, model: Model, sides: Sequence[Side]) -> None:
    """A row for each side: its right answers, and those that are the default's."""
    prompts, answers = questions()
    new = [len(answer) for answer in answers]
    with started(engine, model, sides, 256, report) as engines:
        given = {label: each.ask(prompts, new)[1] for label, each in engines.items()}
        for label, texts in given.items():
            right = sum(bytes(text) == answer for text, answer in zip(texts, answers, strict=True))
            equal = sum(map(operator.eq, texts, given.get(engine, ())))
            counts = (f"{right}/{TEXTS}", f"{equal}/{TEXTS}" if engine in given else None)
            record = {"side": label, "right": right, "equal": equal}
            report.add(label, "texts", None, None, None, None, *counts, record=record)


if __name__ == "__main__":
    main()
