"""The canary's checks of one step. Each yields its findings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from attnmux.core import AttentionCall, AttnmuxError, BackendContext, ForwardBatch, KVPool
from attnmux.testing.canary.outputs import Worst, compare_request
from attnmux.testing.canary.watched import Change, kv_memory, rows_at
from attnmux.testing.reference.sampled import RequestView

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
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        draws: random.Random,
        request: RequestView | None = None,
    ) -> Iterator[CanaryFinding]:
        """The pool holds K and V of the new tokens; of many tokens, of `STORED_ROWS`.

        request: the only one whose tokens are compared.
        """
        layer = call.layer
        pool = self.context.token_to_kv_pool.of_layers((layer.layer_id,))
        assert call.k is not None
        loc = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        if loc is None or layer.layer_id not in pool.layer_ids:
            return
        slots = pool.translate(loc, layer.layer_id)
        tokens = (slots >= pool.page_size).nonzero().flatten()
        if request is not None:
            of_request = tokens - request.first_token
            tokens = tokens[(of_request >= 0) & (of_request < request.new)]
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

    def check_tokens(
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        result: torch.Tensor,
        request: RequestView,
        offsets: Sequence[int],
        heads: range,
    ) -> Iterator[CanaryFinding]:
        """Output and LSE of some new tokens and of query heads that share a KV head agree with the
        reference."""
        found = compare_request(self.context, call, batch, result, request, offsets, heads)
        for check, worst in ("output", found.output), ("LSE", found.lse):
            if worst is not None and worst.ratio > 1:
                yield self.off(check, worst, call.layer.layer_id, request)

    def off(self, check: str, worst: Worst, layer_id: int, request: RequestView) -> CanaryFinding:
        """The finding for a value beyond its tolerance."""
        place = f" in dim {worst.dim}" if check == "output" else ""
        return self.finding(
            check,
            f"{worst.expected:.6g}{place}",
            f"{worst.got:.6g}",
            request,
            layer_id=layer_id,
            token=worst.token,
            head=worst.head,
        )

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


def _some(row: torch.Tensor) -> str:
    """The first values of a slot's row, for a message."""
    return str([round(value, 4) for value in row.flatten()[:3].float().tolist()])[:-1] + ", …]"
