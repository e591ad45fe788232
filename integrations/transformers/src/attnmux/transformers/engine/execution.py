"""Runs a plan: builds the batch, calls the model and samples the next tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from attnmux.core import ForwardMode, GraphRunner
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.decode_batch import DecodeBatch
from attnmux.transformers.engine.scheduler import Plan
from attnmux.transformers.engine.stats import Laps
from attnmux.transformers.sampling import Sampler, sample
from attnmux.transformers.sampling_params import SamplingParams
from attnmux.transformers.sequence import Step

GREEDY = Sampler(SamplingParams())


class StepRunner(Protocol):
    """A model as an engine uses it; `ModelRunner` is one."""

    @property
    def steps(self) -> StepBuilder: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def verify_graphs(self) -> GraphRunner | None:
        """The graphs of steps that verify drafts; None if these run eagerly. Trees are padded to
        their number of tokens."""

    def forward(self, step: Step, indices: torch.Tensor, laps: Laps | None = None) -> torch.Tensor:
        """The logits [n, vocabulary] after the step's tokens at `indices` [n] int64.

        laps: its time goes to "metadata" and "launch".
        """


class Execution:
    """Runs plans. While the same requests decode, their batch and tokens stay on the device."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._decode: DecodeBatch | None = None
        self._tokens: torch.Tensor | None = None
        """[B] int64: the tokens sampled in the last step of `_decode`."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(self, plan: Plan, laps: Laps) -> list[list[int]]:
        """The next token of each of `plan.requests`, as a list of one. Waits for the device.

        For a request whose prompt continues in the next step, the value only says whether its
        logits are numbers.
        """
        step = self._extend(plan) if plan.chunks else self._decode_step(plan)
        laps.lap("allocate")
        logits = self._runner.forward(step, step.last_indices, laps)
        samplers = [request.sampler for request in plan.sampled]
        samplers += [GREEDY] * (len(plan.requests) - len(samplers))
        self._tokens = sample(logits, samplers)
        laps.lap("sample")
        tokens: list[int] = self._tokens.tolist()
        laps.lap("wait")
        return [[token] for token in tokens]

    def _decode_step(self, plan: Plan) -> Step:
        states = tuple(request.state for request in plan.decoding)
        if self._decode is not None and self._decode.states == states:
            return self._decode.step(self._tokens)
        self._decode = None
        self._decode = self._runner.steps.decode_batch(states)
        return self._decode.step()

    def _extend(self, plan: Plan) -> Step:
        self._decode = None
        counts = [1] * len(plan.decoding) + [count for _, count in plan.chunks]
        mode = ForwardMode.MIXED if plan.decoding else ForwardMode.EXTEND
        states = [request.state for request in plan.requests]
        return self._runner.steps.extend(states, counts, forward_mode=mode)

    def forget(self) -> None:
        """Read the requests again in the next step, as after a failure."""
        self._decode = None
