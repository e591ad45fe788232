"""Drafts by a second, smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

import torch

from attnmux.core import DraftTree, InvalidInput, PoolExhausted, check_positive
from attnmux.transformers.engine.execution import StepRunner
from attnmux.transformers.sequence import SequenceState
from attnmux.transformers.verify_step import truncate

CATCH_UP_TOKENS = 8192
"""The most tokens of a step in which the draft model reads what it has not read yet."""


class ModelProposer:
    """Drafts a chain of the draft model's likeliest tokens.

    The draft model has a KV pool of its own. In each round it reads the tokens that were accepted
    since the last one, and forgets those that were rejected. If its pool is too small for all
    requests, the step runs without drafts.
    """

    def __init__(self, runner: StepRunner, *, vocabulary_size: int, steps: int = 3) -> None:
        """runner: of the draft model; it belongs to the proposer alone. vocabulary_size: of the
        target model. steps: drafts of a chain.

        Raises InvalidInput for fewer than 1, for a draft model of another vocabulary, and for one
        with a window pool, which cannot take back windows that it has freed.
        """
        check_positive("steps", steps)
        if runner.vocabulary_size != vocabulary_size:
            raise InvalidInput(
                "draft",
                got=f"a model of {runner.vocabulary_size} tokens",
                expected=f"the target model's vocabulary of {vocabulary_size}",
            )
        if runner.steps.window_tree is not None:
            got, expected = "a draft model with a window pool", "window_step_tokens=None for it"
            raise InvalidInput("draft", got=got, expected=expected)
        self.draft_token_num = steps + 1
        self._runner = runner
        self._read: dict[SequenceState, SequenceState] = {}
        """What the draft model has read of each request."""

    def propose(self, states: Sequence[SequenceState], num_tokens: int) -> DraftTree | None:
        """See `Proposer`. Waits for the draft model's device."""
        num_drafts = min(num_tokens, self.draft_token_num) - 1
        longest = self._runner.steps.max_context_len
        if any(len(state.token_ids) + num_drafts - 1 > longest for state in states):
            return None
        try:
            drafts = self._draft(states, num_drafts)
        except PoolExhausted:
            self._forget()
            return None
        except BaseException:
            self._forget()
            raise
        roots = torch.tensor([[state.token_ids[-1]] for state in states])
        return DraftTree.chains(torch.cat([roots, drafts], dim=1))

    def keep_only(self, states: Collection[SequenceState]) -> None:
        """Free what the draft model holds for all other requests."""
        gone = self._read.keys() - set(states)
        self._runner.steps.release([self._read[state] for state in gone])
        for state in gone:
            del self._read[state]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _draft(self, states: Sequence[SequenceState], num_drafts: int) -> torch.Tensor:
        """[B, num_drafts] int64 on the host."""
        self.keep_only(states)
        read = [self._rewound(state) for state in states]
        drafts = [torch.cat(list(self._catch_up(read)))]
        if num_drafts > 1:
            for each in read:
                each.token_ids.append(0)  # its value stays on the device
            batch = self._runner.steps.decode_batch(read)
            while len(drafts) < num_drafts:
                step = batch.step(drafts[-1])
                drafts.append(self._runner.forward(step, step.last_indices).argmax(dim=-1))
        answer = torch.stack(drafts, dim=1).cpu()
        for state, each, row in zip(states, read, answer.tolist(), strict=True):
            each.token_ids = [*state.token_ids, *row][: each.num_cached]
        return answer

    def _rewound(self, state: SequenceState) -> SequenceState:
        """The request as the draft model has read it, without what was rejected and with what it
        has to read: at least the last token."""
        read = self._read.setdefault(state, SequenceState(token_ids=[]))
        # Only the drafts of the last round may differ
        known = max(len(read.token_ids) - self.draft_token_num, 0)
        pairs = zip(read.token_ids[known:], state.token_ids[known:-1], strict=False)
        common = known + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common < read.num_cached:
            truncate(self._runner.steps, [read], [common])
        read.token_ids = state.token_ids[:]
        return read

    def _catch_up(self, read: Sequence[SequenceState]) -> Iterator[torch.Tensor]:
        """Read all pending tokens. The likeliest next tokens, in parts of [n] int64."""
        steps = self._runner.steps
        most = min(CATCH_UP_TOKENS, steps.max_step_tokens or CATCH_UP_TOKENS)
        group: list[SequenceState] = []
        for state in read:
            while state.num_pending > most:
                self._extend([state], [most])
            if group and sum(each.num_pending for each in [*group, state]) > most:
                yield self._extend(group)
                group = []
            group.append(state)
        yield self._extend(group)

    def _extend(
        self, states: Sequence[SequenceState], counts: Sequence[int] | None = None
    ) -> torch.Tensor:
        step = self._runner.steps.extend(states, counts)
        return self._runner.forward(step, step.last_indices).argmax(dim=-1)

    def _forget(self) -> None:
        """Free all of the draft model's memory."""
        self._read.clear()
        self._runner.steps.reset()
