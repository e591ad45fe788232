"""Drafts without a model: what followed the text's last tokens where they occurred before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from attnmux.core import InvalidInput, check_at_least

OCCURRENCES = 32
"""The most occurrences of one n-gram that a lookup reads. In a text of few different tokens nearly
all of them go on alike."""


class NgramIndex:
    """Where each n-gram of one growing text ends.

    A lookup takes the longest suffix of the text, of `min_ngram` to `max_ngram` tokens, that
    occurred before. Recent occurrences come first.
    """

    def __init__(self, *, min_ngram: int = 1, max_ngram: int = 4) -> None:
        """Raises InvalidInput for lengths below 1 and for a smallest above the largest."""
        check_at_least(1, "min_ngram", min_ngram)
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
        found: list[list[int]] = []
        end = len(token_ids)
        for length in self._lengths:
            if length >= end:
                continue
            ends = self._ends.get(tuple(token_ids[end - length :]), ())
            for place in islice(reversed(ends), OCCURRENCES):
                if place < end:
                    chain = _continuation(token_ids, place, depth)
                    if chain not in found:
                        found.append(chain)
                if len(found) == width:
                    return found
        return found

    def tree(
        self, token_ids: Sequence[int], *, num_tokens: int, depth: int, topk: int
    ) -> tuple[list[int], list[int]]:
        """Up to `topk` continuations merged where they begin alike: tokens and parents.

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
