"""`attnmux generate`: text from a model, on the backend that was chosen."""

from __future__ import annotations

import pkgutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click
import torch

from attnmux.core import (
    AttentionBackend,
    Decision,
    Detection,
    InvalidInput,
    Platform,
    Plugins,
    PoolExhausted,
    Settings,
    pick_platform,
)
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.transformers import recall
from attnmux.transformers.checkpoint import Checkpoint, open_checkpoint, quiet_transformers
from attnmux.transformers.cli_output import Printer, as_dict, closing_line
from attnmux.transformers.cli_prompts import UserPrompt, read_prompts
from attnmux.transformers.decision import RunnerOptions
from attnmux.transformers.engine import PREFILL_TOKENS, Engine
from attnmux.transformers.generate import Generation, Prompt, run_prompts
from attnmux.transformers.load import load_runner
from attnmux.transformers.pools import MemoryBudget
from attnmux.transformers.runner import ModelRunner
from attnmux.transformers.sampling import SamplingParams
from attnmux.transformers.tokenization import encode_prompts


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
            "--device", got=f"{name} ({reason})", expected="a device that torch can use here"
        ) from error
    if platform is not None:
        return platform
    found = tuple(one for one in detection.platforms if one.device_type == kind)
    if not found:
        present = ", ".join(sorted({one.device_type for one in detection.platforms}))
        raise InvalidInput("--device", got=name, expected=f"one of {present}")
    return pick_platform(replace(detection, platforms=found))


AT_LEAST_1 = click.IntRange(min=1)


