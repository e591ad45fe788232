"""A wrapper that checks a share of a backend's steps while an engine runs them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    AttnmuxError,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    LayerSpec,
    quantise,
)
from attnmux.core.composites import DispatchingBackend
from attnmux.core.kv.quantise import FP8_DTYPES
from attnmux.testing.comparison import LSE_TOLERANCE, Tolerance, output_tolerance
from attnmux.testing.sampled import Expected, RequestView, expected_at, requests_of
from attnmux.testing.watched import Change, WatchedSlots, kv_memory, rows_at

STORED_ROWS = 64
"""New tokens of a layer whose K and V are looked for in the pool."""


class CanaryFinding(AttnmuxError):
    """A checked step did what the contract forbids. Fields that do not apply are None."""

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
        """Row of the request table."""
        self.token = token
        """Among the step's T tokens."""
        self.head = head
        self.slot = slot
        """Of the layer's buffer."""
        places = {
            "layer": layer_id,
            "request row": request_row,
            "token": token,
            "head": head,
            "slot": slot,
        }
        place = "".join(f", {name} {value}" for name, value in places.items() if value is not None)
        super().__init__(f"canary, step {step}, {check}{place}: expected {expected}, got {got}")


OnFinding = Callable[[CanaryFinding], None]


def raise_finding(finding: CanaryFinding) -> None:
    """Stop at the first finding."""
    raise finding


@dataclass(frozen=True, kw_only=True, slots=True)
class CanarySample:
    """How much of a checked step is checked. The cost grows with the length of the requests that
    are drawn, and not with their number."""

    layers: int = 2
    """Layers, drawn anew for each step."""
    points: int = 2
    """(token, head) pairs of each layer, compared with the reference."""
    slots: int = 128
    """Slots of each layer whose bits are watched."""


DEFAULT_SAMPLE = CanarySample()


