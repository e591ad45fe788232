"""FlashMLA: one call of the library for each layer, over the pool's own pages.

Its conventions and ours: Q [B, d, Hq, 576] is latent and rotary part in one row; LSE comes as
[B, Hq, d] and is a natural logarithm, as ours, but +inf for a query without keys; causality counts
from the end of the keys. Over e4m3, Q and the softmax's weights are rounded to e4m3 too and the
output is bfloat16. The library allocates its output by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported, InvalidInput
from attnmux.nvidia.flashmla.calls import LayerCall, PlanGroup
from attnmux.nvidia.flashmla.plans import Plan, PlanBuffers, Planner
from attnmux.nvidia.latent import RANK, latent_layers
from attnmux.nvidia.page_tables import Step
from attnmux.nvidia.results import nothing, store_lse
from attnmux.nvidia.steps import check_room, prepared

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec
    from attnmux.nvidia.flashmla.kernels import Kernels

MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class FlashMLABackend(AttentionBackend):
    """Decoding, verification and drafts of MLA on Hopper GPUs; prefill is another backend's."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options)
        self._kernels = kernels
        self._calls = {
            layer.layer_id: LayerCall.of(layer, context, kernels)
            for layer in latent_layers(context)
        }
        self._planner = Planner.of(self._calls, context, kernels)
        self._fixed: list[PlanBuffers] = []
        """The last ones are the largest; those before are read by graphs captured with them."""
        self._fixed_batch_size = 0
        self._step: Step | None = None
        self._buffers: PlanBuffers | None = None
        self._plans: dict[PlanGroup, Plan] = {}

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape on the host; nothing is launched.

        Raises InvalidInput for a step that the kernels do not serve.
        """
        self._step, self._buffers, self._plans = None, None, {}
        if batch.forward_mode is ForwardMode.IDLE:
            return
        if batch.forward_mode not in MODES:
            raise InvalidInput(
                "forward_mode",
                came=batch.forward_mode.name,
                expected=f"one of {', '.join(mode.name for mode in MODES)}: prefill is for the "
                "backend of the phase extend",
            )
        if in_capture:
            self._buffers = self._capture_buffers(batch)
        step = Step.of(batch, self.context, self._buffers.keys if self._buffers else {})
        if step.queries_each is None:
            self._planner.check(batch.num_tokens)
        else:
            self._planner.check(batch.batch_size, step.queries_each)
        self._step = step

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Build tables, lengths and schedules on the device: at replay from what the batch then
        holds."""
        if self._step is not None and batch.num_tokens:
            self._plans = self._planner.plan(self._step, batch, self._buffers)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called again, for graphs of another mode, it keeps what captured graphs point at."""
        if max_bs > self._fixed_batch_size:
            self._fixed.append(self._planner.buffers(max_bs))
            self._fixed_batch_size = max_bs

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call.q, call.q_rope, call.layer, call.out, call.lse)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.k is not None and not call.save_kv_cache:
            raise InvalidInput(
                "save_kv_cache", came=False, expected="True: the kernels read the pool alone"
            )
        return self._attend(call.q, call.q_rope, call.layer, call.out, call.lse)

    def _attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        layer: LayerSpec,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        prepared(self._step)
        if not q.shape[0]:
            return nothing(q, layer, out, lse)
        call = self._calls.get(layer.layer_id)
        if call is None:
            raise InvalidInput("layer", came=f"{layer.kind}, id {layer.layer_id}", expected="mla")
        plan = self._plans[call.group]
        result, kernels_lse = self._kernels.flash_mla_with_kvcache(
            call.queries(q, q_rope, plan.queries_each),
            call.k_cache,
            plan.block_table,
            plan.cache_seqlens,
            RANK,
            **plan.schedule,
            **call.arguments,
        )
        if call.is_fp8:
            plan.lens.replace(result, 0)
        if lse is not None:
            plan.lens.replace(kernels_lse, -torch.inf)
            store_lse(kernels_lse, lse, plan.queries_each)
        return result.flatten(0, 1).to(q.dtype)

    def _capture_buffers(self, batch: ForwardBatch) -> PlanBuffers:
        if batch.forward_mode is ForwardMode.DRAFT_EXTEND:
            raise GraphUnsupported(
                "requests with different numbers of new tokens are captured by no graph: run "
                "DRAFT_EXTEND eagerly"
            )
        check_room(batch, self._fixed_batch_size)
        return self._fixed[-1]