@click.command()
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--prompts",
    "file",
    metavar="FILE",
    help="Read more prompts from a file, one per line. A line may be a JSON object with the keys "
    "prompt, max_new_tokens, temperature, top_p and seed. - reads stdin.",
)
@click.option("--model", help="A folder or a Hugging Face hub id. Default: the shipped model.")
@click.option("--revision", help="A branch, tag or commit of the model on the hub.")
@click.option(
    "--max-new-tokens",
    type=AT_LEAST_1,
    default=128,
    show_default=True,
    help="Limit for each prompt.",
)
@click.option("--temperature", default=0.0, show_default=True, help="0 decodes greedily.")
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    help="Sample from the likeliest tokens that reach this probability.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the sampling.")
@click.option("--chat", is_flag=True, help="Apply the model's chat template to each prompt.")
@click.option("--backend", help="The backend for prefill and decode.")
@click.option("--prefill-backend", help="The backend for prefill.")
@click.option("--decode-backend", help="The backend for decode.")
@click.option(
    "--page-size", type=AT_LEAST_1, help="Tokens per KV page. Default: chosen with the backend."
)
@click.option("--kv-dtype", help="Dtype of the KV cache. Default: the model's.")
@click.option("--dtype", help="Dtype of the model. Default: the checkpoint's.")
@click.option(
    "--mla",
    type=click.Choice(["absorbed", "expanded"]),
    help="Whether the KV cache of a DeepSeek model holds the latent or the K and V of every head. "
    "Default: absorbed, unless only a last-resort backend serves it.",
)
@click.option(
    "--context", type=AT_LEAST_1, help="Maximum tokens of a request. Default: the model's limit."
)
@click.option(
    "--memory",
    help="Size of the KV cache: 2GB, 512MiB, or 80% of the free memory. Default: enough for the "
    "prompts that run at a time.",
)
@click.option(
    "--max-running",
    type=AT_LEAST_1,
    default=64,
    show_default=True,
    help="Maximum prompts that run at a time.",
)
@click.option(
    "--prefill-tokens",
    type=AT_LEAST_1,
    default=PREFILL_TOKENS,
    show_default=True,
    help="Prompt tokens per step. Longer prompts are split into chunks.",
)
@click.option(
    "--graph/--no-graph",
    default=None,
    help="Replay decode steps from device graphs. Default: if device and backend support them.",
)
@click.option("--device", help="A torch device, such as cpu or cuda:1. Default: the accelerator.")
@click.option(
    "--canary",
    type=click.FloatRange(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Compare that share of the steps with the reference while they run; 0.01 is cheap, 1 "
    "checks every step. Stops at the first finding. Needs attnmux-testing.",
)
@click.option(
    "--keep-failures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep a step that fails in attention, for `attnmux replay`. Needs attnmux-testing.",
)
@click.option(
    "--keep-values", is_flag=True, help="Let --keep-failures keep Q, K and V too, not shapes alone."
)
@click.option("--no-stream", is_flag=True, help="Print each text once it is complete.")
@common_options
@pass_run
def generate(
    run: Run,
    /,
    as_json: bool,
    prompts: tuple[str, ...],
    file: str | None,
    model: str | None,
    revision: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    chat: bool,
    page_size: int | None,
    kv_dtype: str | None,
    dtype: str | None,
    mla: Literal["absorbed", "expanded"] | None,
    context: int | None,
    memory: str | None,
    max_running: int,
    prefill_tokens: int,
    graph: bool | None,
    device: str | None,
    canary: float,
    keep_failures: Path | None,
    keep_values: bool,
    no_stream: bool,
    **backends: str | None,
) -> None:
    """Continue each PROMPT with the shipped model or with any Hugging Face decoder model.

    PROMPT "-" reads stdin. Without a prompt, the shipped model answers a random question.
    Text goes to stdout; the chosen backend, progress and speed go to stderr.
    """
    sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    budget = None if memory is None else MemoryBudget.parse(memory)
    settings = run.settings()
    asked = read_prompts(prompts, file, model=model, seed=seed)
    with _quiet(run.debug):
        began = time.perf_counter()
        source = recall.PATH if model is None else model
        checkpoint = open_checkpoint(source, revision=revision, progress=sys.stderr.isatty())
        _refuse_encoders(checkpoint)
        context = context_of(checkpoint, context)
        wanted = _encode(checkpoint, asked, max_new_tokens, sampling, context, chat)
        plugins = run.plugins(settings)
        options = RunnerOptions(
            max_batch_size=min(len(wanted), max_running),
            max_context_len=context,
            max_total_tokens=_most_tokens(wanted, context, max_running) if budget is None else None,
            memory=budget,
            graph=graph,
            dtype=dtype,
            kv_dtype=kv_dtype,
            mla=mla,
            page_size=page_size,
            device=device,
            policy=settings.policy(**backends),
            measurements=run.measurements(settings),
            launches=run.launches(settings),
            debug=run.debug,
            wrap=_wrapper(run, canary, keep_failures, keep_values),
        )
        platform = platform_for(run.detect(plugins), settings, device)
        runner = _load(run, checkpoint, platform, plugins, options)
        load_seconds = time.perf_counter() - began
        click.echo(runner.decision.summary(), err=True)
        engine = Engine(
            runner,
            tokenizer=checkpoint.require_tokenizer(),
            stop_ids=checkpoint.stop_ids(runner.model),
            prefill_tokens=prefill_tokens,
        )
        generation = _generate(engine, wanted, silent=as_json, stream=not no_stream)
    if as_json:
        texts = [one.prompt for one in asked]
        answer = as_dict(generation, texts, runner, load_seconds)
        echo_json({"model": checkpoint.source, **answer, "warnings": run.warnings})
    click.echo(closing_line(generation, runner), err=True)


def _wrapper(
    run: Run, canary: float, folder: Path | None, keep_values: bool
) -> Callable[[AttentionBackend, Decision], AttentionBackend] | None:
    if not canary and folder is None:
        return None
    try:
        # By name: only those who ask need the distribution
        make_canary = pkgutil.resolve_name("attnmux.testing.canary:CanaryBackend")
        make_keeper = pkgutil.resolve_name("attnmux.testing.failures:FailureKeeper")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("attnmux.testing"):
            raise
        got = "no attnmux-testing"
        expected = "pip install attnmux-testing"
        raise InvalidInput("--canary, --keep-failures", got=got, expected=expected) from error

    def wrap(backend: AttentionBackend, decision: Decision) -> AttentionBackend:
        if canary:
            backend = make_canary(backend, share=canary)
        if folder is not None:
            backend = make_keeper(
                backend, folder, decision=decision, tensors=keep_values, on_kept=run.warn
            )
        return backend

    return wrap


def _encode(
    checkpoint: Checkpoint,
    asked: Sequence[UserPrompt],
    max_new_tokens: int,
    sampling: SamplingParams,
    context: int,
    chat: bool,
) -> list[Prompt]:
    texts = [one.prompt for one in asked]
    encoded = encode_prompts(checkpoint, texts, max_context_len=context, chat=chat)
    return [
        one.with_ids(ids, max_new_tokens, params)
        for one, ids, params in zip(asked, encoded, sampling.for_each(len(asked)), strict=True)
    ]


def _most_tokens(wanted: Sequence[Prompt], context: int, max_running: int) -> int:
    """Tokens of the longest prompts that may run at a time, with their answers."""
    lens = sorted(min(len(one.token_ids) + one.max_new_tokens, context) for one in wanted)
    return sum(lens[-max_running:])


def _refuse_encoders(checkpoint: Checkpoint) -> None:
    if checkpoint.config.is_encoder_decoder:
        raise InvalidInput(
            "model",
            got=f"{checkpoint.source}, an encoder-decoder model",
            expected="a decoder-only model; an encoder-decoder model runs from Python, with "
            "Engine.add(encoder_states=…)",
        )


def context_of(checkpoint: Checkpoint, wanted: int | None) -> int:
    """Tokens of the longest request. Raises InvalidInput for more than the model's positions."""
    limit = checkpoint.max_context_len
    if wanted is None and limit is None:
        raise InvalidInput(
            "--context", got="nothing", expected="a number, since the model states no limit"
        )
    if wanted is None or limit is None:
        return wanted or limit or 0
    if wanted > limit:
        raise InvalidInput("--context", got=wanted, expected=f"at most the model's limit, {limit}")
    return wanted


def _load(
    run: Run, checkpoint: Checkpoint, platform: Platform, plugins: Plugins, options: RunnerOptions
) -> ModelRunner:
    offers = plugins.offers()
    progress = sys.stderr.isatty()
    try:
        return load_runner(checkpoint, platform, offers, options, progress=progress, warn=run.warn)
    except PoolExhausted as error:
        if options.memory is not None:
            raise
        raise PoolExhausted(
            error.what,
            wanted=error.wanted,
            available=error.available,
            hint="lower --max-running, --max-new-tokens or --context, use a smaller --kv-dtype, or "
            "set --memory, so that prompts wait for room",
        ) from error


def _generate(
    engine: Engine, wanted: Sequence[Prompt], *, silent: bool, stream: bool
) -> Generation:
    if silent:
        return run_prompts(engine, wanted)
    with Printer(len(wanted), stream=stream) as printer:
        return run_prompts(engine, wanted, on_text=printer)


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Only errors from the libraries below, unless debugging."""
    with warnings.catch_warnings(), quiet_transformers(progress=sys.stderr.isatty()):
        if not debug:
            warnings.simplefilter("ignore")
        yield
