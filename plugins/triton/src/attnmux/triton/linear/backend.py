"""Linear layers on Triton kernels: a token at a time for few new tokens, in chunks for prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import triton

from attnmux.core import AttentionBackend, BackendContext
from attnmux.core.plugin import LinearAttentionBackend
from attnmux.triton.kernels.linear.channel_scan import scan_channels
from attnmux.triton.kernels.linear.tokens import recur
from attnmux.triton.linear.chunks import ChunkRun
from attnmux.triton.linear.convolutions import TritonConvolutions
from attnmux.triton.linear.device import LinearDevice
from attnmux.triton.linear.step import LinearStep, strided

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch
    from attnmux.core.plugin import ConvCall, LinearCall

SCAN_TILE = 1024
"""Numbers of a state that a program of `scan_channels` holds: 32 for each thread of its warp. On an
H200, prompts take 0.7 to 0.9 times as long as with 512, and decode as long."""
SCAN_STAGES = 6
"""Tokens that it loads ahead, in 22 KiB of shared memory. 3 to 12 take as long."""


class TritonLinearBackend(LinearAttentionBackend):
    """The recurrences of every kind, and convolutions."""

    few_tokens = 16
    """Steps whose requests have no more new tokens than this run token by token. Those of mamba1
    always do: in chunks, a V of one dim would be a matrix of one column."""

    least_span = 16
    """Chunks that a program goes through at least if a long prompt is cut into spans."""

    _step: LinearStep

    def __init__(
        self,
        context: BackendContext,
        options: Mapping[str, object] = AttentionBackend.NO_OPTIONS,
        *,
        device: LinearDevice | None = None,
    ) -> None:
        """device: the one to serve, if not that which Triton drives. Raises BackendFailed if
        Triton cannot drive the context's device."""
        super().__init__(context, options)
        self.device = LinearDevice.of(context) if device is None else device
        self._convolutions = TritonConvolutions(self.states)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        mode = batch.forward_mode
        if mode.is_extend() and not mode.is_target_verify():
            self._convolutions.prepare(batch)
            self._step = self._convolutions.step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: decode steps, and those that verify drafts, read the batch and the
        states alone."""

    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        self._recur(call, batch, batch.seq_lens, None)

    def forward_verify(self, call: LinearCall, batch: ForwardBatch) -> None:
        self._recur(call, batch, batch.seq_lens, None, drafts=batch.drafts().draft_token_num)

    def forward_extend(self, call: LinearCall, batch: ForwardBatch) -> None:
        step, known = self._step, batch.extend_prefix_lens
        assert known is not None  # LinearStep.of has checked it
        call.out[step.num_tokens :].zero_()
        if call.layer.kind == "mamba1" or step.longest <= self.few_tokens:
            self._recur(call, batch, known, step.starts)
        else:
            self._run_chunks(call, batch, known)

    def _recur(
        self,
        call: LinearCall,
        batch: ForwardBatch,
        known: torch.Tensor,
        starts: torch.Tensor | None,
        *,
        drafts: int = 0,
    ) -> None:
        layer = call.layer
        heads, k_dim, v_dim = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        block_k = triton.next_power_of_2(k_dim)
        given = (
            *strided(call.q),
            *strided(call.k),
            *strided(call.v),
            call.g.contiguous(),
            None if call.beta is None else call.beta.contiguous(),
            call.out,
            self.states.state(layer.layer_id),
            self.states.draft_state(layer.layer_id) if drafts else None,
            batch.req_pool_indices,
            known,
            starts,
            layer.scaling,
        )
        shape = {
            "HV": heads,
            "GROUP": heads // layer.num_k_heads,
            "K": k_dim,
            "BLOCK_K": block_k,
            "HAS_BETA": call.beta is not None,
            "NORMED": layer.qk_l2norm,
            "IS_DECODE": starts is None and not drafts,
            "DRAFTS": drafts,
            "ROOM": self.states.draft_tokens if drafts else 0,
        }
        if layer.kind == "mamba1":
            tile = max(1, SCAN_TILE // block_k)
            scan_channels[triton.cdiv(heads, tile), batch.batch_size](
                *given, BLOCK_H=tile, STAGES=self._scan_stages, num_warps=1, **shape
            )
            return
        block_v = min(triton.next_power_of_2(v_dim), max(8, 4096 // block_k))
        recur[triton.cdiv(v_dim, block_v), heads, batch.batch_size](
            *given,
            V=v_dim,
            BLOCK_V=block_v,
            HAS_DELTA_RULE=layer.has_delta_rule,
            BY_CHANNEL=call.g.dim() == 3,
            num_warps=4,
            **shape,
        )

    @property
    def _scan_stages(self) -> int:
        """If loads ahead take registers, half as many do for half as many threads: compiled for
        gfx1201, 6 stages spill 376 bytes a thread, and 3 none."""
        device = self.device
        return SCAN_STAGES if device.copies_ahead else SCAN_STAGES * device.warp_threads // 64

    def _run_chunks(self, call: LinearCall, batch: ForwardBatch, known: torch.Tensor) -> None:
        ChunkRun(
            call=call,
            step=self._step,
            states=self.states.state(call.layer.layer_id),
            rows=batch.req_pool_indices,
            known=known,
            device=self.device,
            least_span=self.least_span,
        ).run()

    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._convolutions.run(call, batch)

    def verify_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._convolutions.verify(call, batch)
