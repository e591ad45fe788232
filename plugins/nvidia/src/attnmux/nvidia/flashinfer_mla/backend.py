"""The contract, served by flashinfer's wrapper for MLA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported
from attnmux.nvidia.flashinfer.compiling import compile_kernels
from attnmux.nvidia.flashinfer.staging import Staging
from attnmux.nvidia.flashinfer.states import writable_lse
from attnmux.nvidia.flashinfer_mla.heads import padded
from attnmux.nvidia.flashinfer_mla.kernels import Kernels
from attnmux.nvidia.flashinfer_mla.latents import Latents, PoolRows, of_call
from attnmux.nvidia.flashinfer_mla.planning import GraphIndices, Planned, Plans, Source
from attnmux.nvidia.flashinfer_mla.settings import PlanGroup, read_settings
from attnmux.nvidia.flashinfer_mla.step import Step
from attnmux.nvidia.latent import RANK, ROPE, rotary
from attnmux.nvidia.results import nothing
from attnmux.nvidia.rows import aligned, is_aligned
from attnmux.nvidia.steps import prepared

if TYPE_CHECKING:
    from attnmux.core.layer import LayerSpec

ADDRESS = "nvidia/flashinfer_mla"

CAPTURED = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
"""Modes whose requests have the same number of new tokens in every step. The others' plans would
have other tiles than the captured launch has blocks for: `num_blks_x` in scheduler.cuh is 1 up to a
mean of 64 rows a request, else 2."""


class FlashInferMLABackend(AttentionBackend):
    """Absorbed MLA, eager and in graphs. A pool of 8-bit floats is read eagerly alone."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Compiles the kernels and runs each phase's once.

        Raises InvalidInput for layers, pools and options that no kernel serves, BackendFailed where
        a kernel does not compile or does not run.
        """
        super().__init__(context, options)
        self._settings = read_settings(context, options)
        self._groups = {layer.layer_id: PlanGroup.of(layer, context) for layer in context.layers}
        self._distinct = tuple(dict.fromkeys(self._groups.values()))
        self._rows = {
            layer.layer_id: PoolRows.of(layer, context, self._settings) for layer in context.layers
        }
        # Kernels run one after another, so all wrappers of flashinfer share their scratch.
        workspace = context.workspace.get("flashinfer", self._settings.workspace_bytes)
        self._plans = Plans(kernels, self._settings, workspace)
        self._graphs: list[GraphIndices] = []
        self._staging = Staging(context.device)
        self._step: Step | None = None
        self._planned: dict[tuple[Source, PlanGroup], Planned] = {}
        compile_kernels(ADDRESS, context, self._try_step)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan the step for every group of layers."""
        self._planned = {}
        self._step = None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        step = Step(batch, self.context, self._settings.page_size)
        graph = self._graph(batch, in_capture)
        if step.num_rows:
            self._staging.wait()
            for group in self._distinct:
                out = None if graph is None else graph.of_group[group.pool_group]
                self._planned[Source.POOL, group] = self._plans.plan(Source.POOL, group, step, out)
            self._staging.mark()
        self._step = step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Raises GraphUnsupported for a pool of 8-bit floats: copies of all keys that a captured
        step might have would take more memory than the pool."""
        if self._settings.widens:
            raise GraphUnsupported(
                "flashinfer_mla widens 8-bit keys into memory of the step's size, which no graph "
                "has: run without graphs, take a KV dtype of 16 bits, or choose another backend"
            )
        if not any(graph.max_batch_size >= max_bs for graph in self._graphs):
            # Graphs that were captured before go on with their own.
            page_size = self._settings.page_size
            self._graphs.append(GraphIndices(self._distinct, self.context, page_size, max_bs))

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._forward(call.q, call.q_rope, None, None, call.layer, call.out, call.lse)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        in_call = None if call.save_kv_cache else call.k
        return self._forward(
            call.q, call.q_rope, in_call, call.k_rope, call.layer, call.out, call.lse
        )

    def _forward(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        k: torch.Tensor | None,
        k_rope: torch.Tensor | None,
        layer: LayerSpec,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over k and k_rope where they are given, else over the pool."""
        step = prepared(self._step)
        q_rope = rotary(q_rope)
        if not step.num_rows:
            return nothing(q, layer, out, lse)
        group, scale = self._groups[layer.layer_id], 1.0
        if k is None:
            rows, planned = self._rows[layer.layer_id], self._planned[Source.POOL, group]
            latents, scale = rows.read(planned.slots), rows.rest
        else:
            latents = of_call(k, k_rope, q.dtype)
            planned = self._planned_for_call(group, step)
        if scale != 1:
            q, q_rope = q * scale, q_rope * scale
        if out is None or not is_aligned(out):
            out = q.new_empty((*q.shape[:2], RANK))
        into = writable_lse(lse)
        if step.num_rows < len(q):
            behind = slice(step.num_rows, None)
            nothing(q[behind], layer, out[behind], None if into is None else into[behind])
        _attend(planned, (aligned(q), aligned(q_rope)), latents, out, into)
        if lse is not None and into is not None and into is not lse:
            lse.copy_(into)
        return out if scale == 1 else out.mul_(scale)

    def _planned_for_call(self, group: PlanGroup, step: Step) -> Planned:
        """Planned now: most calls have their keys in the pool."""
        planned = self._planned.get((Source.CALL, group))
        if planned is None:
            planned = self._planned[Source.CALL, group] = self._plans.plan(Source.CALL, group, step)
            self._staging.mark()
        return planned

    def _graph(self, batch: ForwardBatch, in_capture: bool) -> GraphIndices | None:
        """The indices of a batch that is captured now or was before."""
        if not in_capture:
            return next((graph for graph in self._graphs if graph.serves(batch)), None)
        if batch.forward_mode not in CAPTURED:
            raise GraphUnsupported(
                f"a captured launch fixes how rows are tiled, which {batch.forward_mode.name} with "
                "its requests of many lengths does not: run it eagerly"
            )
        for graph in self._graphs:
            if batch.batch_size <= graph.max_batch_size:
                graph.capture(batch)
                return graph
        raise GraphUnsupported(
            f"no buffers for a captured batch of {batch.batch_size} requests: call "
            "init_cuda_graph_state with the largest first"
        )

    def _try_step(self, batch: ForwardBatch) -> None:
        """Attend over padding's slot: a build for other devices loads, and fails when launched."""
        context, layer = self.context, self.context.layers[0]
        shape = (1, layer.tp_q_head_num)
        q, q_rope = (
            torch.zeros((*shape, dim), dtype=self._settings.dtype, device=context.device)
            for dim in (RANK, ROPE)
        )
        self.init_forward_metadata(batch)
        self._forward(q, q_rope, None, None, layer, None, None)
        self._step = None
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)


