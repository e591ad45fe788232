"""Compares a layer's outputs for some tokens of one request with the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core import AttentionCall, BackendContext, ForwardBatch, KVPool
from attnmux.testing.reference.sampled import Expected, RequestView, expected_at
from attnmux.testing.run.comparison import Tolerance, lse_tolerance, output_tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The value whose error is the largest part of its tolerance."""

    ratio: float
    """The error divided by the tolerance; infinite if the value is not a number."""
    expected: float
    got: float
    token: int
    """Index among the step's T tokens."""
    head: int
    dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The figures of a comparison. `output` is None if the reference itself is not finite: then Q,
    K or V are not, and the model is at fault."""

    output: Worst | None
    lse: Worst | None
    """None without an LSE too."""


def slots_of(context: BackendContext, rows: torch.Tensor, length: int) -> torch.Tensor:
    """The slots of the first `length` tokens of some rows of the request table, [n, length] int64.

    Reads these rows alone, as pages if the engine keeps pages.
    """
    table, tokens = context.req_to_token_pool.columns_for(context.token_to_kv_pool.page_size)
    columns = table[rows, : -(-length // tokens)].long().unsqueeze(-1)
    offsets = torch.arange(tokens, device=table.device)
    return (columns * tokens + offsets).flatten(1)[:, :length]


def compare_request(
    context: BackendContext,
    call: AttentionCall,
    batch: ForwardBatch,
    result: torch.Tensor,
    request: RequestView,
    offsets: Sequence[int],
    heads: range,
) -> Compared:
    """Compare output and LSE of some new tokens and of query heads that share a KV head.

    result: [T, Hq, Dv]. offsets: indices among the request's new tokens, ascending.
    """
    layer = call.layer
    pool = context.token_to_kv_pool.of_layers((layer.layer_id,))
    eight_bits = pool.dtype in KVPool.FP8_DTYPES and not call.has_own_kv
    tokens = torch.tensor(offsets, device=call.q.device) + request.first_token
    of_heads = slice(heads.start, heads.stop)
    parts = [call.q] if call.q_rope is None else [call.q, call.q_rope]
    q = torch.cat([part[tokens, of_heads] for part in parts], dim=-1)
    # A backend that multiplies 8-bit floats rounds Q too
    queries = [q, KVPool.quantise(q, pool.dtype, None).to(q.dtype)] if eight_bits else [q]
    row = torch.tensor([request.row], device=context.req_to_token_pool.device)
    slots = slots_of(context, row, request.encoder + max(request.cached, 0) + request.new)[0]
    expected = [
        expected_at(call, batch, slots, pool, request, offsets, heads, one) for one in queries
    ]
    finite = expected[0].out.isfinite().all(-1)
    if not bool(finite.any()):
        return Compared(output=None, lse=None)
    tolerance = output_tolerance(call.q.dtype, pool.dtype, fp8_products=eight_bits)
    got = result[tokens, of_heads].double()
    ratios = [_ratios(got, one, tolerance) for one in expected]
    of_rows = torch.stack([each.amax(-1) for each in ratios]).amin(0)
    at, head = _largest(of_rows.masked_fill(~finite, -1))
    dim = int(ratios[0][at, head].argmax())
    output = Worst(
        ratio=float(of_rows[at, head]),
        expected=float(expected[0].out[at, head, dim]),
        got=float(got[at, head, dim]),
        token=int(tokens[at]),
        head=heads[head],
        dim=dim,
    )
    if call.lse is None:
        return Compared(output=output, lse=None)
    bound = lse_tolerance(layer, call.q.dtype, pool.dtype, fp8_products=eight_bits, rounds_q=True)
    lse = call.lse[tokens, of_heads].double()
    of_rows = torch.stack(
        [_over(lse, one.lse, bound.atol + bound.rtol * one.lse.abs()) for one in expected]
    ).amin(0)
    at, head = _largest(of_rows.masked_fill(~finite, -1))
    worst_lse = Worst(
        ratio=float(of_rows[at, head]),
        expected=float(expected[0].lse[at, head]),
        got=float(lse[at, head]),
        token=int(tokens[at]),
        head=heads[head],
    )
    return Compared(output=output, lse=worst_lse)


def _ratios(got: torch.Tensor, expected: Expected, tolerance: Tolerance) -> torch.Tensor:
    """[n, H, Dv]: errors as parts of the tolerance. The suite's absolute tolerance holds for values
    of about 1; here it is scaled to the size of the values that attention added up."""
    allowed = tolerance.atol * expected.scale.unsqueeze(-1) + tolerance.rtol * expected.out.abs()
    return _over(got, expected.out, allowed)


def _over(got: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """|got - expected| / allowed; 0 if they are equal, infinite for NaN."""
    ratio = ((got - expected).abs() / allowed).nan_to_num(torch.inf, posinf=torch.inf)
    return torch.where(got == expected, 0.0, ratio)


def _largest(values: torch.Tensor) -> tuple[int, int]:
    """The place of the largest of [n, H] values."""
    row, column = divmod(int(values.argmax()), values.shape[1])
    return row, column
