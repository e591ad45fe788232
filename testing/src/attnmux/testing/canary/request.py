"""A wrapper that now and then checks one request while another engine serves."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from types import MappingProxyType

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    AttnmuxError,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    LayerSpec,
    torch_dtype,
)
from attnmux.testing.canary.checks import CheckedStep
from attnmux.testing.canary.counts import counts
from attnmux.testing.canary.failures import FailureFolder
from attnmux.testing.canary.outputs import compare_request
from attnmux.testing.canary.wrapping import WrappingBackend
from attnmux.testing.reference.sampled import RequestView, requests_of

PAIRS = 1 << 22
"""The most logits of a KV head that are compared: 32 MB in float64."""
RUN = 8
"""Consecutive tokens that are compared of a long prompt."""
NO_NAMES: Mapping[int, str] = MappingProxyType({})


class RequestCanary(WrappingBackend):
    """Wraps any backend. In one step of `every`, one request is checked in one layer.

    Its K and V of the new tokens must be in the pool, and its outputs must agree with the float64
    reference over what the pool holds: of all new tokens, or of runs of 8 of a long prompt, and all
    heads. Nothing of other requests is read. Step, layer and request are drawn from a generator of
    their own, so that ranks with the same steps check the same ones.

    A step that a device graph replays calls no layer. The next prepared step then runs the drawn
    layer once more, before the replay, with queries that are drawn too, over K and V of the pool;
    it stores nothing. Captures are not checked.

    A disagreement is logged as an error, counted, and kept if there is a folder. It is not raised:
    the engine serves on. A check that fails by itself, as by a lack of memory, is a warning.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        every: int,
        logger: logging.Logger,
        failures: FailureFolder | None = None,
        names: Mapping[int, str] = NO_NAMES,
        seed: int = 0,
    ) -> None:
        """every: steps for one check. names: the engine's own names of layers, by id.

        Raises InvalidInput for a number of steps below 1.
        """
        InvalidInput.check_at_least(1, "every", every)
        super().__init__(backend)
        self._checks = _Checks(self, every, logger, failures, names, seed)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._checks.end()
        self.backend.init_forward_metadata(batch)
        self._checks.begin(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self._checks.end()
        self.backend.init_forward_metadata_out_graph(batch, in_capture)
        if not in_capture:
            self._checks.begin(batch)
            self._checks.rehearse(self.backend, batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_in_graph(batch)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        result = self.backend.forward_decode(call, batch)
        if call.layer.layer_id == self._checks.layer_id:
            self._checks.after(call, batch, result)
        return result

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        result = self.backend.forward_extend(call, batch)
        if call.layer.layer_id == self._checks.layer_id:
            self._checks.after(call, batch, result)
        return result


class _Checks:
    """Draws the steps to check, and checks them."""

    def __init__(
        self,
        owner: RequestCanary,
        every: int,
        logger: logging.Logger,
        failures: FailureFolder | None,
        names: Mapping[int, str],
        seed: int,
    ) -> None:
        self._context, self._every, self._logger = owner.context, every, logger
        self._failures, self._names, self._counts = failures, names, counts()
        self._random = random.Random(seed)
        self._queries = torch.Generator().manual_seed(seed)
        self._step = 0
        self._next = 1 + self._random.randrange(every)
        self._is_due = self._was_replayed = False
        self._request: RequestView | None = None
        self.layer_id: int | None = None
        """The layer to check when it is called in the running step."""

    def end(self) -> None:
        """The step before is over. If its layer was not called from Python, a graph replayed it."""
        if self.layer_id is not None:
            self._is_due = self._was_replayed = True
            self.layer_id = None

    def begin(self, batch: ForwardBatch) -> None:
        """Draw whether the step is checked, and if so, its request and layer.

        A step without a request, as of an engine that warms up, leaves the check to the next one.
        """
        self._step += 1
        if self._step == self._next:
            self._is_due = True
        if not self._is_due or batch.forward_mode is ForwardMode.IDLE:
            return
        first, loc = self._context.token_to_kv_pool.page_size, batch.out_cache_loc.tolist()
        served = [
            each for each in requests_of(batch) if each.new and loc[each.first_token] >= first
        ]
        if not served:
            return
        self._is_due = False
        blocks = -(-self._step // self._every)
        self._next = blocks * self._every + 1 + self._random.randrange(self._every)
        self._request = self._random.choice(served)
        self.layer_id = self._random.choice(self._context.layers).layer_id

    def rehearse(self, backend: AttentionBackend, batch: ForwardBatch) -> None:
        """If the last drawn step was replayed, run the drawn layer of this prepared one here."""
        if self.layer_id is None or not self._was_replayed:
            return
        self._was_replayed = False
        layer = next(each for each in self._context.layers if each.layer_id == self.layer_id)
        try:
            call = self._rehearsed_call(layer, batch)
            backend.init_forward_metadata_in_graph(batch)
            result = backend.forward(call.q, None, None, layer, batch, q_rope=call.q_rope)
        except Exception as problem:  # e.g. no memory for the queries
            self.layer_id = None
            self._warn(problem)
            return
        self.after(call, batch, result, rehearsed=True)

    def _rehearsed_call(self, layer: LayerSpec, batch: ForwardBatch) -> AttentionCall:
        """Normal queries; K and V are in the pool."""
        dtype, rope = self._context.request.dtype, layer.qk_rope_head_dim
        shape = batch.num_tokens, layer.tp_q_head_num

        def drawn(dim: int) -> torch.Tensor:
            values = torch.randn((*shape, dim), generator=self._queries)
            return values.to(self._context.device, torch_dtype(dtype or "bfloat16"))

        q_rope = drawn(rope) if rope else None
        return AttentionCall(drawn(layer.query_dim), None, None, layer, q_rope=q_rope)

    def after(
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        result: torch.Tensor,
        *,
        rehearsed: bool = False,
    ) -> None:
        """Check the drawn request of a layer's call. rehearsed: the queries are drawn."""
        self.layer_id, request = None, self._request
        assert request is not None
        try:
            self._check(call, batch, result, request, "drawn" if rehearsed else "its own")
        except Exception as problem:  # e.g. no memory for the reference: the engine serves on
            self._warn(problem)

    def _check(
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        result: torch.Tensor,
        request: RequestView,
        queries: str,
    ) -> None:
        started, layer, context = time.perf_counter(), call.layer, self._context
        step = CheckedStep(number=self._step, context=context, requests=(request,))
        stored = call.k is not None and call.save_kv_cache
        findings = list(step.check_stored(call, batch, self._random, request)) if stored else []
        offsets, worst = self._offsets(request, layer), None
        group = layer.tp_q_head_num // layer.tp_k_head_num
        for start in range(0, layer.tp_q_head_num, group):
            heads = range(start, start + group)
            found = compare_request(context, call, batch, result, request, offsets, heads).output
            if found is not None and (worst is None or found.ratio > worst.ratio):
                worst = found
        if worst is not None and worst.ratio > 1:
            findings.append(step.off("output", worst, layer.layer_id, request))
        self._counts.check()
        layer_name = self._names.get(layer.layer_id, f"layer {layer.layer_id}")
        error = "the reference is not finite"
        if worst is not None:
            off = abs(worst.got - worst.expected)
            error = f"largest error {worst.ratio:.2g} of the tolerance ({off:.2g})"
        said = (
            f"canary: step {self._step}, {layer_name}, {batch.forward_mode.name}, request "
            f"{request.index + 1} of {batch.batch_size}, {len(offsets)} of {request.new} new "
            f"tokens after {request.cached}, {layer.tp_q_head_num} heads, {queries} queries: "
            f"{error}, {(time.perf_counter() - started) * 1000:.1f} ms"
        )
        method = "forward_decode" if batch.forward_mode.is_decode() else "forward_extend"
        if not findings:
            self._logger.info("%s", said)
        for finding in findings:
            self._counts.finding(finding.check)
            kept = ""
            if self._failures is not None:
                kept = self._failures.keep(context, finding, method, batch, call, request)
            self._logger.error("%s; %s; %s", finding, said, kept or "nothing is kept")

    def _offsets(self, request: RequestView, layer: LayerSpec) -> list[int]:
        """All new tokens of a request, or the last ones and drawn runs if it has many."""
        group = layer.tp_q_head_num // layer.tp_k_head_num
        keys = request.encoder + max(request.cached, 0) + request.new
        most = max(PAIRS // (keys * group), 1)
        if most >= request.new:
            return list(range(request.new))
        last = min(RUN, most)
        runs = range(0, request.new - last, RUN)
        drawn = self._random.sample(runs, min(most // RUN, len(runs)) - 1) if most >= RUN else []
        chosen = {start + place for start in drawn for place in range(RUN)}
        return sorted(chosen | set(range(request.new - last, request.new)))

    def _warn(self, problem: Exception) -> None:
        self._logger.warning(
            "canary: step %d could not be checked: %s", self._step, AttnmuxError.in_brief(problem)
        )
