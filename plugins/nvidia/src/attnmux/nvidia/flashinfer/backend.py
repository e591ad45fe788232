"""MHA and GQA on flashinfer's wrappers: steps, calls, and the merge of two partial results.

flashinfer's LSE is in base 2. A row without keys has output 0, and LSE -inf, or near -5e4 before
0.7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnmux.core import GraphUnsupported, InvalidInput
from attnmux.core.plugin import KernelLibrary, LibraryBackend, Rows, rehearse
from attnmux.nvidia.flashinfer.graphs import GraphPlans
from attnmux.nvidia.flashinfer.layers import FlashInferLayer, PlanGroup
from attnmux.nvidia.flashinfer.planning import FlashInferKernels, Planner, check_served
from attnmux.nvidia.flashinfer.settings import graph_workspace_bytes, read_settings
from attnmux.nvidia.flashinfer.shared import HINT, Staging, workspace, writable_lse
from attnmux.nvidia.flashinfer.step import FlashInferStep, Role, planned_roles
from attnmux.nvidia.packed_values import bounded

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

LN_2 = math.log(2)

NO_KEYS = -4e4
"""The LSE of a row without keys lies below: before 0.7 `math.cuh` starts from -5e4, not from -inf,
and adds log2 of the number of masked keys. No row with keys comes near."""

State = tuple[torch.Tensor, torch.Tensor]
"""Output [T, H, D] and base-2 LSE [T, H] of a part of the keys."""


class FlashInferBackend(
    LibraryBackend[FlashInferKernels, FlashInferLayer, FlashInferStep, GraphPlans]
):
    """MHA and GQA through flashinfer, eager and in graphs.

    Extend attends to the call's own K and V, and merges the result with attention over the cached
    prefix if there is one. It reads all keys from the pool if layers have windows, sinks or
    cross attention, with a quantised pool, for drafts, for many items and in graphs.
    """

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: FlashInferKernels
    ) -> None:
        """Raises InvalidInput for options, layers and phases that no kernel serves."""
        groups = [PlanGroup.of(layer, context) for layer in context.layers]
        self._groups = tuple(dict.fromkeys(groups))
        self._settings = read_settings(context, options, self._groups)
        super().__init__(context, options, kernels)
        self._is_encoder = not any(layer.is_causal for layer in context.layers)
        self._reads_calls = self._settings.kv_dtype == self._settings.dtype and not any(
            group.window >= 0 or group.view.cross or group.has_sinks for group in self._groups
        )
        self._planner = self._make_planner(self._settings.workspace_bytes)
        self._staging = Staging(context.device)
        for role in planned_roles(context.request, is_encoder=self._is_encoder):
            for group in self._groups:
                check_served(role, group, has_items=context.request.multi_item)

    def prepare_layer(self, layer: LayerSpec) -> FlashInferLayer:
        return FlashInferLayer.of(
            layer,
            self._groups.index(PlanGroup.of(layer, self.context)),
            self.context,
            self._settings.page_size,
            self._settings.dtype.itemsize,
        )

    def plan_step(self, batch: ForwardBatch, buffers: GraphPlans | None) -> FlashInferStep:
        """Plan every group of layers. A batch that was captured is recognised by its address."""
        step = FlashInferStep(batch, self.context, self._settings.page_size)
        if not step.num_rows:
            return step
        self._staging.wait()
        # The latest buffers first: a batch may have been captured again.
        replayed = next((buffer for buffer in reversed(self._buffers) if buffer.has(batch)), None)
        if buffers is not None:
            step.wrappers |= buffers.capture(step)
        elif replayed is not None:
            step.wrappers |= replayed.replan(step)
        else:
            step.new = self._roles(step)
            for number, group in enumerate(self._groups):
                for role in step.new:
                    step.wrappers[role, number] = self._planner.plan_eager(role, group, step)
        self._staging.mark()
        return step

    def fill_step(self, step: FlashInferStep, batch: ForwardBatch) -> None:
        """Nothing is left to do: plans are made outside of graphs."""

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> GraphPlans:
        if self._settings.deterministic:
            raise GraphUnsupported(
                "flashinfer captures no decode that keeps keys whole, as deterministic does: run "
                "without graphs, or choose another backend"
            )
        nbytes = self._settings.workspace_bytes
        if not self.options.get("workspace_bytes"):
            nbytes = max(nbytes, graph_workspace_bytes(self._groups, max_bs, max_num_tokens))
        if nbytes > self._settings.workspace_bytes:
            self._staging.wait()
            self._planner = self._make_planner(nbytes)
        return GraphPlans(
            self._planner,
            self.context,
            self._groups,
            max_batch_size=max_bs,
            max_num_tokens=max_num_tokens,
        )

    def attend(
        self,
        call: AttentionCall,
        layer: FlashInferLayer,
        step: FlashInferStep,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        q, k, v, out = call.q, call.k, call.v, call.out
        num_rows = step.num_rows
        if not num_rows:
            return call.empty_result()
        tokens, num_heads, _ = q.shape
        if out is None or not Rows.is_writable(out):
            out = q.new_empty((tokens, num_heads, call.layer.v_head_dim))
        base_2 = writable_lse(call.lse)
        into, lse = out, base_2
        if num_rows < tokens:
            rows = slice(num_rows)
            q, into, lse = q[rows], out[rows], None if base_2 is None else base_2[rows]
            out[num_rows:].zero_()
            if k is not None and v is not None and not call.layer.is_cross_attention:
                k, v = k[rows], v[rows]
        roles = step.in_pool if k is None else step.new if call.save_kv_cache else step.own
        q = Rows.aligned(q)
        if len(roles) == 1:
            self._run(roles[0], layer, step, q, k, v, into, lse)
        else:
            if lse is None:
                lse = q.new_empty((num_rows, num_heads), dtype=torch.float32)
            self._run(roles[0], layer, step, q, k, v, into, lse)
            part = torch.empty_like(into), torch.empty_like(lse)
            self._run(roles[1], layer, step, q, None, None, *part)
            merge(self.kernels, layer.merged_heads, (into, lse), part)
        store_natural(base_2, call.lse)
        return out

    def _run(
        self,
        role: Role,
        layer: FlashInferLayer,
        step: FlashInferStep,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attention over one part of the keys; `lse` in base 2."""
        wrapper = step.wrappers.get((role, layer.group))
        if wrapper is None:
            # A call of another kind than most.
            wrapper = self._planner.plan_eager(role, self._groups[layer.group], step)
            step.wrappers[role, layer.group] = wrapper
            self._staging.mark()
        if role is Role.RAGGED and k is not None and v is not None:
            if k.dtype != q.dtype or v.dtype != q.dtype:  # as the pool would have cast them
                k, v = k.to(q.dtype), v.to(q.dtype)
            if self._settings.reads_tiles:
                v = bounded(v, step.batch.batch_size)
            q = q if layer.own_q_factor is None else q * layer.own_q_factor
            wrapper.run(
                q, Rows.aligned(k), Rows.aligned(v), out=out, lse=lse, return_lse=lse is not None
            )
            return
        if layer.kv is None:
            raise InvalidInput("k", got=None, expected="K and V: the pool does not store the layer")
        wrapper.run(
            q if layer.q_factor is None else q * layer.q_factor,
            layer.kv,
            *layer.of_sinks,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            out=out,
            lse=lse,
            return_lse=lse is not None,
        )

    def _roles(self, step: FlashInferStep) -> tuple[Role, ...]:
        """The parts of the keys that calls with new K and V attend to, in an eager step."""
        if self._is_encoder:
            return (Role.RAGGED,)
        if Role.PAGED not in step.in_pool or not self._reads_calls:
            return step.in_pool
        return (Role.RAGGED, Role.PREFIX) if step.has_prefix else (Role.RAGGED,)

    def _make_planner(self, workspace_bytes: int) -> Planner:
        return Planner(self.kernels, self._settings, workspace(self.context, workspace_bytes))


