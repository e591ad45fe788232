"""What every emulator computes in the end: dense attention over padded batches, in float64.

Shapes are static and nothing is read on the host, so that a recorded step can be replayed. Results
are rounded to float32, which hides how a matrix product was split up: a batch of another size may
be split otherwise. It shares no code with `attnmux.testing.reference`, which emulated backends are
compared with.
"""

from __future__ import annotations

import torch
from torch.library import Library


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float | torch.Tensor,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rounded_weights: tuple[torch.dtype, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of B padded requests.

    q: [B, Tq, Hq, D]. k: [B, S, Hkv, D]. v: [B, S, Hkv, Dv]. keep: [B, Tq, S] bool. Where keep is
    False, K may hold anything and V anything finite.
    scale: a number, or a tensor that broadcasts to the logits [B, Hkv, G, Tq, S].
    sinks: [Hq], a logit each that takes part in the denominator alone.
    rounded_weights: what the weights are rounded to before they meet V, and what a row's largest
    is then. The denominator is of those before.
    Returns out [B, Tq, Hq, Dv] and lse [B, Tq, Hq], natural logarithm, float32; a row without keys
    has out 0 and lse -inf, with sinks the sink.
    """
    scales, number = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, scale)
    weights, largest = rounded_weights or (None, 1.0)
    out, lse = torch.ops.attnmux_emulated.attend(
        q, k, v, keep, scales, number, softcap, sinks, weights, largest
    )
    return out, lse


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    scales: torch.Tensor | None,
    number: float,
    softcap: float,
    sinks: torch.Tensor | None,
    weights: torch.dtype | None,
    largest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request after the other: only the rows that see a key, and the keys that a row sees."""
    batch_size, num_queries, num_heads, _ = q.shape
    kv_heads = k.shape[2]
    out = q.new_zeros((batch_size, num_queries, num_heads, v.shape[-1]), dtype=torch.float32)
    lse = out.new_full((num_heads,), -torch.inf) if sinks is None else sinks.float()
    lse = lse.expand(out.shape[:-1]).clone()
    if scales is not None:
        shape = (batch_size, kv_heads, num_heads // kv_heads, num_queries, k.shape[1])
        scales = scales.expand(shape)
    for request, sees in enumerate(keep):
        rows, keys = (sees.any(axis).nonzero().flatten() for axis in (1, 0))
        if not v[request].sum(dtype=torch.float64).isfinite():
            # A weight of 0 makes no zero of these.
            rows, keys = (torch.arange(size, device=q.device) for size in sees.shape)
        if len(rows):
            scale = number if scales is None else scales[request][..., rows, :][..., keys]
            out[request, rows], lse[request, rows] = _softmax(
                q[request, rows],
                k[request, keys],
                v[request, keys],
                sees[rows][:, keys],
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                weights=weights,
                largest=largest,
            )
    return out, lse


def _softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float | torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
    weights: torch.dtype | None,
    largest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of one request: q [Tq, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv], keep [Tq, S]."""
    kv_heads = k.shape[1]
    queries = q.double().reshape(len(q), kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
    keys, values = (rows.double().transpose(0, 1).unsqueeze(1) for rows in (k, v))
    logits = (queries @ keys.mT) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~keep, -torch.inf)
    # exp(-inf - -inf) is NaN; a row without keys has weights 0.
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top.isneginf(), 0)
    shares = torch.exp(logits - top)
    total = shares.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double().view(kv_heads, -1, 1, 1) - top)
    if weights is not None:
        shares = (shares * largest).to(weights).double() / largest
    out = shares @ values / total.clamp(min=torch.finfo(total.dtype).tiny)
    lse = (total.log() + top).squeeze(-1)
    return out.permute(2, 0, 1, 3).flatten(1, 2).float(), lse.permute(2, 0, 1).flatten(1).float()


library = Library("attnmux_emulated", "DEF")  # type: ignore[no-untyped-call]  # torch's
library.define(  # type: ignore[no-untyped-call]  # as above
    "attend(Tensor q, Tensor k, Tensor v, Tensor keep, Tensor? scales, float number, float softcap,"
    " Tensor? sinks, ScalarType? weights, float largest) -> (Tensor, Tensor)"
)
library.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above


def finite_values(v: torch.Tensor, loads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """V for one product over the keys of all requests, where a weight of 0 would let NaN through.

    v: [S, …]. loads: [T, S] bool, the keys that each row's kernel loads.
    Returns v with 0 in place of NaN and infinities, and which rows load one of these: [T] bool.
    """
    is_finite = v.isfinite()
    spoils = ~is_finite.flatten(1).all(1)
    return v.masked_fill(~is_finite, 0), (loads & spoils).any(1)


def token_places(cu_seqlens: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each packed token, B after the last request's, and its place in the request.

    cu_seqlens: [B + 1] int32. Returns two [num_tokens] int64.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    request = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    starts = torch.cat([cu_seqlens, cu_seqlens.new_zeros(1)])
    return request, tokens - starts[request]


def padded(packed: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """[B, longest, …] of packed [total, …]; after a request's end come other rows."""
    columns = torch.arange(longest, device=packed.device)
    rows = cu_seqlens[:-1].long().unsqueeze(1) + columns
    if not packed.shape[0]:
        return packed.new_zeros((*rows.shape, *packed.shape[1:]))
    return packed[rows.clamp(max=packed.shape[0] - 1)]


def unpadded(batched: torch.Tensor, cu_seqlens: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The rows of batched [B, longest, …] back in packed order, and `into`'s where there are none.

    into: [total, …]; rows after the last request's keep their values.
    """
    request, place = token_places(cu_seqlens, into.shape[0])
    num_requests, longest = batched.shape[:2]
    if not num_requests or not longest:
        return into.clone()
    rows = request.clamp(max=num_requests - 1) * longest + place.clamp(min=0, max=longest - 1)
    taken = batched.flatten(0, 1)[rows].to(into.dtype)
    belongs = (request < num_requests).view(-1, *[1] * (into.dim() - 1))
    return torch.where(belongs, taken, into)
