"""Runs `attnmux generate`: loads the model and prints what it generates."""

from __future__ import annotations

import pkgutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import click
import torch

from attnmux.core import (
    AttentionBackend,
    Chooser,
    Decision,
    InvalidInput,
    Measurement,
    Offer,
    Platform,
    Plugins,
    PoolExhausted,
    Settings,
)
from attnmux.core.verbs import Run
from attnmux.transformers import recall
from attnmux.transformers.cli.encoding import (
    context_of,
    encode,
    most_tokens,
)
from attnmux.transformers.cli.options import Answering, Options, Watching
from attnmux.transformers.cli.output import Printer, as_dict, closing_line
from attnmux.transformers.cli.prompts import UserPrompt
from attnmux.transformers.cli.ranks import only_first
from attnmux.transformers.engine.engine import Engine
from attnmux.transformers.engine.generate import Generation, Prompt, run_prompts
from attnmux.transformers.load.checkpoint import Checkpoint, open_checkpoint, quiet_transformers
from attnmux.transformers.load.generation_config import ignored_sampling
from attnmux.transformers.load.load_runner import load_head_runner, load_runner
from attnmux.transformers.load.model_request import stated_request
from attnmux.transformers.model.eagle_head import EagleHead
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.requests.sampling_params import SamplingParams
from attnmux.transformers.run.runner import ModelRunner


def platform_for(run: Run, plugins: Plugins, settings: Settings, device: str | None) -> Platform:
    """The platform of a torch device; without one the configured or the only accelerator's.

    Warns of a CPU that is used beside a device that torch can use.
    Raises InvalidInput for a device that is not here, or that this build of torch cannot use, and
    AmbiguousPlatform as `Chooser.here` does.
    """
    where = settings.where("platform")
    platform, wanted = None, settings.platform
    detection = run.detect(plugins)
    unfound = None if detection.accelerators else usable_type()
    if device is None and wanted is None and unfound:
        run.warn(
            f"torch can use a device of type {unfound}, which no plugin found, and the CPU is "
            f"used: say --device {unfound}, or name its platform (VENDOR:ARCH in ATTNMUX_PLATFORM "
            "or as platform in attnmux.toml; cpu keeps the CPU)"
        )
    if device is None:
        try:
            platform = detection.pick(wanted, named=where)
        except InvalidInput:
            device = unfound
            if device is None:
                raise
    name = device or (platform.device_type if platform is not None else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            "--device", got=f"{name} ({reason})", expected="a device that torch can use here"
        ) from error
    if platform is not None:
        return platform
    return Chooser.platform_of(torch.device(name), detection, wanted, named=where)


def usable_type() -> str | None:
    """The type of the accelerator that torch can use here; None without one."""
    seen = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return seen.type if seen is not None and seen.type in Platform.device_types() else None


def run_command(
    run: Run,
    settings: Settings,
    asked: Sequence[UserPrompt],
    sampling: SamplingParams,
    given: Mapping[str, Any],
) -> None:
    """Generate for the prompts. given: the other arguments of `command.generate`, by name."""
    deterministic = given["deterministic"] or settings.deterministic
    options = Options.of({**given, "deterministic": deterministic})
    answering, drafting = options.answering, options.drafting
    if sampling.logprobs is not None and not answering.as_json:
        raise InvalidInput("--logprobs", got="text", expected="--json with it")
    options.parallel.start(run)
    with ExitStack() as stack:
        stack.enter_context(_quiet(run.debug))
        began = time.perf_counter()
        checkpoint = _open(answering)
        context = context_of(checkpoint, answering.context)
        if answering.context is None and context != checkpoint.max_context_len:
            run.warn(
                f"requests have up to {context} tokens: beyond it the model's longrope rotates by "
                "its long factors, which a larger --context takes for every request"
            )
        encoded = encode(checkpoint, asked, answering, sampling, context)
        plugins = run.plugins(settings)
        options.check_used(plugins.offers(), images=bool(encoded.pictured))
        platform = platform_for(run, plugins, settings, options.running["device"])
        ranks = options.parallel.ranks(platform.device_type, checkpoint.config)
        stack.enter_context(only_first(ranks))
        parts = ranks.requests.deal(encoded.prompts)
        room = partial(most_tokens, encoder_len=encoded.encoder_len)
        most = max(room(part, context, answering.max_running) for part in parts)
        running = RunnerOptions(
            max_batch_size=min(len(parts[0]), answering.max_running),
            max_context_len=context,
            max_total_tokens=most if options.memory is None else None,
            max_encoder_len=encoded.encoder_len or None,
            images=bool(encoded.pictured),
            ranks=ranks,
            **_of_drafts(options, checkpoint),
            **_of_machine(run, settings, options, plugins, platform),
            **options.running,
        )
        options.check_linear(partial(_may_have_linear, checkpoint, running))
        load = partial(_load, run, platform, plugins)
        runner = load(checkpoint, running)
        options.check_linear(lambda: bool(runner.decision.parts.get("linear_layers")))
        drafter = drafting.drafter(checkpoint, runner, running, load, max_total_tokens=most)
        drafts = drafting.proposer(checkpoint, runner, drafter, running, warn=run.warn)
        wanted = encoded.read_by(runner)
        load_seconds = time.perf_counter() - began
        if not answering.states_sampling and (ignored := ignored_sampling(runner.model)):
            run.warn(ignored)
        click.echo(ranks.building.summary(runner.decision), err=True)
        if drafter is not None:
            click.echo(f"drafts: {drafter.decision.summary()}", err=True)
        engine = Engine(
            runner,
            tokenizer=checkpoint.require_tokenizer(),
            stop_ids=checkpoint.stop_ids(runner.model),
            prefill_tokens=answering.prefill_tokens,
            drafts=drafts,
            accept=options.accept,
            draft_always=drafting.always,
        )
        as_json = answering.as_json
        generation = _generate(engine, wanted, silent=as_json, stream=not answering.no_stream)
        if as_json and ranks.rank == 0:
            texts = [prompt.audio or prompt.prompt for prompt in asked]
            answer = as_dict(generation, texts, runner, load_seconds, drafter=drafter)
            run.echo_json({"model": checkpoint.source, **answer, "warnings": run.warnings})
        click.echo(closing_line(generation, runner, drafter=drafter), err=True)


