"""`attnmux generate`: text from a model, served by the backend that was chosen."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import click

from attnmux.core.choosing.find.plugins import Plugins
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.errors import InvalidInput, PoolExhausted
from attnmux.transformers import recall
from attnmux.transformers.asking import Asked, read_asked
from attnmux.transformers.checkpoint import Checkpoint, open_checkpoint, quiet_transformers
from attnmux.transformers.engine import PREFILL_TOKENS, Engine
from attnmux.transformers.generate import Generation, Prompt, run_prompts
from attnmux.transformers.load import load_runner
from attnmux.transformers.memory import MemoryBudget
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.placing import platform_for
from attnmux.transformers.printing import Printer
from attnmux.transformers.prompts import encode_prompts
from attnmux.transformers.reporting import as_dict, closing_line
from attnmux.transformers.runner import ModelRunner
from attnmux.transformers.sampling import SamplingParams

AT_LEAST_1 = click.IntRange(min=1)


@click.command()
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--prompts",
    "file",
    metavar="FILE",
    help="More prompts, one a line, or one JSON object a line with the keys prompt, "
    "max_new_tokens, temperature, top_p, seed; - is stdin.",
)
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
    "--mla",
    type=click.Choice(["absorbed", "expanded"]),
    help="What the KV cache of a DeepSeek model holds, the latent or every head's K and V; "
    "default: absorbed where a backend serves it as more than a last resort.",
)
@click.option(
    "--context", type=AT_LEAST_1, help="Most tokens of a request; default: the model's limit."
)
@click.option(
    "--memory",
    help="Of the KV cache, such as 2GB, 512MiB or 80% of what is free; default: what the prompts "
    "that run at a time can need.",
)
@click.option(
    "--max-running", type=AT_LEAST_1, default=64, show_default=True, help="Prompts at a time."
)
@click.option(
    "--prefill-tokens",
    type=AT_LEAST_1,
    default=PREFILL_TOKENS,
    show_default=True,
    help="Prompt tokens of one step; longer prompts come in chunks.",
)
@click.option(
    "--graph/--no-graph",
    default=None,
    help="Replay decode steps from device graphs; default: where device and backend can.",
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
    file: str | None,
    model: str | None,
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
    no_stream: bool,
    **backends: str | None,
) -> None:
    """Continue each PROMPT with the shipped model or with any Hugging Face decoder model.

    PROMPT "-" reads one from stdin. Without any, the shipped model is asked a made-up question.
    Text goes to stdout; the chosen backend, progress and speed go to stderr.
    """
    sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    budget = None if memory is None else MemoryBudget.parse(memory)
    settings = run.settings()
    asked = read_asked(prompts, file, model=model, seed=seed)
    with _quiet(run.debug):
        began = time.perf_counter()
        source = recall.PATH if model is None else model
        checkpoint = open_checkpoint(source, progress=sys.stderr.isatty())
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


def _encode(
    checkpoint: Checkpoint,
    asked: Sequence[Asked],
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
            came=f"{checkpoint.source}, an encoder-decoder model",
            expected="a model that continues its prompt; others run from Python: Engine.add with "
            "encoder_states",
        )


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
            hint="lower --max-running, --max-new-tokens or --context, set --memory (what does not "
            "fit waits), or take a smaller --kv-dtype",
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
