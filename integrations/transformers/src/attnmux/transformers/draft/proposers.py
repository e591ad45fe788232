"""Who guesses the next tokens of requests, and guesses from their own texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from attnmux.core import DraftTree, InvalidInput, check_at_least
from attnmux.transformers.draft.ngram import NgramIndex
from attnmux.transformers.requests.sequence import SequenceState


class Proposer(Protocol):
    """Guesses the next tokens of decoding requests. The target model decides which are right."""

    @property
    def draft_token_num(self) -> int:
        """The most nodes of a request's tree, the root included."""

    @property
    def topk(self) -> int:
        """Branches of a tree; 1 where all trees are chains."""

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
        counts = {"draft_token_num": draft_token_num, "topk": topk, "steps": steps}
        for argument, value in counts.items():
            if value is not None:
                check_at_least(1, argument, value)
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
