"""CUTLASS MLA: one call of the library for each layer, over the pool's own pages.

Its conventions and ours: one query a request, its latent and its rotary part apart; no LSE. Rows of
the page table lie end to end. A request without keys leaves its rows of the output unwritten, and
divides by 0 where parts are put together: the kernel is told of one key, and what it answers is
replaced. The library allocates its output by itself. Its scratch memory is ours, need not be
zeroed, and is never looked at for its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported, InvalidInput
from attnmux.nvidia.cutlass_mla.calls import PAGE, LayerCall, read_num_kv_splits
from attnmux.nvidia.latent import KeyLens, latent_layers, rotary
from attnmux.nvidia.page_tables import KeyGroup, Keys, Step, fixed_buffers
from attnmux.nvidia.results import nothing
from attnmux.nvidia.rows import aligned
from attnmux.nvidia.steps import check_room, prepared

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.nvidia.cutlass_mla.kernels import Kernels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GraphBuffers:
    """What graphs replay with."""

    keys: dict[KeyGroup, Keys]
    lens: KeyLens
    workspace: torch.Tensor
    """Kept, should the shared one grow: a captured launch has its address."""


class CutlassMLABackend(AttentionBackend):
    """Decoding of MLA on SM100; prefill, verification and drafts are another backend's."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Raises InvalidInput for options, layers and pools that the kernel does not serve."""
        super().__init__(context, options)
        self._kernels = kernels
        self._num_kv_splits = read_num_kv_splits(options)
        self._calls = {
            layer.layer_id: LayerCall.of(layer, context) for layer in latent_layers(context)
        }
        self._groups = tuple(dict.fromkeys(call.group for call in self._calls.values()))
        self._fixed: list[GraphBuffers] = []
        """The last ones are the largest; those before are read by graphs captured with them."""
        self._fixed_batch_size = 0
        self._step: Step | None = None
        self._buffers: GraphBuffers | None = None
        self._lens: KeyLens | None = None
        self._workspace: torch.Tensor | None = None

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape and its scratch memory on the host; nothing is launched.

        Raises InvalidInput for a step that the kernel does not serve.
        """
        self._step, self._buffers, self._lens, self._workspace = None, None, None, None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        if not batch.forward_mode.is_decode():
            raise _only_decode(batch.forward_mode)
        if in_capture:
            self._buffers = self._capture_buffers(batch)
        buffers = self._buffers
        self._step = Step.of(batch, self.context, buffers.keys if buffers else {})
        if buffers is not None:
            self._workspace = buffers.workspace
        elif batch.batch_size:
            self._workspace = self._scratch(self._step.max_seqlen_k, batch.batch_size)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Build page tables and lengths on the device: at replay from what the batch then holds."""
        if self._step is not None:
            self._step.fill(batch, self._groups, self.context)
            self._lens = KeyLens.of(batch.seq_lens, self._buffers.lens if self._buffers else None)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called again, for larger graphs, it keeps what captured graphs point at.

        Raises GraphUnsupported where the kernel chooses the parts by itself.
        """
        if self._num_kv_splits < 1:
            raise GraphUnsupported(
                "the parts that the kernel chooses must not be captured: set num_kv_splits to 1 "
                "or more"
            )
        if max_bs > self._fixed_batch_size:
            self._fixed.append(
                GraphBuffers(
                    keys=fixed_buffers(self._groups, max_bs, self.context),
                    lens=KeyLens.buffers(max_bs, self.context.device),
                    workspace=self._scratch(self.context.max_context_len, max_bs),
                )
            )
            self._fixed_batch_size = max_bs

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.lse is not None:
            raise InvalidInput("lse", came="a tensor", expected="None: the library gives no LSE")
        if not call.q.shape[0]:
            return nothing(call.q, call.layer, call.out, call.lse)
        step, lens = prepared(self._step), prepared(self._lens)
        own = self._calls.get(call.layer.layer_id)
        if own is None:
            raise InvalidInput(
                "layer", came=f"{call.layer.kind}, id {call.layer.layer_id}", expected="mla"
            )
        result = self._kernels.cutlass_mla_decode(
            aligned(call.q),
            aligned(rotary(call.q_rope)),
            own.cache,
            lens.at_least_one,
            step.keys[own.group].page_table,
            self._workspace,
            own.scale,
            self._num_kv_splits,
        )
        lens.replace(result, 0)
        return result

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        """Raises InvalidInput: the kernel has one query a request."""
        raise _only_decode(batch.forward_mode)

    def _capture_buffers(self, batch: ForwardBatch) -> GraphBuffers:
        check_room(batch, self._fixed_batch_size)
        return self._fixed[-1]

    def _scratch(self, max_seqlen_k: int, batch_size: int) -> torch.Tensor:
        """The kernel counts the keys that the table has room for, not those that there are."""
        room = -(-max_seqlen_k // PAGE) * PAGE
        nbytes = self._kernels.cutlass_mla_get_workspace_size(
            room, batch_size, num_kv_splits=self._num_kv_splits
        )
        return self.context.workspace.get("cutlass_mla", nbytes)


def _only_decode(mode: ForwardMode) -> InvalidInput:
    return InvalidInput(
        "forward_mode",
        came=mode.name,
        expected="DECODE: other steps are for the backends of their phases",
    )
