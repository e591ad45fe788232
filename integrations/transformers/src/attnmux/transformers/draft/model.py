"""Drafts by a second, smaller model of the same vocabulary, or by an EAGLE head."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from attnmux.core import (
    DeviceGraphs,
    ForwardBatch,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    InvalidInput,
    PoolExhausted,
)
from attnmux.parts import DraftTree
from attnmux.transformers.draft.loop import DraftLoop, DraftModel, drafted_tree
from attnmux.transformers.draft.paths import DraftCandidates, likeliest
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import SequenceState, Step
from attnmux.transformers.run.step_runner import StepRunner

CATCH_UP_TOKENS = 8192
"""The most tokens of a step in which the draft model reads new tokens."""


class DraftRunner(StepRunner, DraftModel, Protocol):
    """A draft model as a proposer uses it; `ModelRunner` is one."""

    @property
    def catch_up_graphs(self) -> GraphRunner | None:
        """The graphs of DRAFT_EXTEND steps; None if these run eagerly, as EXTEND."""

    def features_of(self, states: torch.Tensor) -> torch.Tensor:
        """Features that an EAGLE head joins to tokens, from the target's hidden states [n,
        width]."""

    def capture_catch_up(
        self, num_tokens: int, *, batch_sizes: Sequence[int], devices: DeviceGraphs
    ) -> None:
        """Make `catch_up_graphs`, for `num_tokens` new tokens of each request."""


class ModelProposer:
    """Drafts the tokens that the draft model finds likeliest, as trees or as chains.

    The draft model has a KV pool of its own. In each round it reads the tokens that were accepted
    since the last one. Then it follows the `topk` likeliest paths of each request, `steps` tokens
    deep, on rows and pages that are free again after the round. The `draft_token_num` - 1 best
    candidates of all steps make the tree. If the pool is too small for all requests, the step runs
    without drafts.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        vocabulary_size: int,
        steps: int = 3,
        topk: int = 1,
        draft_token_num: int | None = None,
        target: StepBuilder | None = None,
    ) -> None:
        """runner: of the draft model; it belongs to the proposer alone. vocabulary_size: of the
        target model. steps: drafts of a path. topk: paths of a request; 1 makes chains.
        draft_token_num: nodes of a request's tree, its root included; None: steps + 1.
        target: for an EAGLE head, the target's, with the hidden states of its cached tokens. The
        head reads each token but the first, together with the state of the token before it.

        Raises InvalidInput for numbers below 1, for fewer than 2 nodes or more than there are
        candidates, for a draft model of another vocabulary or with fewer tokens than topk, for one
        with linear layers, indexers or keys of blocks, whose states and keys no branch has, and for
        one with a window pool, which branches cannot share. Also for a target without the hidden
        states that the head reads.
        """
        InvalidInput.check_at_least(1, "steps", steps)
        InvalidInput.check_at_least(1, "topk", topk)
        most = most_nodes(steps, topk)
        num = steps + 1 if draft_token_num is None else draft_token_num
        if not 2 <= num <= most:
            expected = f"2 to {most}: the root and the candidates of {steps} steps with topk {topk}"
            raise InvalidInput("draft_token_num", got=num, expected=expected)
        tokens = vocabulary_size if runner.token_ids is None else len(runner.token_ids)
        if topk > tokens:
            expected = f"at most the vocabulary of {tokens}"
            raise InvalidInput("topk", got=topk, expected=expected)
        _check_model(runner, vocabulary_size)
        if target is not None:
            _check_states(runner, target)
        self.draft_token_num = num
        self.topk = topk
        self.steps = steps = min(steps, num - 1)  # no tree has room for longer paths
        self._runner = runner
        self._loop = None if steps == 1 else DraftLoop(runner, topk=topk, num_steps=steps - 1)
        self._kernels = runner.tree_kernels if topk > 1 else None
        self._read: dict[SequenceState, SequenceState] = {}
        """The tokens of each request that the draft model has read."""
        self._target = target
        self._rows: dict[SequenceState, int | None] = {}
        """The target's row of each request that reads, in this round."""

    @property
    def device(self) -> torch.device:
        """The draft model's."""
        return self._runner.context.device

    def capture_graphs(
        self, *, batch_sizes: Sequence[int] | None = None, devices: DeviceGraphs | None = None
    ) -> None:
        """Capture the draft model's rounds: one graph reads the accepted tokens, and another holds
        all steps after it. Later rounds replay them.

        batch_sizes: of requests; None takes the usual ones. devices: None takes those of the
        model's device. Raises GraphUnsupported if device or backend have no graphs; what could not
        be captured runs eagerly.
        """
        devices = devices or DeviceGraphs.of(self.device)
        most = self._runner.context.max_batch_size
        sizes = GraphConfig.sizes(pool_size=most, speculation=True, chosen=batch_sizes)
        if self._loop is not None:
            self._loop.capture(sizes, devices)
        self._runner.capture_catch_up(self.steps + 1, batch_sizes=sizes, devices=devices)

    def propose(self, states: Sequence[SequenceState], num_tokens: int) -> DraftTree | None:
        """See `Proposer`. Waits for the draft model's device."""
        longest = max(len(state.token_ids) for state in states)
        room = self._runner.steps.max_context_len - longest
        if room < 0:
            return None
        num_steps = min(self.steps, room + 1, num_tokens - 1)
        try:
            candidates = self._draft(states, num_steps)
            return drafted_tree(
                torch.tensor([state.token_ids[-1] for state in states]),
                candidates,
                min(num_tokens, self.draft_token_num, candidates.tokens.shape[1] + 1),
                topk=self.topk,
                kernels=self._kernels,
            )
        except PoolExhausted:
            return None
        except BaseException:
            self._forget()
            raise

    def look_back(self, state: SequenceState, begin: int) -> None:
        """None: only the draft model can say what it would have guessed."""

    def keep_only(self, states: Collection[SequenceState]) -> None:
        """Free the draft model's memory of all other requests."""
        gone = self._read.keys() - set(states)
        self._runner.steps.release([self._read[state] for state in gone])
        for state in gone:
            del self._read[state]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _draft(self, states: Sequence[SequenceState], num_steps: int) -> DraftCandidates:
        """The candidates [B, n], on the device."""
        self.keep_only(states)
        read = [self._read.setdefault(state, SequenceState(token_ids=[])) for state in states]
        skipped = 0 if self._target is None else 1
        for own_state, state in zip(read, states, strict=True):
            own_state.token_ids += state.token_ids[skipped + len(own_state.token_ids) :]
        self._rows = {own_state: state.row for own_state, state in zip(read, states, strict=True)}
        first = zip(*self._catch_up(read), strict=True)
        scores, tokens = (torch.cat(tensors) for tensors in first)
        if self._loop is not None:
            return self._loop.run(read, scores, tokens, num_steps - 1)
        return DraftCandidates(scores=scores, tokens=tokens, parents=torch.full_like(tokens, -1))

    def _catch_up(
        self, read: Sequence[SequenceState]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read all pending tokens. What `likeliest` returns of them, in parts of n requests."""
        most = CATCH_UP_TOKENS
        group: list[SequenceState] = []
        for state in read:
            while state.num_pending > most:
                self._extend([state], [most])
            if group and sum(member.num_pending for member in [*group, state]) > most:
                yield self._extend(group)
                group = []
            group.append(state)
        yield self._extend(group)

    def _extend(
        self, states: Sequence[SequenceState], counts: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps, graphs = self._runner.steps, self._runner.catch_up_graphs
        if graphs is not None and counts is None and can_reread(states, self.steps + 1):
            step = reread(states, steps, self.steps + 1)
            counts = [self.steps + 1] * len(states)
        else:
            counts = counts or [state.num_pending for state in states]
            step = steps.extend(states, counts)
        if self._target is not None:
            step = replace(step, features=self._features(states, counts))
        logits = self._runner.forward(step, step.last_indices)
        return likeliest(logits, self.topk, token_ids=self._runner.token_ids)

    def _features(self, states: Sequence[SequenceState], counts: Sequence[int]) -> torch.Tensor:
        """[T, width]: the target's states that the last tokens of each request join."""
        assert self._target is not None
        assert self._target.hidden is not None
        table, nums = self._target.req_to_token_pool.req_to_token, np.array(counts)
        rows = np.array([self._rows[state] for state in states]).repeat(nums)
        firsts = np.array([state.num_cached for state in states]) - nums
        ends = nums.cumsum()
        columns = np.arange(int(ends[-1])) + (firsts - (ends - nums)).repeat(nums)
        cells = torch.from_numpy(rows * table.shape[1] + columns)
        slots = table.view(-1).index_select(0, cells.to(table.device, non_blocking=True))
        return self._runner.features_of(self._target.hidden.at(slots.long()))

    def _forget(self) -> None:
        """Free all of the draft model's memory."""
        self._read.clear()
        self._runner.steps.reset()
        if self._loop is not None:
            self._loop.forget()


def most_nodes(steps: int, topk: int) -> int:
    """Nodes of the largest tree: the root, and the candidates of all steps."""
    return 1 + topk + (steps - 1) * topk * topk


def _check_model(runner: DraftRunner, vocabulary_size: int) -> None:
    """Refuse a model that cannot draft. Raises InvalidInput."""
    got = expected = ""
    if runner.vocabulary_size != vocabulary_size:
        got = f"a model of {runner.vocabulary_size} tokens"
        expected = f"the target model's vocabulary of {vocabulary_size}"
    elif runner.steps.window_tree is not None:
        got, expected = "a draft model with a window pool", "window_step_tokens=None for it"
    elif runner.steps.linear_states is not None:
        got, expected = "a draft model with linear layers", "attention in every layer"
    elif runner.context.request.index_topk is not None:
        got = "a draft model with indexers, whose keys no branch has"
        expected = "a max_context_len of no more tokens than they pick, or another model"
    elif runner.context.request.compressed_layers:
        got = "a draft model with keys of blocks of tokens, which no branch has"
        expected = "a model whose layers see only tokens"
    if got:
        raise InvalidInput("draft", got=got, expected=expected)


def _check_states(runner: DraftRunner, target: StepBuilder) -> None:
    """Refuse a target without the states that a head reads. Raises InvalidInput."""
    if target.hidden is None:
        expected = "the steps of a runner with RunnerOptions.hidden_states"
        raise InvalidInput("target", got="a target without hidden states", expected=expected)
    runner.features_of(target.hidden.states[:0])


def can_reread(states: Sequence[SequenceState], num_tokens: int) -> bool:
    """Whether `reread` serves the requests."""
    return all(state.num_pending <= num_tokens <= len(state.token_ids) for state in states)


def reread(states: Sequence[SequenceState], steps: StepBuilder, num_tokens: int) -> Step:
    """A DRAFT_EXTEND step over the last d tokens of each request, which include all pending ones.

    Graphs hold steps with as many tokens for every request. If fewer are pending, the tokens
    before them run again, and write the same K and V to their slots: unlike padding, they have
    slots and keys.
    num_tokens: d. The requests own all of their slots. Raises as `StepBuilder.extend` does.
    """
    taken = steps.extend(states, forward_mode=ForwardMode.DRAFT_EXTEND).batch
    starts = [state.num_cached - num_tokens for state in states]
    host = torch.tensor(
        [
            [token for state in states for token in state.token_ids[-num_tokens:]],
            [start + place for start in starts for place in range(num_tokens)],
        ]
    )
    input_ids, positions = host.to(steps.device, non_blocking=True).unbind()
    rows = taken.req_pool_indices.repeat_interleave(num_tokens, output_size=len(positions))
    counts_cpu = torch.full((len(states),), num_tokens, dtype=torch.int32)
    assert taken.seq_lens_cpu is not None
    batch = ForwardBatch(
        forward_mode=ForwardMode.DRAFT_EXTEND,
        batch_size=len(states),
        req_pool_indices=taken.req_pool_indices,
        seq_lens=taken.seq_lens,
        out_cache_loc=steps.req_to_token_pool.req_to_token[rows, positions].long(),
        positions=positions,
        seq_lens_cpu=taken.seq_lens_cpu,
        seq_lens_sum=taken.seq_lens_sum,
        extend_seq_lens=counts_cpu.to(steps.device),
        extend_seq_lens_cpu=counts_cpu,
        extend_prefix_lens=taken.seq_lens - num_tokens,
        extend_prefix_lens_cpu=taken.seq_lens_cpu - num_tokens,
        extend_num_tokens=len(positions),
    )
    last = torch.arange(1, len(states) + 1, device=steps.device) * num_tokens - 1
    return Step(batch=batch, input_ids=input_ids, last_indices=last)
