"""Which models are compiled, and the steps that make their code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from attnmux.core import BackendContext, InvalidInput
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.repeated import has_numbered_calls
from attnmux.transformers.requests.sequence import SequenceState
from attnmux.transformers.run.served_model import ServedModel

TRIAL_TOKENS = 19
"""Prompt tokens of the steps that compile a model."""


class RunsSteps(Protocol):
    """What a trial needs of a runner."""

    @property
    def context(self) -> BackendContext: ...
    def extend(self, states: Sequence[SequenceState]) -> torch.Tensor: ...
    def decode(self, states: Sequence[SequenceState]) -> torch.Tensor: ...
    def release(self, states: Sequence[SequenceState]) -> None: ...


def check_compiles(model: ServedModel) -> None:
    """Raise InvalidInput for a model whose layers no compiler takes as they are."""
    if model.linear:
        expected = "attention in every layer: a compiler would cut the model at each other one"
        raise InvalidInput("compile", got="a model with linear layers", expected=expected)
    if model.compressors is not None:
        expected = "a model whose layers make no keys of blocks, which read the running step"
        raise InvalidInput("compile", got="compressed keys", expected=expected)
    if model.indexers is not None:
        expected = "a model without indexers, which read the running step"
        raise InvalidInput("compile", got="sparse attention", expected=expected)
    if has_numbered_calls(model.module):
        expected = "attention once in each layer: its code serves all that are alike"
        raise InvalidInput("compile", got="layers that attend again", expected=expected)
    if isinstance(model.module, PackedDecoder):
        raise no_layers(model)


def no_layers(model: ServedModel) -> InvalidInput:
    """The error of a model without a list of layers."""
    got = type(model.module).__name__
    return InvalidInput("compile", got=got, expected="a model with a list of layers")


def try_steps(runner: RunsSteps) -> None:
    """Run a prompt, then one decode step of two requests and one of one. A compiler makes other
    code for a single token than for more."""
    states: list[SequenceState] = []
    try:
        for _ in range(min(2, runner.context.max_batch_size)):
            prompt_len = max(min(TRIAL_TOKENS, runner.context.max_context_len - 2), 1)
            states.append(SequenceState(token_ids=[0] * prompt_len))
            runner.extend(states[-1:])
            states[-1].token_ids.append(0)
        runner.decode(states)
        for state in states:
            state.token_ids.append(0)
        runner.decode(states[:1])
    finally:
        runner.release(states)
