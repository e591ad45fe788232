"""Lengths of a step on the host: the operators take them as lists."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from attnmux.core import InvalidInput

if TYPE_CHECKING:
    import torch

    from attnmux.core import ForwardBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLens:
    """Lengths of each request of a step."""

    new: tuple[int, ...]
    """Queries."""
    keys: tuple[int, ...]
    """Keys, with those of the queries."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> HostLens:
        """Raises InvalidInput if the batch lacks its lengths on the host."""
        keys = _on_host("seq_lens_cpu", batch.seq_lens_cpu)
        if batch.forward_mode.is_decode():
            return cls(new=(1,) * len(keys), keys=keys)
        new = _on_host("extend_seq_lens_cpu", batch.extend_seq_lens_cpu)
        if batch.forward_mode.is_target_verify():
            keys = tuple(before + more for before, more in zip(keys, new, strict=True))
        return cls(new=new, keys=keys)

    @property
    def bounds(self) -> list[int]:
        """Where each request's queries end."""
        return list(accumulate(self.new))

    @property
    def num_queries(self) -> int:
        return sum(self.new)

    @property
    def has_one_query_each(self) -> bool:
        """Whether no request has more: then each query sees all keys."""
        return max(self.new, default=0) <= 1

    @property
    def rows_without_keys(self) -> list[int]:
        """Queries that see no key: those of decoding requests without keys."""
        return [
            end - 1
            for end, new, keys in zip(self.bounds, self.new, self.keys, strict=True)
            if new and not keys
        ]

    @property
    def at_least_one_key(self) -> list[int]:
        """Keys of each request. A request without keys counts one: its first table entry is the
        reserved page, which the operators may read."""
        return [max(length, 1) for length in self.keys]


def _on_host(name: str, lens: torch.Tensor | None) -> tuple[int, ...]:
    if lens is None:
        raise InvalidInput(
            name, got=None, expected="the lengths on the host, as the operators take lists"
        )
    return tuple(lens.tolist())