def store_natural(base_2: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Turn base-2 LSE into the contract's in place, and copy it to `lse` if that is another."""
    if base_2 is None or lse is None:
        return
    base_2.masked_fill_(base_2 < NO_KEYS, -torch.inf).mul_(LN_2)
    if base_2 is not lse:
        lse.copy_(base_2)


def merge(kernels: FlashInferKernels, heads: int, state: State, other: State) -> None:
    """Make `state` attention over both parts' keys, `heads` heads of a token at once.

    Merging goes head by head, so more heads than a block holds are merged as more tokens of fewer
    heads. LSE stays in base 2, and that of rows without keys as it is: the kernel subtracts
    maxima, and before 0.7 it makes NaN of -inf - -inf.
    """
    _, num_heads, head_dim = state[0].shape
    if heads < num_heads:
        state, other = (
            (out.view(-1, heads, head_dim), lse.view(-1, heads)) for out, lse in (state, other)
        )
    kernels.merge_state_in_place(*state, *other)


make = KernelLibrary(
    address="nvidia/flashinfer",
    backend=FlashInferBackend,
    providers={
        "flashinfer": partial(
            KernelLibrary.imported,
            FlashInferKernels,
            "flashinfer",
            "flashinfer.decode",
            "flashinfer.jit.attention",
            "flashinfer.jit.attention.variants",
        )
    },
    trial=rehearse,
    hint=HINT,
)
