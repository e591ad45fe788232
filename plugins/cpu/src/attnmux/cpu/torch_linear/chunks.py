"""The recurrence of linear layers in chunks: matrix products within a chunk, a loop over chunks.

Within a chunk of C tokens, G_i is the sum of g up to and with token i, and S the state before the
chunk. Unrolled, the recurrence of `LinearLayerSpec` reads

    (I + diag(beta) L) U = diag(beta) (V - (exp(G) K) S)     L_ij = k_i . exp(G_i - G_j) k_j, j < i
    O = scaling * ((exp(G) Q) S + M U)                       M_ij = q_i . exp(G_i - G_j) k_j, j <= i
    S' = exp(G_C) S + (exp(G_C - G) K)^T U

with L = 0 for kinds without the delta rule. Only differences of G with i >= j are exponentiated,
so that nothing overflows however strong the decay is. Source: Yang et al., Gated Delta Networks,
arXiv:2412.06464, section 3.3; a decay for each channel as in Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 64
CHANNEL_CHUNK = 16
"""For a decay of each channel, whose products take a pass for each token of a chunk."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunks:
    """The places of a step's tokens in chunks of `size`, request by request."""

    size: int
    tokens: torch.Tensor
    """[N, size] int64: the token at each place; 0 if there is none."""
    filled: torch.Tensor
    """[N, size] bool: whether there is one."""
    order: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """For the first, second, … chunk of the requests: (requests that have one, the chunks)."""

    @classmethod
    def of(cls, lens: list[int], size: int, device: torch.device) -> Chunks:
        """lens: new tokens of each request; their tokens lie one after another."""
        first_token = 0
        rows: list[list[int]] = []
        filled: list[list[bool]] = []
        order: dict[int, list[tuple[int, int]]] = {}
        for request, length in enumerate(lens):
            for rank, start in enumerate(range(0, length, size)):
                order.setdefault(rank, []).append((request, len(rows)))
                count = min(size, length - start)
                rows.append([*range(first_token + start, first_token + start + count)])
                rows[-1] += [0] * (size - count)
                filled.append([True] * count + [False] * (size - count))
            first_token += length
        pairs = [torch.tensor(order[rank], device=device) for rank in sorted(order)]
        return cls(
            size=size,
            tokens=torch.tensor(rows, dtype=torch.int64, device=device).view(-1, size),
            filled=torch.tensor(filled, dtype=torch.bool, device=device).view(-1, size),
            order=tuple((pair[:, 0], pair[:, 1]) for pair in pairs),
        )

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """[N, heads, size, ...] float32 of values [T, heads, ...]: 0 if there is no token."""
        filled = self.filled.view(*self.filled.shape, *[1] * (values.dim() - 1))
        taken = torch.where(filled, values[self.tokens].float(), 0.0)
        return taken.transpose(1, 2)

    def join(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write values [N, heads, size, ...] to the tokens of out [T, heads, ...]."""
        picked = values.transpose(1, 2)[self.filled]
        out[self.tokens[self.filled]] = picked.to(out.dtype)


def run_chunks(
    chunks: Chunks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    *,
    has_delta_rule: bool,
) -> torch.Tensor:
    """The outputs [N, H, C, V], without scaling; `states` [B, H, K, V] become those afterwards.

    q, k: [N, H, C, K]; v: [N, H, C, V]; g: [N, H, C, 1] or [N, H, C, K]; beta: [N, H, C, 1], all
    float32. A place without a token has 0 in all.
    """
    decay = g.cumsum(-2)
    last = decay[..., -1:, :]
    later = torch.cat([g[..., 1:, :], torch.zeros_like(last)], dim=-2).flip(-2).cumsum(-2).flip(-2)
    grown, left = decay.exp(), later.exp() * k
    among = _products(q, k, g).tril()
    values = v if beta is None else beta * v
    known = grown * k
    if has_delta_rule:
        assert beta is not None
        held = beta * _products(k, k, g)
        both = torch.cat([values, beta * known], dim=-1)
        solved = torch.linalg.solve_triangular(held, both, upper=False, unitriangular=True)
        values, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    out = torch.empty_like(v)
    for requests, places in chunks.order:
        state, added = states[requests], values[places]
        if has_delta_rule:
            added = added - known[places] @ state
        out[places] = (grown[places] * q[places]) @ state + among[places] @ added
        kept = last[places].exp().transpose(-1, -2) * state
        states[requests] = kept + left[places].transpose(-1, -2) @ added
    return out


def _products(left: torch.Tensor, right: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """[N, H, C, C]: left_i . exp(G_i - G_j) right_j for j <= i; undefined elsewhere.

    G_i - G_j is summed over the tokens in between: the difference of two long sums would be
    inexact after a token that forgets everything.
    """
    if g.shape[-1] == 1:
        between = g.expand(*g.shape[:-1], g.shape[-2]).tril(-1).cumsum(-2)
        return (left @ right.transpose(-1, -2)) * between.exp()
    columns = []
    for j in range(g.shape[-2]):
        between = torch.cat([torch.zeros_like(g[..., : j + 1, :]), g[..., j + 1 :, :]], dim=-2)
        column = between.cumsum(-2).exp() * left * right[..., j : j + 1, :]
        columns.append(column.sum(-1))
    return torch.stack(columns, dim=-1)
