"""The output of `attnmux generate`: texts, the JSON answer and the closing line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import click

from attnmux.transformers.engine.generate import Generation
from attnmux.transformers.load.tokenization import TextOrIds
from attnmux.transformers.requests.shapes import STORED, by_shape
from attnmux.transformers.run.runner import ModelRunner


class Printer:
    """Prints the pieces of the first unfinished text as they come, and keeps the others' back.

    Called as `OnText`. With several texts each has a heading. Leaving the context ends a line
    that was begun.
    """

    def __init__(self, num_texts: int, *, stream: bool) -> None:
        self._waiting: list[list[str]] = [[] for _ in range(num_texts)]
        self._finished = [False] * num_texts
        self._stream = stream
        self._current = 0
        self._open = False
        """Whether something of the current text may be on its line."""

    def __enter__(self) -> Printer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._open:
            click.echo()

    def __call__(self, index: int, piece: str, finished: bool) -> None:
        self._waiting[index].append(piece)
        self._finished[index] = finished
        while self._current < len(self._waiting):
            done = self._finished[self._current]
            if self._stream or done:
                self._print("".join(self._waiting[self._current]))
                self._waiting[self._current] = []
            if not done:
                return
            click.echo()
            self._open = False
            self._current += 1

    def _print(self, text: str) -> None:
        if not self._open and len(self._waiting) > 1:
            click.echo(f"==> prompt {self._current + 1} <==")
        # Before the text: an interrupt in between must not leave a line open.
        self._open = True
        click.echo(text, nl=False)


def as_dict(
    generation: Generation,
    prompts: Sequence[TextOrIds],
    runner: ModelRunner,
    load_seconds: float,
    *,
    drafter: ModelRunner | None = None,
) -> dict[str, Any]:
    """Results, timings, reused tokens, and the backends. drafter: the runner of a draft model."""
    timings, stats = generation.timings, generation.stats
    return {
        "results": [
            {
                "prompt": prompt,
                "text": result.text,
                "token_ids": list(result.token_ids),
                "finish_reason": result.finish_reason,
                "reused_tokens": result.reused_tokens,
                "logprobs": [logprob._asdict() for logprob in result.logprobs],
            }
            for prompt, result in zip(prompts, generation.results, strict=True)
        ],
        "timings": {
            "load_seconds": load_seconds,
            **asdict(timings),
            "prefill_tokens_per_second": timings.prefill_tokens_per_second,
            "decode_tokens_per_second": timings.decode_tokens_per_second,
        },
        "prefix_cache": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "evicted_tokens": stats.evicted_tokens,
        },
        "drafts": {
            **asdict(stats.drafts),
            "accepted_per_step": stats.drafts.accepted_per_step,
            "decision": None if drafter is None else _decided(drafter),
        },
        "retractions": stats.retractions,
        "ranks": runner.ranks.size,
        "kv_pool_tokens": runner.kv_tokens,
        "kv_window_tokens": runner.sizes.swa,
        "kv_one_pool_tokens": runner.sizes.one_pool,
        "compiled": runner.is_compiled,
        "graph_batch_sizes": [] if runner.graphs is None else list(runner.graphs.batch_sizes),
        "piece_bytes": {} if runner.pieces is None else dict(runner.pieces.runner.memory_bytes),
        "decision": _decided(runner),
    }


def _decided(runner: ModelRunner) -> dict[str, Any]:
    decision = runner.decision
    return {
        "hash": decision.hash,
        "page_size": decision.page_size,
        "kv_dtype": decision.kv_dtype,
        "phases": {
            phase: {"backend": choice.backend, "plugin": choice.plugin}
            for phase, choice in runner.ranks.building.served(decision).items()
        },
        "decode_sizes": [
            {
                "least": decode_size.least,
                "most": decode_size.most,
                "backend": decode_size.choice.backend,
                "plugin": decode_size.choice.plugin,
            }
            for decode_size in decision.decode_sizes
        ],
        "others": [
            {
                **group.to_dict(),
                "kv_dtype": other.kv_dtype,
                "phases": {
                    phase: {"backend": choice.backend, "plugin": choice.plugin}
                    for phase, choice in other.phases.items()
                },
            }
            for group, other in zip(decision.request.other_layers, decision.others, strict=True)
        ],
    }


def _served(runner: ModelRunner) -> dict[str, str]:
    """The backends by phase."""
    return {
        phase: f"{choice.backend} ({choice.plugin})"
        for phase, choice in runner.ranks.building.served(runner.decision).items()
    }


def _drafted(drafter: ModelRunner) -> str:
    """The backends that a draft model's steps run on: those that decode, and those that read."""
    served = _served(drafter)
    return " and ".join(dict.fromkeys([served["decode"], served["verify"]]))


def closing_line(
    generation: Generation, runner: ModelRunner, *, drafter: ModelRunner | None = None
) -> str:
    """Speed and backends of both phases, reused prompt tokens, accepted drafts and their proposer,
    requests that waited for memory. drafter: as in `as_dict`."""
    timings, stats = generation.timings, generation.stats
    served = _served(runner)
    for size in runner.decision.decode_sizes:
        served["decode"] += f", of {size} requests {size.choice.backend} ({size.choice.plugin})"
    for group, other in zip(
        runner.decision.request.other_layers, runner.decision.others, strict=True
    ):
        for phase in served:
            choice = other.phases[phase]
            served[phase] += f", of {group} {choice.backend} ({choice.plugin})"
    ways = [*["compiled"] * runner.is_compiled, *["in graphs"] * (runner.graphs is not None)]
    parts = [
        f"prefill: {timings.prefill_tokens} tokens, "
        f"{timings.prefill_tokens_per_second:.1f} tokens/s, {served['extend']}"
        + (", in pieces" if runner.pieces is not None else ""),
        f"decode: {timings.decode_tokens} tokens, "
        f"{timings.decode_tokens_per_second:.1f} tokens/s, {', '.join([served['decode'], *ways])}",
        f"prefixes: {stats.reused_tokens} of {stats.prompt_tokens} prompt tokens reused",
    ]
    if runner.ranks.size > 1:
        nbytes = runner.context.token_to_kv_pool.nbytes
        parts.append(
            f"{runner.ranks.size} ranks: KV memory for {runner.kv_tokens} tokens, {nbytes:,} bytes "
            "on each"
        )
    elif runner.decision.others:
        count = len(by_shape(runner.context.layers, *STORED))
        pool = runner.context.token_to_kv_pool
        differing = "shapes" if len(pool.dtypes) == 1 else "shapes or KV dtypes"
        parts.append(
            f"KV memory for {runner.kv_tokens} tokens, {pool.nbytes:,} bytes in pools of {count} "
            f"{differing}"
        )
    if runner.sizes.swa is not None:
        parts.append(
            f"KV memory: {runner.sizes.full} tokens, {runner.sizes.gain:.2f} times as many as "
            "without a window pool"
        )
    if stats.drafts.rested:
        parts.append(f"drafts would not have paid for {stats.drafts.rested} tokens")
    if stats.drafts.requests:
        parts.append(
            f"drafts: {stats.drafts.accepted_tokens} of {stats.drafts.draft_tokens} accepted, "
            f"{stats.drafts.accepted_per_step:.2f} a step of a prompt, verified by "
            f"{served['verify']}" + ("" if drafter is None else f", drafted by {_drafted(drafter)}")
        )
    if stats.retractions:
        times = "once" if stats.retractions == 1 else f"{stats.retractions} times"
        parts.append(f"memory ran out {times}: requests waited and ran again")
    return "; ".join(parts)
