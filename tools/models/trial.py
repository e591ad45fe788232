"""One architecture as a small random model: attnmux's engine against transformers' eager attention.

The model's own forward over each whole text says what text and logits are: eager attention in
float32, one text at a time, without a cache. The engine runs all prompts at once, with shared
prefixes and prompts in chunks, at several page sizes.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from attnmux.core import AttnmuxError, Offer, Platform
from attnmux.transformers import ModelRunner, RunnerOptions, load_runner, open_checkpoint
from attnmux.transformers.load.checkpoint import quiet_transformers
from tools.models.architectures import architecture_of
from tools.models.compare import WrongAnswer, compare_logits, compare_text
from tools.models.outcome import Outcome, Status
from tools.models.recipe import DimsKind, Recipe
from tools.models.reference import Reference, build, dims_of

PAGE_SIZES: Mapping[DimsKind, Sequence[int]] = {"small": (1, 16), "real": (16, 64)}
"""Kernels for latents read pages of 64."""


def _ignore(text: str) -> None: ...


def try_architecture(
    name: str,
    recipe: Recipe,
    platform: Platform,
    offers: Sequence[Offer],
    *,
    page_sizes: Sequence[int] | None = None,
    say: Callable[[str], None] = _ignore,
) -> Outcome:
    """Build, serve and compare an architecture. say: called with each stage as it begins."""
    torch.manual_seed(recipe.seed)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers(progress=False):
        say("eager attention")
        try:
            reference = build(architecture_of(name), recipe, Path(folder))
        except Exception as error:  # transformers' models raise anything
            return Outcome(config=name, status="not built", reason=in_one_line(error))
        outcome = Outcome(config=name, status="served", dims=dims_of(reference.config))
        for page_size in page_sizes or PAGE_SIZES[recipe.dims]:

            def say_where(text: str, page_size: int = page_size) -> None:
                say(f"page size {page_size}: {text}")

            make = partial(make_runner, Path(folder), page_size, platform, offers, recipe.dtype)
            outcome = _tried(outcome, make, reference, say_where)
            if outcome.status != "served":
                return replace(outcome, reason=f"{outcome.reason} (page size {page_size})")
    return outcome


def _tried(
    outcome: Outcome,
    make: Callable[[], ModelRunner],
    reference: Reference,
    say: Callable[[str], None],
) -> Outcome:
    """The outcome after another runner."""
    say("loading")
    try:
        runner = make()
        outcome = replace(outcome, backend=", ".join(sorted(_chosen(runner))))
        say("logits")
        found = compare_logits(runner, reference)
        say("texts")
        compare_text(runner, reference)
    except WrongAnswer as error:
        status: Status = "wrong"
        reason = str(error)
    except AttnmuxError as error:
        status, reason = "refused", in_one_line(error)
    except Exception as error:  # whatever is not typed is a fault of attnmux
        status, reason = "failed", in_one_line(error)
    else:
        return replace(
            outcome,
            worst=max(outcome.worst or 0.0, found.worst),
            of_bound=max(outcome.of_bound or 0.0, found.of_bound),
        )
    return replace(outcome, status=status, reason=reason)


def make_runner(
    folder: Path, page_size: int, platform: Platform, offers: Sequence[Offer], dtype: str
) -> ModelRunner:
    options = RunnerOptions(
        max_batch_size=4,
        max_context_len=64,
        max_total_tokens=1024,
        window_step_tokens=16,
        page_size=page_size,
        dtype=dtype,
    )
    return load_runner(open_checkpoint(folder), platform, offers, options, warn=_ignore)


def _chosen(runner: ModelRunner) -> set[str]:
    """The backends of all layers."""
    decision = runner.decision
    chosen = [choice for _, choice in decision.choices]
    chosen += [choice for *_, choice in decision.part_choices]
    return {choice.backend for choice in chosen}


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def try_alone(
    name: str,
    recipe: Recipe,
    platform: Platform,
    offers: Sequence[Offer],
    say: Callable[[str], None] = _ignore,
) -> Outcome:
    """The same in a process of its own, on one thread, as small tensors want it."""
    torch.set_num_threads(1)
    start = time.monotonic()
    outcome = try_architecture(name, recipe, platform, offers, say=say)
    return replace(outcome, seconds=time.monotonic() - start)
