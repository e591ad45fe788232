"""A wrapper that checks a share of a backend's steps while an engine runs them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    LayerSpec,
)
from attnmux.testing.canary.checks import CanaryFinding, CheckedStep
from attnmux.testing.canary.watched import WatchedSlots
from attnmux.testing.canary.wrapping import WrappingBackend
from attnmux.testing.reference.sampled import RequestView, requests_of

OnFinding = Callable[[CanaryFinding], None]


def raise_finding(finding: CanaryFinding) -> None:
    """Stop at the first finding."""
    raise finding


@dataclass(frozen=True, kw_only=True, slots=True)
class CanarySample:
    """How much of a step is checked. The cost grows with the lengths of the drawn requests, and not
    with their number."""

    layers: int = 2
    """Layers, drawn anew for each step."""
    points: int = 2
    """(token, head) pairs of each layer, compared with the reference."""
    slots: int = 128
    """Watched slots of each layer."""


DEFAULT_SAMPLE = CanarySample()


class CanaryBackend(WrappingBackend):
    """Wraps any backend and checks a share of its steps while it serves.

    A checked step is compared with the contract in six ways:

    table   the request table names the slots that the step writes; no slot is written that a
            request of the step reads; the row of a decoding request still begins as it did
    slot    a slot that a request reads has the bits of the last checked step, unless a step wrote
            it since
    write   a layer's call changes no slot but the step's own
    store   the pool holds K and V of the new tokens at `out_cache_loc`, bit by bit
    output  sampled rows and heads agree with the float64 reference over what the pool holds
    LSE     so does their LSE, in base e, if the caller wants it

    Steps are drawn from a generator of their own: the same seed checks the same steps.
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
        """share: part of all steps, from 0 to 1. on_finding: gets each finding; it may log it
        instead of raising it. Raises InvalidInput for a share outside 0 to 1."""
        if not 0 <= share <= 1:
            raise InvalidInput("share", got=share, expected="0 to 1")
        super().__init__(backend)
        self._checks = _Checks(backend.context, share, seed, sample, on_finding)

    @property
    def checked_steps(self) -> int:
        """Steps checked so far."""
        return self._checks.checked_steps

    def forget(self) -> None:
        """Call this when anything but a step has written to slots or rows that requests hold."""
        self._checks.forget()

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
        self._checked = CheckedStep(number=0, context=context, requests=())
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
        step = self._checked = CheckedStep(
            number=self._step, context=self._context, requests=requests_of(batch)
        )
        loc = batch.out_cache_loc
        if batch.encoder_out_cache_loc is not None:
            loc = torch.cat([loc, batch.encoder_out_cache_loc])
        read = step.slots_read()
        self._report(step.check_table(batch, read))
        if batch.forward_mode.is_decode():
            self._report(self._check_rows(step))
        for change in self.watched.changed_since_recorded(read):
            self._on_finding(step.changed("slot", change, "the bits of the last checked step"))
        ids = [layer.layer_id for layer in self._context.layers]
        drawn = self._points.sample(ids, min(self._sample.layers, len(ids)))
        stored = set(self._context.token_to_kv_pool.layer_ids)
        self.watched.record([each for each in drawn if each in stored], read, loc)
        self._drawn = frozenset(drawn)

    def after(self, call: AttentionCall, batch: ForwardBatch, result: torch.Tensor) -> None:
        """Check the writes and the results of a layer's call."""
        step, layer = self._checked, call.layer
        if call.k is not None and call.save_kv_cache:
            self._report(step.check_stored(call, batch, self._points))
        for change in self.watched.changed_by_call(layer.layer_id):
            said = "no change: the slot is not the step's"
            self._on_finding(step.changed("write", change, said))
        for request, offset, head in self._draw_points(step, layer):
            heads = range(head, head + 1)
            self._report(step.check_tokens(call, batch, result, request, [offset], heads))

    def _report(self, findings: Iterator[CanaryFinding]) -> None:
        for finding in findings:
            self._on_finding(finding)

    def _check_rows(self, step: CheckedStep) -> Iterator[CanaryFinding]:
        """Rows of requests that only decoded since the last check hold the slots that they held."""
        table = self._context.req_to_token_pool.req_to_token
        rows = step.on_device([each.row for each in step.requests])
        ends = step.on_device([each.encoder + each.cached + 1 for each in step.requests])
        columns = torch.arange(table.shape[1], device=table.device)
        changed = (table[rows] != self._rows[rows]) & (columns < self._lens[rows].unsqueeze(1))
        for index, column in changed.nonzero()[:1].tolist():
            request = step.requests[index]
            before, now = int(self._rows[request.row, column]), int(table[request.row, column])
            yield step.finding("table", f"slot {before} in column {column}", f"slot {now}", request)
        self._rows[rows] = table[rows]
        self._lens[rows] = ends

    def _draw_points(
        self, step: CheckedStep, layer: LayerSpec
    ) -> Iterator[tuple[RequestView, int, int]]:
        """(request, place among its new tokens, query head)."""
        requests = [each for each in step.requests if each.new]
        for _ in range(self._sample.points if requests else 0):
            request = self._points.choice(requests)
            # The last token sees the most keys, and is the one that is sampled from
            is_last = self._points.random() < 0.5
            offset = request.new - 1 if is_last else self._points.randrange(request.new)
            yield request, offset, self._points.randrange(layer.tp_q_head_num)
