"""`attnmux generate`: text from a model, served by the backend that was chosen."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import click
import torch

from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import Plugins
from attnmux.core.choosing.probe import Detection, pick_platform
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.errors import InvalidInput, PoolExhausted
from attnmux.core.settings import Settings
from attnmux.transformers import recall
from attnmux.transformers.checkpoint import Checkpoint, open_checkpoint, quiet_transformers
from attnmux.transformers.generate import Generation, Generator
from attnmux.transformers.load import RunnerOptions, load_runner
from attnmux.transformers.printing import Printer
from attnmux.transformers.prompts import encode_prompts
from attnmux.transformers.runner import ModelRunner
from attnmux.transformers.sampling import SamplingParams

SAMPLE_BYTES = 240
AT_LEAST_1 = click.IntRange(min=1)


@click.command()
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option("--model", help="A folder or a Hugging Face hub id; default: the shipped model.")
@click.option(
    "--max-new-tokens", type=AT_LEAST_1, default=128, show_default=True, help="For each prompt."
)
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the likeliest tokens.")
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
@click.option("--chat", is_flag=True, help="Put each prompt into the model's chat template.")
@click.option("--backend", help="The backend for prefill and decode.")
@click.option("--prefill-backend", help="The backend for prefill.")
@click.option("--decode-backend", help="The backend for decode.")
@click.option(
    "--page-size", type=AT_LEAST_1, help="Tokens of a KV page; default: the solver's choice."
)
@click.option("--kv-dtype", help="Of the KV cache; default: as the model.")
@click.option("--dtype", help="Of the model; default: the checkpoint's.")
@click.option(
    "--context", type=AT_LEAST_1, help="Most tokens of a request; default: the model's limit."
)
@click.option("--device", help="torch's name, such as cpu or cuda:1; default: the accelerator.")
@click.option("--no-stream", is_flag=True, help="Print the text when all of it is there.")
@common_options
@pass_run
def generate(
    run: Run,
    /,
    as_json: bool,
    prompts: tuple[str, ...],
    model: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    chat: bool,
    page_size: int | None,
    kv_dtype: str | None,
    dtype: str | None,
    context: int | None,
    device: str | None,
    no_stream: bool,
    **backends: str | None,
) -> None:
    """Continue each PROMPT with the shipped model or with any Hugging Face decoder model.

    PROMPT "-" reads one from stdin. Without any, the shipped model is asked a made-up question.
    Text goes to stdout; the chosen backend, progress and speed go to stderr.
    """
    sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    settings = run.settings()
    texts = read_prompts(prompts, model, seed)
    with _quiet(run.debug):
        began = time.perf_counter()
        source = recall.PATH if model is None else model
        checkpoint = open_checkpoint(source, progress=sys.stderr.isatty())
        context = context_of(checkpoint, context)
        ids = encode_prompts(checkpoint, texts, max_context_len=context, chat=chat)
        plugins = run.plugins(settings)
        options = RunnerOptions(
            max_batch_size=len(ids),
            max_context_len=context,
            max_total_tokens=sum(min(len(one) + max_new_tokens, context) for one in ids),
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            device=device,
            policy=settings.policy(**backends),
            debug=run.debug,
        )
        platform = platform_for(run.detect(plugins), settings, device)
        runner = _load(checkpoint, platform, plugins, options)
        load_seconds = time.perf_counter() - began
        click.echo(runner.decision.summary(), err=True)
        generation = _generate(
            runner, checkpoint, ids, max_new_tokens, sampling, silent=as_json, stream=not no_stream
        )
    if as_json:
        echo_json(
            {
                "model": checkpoint.source,
                **_as_dict(generation, texts, load_seconds),
                "decision": _decided(runner.decision),
                "warnings": run.warnings,
            }
        )
    click.echo(_speed(generation, runner.decision), err=True)


def read_prompts(prompts: Sequence[str], model: str | None, seed: int) -> list[str]:
    """The texts to continue; for the shipped model one is made up where none is given."""
    if prompts:
        return [_stdin() if prompt == "-" else prompt for prompt in prompts]
    if model is not None:
        raise click.UsageError("Give a PROMPT, or - to read one from stdin.")
    prompt, answer = recall.make_prompt(random.Random(seed), SAMPLE_BYTES)
    click.echo(f"no prompt given; a made-up one, to which {answer} is right:\n{prompt}", err=True)
    return [prompt]


def _stdin() -> str:
    """All of stdin without the last line's end, UTF-8 whatever the locale says."""
    if sys.stdin is None:
        raise click.UsageError("- reads a prompt from stdin, which is closed.")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidInput("stdin", came=str(error), expected="text in UTF-8") from error


