"""attnmux's logits and texts against those that the model itself gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attnmux.transformers import Engine, ModelRunner, SequenceState
from tools.models.bounds import Wanted, difference, geometric_mean
from tools.models.reference import NEW_TOKENS, Reference

CHUNK = 7
"""Prompt tokens of a step, so that most prompts run in chunks."""


class WrongAnswer(Exception):
    """attnmux and transformers disagree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """Differences of attnmux's logits from the reference."""

    worst: float
    """The largest, as a share of the logits' spread."""
    of_bound: float
    """That of a token, or the mean, which comes closest to its bound, as a share of the bound."""


def compare_logits(runner: ModelRunner, reference: Reference) -> Differences:
    """Run prompts in two steps, then decode the model's own tokens.

    Raises WrongAnswer for one beyond its bound, and for a mean beyond its bound.
    """
    wanted, bounds = reference.wanted, reference.bounds
    found = torch.zeros_like(bounds.each)
    for first in range(0, len(wanted), 2):
        pair = wanted[first : first + 2]
        for step, logits in enumerate(_said(runner, pair)):
            theirs = torch.stack([each.logits[step] for each in pair])
            found[first : first + 2, step] = difference(logits, theirs)
    for place, each in enumerate(wanted):
        for step in range(NEW_TOKENS):
            _check_difference(each, step, found[place, step], bounds.each[place, step])
    if not (mean := geometric_mean(found)) <= bounds.mean:
        raise WrongAnswer(f"logits differ by {mean:.2g} on average, beyond {bounds.mean:.2g}")
    shares = [float((found / bounds.each).max()), mean / bounds.mean]
    return Differences(worst=float(found.max()), of_bound=max(shares))


def _said(runner: ModelRunner, pair: Sequence[Wanted]) -> Iterator[torch.Tensor]:
    """[requests, vocabulary] float32 on the CPU, for each of the new tokens."""
    states = [
        SequenceState(token_ids=list(each.prompt), encoder_states=encoded)
        for each, encoded in zip(pair, _encoded(runner, pair), strict=True)
    ]
    if min(len(each.prompt) for each in pair) > 1:
        runner.extend(states, [len(each.prompt) // 2 for each in pair])
    logits = runner.extend(states)
    for step in range(NEW_TOKENS):
        yield logits.float().cpu()
        if step + 1 < NEW_TOKENS:
            for each, state in zip(pair, states, strict=True):
                state.token_ids.append(each.tokens[step])
            logits = runner.decode(states)
    runner.release(states)


def _check_difference(wanted: Wanted, step: int, found: torch.Tensor, bound: torch.Tensor) -> None:
    if not found <= bound:
        raise WrongAnswer(
            f"logits of token {step + 1} after {len(wanted.prompt)} differ by {float(found):.2g}, "
            f"beyond {float(bound):.2g}"
        )


def _encoded(runner: ModelRunner, wanted: Sequence[Wanted]) -> Sequence[torch.Tensor | None]:
    """The encoder's states of each request, from as few calls as there can be."""
    given = [each.encoder for each in wanted if each.encoder is not None]
    return runner.encode_all(given) if given else [None] * len(wanted)


def compare_text(runner: ModelRunner, reference: Reference) -> None:
    """Run all prompts in the engine. Raises WrongAnswer for another text.

    A text may leave the wanted one where two tokens are as likely as each other, within the
    bound of their logits.
    """
    wanted, engine = reference.wanted, Engine(runner, prefill_tokens=CHUNK)
    order = [
        engine.add(each.prompt, max_new_tokens=NEW_TOKENS, encoder_states=encoded)
        for each, encoded in zip(wanted, _encoded(runner, wanted), strict=True)
    ]
    texts = {}
    while engine.has_work:
        for output in engine.step():
            if output.result is not None:
                texts[output.request_id] = output.result.token_ids
    for each, bound, request_id in zip(wanted, reference.bounds.each, order, strict=True):
        _compare_tokens(each, bound, texts[request_id])


def _compare_tokens(wanted: Wanted, bounds: torch.Tensor, ours: Sequence[int]) -> None:
    for logits, bound, mine, theirs in zip(wanted.logits, bounds, ours, wanted.tokens, strict=True):
        if mine != theirs:
            if (logits[theirs] - logits[mine]) / logits.std() > bound:
                raise WrongAnswer(f"text {list(ours)} instead of {wanted.tokens}")
            return
