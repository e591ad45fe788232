"""Speculative decoding in the engine: drafts, room for them, and one step that verifies them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from attnmux.core import InvalidInput
from attnmux.parts import AcceptThresholds, DraftTree, LinearStatePool, sample_tree_target_only
from attnmux.transformers.draft.pace import DraftPace
from attnmux.transformers.draft.proposers import Proposer
from attnmux.transformers.draft.verify_rows import VerifyRows
from attnmux.transformers.draft.verify_step import VerifyStep
from attnmux.transformers.engine.acceptance import (
    HostTrees,
    Verification,
    followed_paths,
    sampled_paths,
)
from attnmux.transformers.engine.prefix import PrefixCache
from attnmux.transformers.engine.request import LiveRequest
from attnmux.transformers.requests.sampling import sample, upcoming
from attnmux.transformers.run.stats import EngineStats, Laps
from attnmux.transformers.run.step_runner import StepRunner

LOOKAHEAD = 32
"""Tokens for which requests get slots in addition to those of their drafts: most steps then take
none."""

PLENTY = 4
"""Prefixes are evicted for slots taken ahead if those are at most this part of the rest."""


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
        *,
        always: bool = False,
    ) -> None:
        """accept: of sampled requests. always: draft also where it does not pay. Several ranks do,
        since their clocks differ and their steps must not, and thresholds, by which texts depend
        on the drafts.

        Raises InvalidInput for a model with an encoder, and for drafts of which linear layers keep
        no states."""
        if cache.steps.max_encoder_len:
            got = "drafts for an encoder-decoder model"
            raise InvalidInput("drafts", got=got, expected="a decoder-only model")
        if cache.steps.linear_states is not None:
            _check_states(proposer, cache.steps.linear_states)
        runner.check_drafts(proposer.topk)
        self._proposer = proposer
        always = always or runner.ranks.size > 1 or not accept.exact
        self._pace = None if always else DraftPace(proposer)
        self._cache = cache
        self._stats = stats
        self._accept = accept
        self._runner = runner
        self._sample = sample_tree_target_only
        if not accept.exact and runner.tree_kernels is not None:
            self._sample = runner.tree_kernels.sample
        self._running: Verification | None = None
        self._rows: VerifyRows | None = None
        """Rows of the last step."""

    def drafts(self, requests: Sequence[LiveRequest]) -> DraftTree | None:
        """Trees for the requests' next step; None if it is a plain one. They fit into the contexts
        and, once `make_room` has run, into the pool."""
        most = self._most(requests)
        if most < 2:
            return None
        states = [request.state for request in requests]
        if self._pace is not None and not self._pace.drafts(states, most):
            self._stats.drafts.rested += len(requests)
            return None
        return self._proposer.propose(states, most)

    def rests(self, requests: Sequence[LiveRequest]) -> bool:
        """Whether the requests' next step is a plain one, whatever this one yields."""
        if self._pace is None:
            return False
        states = [request.state for request in requests]
        if self._pace.drafts(states, self._proposer.draft_token_num):
            return False
        self._stats.drafts.rested += len(requests)
        return True

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
        return min(LOOKAHEAD, max([request.num_remaining for request in requests]))

    def launch(self, requests: Sequence[LiveRequest], tree: DraftTree, laps: Laps) -> Verification:
        """Launch a step. Call `commit` once the requests have taken its tokens."""
        with torch.inference_mode(False):
            runner = self._runner
            step = VerifyStep(
                [request.state for request in requests],
                tree,
                self._cache.steps,
                runner.verify_graphs,
                ahead=partial(self._ahead, requests),
                rows=self._rows,
            )
            self._rows, tree = step.rows, step.tree
            laps.lap("allocate")
            logits = runner.forward(step.step, step.step.last_indices, laps)
            samplers = [request.sampler for request in requests]
            draws = upcoming(samplers, tree.depths.tolist())
            if draws and not self._accept.exact:
                answer = partial(sampled_paths, tree, logits, draws, self._accept, self._sample)
            else:
                answer = partial(followed_paths, HostTrees.of(tree), sample(logits, draws))
            self._running = running = Verification(step, answer, self._stats.drafts)
            step.take_ahead()
        laps.lap("sample")
        return running

    def commit(self, requests: Sequence[LiveRequest], *, is_whole: bool) -> None:
        """Keep the K and V of the tokens that the requests took, and free all other slots.

        is_whole: whether they took all of them.
        """
        running, self._running = self._running, None
        if running is None:
            return
        running.commit(None if is_whole else [len(one.state.token_ids) for one in requests])
        if self._pace is not None:
            states = [request.state for request in requests]
            self._pace.count(states, running.accepted, running.depth)

    def time(self, requests: Sequence[LiveRequest], laps: Laps, *, verified: bool) -> None:
        """Count the time of a step that decoded."""
        if self._pace is not None:
            drafting = laps.seconds["draft"]
            seconds = sum(laps.seconds.values()) - laps.seconds["stream"]
            self._pace.time(len(requests), seconds, drafting=drafting, verified=verified)

    def forget(self) -> None:
        """Drop a step that failed."""
        self._running = self._rows = None

    def keep_only(self, requests: Iterable[LiveRequest]) -> None:
        """Free the drafting memory of requests that have ended."""
        self._rows = None
        self._proposer.keep_only([request.state for request in requests])

    def _most(self, requests: Sequence[LiveRequest]) -> int:
        """Nodes for which every context, the model's longest row and the pool have room."""
        steps = self._cache.steps
        longest = max([request.state.num_cached for request in requests])
        most = min(
            self._proposer.draft_token_num,
            max([request.num_remaining for request in requests]),
            steps.max_context_len - longest,
        )
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


def _check_states(proposer: Proposer, states: LinearStatePool) -> None:
    num, most = proposer.draft_token_num, states.draft_tokens
    if proposer.topk > 1:
        got = f"trees with {proposer.topk} branches, for a model with linear layers"
        raise InvalidInput("drafts", got=got, expected="chains (topk=1): branches have no states")
    if num > most:
        got = f"drafts of {num} tokens, for linear layers with states of {most}"
        expected = f"a runner with RunnerOptions.draft_tokens={num}, or shorter drafts"
        raise InvalidInput("drafts", got=got, expected=expected)