class CanaryBackend(DispatchingBackend):
    """Any backend, with a share of its steps checked while it serves.

    A checked step is compared with the contract in six ways:

    table   the request table names the slots that the step writes; no slot is written that a
            request of the step reads; the row of a decoding request still begins as it did
    slot    a slot that a request reads has the bits of the last checked step, unless a step wrote
            it since
    write   a layer's call changes no slot but the step's own
    store   the pool holds K and V of the new tokens at `out_cache_loc`, bit by bit
    output  sampled rows and heads agree with the float64 reference over what the pool holds
    LSE     the same for LSE, in base e, where the caller asks for it

    Whole steps are drawn by a generator of their own, so that the same seed checks the same steps.
    Checked steps synchronise with the device; others cost one small write a step. A step replayed
    from a device graph gets the checks "table" and "slot" alone, before the replay: its layers run
    without Python. Captures are not checked.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        share: float = 0.01,
        seed: int = 0,
        sample: CanarySample = DEFAULT_SAMPLE,
        on_finding: OnFinding = raise_finding,
    ) -> None:
        """share: of all steps, from 0 to 1. on_finding: called with each finding; it may log
        instead of raising. Raises InvalidInput for another share."""
        if not 0 <= share <= 1:
            raise InvalidInput("share", got=share, expected="0 to 1")
        super().__init__(backend.context, backend.options)
        self.backend = backend
        self._checks = _Checks(backend.context, share, seed, sample, on_finding)

    @property
    def checked_steps(self) -> int:
        """Steps that were checked so far."""
        return self._checks.checked_steps

    def forget(self) -> None:
        """Call this after something other than a step wrote to slots or rows that requests hold."""
        self._checks.forget()

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        return self.backend

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The backend of that mode, wrapped; all wrappers share one count of steps."""
        child = self.backend.select(mode)
        if child is self.backend:
            return self
        wrapped = copy.copy(self)
        wrapped.backend = child
        return wrapped

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._checks.pause()
        self.backend.init_forward_metadata(batch)
        self._checks.begin(batch)
        self._checks.watch_layers()

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self._checks.pause()
        self.backend.init_forward_metadata_out_graph(batch, in_capture)
        if not in_capture:
            self._checks.begin(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_in_graph(batch)
        self._checks.watch_layers()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.backend.get_cuda_graph_seq_len_fill_value()

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        result = self.backend.forward_decode(call, batch)
        if call.layer.layer_id in self._checks.layers:
            self._checks.after(call, batch, result)
        return result

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        result = self.backend.forward_extend(call, batch)
        if call.layer.layer_id in self._checks.layers:
            self._checks.after(call, batch, result)
        return result


class _Checks:
    """Draws the steps to check, and checks them."""

    def __init__(
        self,
        context: BackendContext,
        share: float,
        seed: int,
        sample: CanarySample,
        on_finding: OnFinding,
    ) -> None:
        self._context, self._share, self._sample = context, share, sample
        self._on_finding = on_finding
        self._steps = random.Random(seed)
        self._points = random.Random(seed + 1)
        generator = torch.Generator().manual_seed(seed)
        pool = context.token_to_kv_pool
        self.watched = WatchedSlots(pool, count=sample.slots, generator=generator)
        self.layers: frozenset[int] = frozenset()
        """Layers to check when they are called in the running step."""
        self.checked_steps = 0
        self._step = 0
        self._drawn: frozenset[int] = frozenset()
        self._requests: tuple[RequestView, ...] = ()
        table = context.req_to_token_pool.req_to_token
        with torch.inference_mode(False):  # written in steps of either kind
            self._rows = torch.zeros_like(table)
            self._lens = torch.zeros(len(table), dtype=torch.int64, device=table.device)

    def forget(self) -> None:
        self.watched.forget()
        self._lens.zero_()

    def pause(self) -> None:
        """No layer is checked until the next step begins."""
        self.layers = self._drawn = frozenset()

    def watch_layers(self) -> None:
        """The step's layers are called from Python, so that they can be checked."""
        self.layers = self._drawn

    def begin(self, batch: ForwardBatch) -> None:
        """Draw whether the step is checked; if so, check the table and the slots that it reads."""
        if batch.forward_mode is ForwardMode.IDLE:
            return
        self._step += 1
        if batch.forward_mode.is_extend():
            # The row may be another request's now, or the engine may give it a cached prefix
            self._lens.index_fill_(0, batch.req_pool_indices, 0)
        if self._steps.random() >= self._share:
            self.watched.note_writes(batch.out_cache_loc)
            if batch.encoder_out_cache_loc is not None:
                self.watched.note_writes(batch.encoder_out_cache_loc)
            return
        self.checked_steps += 1
        self._requests = requests_of(batch)
        loc = batch.out_cache_loc
        if batch.encoder_out_cache_loc is not None:
            loc = torch.cat([loc, batch.encoder_out_cache_loc])
        read = self._slots_read()
        self._check_table(batch, read)
        if batch.forward_mode.is_decode():
            self._check_rows()
        for change in self.watched.changed_since_recorded(read):
            self._report_change("slot", change, "the bits of the last checked step")
        ids = [layer.layer_id for layer in self._context.layers]
        drawn = self._points.sample(ids, min(self._sample.layers, len(ids)))
        stored = set(self._context.token_to_kv_pool.layer_ids)
        self.watched.record([each for each in drawn if each in stored], read, loc)
        self._drawn = frozenset(drawn)

    def after(self, call: AttentionCall, batch: ForwardBatch, result: torch.Tensor) -> None:
        """Check a layer's call: its writes, its results."""
        layer = call.layer
        if call.k is not None and call.save_kv_cache:
            self._check_stored(call, batch)
        for change in self.watched.changed_by_call(layer.layer_id):
            self._report_change("write", change, "no change: the slot is not the step's")
        for request, offset, head in self._draw_points(layer):
            self._check_point(call, batch, result, request, offset, head)

    def _slots_read(self) -> torch.Tensor:
        """Slots of all cached tokens of the step's requests, [n] int64, the encoder's included."""
        table = self._context.req_to_token_pool.req_to_token
        ends = [each.encoder + max(each.cached, 0) for each in self._requests]
        rows = self._on_device([each.row for each in self._requests])
        columns = torch.arange(max(ends, default=0), device=table.device)
        held = columns < self._on_device(ends).unsqueeze(1)
        return table[rows, : len(columns)][held].long()

    def _check_table(self, batch: ForwardBatch, read: torch.Tensor) -> None:
        """New tokens: the table names their slots, each is written once, and none is read."""
        context = self._context
        tokens: list[int] = []
        rows: list[int] = []
        columns: list[int] = []
        for each in self._requests:
            if each.cached >= 0:
                start = each.encoder + each.cached
                tokens += range(each.first_token, each.first_token + each.new)
                rows += [each.row] * each.new
                columns += range(start, start + each.new)
        loc = batch.out_cache_loc[self._on_device(tokens)]
        table = context.req_to_token_pool.req_to_token
        named = table[self._on_device(rows), self._on_device(columns)].long()
        holders = torch.zeros(context.token_to_kv_pool.num_slots, dtype=torch.int32)
        holders = holders.to(loc.device)
        holders[read] = 1
        holders.index_add_(0, loc, torch.ones_like(loc, dtype=torch.int32))
        wrong = ((named != loc) | (holders[loc] > 1)) & (loc > 0)
        for index in wrong.nonzero().flatten().tolist():
            slot, in_table, token = int(loc[index]), int(named[index]), tokens[index]
            expected, got = f"slot {in_table}, as in the request table", f"slot {slot}"
            if in_table == slot:
                expected, got = "a slot of its own", f"slot {slot}, which another token has too"
            self._report("table", expected, got, self._request_of(token), token=token)

    def _check_rows(self) -> None:
        """Rows of requests that only decoded since the last check hold the slots that they held."""
        table = self._context.req_to_token_pool.req_to_token
        rows = self._on_device([each.row for each in self._requests])
        ends = self._on_device([each.encoder + each.cached + 1 for each in self._requests])
        columns = torch.arange(table.shape[1], device=table.device)
        changed = (table[rows] != self._rows[rows]) & (columns < self._lens[rows].unsqueeze(1))
        for index, column in changed.nonzero()[:1].tolist():
            request = self._requests[index]
            before, now = int(self._rows[request.row, column]), int(table[request.row, column])
            self._report("table", f"slot {before} in column {column}", f"slot {now}", request)
        self._rows[rows] = table[rows]
        self._lens[rows] = ends

    def _on_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._context.device)

    def _check_stored(self, call: AttentionCall, batch: ForwardBatch) -> None:
        layer, pool = call.layer, self._context.token_to_kv_pool
        assert call.k is not None
        loc = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        if loc is None or layer.layer_id not in pool.layer_ids:
            return
        slots = pool.translate(loc, layer.layer_id)
        tokens = (slots >= pool.page_size).nonzero().flatten()
        if len(tokens) > STORED_ROWS:
            step = -(-len(tokens) // STORED_ROWS)
            tokens = tokens[self._points.randrange(step) :: step]
        given = [call.k, call.v]
        if call.k_rope is not None:
            given = [torch.cat([call.k, call.k_rope], dim=-1)]
        scales = (layer.k_scale, layer.v_scale)
        for name, buffer, rows, scale in zip(
            ("K", "V"), kv_memory(pool, layer.layer_id), given, scales, strict=False
        ):
            assert rows is not None
            expected = quantise(rows[tokens], pool.dtype, scale)
            held = rows_at(buffer, slots[tokens])
            wrong = (expected.contiguous().flatten(1).view(torch.uint8) != held).any(1)
            for index in wrong.nonzero().flatten()[:1].tolist():
                token = int(tokens[index])
                self._report(
                    "store",
                    f"{name} of the call, {_some(expected[index])}",
                    f"{_some(buffer[int(slots[token])])} in {int(wrong.sum())} of {len(tokens)} "
                    "slots",
                    None if layer.is_cross_attention else self._request_of(token),
                    layer=layer,
                    token=token,
                    slot=int(slots[token]),
                )

    def _draw_points(self, layer: LayerSpec) -> Iterator[tuple[RequestView, int, int]]:
        """(request, place among its new tokens, query head)."""
        requests = [each for each in self._requests if each.new]
        for _ in range(self._sample.points if requests else 0):
            request = self._points.choice(requests)
            # The last token sees the most keys, and is the one that is sampled from
            is_last = self._points.random() < 0.5
            offset = request.new - 1 if is_last else self._points.randrange(request.new)
            yield request, offset, self._points.randrange(layer.tp_q_head_num)

    def _check_point(
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        result: torch.Tensor,
        request: RequestView,
        offset: int,
        head: int,
    ) -> None:
        context, layer, token = self._context, call.layer, request.first_token + offset
        table, pool = context.req_to_token_pool.req_to_token, context.token_to_kv_pool
        q = call.q[token, head]
        if call.q_rope is not None:
            q = torch.cat([q, call.q_rope[token, head]])
        eight_bits = pool.dtype in FP8_DTYPES and not call.has_own_kv
        tolerance = output_tolerance(call.q.dtype, pool.dtype, fp8_products=eight_bits)
        # A backend that multiplies 8-bit floats rounds Q too
        queries = [q, quantise(q, pool.dtype, None).to(q.dtype)] if eight_bits else [q]
        got = result[token, head]
        lse = None if call.lse is None else float(call.lse[token, head])
        expected = [
            expected_at(call, batch, table, pool, request, offset, head, one) for one in queries
        ]
        if not bool(expected[0].out.isfinite().all()):
            return  # the model's own K, V or Q are not finite, and no backend can help that

        def report(check: str, expected: str, got: str) -> None:
            self._report(check, expected, got, request, layer=layer, token=token, head=head)

        if not any(_agrees(got, one, tolerance) for one in expected):
            worst = int((got.double() - expected[0].out).abs().nan_to_num(torch.inf).argmax())
            said = f"{float(expected[0].out[worst]):.6g} in dim {worst}"
            report("output", said, f"{float(got[worst]):.6g}")
        bound = LSE_TOLERANCE[call.q.dtype]
        if eight_bits:
            bound = Tolerance(atol=bound.atol + 0.1, rtol=bound.rtol)
        if lse is not None and not any(_is_close(lse, one.lse, bound) for one in expected):
            report("LSE", f"{expected[0].lse:.6g}", f"{lse:.6g}")

    def _request_of(self, token: int) -> RequestView | None:
        for each in self._requests:
            if each.first_token <= token < each.first_token + each.new:
                return each
        return None

    def _report_change(self, check: str, change: Change, expected: str) -> None:
        got = f"hash {change.after:#x} after {change.before:#x}"
        self._on_finding(
            CanaryFinding(
                check,
                expected=expected,
                got=got,
                step=self._step,
                layer_id=change.layer_id,
                slot=change.slot,
            )
        )

    def _report(
        self,
        check: str,
        expected: object,
        got: object,
        request: RequestView | None,
        *,
        layer: LayerSpec | None = None,
        token: int | None = None,
        head: int | None = None,
        slot: int | None = None,
    ) -> None:
        self._on_finding(
            CanaryFinding(
                check,
                expected=expected,
                got=got,
                step=self._step,
                layer_id=None if layer is None else layer.layer_id,
                request_row=None if request is None else request.row,
                token=token,
                head=head,
                slot=slot,
            )
        )


def _agrees(got: torch.Tensor, expected: Expected, tolerance: Tolerance) -> bool:
    """Whether [Dv] values agree. The suite's absolute tolerance holds for values of about 1; here
    it is scaled to the size of the values that were added up."""
    atol = tolerance.atol * expected.scale
    return torch.allclose(got.double(), expected.out, rtol=tolerance.rtol, atol=atol)


def _is_close(got: float, expected: float, tolerance: Tolerance) -> bool:
    return got == expected or abs(got - expected) <= tolerance.atol + tolerance.rtol * abs(expected)


def _some(row: torch.Tensor) -> str:
    """The first values of a slot's row, for a message."""
    return str([round(value, 4) for value in row.flatten()[:3].float().tolist()])[:-1] + ", …]"
