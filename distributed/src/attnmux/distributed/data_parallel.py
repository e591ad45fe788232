"""Data parallel attention: each rank attends in a batch of its own, around tensor-parallel layers.

T_n new tokens on rank n of R, H the width of hidden states. Attention and all that works token by
token run on a rank's own tokens. Before a layer whose weights are split over the ranks, `gather`
gives each rank the hidden states of all of them; after it, `reduce_scatter` sums the ranks' parts
and keeps a rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from attnmux.core import InvalidInput
from attnmux.distributed.ranks import RankGroup


class PaddingMode(Enum):
    """How the tokens of all ranks lie in one tensor."""

    MAX_LEN = auto()
    """[R · max(T_n), H]: every rank has as many rows as the largest. An all-gather makes it and a
    reduce-scatter divides it."""
    SUM_LEN = auto()
    """[sum(T_n), H], without padding. An all-reduce makes it and an all-reduce divides it."""

    @classmethod
    def cheapest(cls, num_tokens: Sequence[int]) -> PaddingMode:
        """MAX_LEN if R · max(T_n) ≤ 2 · sum(T_n), else SUM_LEN.

        Either way a rank sends the fewest rows. In a ring, a rank sends (R - 1) / R of the tensor
        for an all-gather or a reduce-scatter, and twice that for an all-reduce, which is a
        reduce-scatter and an all-gather (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce
        algorithms for clusters of workstations").
        """
        padded = len(num_tokens) * max(num_tokens)
        return cls.MAX_LEN if padded <= 2 * sum(num_tokens) else cls.SUM_LEN


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokensOfRanks:
    """The tokens of every rank in a step, on which the ranks have agreed.

    Every rank makes the same calls in the same order, also one without tokens.
    """

    group: RankGroup
    num_tokens: tuple[int, ...]
    """T of each rank."""
    mode: PaddingMode

    @classmethod
    def of(cls, group: RankGroup, num_tokens: Sequence[int]) -> TokensOfRanks:
        """In the cheapest mode."""
        mode = PaddingMode.cheapest(num_tokens)
        return cls(group=group, num_tokens=tuple(num_tokens), mode=mode)

    @classmethod
    def even(cls, group: RankGroup, num_tokens: int) -> TokensOfRanks:
        """The same number of tokens on each rank, as in a captured graph, whose batch is padded."""
        return cls.of(group, (num_tokens,) * group.size)

    @property
    def own(self) -> int:
        """T of this rank."""
        return self.num_tokens[self.group.rank]

    @property
    def num_rows(self) -> int:
        """Rows of the tensor that holds the tokens of all ranks."""
        if self.mode is PaddingMode.MAX_LEN:
            return self.group.size * max(self.num_tokens)
        return sum(self.num_tokens)

    @property
    def rows(self) -> slice:
        """This rank's own rows of that tensor."""
        if self.mode is PaddingMode.MAX_LEN:
            start = self.group.rank * max(self.num_tokens)
        else:
            start = sum(self.num_tokens[: self.group.rank])
        return slice(start, start + self.own)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, ...]: the hidden states of all ranks, with zeros as padding.

        hidden: [T, ...] of this rank. Raises InvalidInput for another number of rows.
        """
        self._check("hidden", hidden, self.own)
        if not self.num_rows:
            return hidden
        if self.mode is PaddingMode.MAX_LEN:
            most = max(self.num_tokens)
            padded = hidden if self.own == most else _padded(hidden, 0, most)
            return self.group.all_gather(padded).flatten(0, 1)
        return self.group.all_reduce(_padded(hidden, self.rows.start, self.num_rows))

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """[T, ...]: the sum of the ranks' parts, for this rank's own tokens.

        parts: [num_rows, ...], which may be overwritten. Raises InvalidInput for another number of
        rows.
        """
        self._check("parts", parts, self.num_rows)
        if not self.num_rows:
            return parts
        if self.mode is PaddingMode.MAX_LEN:
            by_rank = parts.reshape(self.group.size, max(self.num_tokens), *parts.shape[1:])
            return self.group.reduce_scatter(by_rank)[: self.own]
        return self.group.all_reduce(parts)[self.rows]

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """[T, ...]: this rank's own rows of values that every rank has, [num_rows, ...].

        Raises InvalidInput for another number of rows.
        """
        self._check("values", values, self.num_rows)
        return values[self.rows]

    def _check(self, argument: str, values: torch.Tensor, num_rows: int) -> None:
        if not values.dim() or values.shape[0] != num_rows:
            raise InvalidInput(
                argument,
                got=f"shape {tuple(values.shape)}",
                expected=f"{num_rows} rows, as the ranks agreed for {self.num_tokens} tokens "
                f"in {self.mode.name}",
            )


def _padded(values: torch.Tensor, start: int, num_rows: int) -> torch.Tensor:
    """Values as rows `start` and on of zeros [num_rows, ...], newly allocated."""
    padded = values.new_zeros((num_rows, *values.shape[1:]))
    padded[start : start + values.shape[0]] = values
    return padded
