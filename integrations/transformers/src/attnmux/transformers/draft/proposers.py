"""Proposers, which guess the next tokens of requests, and guesses from their own texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from attnmux.core import InvalidInput
from attnmux.parts import DraftTree
from attnmux.transformers.requests.sequence import SequenceState

OCCURRENCES = 32
"""The most occurrences of one n-gram that a lookup reads. In a text of few different tokens nearly
all of them go on alike."""


class Proposer(Protocol):
    """Guesses the next tokens of decoding requests. The target model decides which are right."""

    @property
    def draft_token_num(self) -> int:
        """The most nodes of a request's tree, the root included."""

    @property
    def topk(self) -> int:
        """Branches of a tree; 1 if all trees are chains."""

    def propose(self, states: Sequence[SequenceState], num_tokens: int) -> DraftTree | None:
        """Trees of one size, of at most `num_tokens` nodes; None without a guess for any request.

        The root of each tree is the request's one pending token. The trees are on the host, except
        `visible`, which may be on the target's device.
        """

    def keep_only(self, states: Collection[SequenceState]) -> None:
        """Free the memory of all other requests: they have ended or wait for memory."""


class NgramProposer:
    """Drafts the tokens that followed a request's last tokens at an earlier place in it."""

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
                InvalidInput.check_at_least(1, argument, value)
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
        trees = [self._tree(state, most) for state in states]
        longest = max((len(tokens) for tokens, _ in trees), default=0)
        if not longest:
            return None
        rows = []
        for state, (tokens, _) in zip(states, trees, strict=True):
            row = [state.token_ids[-1], *tokens]
            rows.append(row + row[-1:] * (longest + 1 - len(row)))
        draft_tokens = torch.from_numpy(np.array(rows))
        if self.topk == 1:
            return DraftTree.chains(draft_tokens)
        links = [[-2, *above, *range(len(above) - 1, longest - 1)] for _, above in trees]
        parents = torch.from_numpy(np.array(links) + 1)
        return DraftTree.of(draft_tokens, parents, topk=self.topk)

    def keep_only(self, states: Collection[SequenceState]) -> None:
        """Nothing to do: the index of a request's text goes with the request."""

    def _tree(self, state: SequenceState, most: int) -> tuple[list[int], Sequence[int]]:
        index = self._indices.get(state)
        if index is None:
            index = NgramIndex(min_ngram=self._min_ngram, max_ngram=self._max_ngram)
            self._indices[state] = index
        if self.topk == 1:
            (chain,) = index.chains(state.token_ids, depth=min(self.steps, most), width=1) or ([],)
            return chain, range(-1, len(chain) - 1)
        return index.tree(state.token_ids, num_tokens=most, depth=self.steps, topk=self.topk)


class NgramIndex:
    """Where each n-gram of one growing text ends.

    A lookup takes the longest suffix of the text, of `min_ngram` to `max_ngram` tokens, that
    occurred before. Recent occurrences come first.
    """

    def __init__(self, *, min_ngram: int = 1, max_ngram: int = 4) -> None:
        """Raises InvalidInput for lengths below 1 and for a smallest above the largest."""
        InvalidInput.check_at_least(1, "min_ngram", min_ngram)
        if max_ngram < min_ngram:
            raise InvalidInput("max_ngram", got=max_ngram, expected=f"at least {min_ngram}")
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._num_indexed = 0

    def chains(self, token_ids: Sequence[int], *, depth: int, width: int) -> list[list[int]]:
        """Up to `width` different continuations of `depth` tokens each, the likeliest first.

        token_ids: the text. It begins with the text of the last call. An occurrence close to the
        end of the text goes on with its own continuation, as a period does.
        """
        self._index(token_ids)
        chains: list[list[int]] = []
        end = len(token_ids)
        for length in self._lengths:
            if length >= end:
                continue
            ends = self._ends.get(tuple(token_ids[end - length :]), ())
            for place in islice(reversed(ends), OCCURRENCES):
                if place < end:
                    chain = _continuation(token_ids, place, depth)
                    if chain not in chains:
                        chains.append(chain)
                if len(chains) == width:
                    return chains
        return chains

    def tree(
        self, token_ids: Sequence[int], *, num_tokens: int, depth: int, topk: int
    ) -> tuple[list[int], list[int]]:
        """Up to `topk` continuations merged if they begin alike: tokens and parents.

        num_tokens: nodes at most, without the root. A parent is the index of an earlier node, or -1
        for the root. The likeliest continuation is the first nodes, in order.
        """
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}
        for chain in self.chains(token_ids, depth=min(depth, num_tokens), width=topk):
            node = -1
            for token in chain:
                child = children.get((node, token))
                if child is None:
                    if len(tokens) == num_tokens:
                        return tokens, parents
                    child = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return tokens, parents

    def _index(self, token_ids: Sequence[int]) -> None:
        """Note the n-grams of the new tokens. One ends before the token at its place."""
        for end in range(self._num_indexed + 1, len(token_ids) + 1):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(token_ids[end - length : end])].append(end)
        self._num_indexed = len(token_ids)


def _continuation(token_ids: Sequence[int], place: int, depth: int) -> list[int]:
    chain = list(token_ids[place : place + depth])
    period = len(token_ids) - place
    while len(chain) < depth:
        chain.append(chain[-period])
    return chain
