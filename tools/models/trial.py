"""One architecture as a small random model: attnmux's engine against transformers' eager attention.

The model's own forward over each whole text says what text and logits are: eager attention, one
text at a time, without a cache. The engine runs all prompts at once, with shared prefixes and
prompts in chunks, at several page sizes.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnmux.core import AttnmuxError, Offer, Platform
from attnmux.transformers import (
    Engine,
    ModelRunner,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
)
from attnmux.transformers.checkpoint import quiet_transformers
from tools.models.architectures import architecture_of
from tools.models.outcome import Outcome, Status
from tools.models.reference import (
    NEW_TOKENS,
    Wanted,
    build,
    dims_of,
)

PAGE_SIZES = (1, 16)
CHUNK = 7
"""Prompt tokens of a step, so that most prompts run in chunks."""
TOLERANCE = 1e-3
"""The largest difference of logits, as a share of their spread: float32's rounding stays far below,
and one key more or less far above."""


class WrongAnswer(Exception):
    """attnmux and transformers disagree."""


def try_architecture(
    name: str,
    seed: int,
    platform: Platform,
    offers: Sequence[Offer],
    *,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> Outcome:
    """Build, serve and compare an architecture."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers(progress=False):
        try:
            config, wanted = build(architecture_of(name), seed, Path(folder))
        except Exception as error:  # transformers' models raise anything
            return Outcome(config=name, status="not built", reason=in_one_line(error))
        dims = dims_of(config)
        backend, worst = "", 0.0
        try:
            for page_size in page_sizes:
                runner = make_runner(Path(folder), page_size, platform, offers)
                backend = ", ".join(sorted({one.backend for one in _chosen(runner)}))
                worst = max(worst, compare_logits(runner, wanted))
                compare_text(runner, wanted)
        except WrongAnswer as error:
            status: Status = "wrong"
            reason = f"{error} (page size {page_size})"
        except AttnmuxError as error:
            status, reason = "refused", in_one_line(error)
        except Exception as error:  # whatever is not typed is a fault of attnmux
            status, reason = "failed", in_one_line(error)
        else:
            return Outcome(config=name, status="served", backend=backend, worst=worst, dims=dims)
    return Outcome(config=name, status=status, reason=reason, backend=backend, dims=dims)


def make_runner(
    folder: Path, page_size: int, platform: Platform, offers: Sequence[Offer]
) -> ModelRunner:
    options = RunnerOptions(
        max_batch_size=4,
        max_context_len=64,
        max_total_tokens=1024,
        window_step_tokens=16,
        page_size=page_size,
    )
    return load_runner(open_checkpoint(folder), platform, offers, options, warn=_ignore)


def _ignore(text: str) -> None: ...


def compare_logits(runner: ModelRunner, wanted: Sequence[Wanted]) -> float:
    """Run prompts in two steps, then decode the model's own tokens. Returns the worst difference.

    Raises WrongAnswer for one beyond the tolerance.
    """
    worst = 0.0
    for one, two in zip(wanted[::2], wanted[1::2], strict=True):
        both = (one, two)
        states = [
            SequenceState(token_ids=list(each.prompt), encoder_states=encoded)
            for each, encoded in zip(both, _encoded(runner, both), strict=True)
        ]
        first = [max(1, len(each.prompt) // 2) for each in both]
        if min(len(each.prompt) for each in both) > 1:
            runner.extend(states, first)
            logits = runner.extend(states)
        else:
            logits = runner.extend(states)
        for step in range(NEW_TOKENS):
            for each, ours in zip(both, logits.cpu(), strict=True):
                worst = max(worst, _difference(each, step, ours))
            if step + 1 < NEW_TOKENS:
                for each, state in zip(both, states, strict=True):
                    state.token_ids.append(each.tokens[step])
                logits = runner.decode(states)
        runner.release(states)
    return worst


def _encoded(runner: ModelRunner, wanted: Sequence[Wanted]) -> Sequence[torch.Tensor | None]:
    """The encoder's states of each request, from as few calls as there can be."""
    given = [each.encoder for each in wanted if each.encoder is not None]
    return runner.encode_all(given) if given else [None] * len(wanted)


def _difference(wanted: Wanted, step: int, ours: torch.Tensor) -> float:
    theirs = wanted.logits[step].float()
    found = float((ours.float() - theirs).abs().max() / theirs.std())
    if not found <= TOLERANCE:
        raise WrongAnswer(
            f"logits of token {step + 1} after {len(wanted.prompt)} differ by {found:.2g}"
        )
    return found


def compare_text(runner: ModelRunner, wanted: Sequence[Wanted]) -> None:
    """Run all prompts in the engine. Raises WrongAnswer for another text.

    A text may leave the wanted one where two tokens are as likely as each other.
    """
    engine = Engine(runner, prefill_tokens=CHUNK)
    order = [
        engine.add(each.prompt, max_new_tokens=NEW_TOKENS, encoder_states=encoded)
        for each, encoded in zip(wanted, _encoded(runner, wanted), strict=True)
    ]
    texts = {}
    while engine.has_work:
        for output in engine.step():
            if output.result is not None:
                texts[output.request_id] = output.result.token_ids
    for each, request_id in zip(wanted, order, strict=True):
        _compare_tokens(each, texts[request_id])


def _compare_tokens(wanted: Wanted, ours: Sequence[int]) -> None:
    for logits, mine, theirs in zip(wanted.logits.float(), ours, wanted.tokens, strict=True):
        if mine != theirs:
            if float((logits[theirs] - logits[mine]) / logits.std()) > TOLERANCE:
                raise WrongAnswer(f"text {list(ours)} instead of {wanted.tokens}")
            return


def _chosen(runner: ModelRunner) -> Iterator[Any]:
    return (choice for _, choice in runner.decision.choices)


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def try_alone(name: str, seed: int, platform: Platform, offers: Sequence[Offer]) -> Outcome:
    """The same in a process of its own, on one thread, as small tensors want it."""
    torch.set_num_threads(1)
    start = time.monotonic()
    outcome = try_architecture(name, seed, platform, offers)
    return replace(outcome, seconds=time.monotonic() - start)
