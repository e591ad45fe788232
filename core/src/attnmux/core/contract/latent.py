"""The up-projection of latent attention (MLA), and the two ways to run a layer through it.

`kv_b_proj` expands the cached latent [rank] to every head's K without its rotary part [nope] and V
[v]. Expanded, the heads attend with nope + rope and v dims. Absorbed, K's half of the matrix moves
into Q and V's half into the output, and all heads share one latent head of rank + rope and rank
dims (DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UpProjection:
    """Expands the latent to every head's K and V."""

    w_uk: torch.Tensor
    """[H, nope, rank]: of K without its rotary part."""
    w_uv: torch.Tensor
    """[H, v, rank]: of V."""
    multiply: Callable[[torch.Tensor], torch.Tensor]
    """From the latent [n, rank] to [n, H * (nope + v)]: each head's K, then its V."""

    @classmethod
    def of(cls, weight: torch.Tensor, *, num_heads: int, v_head_dim: int) -> UpProjection:
        """By the weight [H * (nope + v), rank], which is not copied."""
        weight = weight.detach()
        by_head = weight.view(num_heads, -1, weight.shape[1])
        nope_dim = by_head.shape[1] - v_head_dim
        return cls(
            w_uk=by_head[:, :nope_dim],
            w_uv=by_head[:, nope_dim:],
            multiply=partial(linear, weight=weight),
        )

    @property
    def num_heads(self) -> int:
        return self.w_uk.shape[0]

    @property
    def nope_dim(self) -> int:
        return self.w_uk.shape[1]

    @property
    def v_head_dim(self) -> int:
        return self.w_uv.shape[1]

    @property
    def rank(self) -> int:
        return self.w_uk.shape[2]

    def absorbed_queries(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(`q` [T, H, rank], `q_rope` [T, H, rope]) of the heads' queries [T, H, nope + rope]."""
        nope = torch.bmm(q.transpose(0, 1)[..., : self.nope_dim], self.w_uk)
        # Parts of one row, so that kernels that want it whole need no copy
        rows = torch.cat([nope.transpose(0, 1), q[..., self.nope_dim :]], dim=-1)
        return rows[..., : self.rank], rows[..., self.rank :]

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """The heads' outputs [T, H, v] of absorbed attention's [T, H, rank]."""
        return torch.bmm(out.transpose(0, 1), self.w_uv.transpose(1, 2)).transpose(0, 1)

    def expand(
        self, latent: torch.Tensor, k_rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [n, H, nope + rope] and V [n, H, v] of a latent [n, rank] and rotary K [n, rope]."""
        head_dim = self.nope_dim + self.v_head_dim
        heads = self.multiply(latent).view(len(latent), self.num_heads, head_dim)
        nope, v = heads.tensor_split([self.nope_dim], dim=-1)
        rope = k_rope.unsqueeze(1).expand(-1, self.num_heads, -1)
        return torch.cat([nope, rope], dim=-1), v

    def expand_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`expand` of rows [n, rank + rope], as a pool holds them."""
        return self.expand(rows[:, : self.rank], rows[:, self.rank :])
