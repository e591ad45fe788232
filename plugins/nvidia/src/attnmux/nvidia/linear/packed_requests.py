"""An extend step of linear layers as kernels take it that want no request without tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from attnmux.core.plugin import NewTokens, StatePool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRequests:
    """The requests of an extend step, and those of them that have new tokens."""

    tokens: NewTokens
    active: torch.Tensor | None
    """[n] int64: the requests with new tokens; None if all have some."""
    indptr: torch.Tensor
    """[n + 1] int32: their first tokens, and the end of the last."""
    begun: torch.Tensor
    """[n] bool: which of them start from a state."""

    @classmethod
    def of(cls, tokens: NewTokens) -> PackedRequests:
        device, lens = tokens.starts.device, tokens.lens
        filled = [request for request, count in enumerate(lens) if count]
        ends = [0, *accumulate(lens[request] for request in filled)]
        active = None
        if len(filled) < len(lens):
            active = torch.tensor(filled, dtype=torch.int64, device=device)
        begun = ~tokens.fresh
        return cls(
            tokens=tokens,
            active=active,
            indptr=torch.tensor(ends, dtype=torch.int32, device=device),
            begun=begun if active is None else begun[active],
        )

    def start(self, pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[B, ...] the states before the step, zeros if a request starts."""
        return StatePool.read(pool, rows, self.tokens.fresh)

    def of_active(self, states: torch.Tensor) -> torch.Tensor:
        """[n, ...] of states [B, ...]."""
        return states if self.active is None else states[self.active]

    def finish(
        self, pool: torch.Tensor, rows: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> None:
        """Write states after [n, ...] to the requests' rows, and those before [B, ...] to the rows
        of requests without new tokens. Overwrites `before`."""
        if self.active is not None:
            after = before.index_copy_(0, self.active, after)
        pool.index_copy_(0, rows, after)
