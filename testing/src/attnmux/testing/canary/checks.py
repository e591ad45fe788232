"""The canary's checks of one step. Each yields its findings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from attnmux.core import AttentionCall, AttnmuxError, BackendContext, ForwardBatch, KVPool
from attnmux.testing.canary.watched import Change, kv_memory, rows_at
from attnmux.testing.reference.sampled import Expected, RequestView, expected_at
from attnmux.testing.run.comparison import Tolerance, lse_tolerance, output_tolerance

STORED_ROWS = 64
"""New tokens of a layer whose K and V are compared with the pool."""


class CanaryFinding(AttnmuxError):
    """A checked step broke the contract. Fields that do not apply are None."""

    def __init__(
        self,
        check: str,
        *,
        expected: object,
        got: object,
        step: int,
        layer_id: int | None = None,
        request_row: int | None = None,
        token: int | None = None,
        head: int | None = None,
        slot: int | None = None,
    ) -> None:
        self.check = check
        """"table", "slot", "write", "store", "output" or "LSE"; see `CanaryBackend`."""
        self.expected = expected
        self.got = got
        self.step = step
        self.layer_id = layer_id
        self.request_row = request_row
        """Index in the request table."""
        self.token = token
        """Index among the step's T tokens."""
        self.head = head
        self.slot = slot
        """Index in the layer's buffer."""
        places = {
            "layer": layer_id,
            "request row": request_row,
            "token": token,
            "head": head,
            "slot": slot,
        }
        place = "".join(f", {name} {value}" for name, value in places.items() if value is not None)
        super().__init__(f"canary, step {step}, {check}{place}: expected {expected}, got {got}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckedStep:
    """A step that the canary checks."""

    number: int
    """Among all steps, from 1."""
    context: BackendContext
    requests: tuple[RequestView, ...]

    def slots_read(self) -> torch.Tensor:
        """Slots of all cached tokens of the step's requests, [n] int64, the encoder's included."""
        table = self.context.req_to_token_pool.req_to_token
        ends = [each.encoder + max(each.cached, 0) for each in self.requests]
        rows = self.on_device([each.row for each in self.requests])
        columns = torch.arange(max(ends, default=0), device=table.device)
        held = columns < self.on_device(ends).unsqueeze(1)
        return table[rows, : len(columns)][held].long()

    def on_device(self, values: list[int]) -> torch.Tensor:
        """[n] int64."""
        return torch.tensor(values, dtype=torch.int64, device=self.context.device)

    def check_table(self, batch: ForwardBatch, read: torch.Tensor) -> Iterator[CanaryFinding]:
        """The table names each new token's slot, no other token writes it, and no request reads it.

        read: `slots_read()`.
        """
        tokens: list[int] = []
        rows: list[int] = []
        columns: list[int] = []
        for each in self.requests:
            if each.cached >= 0:
                start = each.encoder + each.cached
                tokens += range(each.first_token, each.first_token + each.new)
                rows += [each.row] * each.new
                columns += range(start, start + each.new)
        loc = batch.out_cache_loc[self.on_device(tokens)]
        table = self.context.req_to_token_pool.req_to_token
        named = table[self.on_device(rows), self.on_device(columns)].long()
        holders = torch.zeros(self.context.token_to_kv_pool.num_slots, dtype=torch.int32)
        holders = holders.to(loc.device)
        holders[read] = 1
        holders.index_add_(0, loc, torch.ones_like(loc, dtype=torch.int32))
        wrong = ((named != loc) | (holders[loc] > 1)) & (loc > 0)
        for index in wrong.nonzero().flatten().tolist():
            slot, in_table, token = int(loc[index]), int(named[index]), tokens[index]
            expected, got = f"slot {in_table}, as in the request table", f"slot {slot}"
            if in_table == slot:
                expected, got = "a slot of its own", f"slot {slot}, which another token has too"
            yield self.finding("table", expected, got, self._request_of(token), token=token)

    def check_stored(
        self, call: AttentionCall, batch: ForwardBatch, draws: random.Random
    ) -> Iterator[CanaryFinding]:
        """The pool holds K and V of the new tokens; of many tokens, of `STORED_ROWS`."""
        layer = call.layer
        pool = self.context.token_to_kv_pool.of_layers((layer.layer_id,))
        assert call.k is not None
        loc = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        if loc is None or layer.layer_id not in pool.layer_ids:
            return
        slots = pool.translate(loc, layer.layer_id)
        tokens = (slots >= pool.page_size).nonzero().flatten()
        if len(tokens) > STORED_ROWS:
            step = -(-len(tokens) // STORED_ROWS)
            tokens = tokens[draws.randrange(step) :: step]
        given = [call.k, call.v]
        if call.k_rope is not None:
            given = [torch.cat([call.k, call.k_rope], dim=-1)]
        parts = [
            KVPool.stored_parts(rows[tokens], pool.dtype, scale)
            for rows, scale in zip(given, (layer.k_scale, layer.v_scale), strict=False)
            if rows is not None
        ]
        names = "K", "V", "scales of K", "scales of V"
        for name, buffer, expected in zip(
            names,
            kv_memory(pool, layer.layer_id),
            chain.from_iterable(zip(*parts, strict=True)),
            strict=False,
        ):
            held = rows_at(buffer, slots[tokens])
            wrong = (expected.contiguous().flatten(1).view(torch.uint8) != held).any(1)
            for index in wrong.nonzero().flatten()[:1].tolist():
                token = int(tokens[index])
                yield self.finding(
                    "store",
                    f"{name} of the call, {_some(expected[index])}",
                    f"{_some(buffer[int(slots[token])])} in {int(wrong.sum())} of {len(tokens)} "
                    "slots",
                    None if layer.is_cross_attention else self._request_of(token),
                    layer_id=layer.layer_id,
                    token=token,
                    slot=int(slots[token]),
                )

    def check_point(
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        result: torch.Tensor,
        request: RequestView,
        offset: int,
        head: int,
    ) -> Iterator[CanaryFinding]:
        """Output and LSE of one new token and one query head agree with the reference."""
        context, layer, token = self.context, call.layer, request.first_token + offset
        table = context.req_to_token_pool.req_to_token
        pool = context.token_to_kv_pool.of_layers((layer.layer_id,))
        q = call.q[token, head]
        if call.q_rope is not None:
            q = torch.cat([q, call.q_rope[token, head]])
        eight_bits = pool.dtype in KVPool.FP8_DTYPES and not call.has_own_kv
        tolerance = output_tolerance(call.q.dtype, pool.dtype, fp8_products=eight_bits)
        # A backend that multiplies 8-bit floats rounds Q too
        queries = [q, KVPool.quantise(q, pool.dtype, None).to(q.dtype)] if eight_bits else [q]
        got = result[token, head]
        lse = None if call.lse is None else float(call.lse[token, head])
        expected = [
            expected_at(call, batch, table, pool, request, offset, head, one) for one in queries
        ]
        if not bool(expected[0].out.isfinite().all()):
            return  # Q, K or V are not finite: the model is at fault, and not the backend
        found = partial(self.finding, request=request, layer_id=layer.layer_id)
        if not any(_agrees(got, one, tolerance) for one in expected):
            worst = int((got.double() - expected[0].out).abs().nan_to_num(torch.inf).argmax())
            said = f"{float(expected[0].out[worst]):.6g} in dim {worst}"
            yield found("output", said, f"{float(got[worst]):.6g}", token=token, head=head)
        bound = lse_tolerance(
            layer, call.q.dtype, pool.dtype, fp8_products=eight_bits, rounds_q=True
        )
        if lse is not None and not any(_is_close(lse, one.lse, bound) for one in expected):
            yield found("LSE", f"{expected[0].lse:.6g}", f"{lse:.6g}", token=token, head=head)

    def _request_of(self, token: int) -> RequestView | None:
        for each in self.requests:
            if each.first_token <= token < each.first_token + each.new:
                return each
        return None

    def changed(self, check: str, change: Change, expected: str) -> CanaryFinding:
        """The finding for a slot whose bits changed."""
        got = f"hash {change.after:#x} after {change.before:#x}"
        return self.finding(check, expected, got, layer_id=change.layer_id, slot=change.slot)

    def finding(
        self,
        check: str,
        expected: object,
        got: object,
        request: RequestView | None = None,
        *,
        layer_id: int | None = None,
        token: int | None = None,
        head: int | None = None,
        slot: int | None = None,
    ) -> CanaryFinding:
        """A finding in this step."""
        return CanaryFinding(
            check,
            expected=expected,
            got=got,
            step=self.number,
            layer_id=layer_id,
            request_row=None if request is None else request.row,
            token=token,
            head=head,
            slot=slot,
        )


def _agrees(got: torch.Tensor, expected: Expected, tolerance: Tolerance) -> bool:
    """Whether [Dv] values agree. The suite's absolute tolerance holds for values of about 1; here
    it is scaled to the size of the values that attention added up."""
    atol = tolerance.atol * expected.scale
    return torch.allclose(got.double(), expected.out, rtol=tolerance.rtol, atol=atol)


def _is_close(got: float, expected: float, tolerance: Tolerance) -> bool:
    return got == expected or abs(got - expected) <= tolerance.atol + tolerance.rtol * abs(expected)


def _some(row: torch.Tensor) -> str:
    """The first values of a slot's row, for a message."""
    return str([round(value, 4) for value in row.flatten()[:3].float().tolist()])[:-1] + ", …]"