def _open(answering: Answering) -> Checkpoint:
    """The model that is asked."""
    source = recall.PATH if answering.model is None else answering.model
    return open_checkpoint(source, revision=answering.revision, progress=sys.stderr.isatty())


def _may_have_linear(checkpoint: Checkpoint, options: RunnerOptions) -> bool:
    """Whether the model's config says so, or says nothing of layers."""
    stated = stated_request(checkpoint, options, dtype=checkpoint.dtype(options.dtype))
    return stated is None or bool(stated.linear_layers)


def _of_drafts(options: Options, checkpoint: Checkpoint) -> dict[str, Any]:
    """Fields of `RunnerOptions` that drafts ask for."""
    drafting = options.drafting
    return {
        "draft_tokens": drafting.draft_token_num,
        "draft_topk": drafting.topk,
        "hidden_states": drafting.head is not None,
        "hidden_layers": drafting.hidden_layers(checkpoint),
    }


def _of_machine(
    run: Run, settings: Settings, options: Options, plugins: Plugins, platform: Platform
) -> dict[str, Any]:
    """Fields of `RunnerOptions` that come from the machine, its settings and measurements."""
    measurements, launches = run.measurements(settings), run.launches(settings)
    return {
        "memory": options.memory,
        "policy": settings.policy(**options.backends),
        "measurements": measurements,
        "launches": launches,
        "debug": run.debug,
        "check": first_use(
            run,
            plugins.offers(),
            measurements,
            device=options.running["device"] or platform.device_type,
            cache=settings.cache_folder(),
            launches=launches,
        ),
        "wrap": wrapper(run, options.watching),
    }


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


def first_use(
    run: Run, offers: Sequence[Offer], measurements: Sequence[Measurement], **place: object
) -> Callable[[Decision], None]:
    """Runs cases on a backend that did not pass here; only warns without attnmux-testing."""
    make = _from_testing("FirstUse")
    if make is None:

        def warn(decision: Decision) -> None:
            run.warn_of_unverified(decision, offers, measurements)

        return warn
    check: Callable[[Decision], None] = make(offers, say=run.warn, **place)
    return check


def _from_testing(name: str) -> Callable[..., Any] | None:
    """A public name of attnmux-testing, which only some need; None without that package."""
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(f"attnmux.testing:{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("attnmux.testing"):
            raise
        return None
    return function


def wrapper(
    run: Run, watching: Watching
) -> Callable[[AttentionBackend, Decision], AttentionBackend] | None:
    """Wraps a backend to check a share of the steps and to store those that fail; None without
    either."""
    if not watching.is_set:
        return None
    make_canary, make_keeper = _from_testing("CanaryBackend"), _from_testing("FailureKeeper")
    if make_canary is None or make_keeper is None:
        got = "no attnmux-testing"
        expected = "pip install attnmux-testing"
        raise InvalidInput("--canary, --keep-failures", got=got, expected=expected)

    def wrap(backend: AttentionBackend, decision: Decision) -> AttentionBackend:
        if watching.canary:
            backend = make_canary(backend, share=watching.canary)
        if watching.keep_failures is not None:
            backend = make_keeper(
                backend,
                watching.keep_failures,
                decision=decision,
                tensors=watching.keep_values,
                on_kept=run.warn,
            )
        return backend

    return wrap
