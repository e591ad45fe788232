"""Runs `attnmux generate`: loads the model and prints what it generates."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import click
import torch

from attnmux.core import (
    AcceptThresholds,
    Detection,
    InvalidInput,
    Platform,
    Plugins,
    PoolExhausted,
    Settings,
    pick_platform,
)
from attnmux.core.cli.run import Run, echo_json
from attnmux.core.lock import Lock
from attnmux.transformers import recall
from attnmux.transformers.checkpoint import Checkpoint, open_checkpoint, quiet_transformers
from attnmux.transformers.cli_drafts import Drafting
from attnmux.transformers.cli_encoding import (
    context_of,
    encode,
    most_tokens,
    read_images,
    refuse_encoders,
)
from attnmux.transformers.cli_output import Printer, as_dict, closing_line
from attnmux.transformers.cli_prompts import UserPrompt
from attnmux.transformers.cli_ranks import Parallel, only_first
from attnmux.transformers.cli_watching import first_use, wrapper
from attnmux.transformers.eagle_head import EagleHead
from attnmux.transformers.engine import Engine
from attnmux.transformers.generate import Generation, Prompt, run_prompts
from attnmux.transformers.load import load_head_runner, load_runner
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.pools import MemoryBudget
from attnmux.transformers.runner import ModelRunner
from attnmux.transformers.sampling_params import SamplingParams


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


def run_command(
    run: Run,
    settings: Settings,
    asked: Sequence[UserPrompt],
    sampling: SamplingParams,
    *,
    model: str | None,
    as_json: bool,
    revision: str | None,
    max_new_tokens: int,
    chat: bool,
    page_size: int | None,
    kv_dtype: str | None,
    dtype: str | None,
    mla: Literal["absorbed", "expanded"] | None,
    context: int | None,
    memory: str | None,
    kept_states: int | None,
    max_running: int,
    prefill_tokens: int,
    draft: str | None,
    draft_tokens: int | None,
    topk: int,
    steps: int | None,
    speculative_attention_mode: Literal["prefill", "decode"] | None,
    draft_backend: str | None,
    accept_threshold_single: float,
    accept_threshold_acc: float,
    sparse: str | None,
    sparse_budget: int | None,
    graph: bool | None,
    compile: bool,
    tp: int | None,
    dcp: bool,
    pcp: int | None,
    pcp_min_tokens: int | None,
    dp_attention: bool,
    device: str | None,
    canary: float,
    keep_failures: Path | None,
    keep_values: bool,
    no_stream: bool,
    **backends: str | None,
) -> None:
    """Generate for the prompts. The other arguments are the options of `cli.generate`."""
    budget = None if memory is None else MemoryBudget.parse(memory)
    accept = AcceptThresholds(single=accept_threshold_single, acc=accept_threshold_acc)
    if not accept.exact and draft is None:
        raise InvalidInput("--accept-threshold-*", got="one below 1", expected="--draft with it")
    drafting = Drafting(
        draft=draft,
        draft_tokens=draft_tokens,
        topk=topk,
        steps=steps,
        attention_mode=speculative_attention_mode,
        backend=draft_backend,
    )
    parallel = Parallel(
        tp=tp, dcp=dcp, pcp=pcp, pcp_min_tokens=pcp_min_tokens, dp_attention=dp_attention
    )
    parallel.check(drafting, watched=canary > 0 or keep_failures is not None)
    if sparse is not None:
        _check_sparse(parallel, canary)
    parallel.start(run)
    with ExitStack() as stack:
        stack.enter_context(_quiet(run.debug))
        began = time.perf_counter()
        source = recall.PATH if model is None else model
        if settings.locked is not None:
            lock = Lock.read(settings.locked_file())
            revision = lock.model_revision(str(source), revision)
        checkpoint = open_checkpoint(source, revision=revision, progress=sys.stderr.isatty())
        refuse_encoders(checkpoint)
        context = context_of(checkpoint, context)
        pictured = read_images(checkpoint, asked, chat)
        wanted = encode(checkpoint, asked, pictured, max_new_tokens, sampling, context, chat)
        plugins = run.plugins(settings)
        platform = platform_for(run.detect(plugins), settings, device)
        ranks = parallel.ranks(platform.device_type, checkpoint.config)
        stack.enter_context(only_first(ranks))
        measurements, launches = run.measurements(settings), run.launches(settings)
        parts = ranks.deal(wanted)
        most = max(most_tokens(part, context, max_running) for part in parts)
        options = RunnerOptions(
            max_batch_size=min(len(parts[0]), max_running),
            max_context_len=context,
            max_total_tokens=most if budget is None else None,
            memory=budget,
            kept_states=kept_states,
            images=bool(pictured),
            draft_tokens=drafting.draft_token_num,
            draft_topk=topk,
            speculative_attention_mode=speculative_attention_mode,
            hidden_states=drafting.head is not None,
            hidden_layers=drafting.hidden_layers(checkpoint),
            sparse=sparse,
            sparse_budget=sparse_budget,
            graph=graph,
            compile=compile,
            dtype=dtype,
            kv_dtype=kv_dtype,
            mla=mla,
            page_size=page_size,
            device=device,
            ranks=ranks,
            policy=settings.policy(**backends),
            measurements=measurements,
            launches=launches,
            debug=run.debug,
            check=first_use(
                run,
                plugins.offers(),
                measurements,
                device=device or platform.device_type,
                cache=settings.cache_folder(),
                launches=launches,
            ),
            wrap=wrapper(run, canary, keep_failures, keep_values),
        )
        load = partial(_load, run, platform, plugins)
        runner = load(checkpoint, options)
        drafter = drafting.drafter(checkpoint, runner, options, load, max_total_tokens=most)
        drafts = drafting.proposer(checkpoint, runner, drafter, options, warn=run.warn)
        wanted = [
            replace(one, images=runner.read_images(pictured[index])) if index in pictured else one
            for index, one in enumerate(wanted)
        ]
        load_seconds = time.perf_counter() - began
        click.echo(ranks.summary(runner.decision), err=True)
        if drafter is not None:
            click.echo(f"drafts: {drafter.decision.summary()}", err=True)
        engine = Engine(
            runner,
            tokenizer=checkpoint.require_tokenizer(),
            stop_ids=checkpoint.stop_ids(runner.model),
            prefill_tokens=prefill_tokens,
            drafts=drafts,
            accept=accept,
        )
        generation = _generate(engine, wanted, silent=as_json, stream=not no_stream)
        if as_json and ranks.rank == 0:
            texts = [one.prompt for one in asked]
            answer = as_dict(generation, texts, runner, load_seconds, drafter=drafter)
            echo_json({"model": checkpoint.source, **answer, "warnings": run.warnings})
        click.echo(closing_line(generation, runner, drafter=drafter), err=True)


def _check_sparse(parallel: Parallel, canary: float) -> None:
    """Raise InvalidInput for options that decoding over chosen pages excludes."""
    found = {
        "--dcp": parallel.dcp,
        "--pcp": parallel.pcp is not None,
        "--canary": canary > 0,
    }
    got = " and ".join(option for option, is_set in found.items() if is_set)
    if got:
        expected = "none of these: one device has all keys of a head, and answers are approximate"
        raise InvalidInput("--sparse", got=f"{got} too", expected=expected)


def _load(
    run: Run,
    platform: Platform,
    plugins: Plugins,
    model: Checkpoint | EagleHead,
    options: RunnerOptions,
) -> ModelRunner:
    offers = plugins.offers()
    progress = sys.stderr.isatty()
    try:
        if isinstance(model, EagleHead):
            return load_head_runner(model, platform, offers, options, warn=run.warn)
        return load_runner(model, platform, offers, options, progress=progress, warn=run.warn)
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
