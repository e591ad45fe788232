"""The short convolutions of linear layers, a launch or two each, where their tokens lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from attnmux.core.plugin import ShortConvolutions, rehearse_convolutions
from attnmux.triton.attention.factory import compute_units
from attnmux.triton.kernels.linear.convolutions import (
    convolve,
    convolve_drafts,
    convolve_one,
    keep_inputs,
)
from attnmux.triton.linear.step import LinearStep, strided

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch
    from attnmux.core.plugin import ConvCall

BLOCK_C = 256
BLOCK_T = 16


class TritonConvolutions(ShortConvolutions):
    """Convolutions of any number of taps and channels."""

    step: LinearStep
    """The extend step that was prepared last."""

    def prepare(self, batch: ForwardBatch) -> None:
        self.step = LinearStep.of(batch)

    def run(self, call: ConvCall, batch: ForwardBatch) -> None:
        x, states = call.x, self.states.conv(call.layer.layer_id, call.index)
        channels, taps = call.weight.shape
        block_c = min(BLOCK_C, triton.next_power_of_2(channels))
        blocks = triton.cdiv(channels, block_c)
        common = {"C": channels, "W": taps, "BLOCK_C": block_c}
        how = {"HAS_BIAS": call.bias is not None, "SILU": call.silu}
        weight, rows = call.weight.contiguous(), batch.req_pool_indices
        given = (*strided(x), weight, call.bias, call.out, states, rows)
        if batch.forward_mode.is_decode():
            convolve_one[(batch.batch_size, blocks)](*given, batch.seq_lens, **common, **how)
            return
        step, known, num_tokens = self.step, batch.extend_prefix_lens, x.shape[0]
        if num_tokens:
            tokens = step.starts, step.request_of, num_tokens
            convolve[(triton.cdiv(num_tokens, BLOCK_T), blocks)](
                *given, known, *tokens, BLOCK_T=BLOCK_T, **common, **how
            )
        if taps > 1:
            keep_inputs[(batch.batch_size, blocks)](
                *strided(x),
                states,
                rows,
                known,
                step.starts,
                BLOCK_W=triton.next_power_of_2(taps - 1),
                **common,
            )

    def verify(self, call: ConvCall, batch: ForwardBatch) -> None:
        layer_id, (channels, taps) = call.layer.layer_id, call.weight.shape
        drafted, drafts = self.states.draft_conv(layer_id, call.index), batch.drafts()
        block_c = min(BLOCK_C, triton.next_power_of_2(channels))
        grid = (batch.batch_size, drafts.draft_token_num, triton.cdiv(channels, block_c))
        convolve_drafts[grid](
            *strided(call.x),
            call.weight.contiguous(),
            call.bias,
            call.out,
            self.states.conv(layer_id, call.index),
            drafted,
            batch.req_pool_indices,
            batch.seq_lens,
            C=channels,
            W=taps,
            HAS_BIAS=call.bias is not None,
            SILU=call.silu,
            BLOCK_C=block_c,
            DRAFTS=drafts.draft_token_num,
            ROOM=drafted.shape[1],
            enable_fp_fusion=True,
        )


def make_convolutions(context: BackendContext) -> ShortConvolutions:
    """Tried once on the context's device."""
    compute_units(context)
    return rehearse_convolutions(TritonConvolutions, context)
