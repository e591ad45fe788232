"""What kernels that work by tiles and by equal numbers of queries are given beyond the requests'.

Drafts may be of different numbers a request, and the kernels take as many queries of each.

The queries of a request come first and are followed by others that nobody reads. The kernels count
causality from the end of the keys, so that a request with fewer queries is said to have as many
more keys: only the queries that nobody reads see those, in what is left over in its last page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.indices import segment_of_place
from attnmux.nvidia.page_tables import Keys


def keep_to_own_pages(keys: Keys, page_size: int) -> None:
    """Repeat a request's last page behind it: kernels load whole tiles of a table.

    What lies in other pages may be not finite, and a weight of 0 makes no zero of that.
    """
    table = keys.page_table
    last = (keys.lens.clamp(min=1) - 1).div(page_size, rounding_mode="floor").unsqueeze(1)
    columns = torch.arange(table.shape[1], device=table.device).expand(len(table), -1)
    table.copy_(table.gather(1, torch.minimum(columns, last)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Padding:
    """A step of B requests with `each` queries, of which the first are a request's own."""

    batch_size: int
    each: int
    rows: torch.Tensor
    """[T] int64: where the tokens are among the B * each rows; one row behind them for tokens of
    no request."""
    kv_lens: torch.Tensor
    """[B] int32."""

    @classmethod
    def of(
        cls, bounds: torch.Tensor, kv_lens: torch.Tensor, *, each: int, num_tokens: int
    ) -> Padding:
        """bounds: [B + 1] int32, where each request's tokens begin. kv_lens: [B] int32."""
        batch_size = len(kv_lens)
        tokens = torch.arange(num_tokens, device=bounds.device)
        request = segment_of_place(bounds, num_tokens)
        rows = request * each + tokens - bounds[request]
        return cls(
            batch_size=batch_size,
            each=each,
            rows=torch.where(request < batch_size, rows, batch_size * each),
            kv_lens=kv_lens + each - bounds.diff(),
        )

    def spread(self, q: torch.Tensor) -> torch.Tensor:
        """[B, each, …] of tokens [T, …]."""
        wide = q.new_zeros((self.batch_size * self.each + 1, *q.shape[1:]))
        wide.index_copy_(0, self.rows, q)
        return wide[:-1].view(self.batch_size, self.each, *q.shape[1:])

    def gather(self, result: torch.Tensor) -> torch.Tensor:
        """Tokens [T, …] of [B, each, …]; those of no request are 0."""
        wide = torch.cat([result.flatten(0, 1), result.new_zeros((1, *result.shape[2:]))])
        return wide.index_select(0, self.rows)
