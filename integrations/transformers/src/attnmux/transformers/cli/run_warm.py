"""Runs `attnmux warm`: decides by the config, builds over a small pool and takes small steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from attnmux.core import (
    BackendFailed,
    Decision,
    InvalidInput,
    Settings,
    make_first,
)
from attnmux.core.verbs import Run, read_assignments
from attnmux.transformers import recall
from attnmux.transformers.cli.drafts import Drafting
from attnmux.transformers.cli.encoding import context_of
from attnmux.transformers.cli.options import BACKENDS
from attnmux.transformers.cli.run import first_use, platform_for
from attnmux.transformers.load.ahead import take_steps
from attnmux.transformers.load.checkpoint import Checkpoint, open_checkpoint
from attnmux.transformers.load.decision import decide_first, stated_ways, without
from attnmux.transformers.load.model_request import stated_request
from attnmux.transformers.options import RunnerOptions


def run_warm(run: Run, settings: Settings, given: Mapping[str, Any], *, as_json: bool) -> None:
    """given: the options of the command, by name."""
    began = time.perf_counter()
    source = recall.PATH if given["model"] is None else given["model"]
    checkpoint = open_checkpoint(source, revision=given["revision"])
    plugins = run.plugins(settings)
    offers = plugins.offers()
    platform = platform_for(run, plugins, settings, given["device"])
    options = _options(run, settings, given, checkpoint)
    stated = stated_request(checkpoint, options, dtype=checkpoint.dtype(options.dtype))
    if stated is None or stated.linear_layers or checkpoint.config.is_encoder_decoder:
        got = f"{checkpoint.source}, whose attention its config.json does not tell"
        expected = "a decoder of softmax attention: of others, generate's first run compiles all"
        raise InvalidInput("--model", got=got, expected=expected)
    ways = stated_ways(stated, options)
    check = first_use(
        run,
        offers,
        options.measurements,
        device=given["device"] or platform.device_type,
        cache=settings.cache_folder(),
        launches=options.launches,
    )

    def decide(failed: Mapping[str, BackendFailed]) -> Decision:
        decision = decide_first(ways, platform, offers, without(failed, options))
        decision.begin_ahead(offers)
        return decision

    def make(decision: Decision) -> Decision:
        check(decision)
        take_steps(decision, options)
        return decision

    decision = make_first(
        decide, make, lambda failure, instead: run.warn(f"{failure}; instead {instead.summary()}")
    )
    seconds = time.perf_counter() - began
    if as_json:
        answer = {"model": checkpoint.source, "decision": decision.to_dict(), "seconds": seconds}
        run.echo_json({**answer, "warnings": run.warnings})
        return
    click.echo(f"{decision.summary()}: its kernels are ready after {seconds:.1f} s")


def _options(
    run: Run, settings: Settings, given: Mapping[str, Any], checkpoint: Checkpoint
) -> RunnerOptions:
    """The options of `generate`, for as many prompts as may run at a time."""
    deterministic = given["deterministic"] or settings.deterministic
    same = ("dtype", "kv_dtype", "kv_dtype_skip", "page_size", "device", "graph")
    mode = given["speculative_attention_mode"]
    of_drafts = {name: given[name] for name in ("draft", "draft_tokens", "topk", "steps")}
    drafting = Drafting(**of_drafts, attention_mode=mode)
    return RunnerOptions(
        max_batch_size=given["max_running"],
        max_context_len=context_of(checkpoint, given["context"]),
        deterministic=deterministic,
        mla="expanded" if deterministic else given["mla"],
        draft_tokens=drafting.draft_token_num,
        draft_topk=drafting.topk,
        speculative_attention_mode=mode,
        policy=settings.policy(
            **{name: given.get(name) for name in BACKENDS},
            options=read_assignments("--set", given["assignments"]),
        ),
        measurements=run.measurements(settings),
        launches=run.launches(settings),
        **{name: given[name] for name in same},
    )