def context_of(checkpoint: Checkpoint, wanted: int | None) -> int:
    """Tokens of the longest request. Raises InvalidInput for more than the model's positions."""
    limit = checkpoint.max_context_len
    if wanted is None and limit is None:
        raise InvalidInput("--context", came="nothing", expected="a number: the model states none")
    if wanted is None or limit is None:
        return wanted or limit or 0
    if wanted > limit:
        raise InvalidInput("--context", came=wanted, expected=f"at most the model's limit, {limit}")
    return wanted


def platform_for(detection: Detection, settings: Settings, device: str | None) -> Platform:
    """The platform of a torch device; without one the configured or the only accelerator's.

    Raises InvalidInput for a device that is not here, or that this build of torch cannot use.
    """
    platform = pick_platform(detection, settings.platform) if device is None else None
    name = device or (platform.device_type if platform is not None else "cpu")
    try:
        kind = torch.device(name).type
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            "--device", came=f"{name} ({reason})", expected="a device that torch can use here"
        ) from error
    if platform is not None:
        return platform
    found = tuple(one for one in detection.platforms if one.device_type == kind)
    if not found:
        present = ", ".join(sorted({one.device_type for one in detection.platforms}))
        raise InvalidInput("--device", came=name, expected=f"one of {present}")
    return pick_platform(replace(detection, platforms=found))


def _load(
    checkpoint: Checkpoint, platform: Platform, plugins: Plugins, options: RunnerOptions
) -> ModelRunner:
    try:
        return load_runner(
            checkpoint, platform, plugins.offers(), options, progress=sys.stderr.isatty()
        )
    except PoolExhausted as error:
        raise PoolExhausted(
            error.what,
            wanted=error.wanted,
            available=error.available,
            hint="lower --max-new-tokens, give fewer or shorter prompts, or a smaller --kv-dtype",
        ) from error


def _generate(
    runner: ModelRunner,
    checkpoint: Checkpoint,
    ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    *,
    silent: bool,
    stream: bool,
) -> Generation:
    generator = Generator(
        runner, tokenizer=checkpoint.require_tokenizer(), stop_ids=checkpoint.stop_ids(runner.model)
    )
    if silent:
        return generator.generate(ids, max_new_tokens=max_new_tokens, sampling=sampling)
    with Printer(len(ids), stream=stream) as printer:
        return generator.generate(
            ids, max_new_tokens=max_new_tokens, sampling=sampling, on_text=printer
        )


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Only errors from the libraries below, unless debugging."""
    with warnings.catch_warnings(), quiet_transformers(progress=sys.stderr.isatty()):
        if not debug:
            warnings.simplefilter("ignore")
        yield


def _as_dict(generation: Generation, texts: Sequence[str], load_seconds: float) -> dict[str, Any]:
    timings = generation.timings
    return {
        "results": [
            {
                "prompt": text,
                "text": result.text,
                "token_ids": list(result.token_ids),
                "finish_reason": result.finish_reason,
            }
            for text, result in zip(texts, generation.results, strict=True)
        ],
        "timings": {
            "load_seconds": load_seconds,
            **asdict(timings),
            "prefill_tokens_per_second": timings.prefill_tokens_per_second,
            "decode_tokens_per_second": timings.decode_tokens_per_second,
        },
    }


def _decided(decision: Decision) -> dict[str, Any]:
    return {
        "hash": decision.hash,
        "page_size": decision.page_size,
        "kv_dtype": decision.kv_dtype,
        "phases": {
            phase: {"backend": choice.backend, "plugin": choice.plugin}
            for phase, choice in decision.phases.items()
        },
    }


def _speed(generation: Generation, decision: Decision) -> str:
    timings = generation.timings
    served = {
        phase: f"{choice.backend} ({choice.plugin})" for phase, choice in decision.phases.items()
    }
    return (
        f"prefill: {timings.prefill_tokens} tokens, "
        f"{timings.prefill_tokens_per_second:.1f} tokens/s, {served['extend']}; "
        f"decode: {timings.decode_tokens} tokens, "
        f"{timings.decode_tokens_per_second:.1f} tokens/s, {served['decode']}"
    )
