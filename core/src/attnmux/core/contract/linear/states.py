"""The states of linear layers, as their backends read and write them: a row for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch

from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.linear.layer import LinearLayerSpec
from attnmux.core.facts.errors import InvalidInput

P = TypeVar("P", bound="StatePool")


class StatePool(ABC):
    """Recurrent and convolution states of all linear layers, by row of the request table.

    Row 0 belongs to padding. A request without cached tokens starts from zeros, whatever its row
    holds, so that no row has to be cleared. A backend reads the state before the step's tokens and
    leaves the state after them; a step that verifies drafts leaves a request's own state unchanged,
    and writes the states after each draft token next to it.

    attnmux-parts has `LinearStatePool`, which engines make.
    """

    size: int
    """Rows for requests, without padding's."""
    layers: tuple[LinearLayerSpec, ...]
    draft_tokens: int
    """d: the states after draft tokens for which each request has room."""
    conv_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls: type[P], context: BackendContext) -> P:
        """The context's states. Raises InvalidInput for a context without linear layers."""
        states = context.linear_states
        if not isinstance(states, cls):
            got = None if states is None else f"one of type {type(states).__name__}"
            raise InvalidInput("context.linear_states", got=got, expected=f"a {cls.__name__}")
        return states

    @staticmethod
    def read(pool: torch.Tensor, rows: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """A copy [B, ...] of rows of `state` or `conv`, with zeros for those that start: their rows
        may hold NaN. fresh: [B] bool."""
        held = pool[rows]
        return held.masked_fill_(fresh.view(-1, *[1] * (held.dim() - 1)), 0)

    @abstractmethod
    def state(self, layer_id: int) -> torch.Tensor:
        """[rows, Hv, K, V] of a layer, float32.

        Raises InvalidInput for a layer without one.
        """

    @abstractmethod
    def conv(self, layer_id: int, index: int = 0) -> torch.Tensor:
        """[rows, W - 1, C] of a layer's convolution: its last inputs, oldest first.

        Raises InvalidInput for a convolution that the layer does not have.
        """

    @abstractmethod
    def draft_state(self, layer_id: int) -> torch.Tensor:
        """[1 + size, d, Hv, K, V] of a layer: the states after each draft token of a request.

        Raises InvalidInput for a layer without one, and for a pool without draft tokens.
        """

    @abstractmethod
    def draft_conv(self, layer_id: int, index: int = 0) -> torch.Tensor:
        """[1 + size, W - 1 + d, C] of a layer's convolution: the inputs before a request's draft
        tokens, then theirs. The W - 1 from place n on are the state after n draft tokens.

        Raises InvalidInput as `draft_state` does.
        """

    @abstractmethod
    def alike(self: P, layers: Sequence[LinearLayerSpec], *, draft_tokens: int) -> P:
        """States of one request for other layers, of the same dtype and on the same device.

        Raises PoolExhausted when memory does not suffice.
        """
