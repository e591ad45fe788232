"""The contract of a backend for linear layers: recurrences and short causal convolutions.

It has the same two halves of preparation as `AttentionBackend`. T new
tokens and B requests of a step; `LinearLayerSpec` has the formula, `LinearCall` the shapes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch

from attnmux.core.arguments import check_fields
from attnmux.core.batch import ForwardMode
from attnmux.core.debug import check_batch
from attnmux.core.errors import InvalidInput
from attnmux.core.linear_call import ConvCall, LinearCall, check_conv, check_linear
from attnmux.core.steps import NO_OPTIONS, StepBackend

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.context import BackendContext
    from attnmux.core.kv.linear_states import LinearStatePool
    from attnmux.core.linear_layer import LinearLayerSpec

SERVED = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.IDLE)


class LinearAttentionBackend(StepBackend):
    """The linear layers of one kind, of one model on one device.

    The states of a step's requests are in the rows `req_pool_indices` of the context's
    `linear_states`. A request whose first new token is its first one starts from zeros, whatever
    the row holds: where `extend_prefix_lens` is 0, and in a decode step where `seq_lens` is 1 or
    less. Each call leaves the rows of the step's requests with the state after their last token,
    and every other row but padding's unchanged.
    """

    def __init__(self, context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> None:
        """Raises InvalidInput for a context without `linear_states`."""
        if context.linear_states is None:
            raise InvalidInput("context.linear_states", got=None, expected="a LinearStatePool")
        self.context = context
        self.options = options
        self.states: LinearStatePool = context.linear_states

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare an eager step. Raises InvalidInput for a malformed batch, and for steps of
        drafts, since a state cannot be taken back to the accepted token."""
        check_fields(batch)
        if batch.forward_mode not in SERVED:
            raise InvalidInput(
                "forward_mode",
                got=batch.forward_mode.name,
                expected=f"{', '.join(mode.name for mode in SERVED)}: no step of drafts",
            )
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
        the states alone and returns zeros.
        Raises InvalidInput, before a state is touched, for shapes, dtypes or devices that do not
        fit the layer and the batch.
        """
        if out is None:
            out = v.new_empty(v.shape)
        call = LinearCall(q, k, v, g, beta, layer, out)
        check_linear(call, batch.num_tokens)
        if batch.forward_mode is ForwardMode.IDLE:
            return out.zero_()
        run = self.forward_decode if batch.forward_mode.is_decode() else self.forward_extend
        run(call, batch)
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
        """Run a convolution, in a step of any kind. Writes `call.out` and the convolution's
        states."""
