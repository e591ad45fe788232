"""Speculative decoding in the engine: drafts, one step that verifies them, and the commit."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from attnmux.core import (
    AcceptThresholds,
    DraftTree,
    InvalidInput,
    NgramIndex,
    check_positive,
    sample_tree_target_only,
)
from attnmux.transformers.engine.acceptance import HostTrees, sampled_paths
from attnmux.transformers.engine.execution import StepRunner
from attnmux.transformers.engine.prefix import PrefixCache
from attnmux.transformers.engine.request import LiveRequest
from attnmux.transformers.engine.stats import EngineStats, Laps
from attnmux.transformers.sampling import NOT_A_NUMBER, Draws, Upcoming, sample
from attnmux.transformers.sequence import SequenceState
from attnmux.transformers.verify_rows import VerifyRows
from attnmux.transformers.verify_step import VerifyStep

LOOKAHEAD = 32
"""Tokens for which requests get slots besides those of their drafts: most steps then take none."""

PLENTY = 4
"""Prefixes are evicted for slots taken ahead where those are at most this part of what is left."""


class Proposer(Protocol):
    """Guesses the next tokens of decoding requests. The target model decides which are right."""

    @property
    def draft_token_num(self) -> int:
        """The most nodes of a request's tree, the root included."""

    def propose(self, states: Sequence[SequenceState], num_tokens: int) -> DraftTree | None:
        """Trees of one size, of at most `num_tokens` nodes; None without a guess for any request.

        The root of each tree is the request's one pending token. The trees are on the host, but
        for `visible`, which may be on the target's device.
        """

    def keep_only(self, states: Collection[SequenceState]) -> None:
        """Free what is held for all other requests: they have ended or wait for memory."""