def _attend(
    planned: Planned,
    queries: tuple[torch.Tensor, torch.Tensor],
    latents: Latents,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write the rows of requests, and their natural LSE."""
    num_rows, num_heads = planned.num_rows, out.shape[1]
    if planned.num_heads == num_heads:
        _run(planned, queries, latents, out, lse)
        return
    q, q_rope = (padded(each, planned.num_heads) for each in queries)
    wide_out = torch.empty_like(q)
    wide_lse = None if lse is None else lse.new_empty(q.shape[:2])
    _run(planned, (q, q_rope), latents, wide_out, wide_lse)
    out[:num_rows].copy_(wide_out[:num_rows, :num_heads])
    if lse is not None and wide_lse is not None:
        lse[:num_rows].copy_(wide_lse[:num_rows, :num_heads])


def _run(
    planned: Planned,
    queries: tuple[torch.Tensor, torch.Tensor],
    latents: Latents,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    for rows, wrapper in planned.calls:
        given: tuple[torch.Tensor | None, ...] = (*queries, out, lse)
        if rows is not None:
            given = tuple(None if each is None else each[rows] for each in given)
        q, q_rope, into, of_lse = given
        wrapper.run(
            q,
            q_rope,
            *latents,
            out=into,
            lse=of_lse,
            return_lse=lse is not None,
            return_lse_base_on_e=True,
        )
