"""The contract of a backend for linear layers: recurrences and short causal convolutions.

It has the same two halves of preparation as `AttentionBackend`. T new
tokens and B requests of a step; `LinearLayerSpec` has the formula, `LinearCall` the shapes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import final

import torch

from attnmux.core.contract.arguments import check_fields
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.debug import check_batch, check_types
from attnmux.core.contract.linear.layer import (
    ConvCall,
    LinearCall,
    LinearLayerSpec,
    check_conv,
    check_linear,
)
from attnmux.core.contract.linear.states import StatePool
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.steps import NO_OPTIONS, StepBackend
from attnmux.core.facts.errors import AttnmuxError, InvalidInput

SERVED = (
    *(ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.IDLE),
    ForwardMode.TARGET_VERIFY,
)


class LinearAttentionBackend(StepBackend):
    """The linear layers of one kind, of one model on one device.

    The states of a step's requests are in the rows `req_pool_indices` of the context's
    `linear_states`. A request whose first new token is its first one starts from zeros, whatever
    the row holds: if `extend_prefix_lens` is 0, and in a decode step if `seq_lens` is 1 or
    less. Each call leaves the rows of the step's requests with the state after their last token,
    and every other row but padding's unchanged.

    A TARGET_VERIFY step changes none of these rows: it leaves the states after each draft token in
    `draft_state` and `draft_conv` of the pool, whose `accept` then gives the requests theirs. Its
    drafts are chains, as many for each request.
    """

    def __init__(self, context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> None:
        """Raises InvalidInput for a context without `linear_states`."""
        self.states = StatePool.of(context)
        self.context = context
        self.options = options

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare an eager step. Raises InvalidInput for a malformed batch, for draft trees and
        more draft tokens than the pool has room for, and for steps of a draft model."""
        if self.context.debug:
            check_types("batch", batch, ForwardBatch)
        check_fields(batch)
        if batch.forward_mode not in SERVED:
            raise InvalidInput(
                "forward_mode",
                got=batch.forward_mode.name,
                expected=f"{', '.join(mode.name for mode in SERVED)}: no step of a draft model",
            )
        if batch.forward_mode.is_target_verify():
            check_drafts(self.states, batch)
        if self.context.debug and batch.forward_mode is not ForwardMode.IDLE:
            check_batch(self.context, batch)
        super().init_forward_metadata(batch)

    @final
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LinearLayerSpec,
        batch: ForwardBatch,
        *,
        g: torch.Tensor,
        beta: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The recurrence of one layer: read the states, run the new tokens, write the states.

        Shapes as in `LinearCall`. Returns `out`, newly allocated unless given; an IDLE step leaves
        the states alone and returns zeros. A TARGET_VERIFY step writes those of drafts alone.
        Raises InvalidInput, before a state is touched, for shapes, dtypes or devices that do not
        fit the layer and the batch.
        """
        if out is None:
            out = v.new_empty(v.shape)
        call = LinearCall(q, k, v, g, beta, layer, out)
        check_linear(call, batch.num_tokens)
        if batch.forward_mode is ForwardMode.IDLE:
            return out.zero_()
        if batch.forward_mode.is_target_verify():
            check_drafts(self.states, batch)
            self.forward_verify(call, batch)
        elif batch.forward_mode.is_decode():
            self.forward_decode(call, batch)
        else:
            self.forward_extend(call, batch)
        return out

    @final
    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        layer: LinearLayerSpec,
        batch: ForwardBatch,
        *,
        bias: torch.Tensor | None = None,
        silu: bool = False,
        index: int = 0,
    ) -> torch.Tensor:
        """A causal convolution of each channel over its last `conv_size` tokens.

        Shapes as in `ConvCall`. Returns [T, C], newly allocated; an IDLE step leaves the states
        alone and returns zeros. Raises InvalidInput as `forward` does.
        """
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        call = ConvCall(x, weight, bias, silu, layer, index, out)
        check_conv(call, batch.num_tokens)
        if batch.forward_mode is ForwardMode.IDLE:
            return out.zero_()
        if batch.forward_mode.is_target_verify():
            check_drafts(self.states, batch)
            self.verify_conv(call, batch)
        else:
            self.forward_conv(call, batch)
        return out

    @abstractmethod
    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        """Run one new token a request. Writes `call.out` and the states."""

    @abstractmethod
    def forward_extend(self, call: LinearCall, batch: ForwardBatch) -> None:
        """Run many new tokens a request; else as `forward_decode`."""

    @abstractmethod
    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        """Run a convolution, in a step of any kind but TARGET_VERIFY. Writes `call.out` and the
        convolution's states."""

    def forward_verify(self, call: LinearCall, batch: ForwardBatch) -> None:
        """Run d draft tokens a request, d being `batch.drafts().draft_token_num`. Writes `call.out`
        and the first d of `states.draft_state` in the requests' rows.

        Raises AttnmuxError unless the backend overrides it. Backends with the phase "verify" on
        their card do.
        """
        raise AttnmuxError(f"{type(self).__name__} verifies no drafts")

    def verify_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        """Run a convolution over d draft tokens a request. Writes `call.out` and the first
        W - 1 + d of `states.draft_conv` in the requests' rows.

        Raises as `forward_verify` does.
        """
        raise AttnmuxError(f"{type(self).__name__} verifies no drafts")


def check_drafts(states: StatePool, batch: ForwardBatch) -> None:
    """Raise InvalidInput unless a step's drafts are chains for which the pool has room."""
    spec = batch.drafts()
    if spec.topk > 1 or spec.tree_mask is not None:
        expected = "chains: the states of a tree's branches are not kept"
        raise InvalidInput("spec_info", got="a draft tree", expected=expected)
    num, most = spec.draft_token_num, states.draft_tokens
    if not 1 <= num <= most:
        expected = f"1 to {most}, for which the states have room (draft_tokens)"
        raise InvalidInput("spec_info.draft_token_num", got=num, expected=expected)
    if batch.num_tokens != batch.batch_size * num:
        got = f"{batch.num_tokens} tokens of {batch.batch_size} requests"
        raise InvalidInput("extend_num_tokens", got=got, expected=f"{num} of each")
