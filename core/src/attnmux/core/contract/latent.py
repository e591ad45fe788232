"""The up-projection of latent attention (MLA), and the two ways to run a layer through it.

`kv_b_proj` expands the cached latent [rank] to every head's K without its rotary part [nope] and V
[v]. Expanded, the heads attend with nope + rope and v dims. Absorbed, K's half of the matrix moves
into Q and V's half into the output, and all heads share one latent head of rank + rope and rank
dims (DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UpProjection:
    """The weight [H * (nope + v), rank] that expands the latent to every head's K and V."""

    weight: torch.Tensor
    num_heads: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Rows of a head: its K without the rotary part, then its V."""
        return self.weight.shape[0] // self.num_heads

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.v_head_dim

    @property
    def rank(self) -> int:
        return self.weight.shape[1]

    @property
    def w_uk(self) -> torch.Tensor:
        """[H, nope, rank], a view of the weight."""
        return self._by_head()[:, : self.nope_dim]

    @property
    def w_uv(self) -> torch.Tensor:
        """[H, v, rank], a view of the weight."""
        return self._by_head()[:, self.nope_dim :]

    def absorbed_queries(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(`q` [T, H, rank], `q_rope` [T, H, rope]) of the heads' queries [T, H, nope + rope]."""
        nope = torch.bmm(q.transpose(0, 1)[..., : self.nope_dim], self.w_uk)
        # Parts of one row, so that kernels that want it whole need no copy
        rows = torch.cat([nope.transpose(0, 1), q[..., self.nope_dim :]], dim=-1)
        return rows[..., : self.rank], rows[..., self.rank :]

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """The heads' outputs [T, H, v] of absorbed attention's [T, H, rank]."""
        return torch.bmm(out.transpose(0, 1), self.w_uv.transpose(1, 2)).transpose(0, 1)

    def expand(self, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K [n, H, nope + rope] and V [n, H, v] of latent rows [n, rank + rope]."""
        latent = rows[:, : self.rank].expand(self.num_heads, -1, -1)
        for weight, into in ((self.w_uk, k[..., : self.nope_dim]), (self.w_uv, v)):
            torch.bmm(latent, weight.detach().transpose(1, 2), out=into.transpose(0, 1))
        k[..., self.nope_dim :] = rows[:, None, self.rank :]

    def _by_head(self) -> torch.Tensor:
        return self.weight.view(self.num_heads, self.head_dim, self.rank)