class NgramProposer:
    """Drafts what followed a request's last tokens where they occurred before in it."""

    def __init__(
        self,
        *,
        draft_token_num: int = 8,
        topk: int = 1,
        steps: int | None = None,
        min_ngram: int = 1,
        max_ngram: int = 4,
    ) -> None:
        """draft_token_num: nodes of a request's tree, its root included. topk: continuations that
        a tree merges; 1 makes chains. steps: tokens of a continuation; None lets one fill a chain,
        and half of a tree. min_ngram, max_ngram: as in `NgramIndex`.

        Raises InvalidInput for numbers below 1, and for fewer than 2 nodes.
        """
        for argument, value in (("topk", topk), ("steps", 1 if steps is None else steps)):
            check_positive(argument, value)
        if draft_token_num < 2:
            got = draft_token_num
            raise InvalidInput("draft_token_num", got=got, expected="the root and a draft, or more")
        NgramIndex(min_ngram=min_ngram, max_ngram=max_ngram)
        self.draft_token_num = draft_token_num
        self.topk = topk
        self.steps = steps or (draft_token_num - 1 if topk == 1 else draft_token_num // 2)
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._indices: WeakKeyDictionary[SequenceState, NgramIndex] = WeakKeyDictionary()

    def propose(self, states: Sequence[SequenceState], num_tokens: int) -> DraftTree | None:
        """See `Proposer`. A tree with fewer nodes than another repeats its last token: a guess like
        any other."""
        most = min(num_tokens, self.draft_token_num) - 1
        found = [self._tree(state, most) for state in states]
        longest = max((len(tokens) for tokens, _ in found), default=0)
        if not longest:
            return None
        rows = []
        for state, (tokens, _) in zip(states, found, strict=True):
            row = [state.token_ids[-1], *tokens]
            rows.append(row + row[-1:] * (longest + 1 - len(row)))
        draft_tokens = torch.from_numpy(np.array(rows))
        if self.topk == 1:
            return DraftTree.chains(draft_tokens)
        links = [[-2, *above, *range(len(above) - 1, longest - 1)] for _, above in found]
        parents = torch.from_numpy(np.array(links) + 1)
        return DraftTree.of(draft_tokens, parents, topk=self.topk)

    def keep_only(self, states: Collection[SequenceState]) -> None:
        """Nothing to do: what was found in a request's text goes with the request."""

    def _tree(self, state: SequenceState, most: int) -> tuple[list[int], Sequence[int]]:
        index = self._indices.get(state)
        if index is None:
            index = NgramIndex(min_ngram=self._min_ngram, max_ngram=self._max_ngram)
            self._indices[state] = index
        if self.topk == 1:
            (chain,) = index.chains(state.token_ids, depth=min(self.steps, most), width=1) or ([],)
            return chain, range(-1, len(chain) - 1)
        return index.tree(state.token_ids, num_tokens=most, depth=self.steps, topk=self.topk)


class Speculation:
    """Runs steps of decoding requests with drafts.

    Each draft token is sampled with the random number that the request draws at its place, so that
    a request's text is the same with and without drafts, up to rounding in the model. Thresholds
    below 1 accept more drafts of sampled requests instead, whose text is then another.
    """

    def __init__(
        self,
        proposer: Proposer,
        cache: PrefixCache,
        stats: EngineStats,
        accept: AcceptThresholds,
        runner: StepRunner,
    ) -> None:
        """accept: of sampled requests. Raises InvalidInput for a model with an encoder."""
        if cache.steps.max_encoder_len:
            got = "drafts for an encoder-decoder model"
            raise InvalidInput("drafts", got=got, expected="a decoder-only model")
        self._proposer = proposer
        self._cache = cache
        self._stats = stats
        self._accept = accept
        self._runner = runner
        self._sample = sample_tree_target_only
        if not accept.exact and runner.tree_kernels is not None:
            self._sample = runner.tree_kernels.sample
        self._step: VerifyStep | None = None
        self._rows: VerifyRows | None = None
        """Of the last step."""
        self._paths: Sequence[Sequence[int]] = []
        self._unsound: list[bool] = []

    def drafts(self, requests: Sequence[LiveRequest]) -> DraftTree | None:
        """Trees for the requests' next step; None if it is a plain one. They fit into the contexts
        and, once `make_room` has run, into the pool."""
        most = self._most(requests)
        if most < 2:
            return None
        states = [request.state for request in requests]
        return self._proposer.propose(states, most)

    def make_room(self, requests: Sequence[LiveRequest], tree: DraftTree) -> None:
        """Evict as much as the step needs, and what it takes ahead if there is plenty."""
        num = tree.draft_token_num
        if self._has_room(requests, num) or not (need := self._new_tokens(requests, num)):
            return
        more = self._new_tokens(requests, num + self._ahead(requests))
        if PLENTY * more <= self._cache.obtainable:
            need = more
        self._stats.evicted_tokens += self._cache.make_room(need)

    def _ahead(self, requests: Sequence[LiveRequest]) -> int:
        """Tokens for which a step that takes slots takes them ahead."""
        return min(LOOKAHEAD, max(request.num_remaining for request in requests))

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(self, requests: Sequence[LiveRequest], tree: DraftTree, laps: Laps) -> list[list[int]]:
        """The new tokens of each request: its accepted drafts and one more. Waits for the device.

        Call `commit` once the requests have taken them.
        """
        states = [one.state for one in requests]
        num_drafts = tree.draft_token_num - 1
        steps, ahead, runner = self._cache.steps, self._ahead(requests), self._runner
        verify = VerifyStep(states, tree, steps, runner.verify_graphs, ahead=ahead, rows=self._rows)
        self._step, self._rows, tree = verify, verify.rows, verify.tree
        laps.lap("allocate")
        logits = runner.forward(verify.step, verify.step.last_indices, laps)
        draws = _draws(requests, tree)
        if draws and not self._accept.exact:
            self._paths, answer = sampled_paths(tree, logits, draws, self._accept, self._sample)
            laps.lap("sample")
            self._unsound = [NOT_A_NUMBER in row for row in answer]
        else:
            sampled = sample(logits, draws)
            trees = HostTrees.of(tree)
            verify.take_ahead(ahead)
            laps.lap("sample")
            predict: list[list[int]] = sampled.cpu().view(tree.draft_tokens.shape).tolist()
            laps.lap("wait")
            self._unsound = [NOT_A_NUMBER in row for row in predict]
            self._paths, answer = trees.accepted(predict)
        num_accepted = sum(map(len, answer)) - len(answer)
        self._stats.drafts.count(len(answer), num_drafts, num_accepted)
        return answer

    def commit(self, requests: Sequence[LiveRequest]) -> None:
        """Keep the K and V of the tokens that the requests took, and free all other slots."""
        step, self._step = self._step, None
        if step is None:
            return
        lens = [len(request.state.token_ids) for request in requests]
        taken = map(operator.sub, lens, step.prefixes)  # and the pending one
        paths = [path[: num - 1] for path, num in zip(self._paths, taken, strict=True)]
        step.commit(paths, self._unsound)

    def forget(self) -> None:
        """Drop a step that failed."""
        self._step = self._rows = None

    def keep_only(self, requests: Iterable[LiveRequest]) -> None:
        """Free what drafting holds for requests that have ended."""
        self._rows = None
        self._proposer.keep_only([request.state for request in requests])

    def _most(self, requests: Sequence[LiveRequest]) -> int:
        """Nodes for which every context, the model's longest row and the pool have room."""
        steps = self._cache.steps
        most = min(
            self._proposer.draft_token_num,
            max(request.num_remaining for request in requests),
            *(steps.max_context_len - request.state.num_cached for request in requests),
        )
        if steps.max_step_tokens is not None:
            most = min(most, steps.max_step_tokens // len(requests))
        if self._has_room(requests, most):
            return most
        while most > 1 and self._new_tokens(requests, most) > self._cache.obtainable:
            most -= 1
        return most

    def _has_room(self, requests: Sequence[LiveRequest], num_new: int) -> bool:
        """Whether even full pages for all of the new tokens are free."""
        need = len(requests) * (num_new + self._cache.page_size)
        return need <= self._cache.allocator.available_size()

    def _new_tokens(self, requests: Sequence[LiveRequest], num_new: int) -> int:
        """Tokens of the pages that the requests open."""
        size, pages = self._cache.page_size, 0
        for request in requests:
            held = request.state.num_held
            end = max(request.state.num_columns + num_new, held)
            pages += -(-end // size) - -(-held // size)
        return pages * size


def _draws(requests: Sequence[LiveRequest], tree: DraftTree) -> list[Draws]:
    """How each node is sampled; empty if no request draws."""
    samplers = [request.sampler for request in requests]
    if all(sampler.draws_by is None for sampler in samplers):
        return []
    places = [
        Upcoming(sampler, depth)
        for sampler, depths in zip(samplers, tree.depths.tolist(), strict=True)
        for depth in depths
    ]
    return list(places)
