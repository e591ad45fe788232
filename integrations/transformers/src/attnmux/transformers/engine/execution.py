"""Runs a plan: builds the batch, calls the model and samples the next tokens."""

from __future__ import annotations

import torch

from attnmux.core import ForwardMode
from attnmux.transformers.engine.request import Plan
from attnmux.transformers.ranks import ONE_RANK, Synchronises
from attnmux.transformers.requests.decode_batch import DecodeBatch
from attnmux.transformers.requests.sampling import Draws, Logprobs, Sampler, sample, upcoming
from attnmux.transformers.requests.sampling_params import SamplingParams
from attnmux.transformers.requests.sequence import Step
from attnmux.transformers.run.stats import Laps
from attnmux.transformers.run.step_runner import StepRunner

GREEDY = Sampler(SamplingParams())


class Launched:
    """A step that the device runs, and the tokens that it is going to yield."""

    def __init__(
        self,
        plan: Plan,
        tokens: torch.Tensor,
        ranks: Synchronises = ONE_RANK.steps,
        logprobs: Logprobs | None = None,
    ) -> None:
        """tokens: [B] int64, of each of `plan.requests`. logprobs: of them, if one asks for any."""
        self.plan = plan
        self._logprobs = logprobs
        self._ranks = ranks
        self.tokens = tokens
        # Pinned memory on the host, which the copy does not wait for
        self._host = tokens.to("cpu", non_blocking=True)
        self._copied: torch.Event | None = None
        if tokens.device.type != "cpu":
            self._copied = torch.Event(tokens.device)
            self._copied.record()

    def wait(self, laps: Laps) -> list[list[int]]:
        """The next token of each of `plan.requests`, as a list of one. Waits for the device.

        For a request whose prompt continues in the next step, the value only says whether its
        logits are numbers.
        """
        if self._copied is not None:
            self._ranks.wait(self._copied)
        tokens = [[token] for token in self._host.tolist()]
        laps.lap("wait")
        return tokens

    def tell(self) -> None:
        """Give the requests the log probabilities of the token that they took."""
        if self._logprobs is None:
            return
        for row, request in enumerate(self.plan.sampled):
            most, ids = request.sampler.params.logprobs, request.state.token_ids
            if most is not None and len(ids) - request.prompt_len > len(request.logprobs):
                request.logprobs.append(self._logprobs.of(row, ids[-1], most))


class Execution:
    """Runs plans. While the same requests decode, their batch and tokens stay on the device."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._decode: DecodeBatch | None = None
        self._last: Launched | None = None
        """The last step of `_decode`."""

    def launch(self, plan: Plan, laps: Laps, *, ahead: bool = False) -> Launched:
        """Launch a step.

        ahead: the requests decode in the step that was launched last, and have not taken its tokens
        yet.
        """
        with torch.inference_mode(False), torch.no_grad():
            step = self._extend(plan) if plan.chunks else self._decode_step(plan, ahead=ahead)
            laps.lap("allocate")
            logits = self._runner.forward(step, step.last_indices, laps)
            tokens = sample(logits, _draws(plan, int(ahead)))
            wanted = Logprobs.wanted([request.sampler for request in plan.sampled], logits, tokens)
            self._last = launched = Launched(plan, tokens, self._runner.ranks.steps, wanted)
        laps.lap("sample")
        return launched

    def _decode_step(self, plan: Plan, *, ahead: bool) -> Step:
        states = tuple(request.state for request in plan.decoding)
        if self._decode is not None and self._last is not None and self._decode.states == states:
            # The request of a token that is no number is about to end; models read its index
            return self._decode.step(self._last.tokens.clamp(min=0) if ahead else self._last.tokens)
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
        self._decode = self._last = None


def _draws(plan: Plan, place: int) -> list[Draws]:
    """How each of `plan.requests` is sampled, so many tokens later; empty if no request draws."""
    samplers = [request.sampler for request in plan.sampled]
    draws = upcoming(samplers, [[place]] * len(samplers))
    return draws and draws + [GREEDY] * (len(plan.requests) - len(draws))
