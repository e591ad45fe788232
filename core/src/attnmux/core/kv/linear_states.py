"""The states of linear layers: one row for each request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.arguments import check_positive
from attnmux.core.errors import InvalidInput
from attnmux.core.kv.memory import allocate_zeroed
from attnmux.core.linear_layer import LinearLayerSpec


class LinearStatePool:
    """Recurrent and convolution states of all linear layers, by row of the request table.

    Row 0 belongs to padding, and the rows after those of requests to states that are kept for later
    ones. A request without cached tokens starts from zeros, whatever its row
    holds, so that no row has to be cleared. A backend reads the state before the step's tokens and
    leaves the state after them.
    """

    def __init__(
        self,
        *,
        size: int,
        layers: Sequence[LinearLayerSpec],
        conv_dtype: torch.dtype,
        device: torch.device | str,
        kept_size: int = 0,
    ) -> None:
        """Rows for `size` requests, and for `kept_size` states that outlive their request.

        Raises InvalidInput for a size below 1, fewer kept states than 0 and two layers with one id,
        and PoolExhausted when memory does not suffice.
        """
        check_positive("size", size)
        if kept_size < 0:
            raise InvalidInput("kept_size", got=kept_size, expected="at least 0")
        ids = [layer.layer_id for layer in layers]
        if len(set(ids)) != len(ids):
            raise InvalidInput("layers", got=f"ids {ids}", expected="a different id for each")
        self.size: int = size
        """Rows for requests, without padding's and those of kept states."""
        self.kept_size: int = kept_size
        self.layers = tuple(layers)
        self.device = torch.device(device)
        self.conv_dtype = conv_dtype
        self._states: dict[int, torch.Tensor] = {}
        self._convs: dict[tuple[int, int], torch.Tensor] = {}
        rows = 1 + size + kept_size
        for layer in self.layers:
            if layer.has_state:
                state = rows, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
                self._states[layer.layer_id] = self._allocated(torch.float32, *state)
            for index, dim in enumerate(layer.conv_dims):
                conv = self._allocated(conv_dtype, rows, layer.conv_size - 1, dim)
                self._convs[layer.layer_id, index] = conv

    def _allocated(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        (buffer,) = allocate_zeroed(
            [shape],
            dtype=dtype,
            device=self.device,
            what=f"linear states of {self.size} requests, and {self.kept_size} kept ones",
            hint="lower the number of requests, or of kept states",
        )
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes held, all rows included."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def kept_rows(self) -> range:
        """The rows of kept states."""
        return range(self.size + 1, 1 + self.size + self.kept_size)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Every buffer; the first dim of each is the rows."""
        return (*self._states.values(), *self._convs.values())

    def state(self, layer_id: int) -> torch.Tensor:
        """[1 + size + kept_size, Hv, K, V] of a layer.

        Raises InvalidInput for a layer without one.
        """
        return self._found(self._states, layer_id, "a layer with a recurrent state")

    def conv(self, layer_id: int, index: int = 0) -> torch.Tensor:
        """[1 + size + kept_size, W - 1, C] of a layer's convolution: its last inputs, oldest first.

        Raises InvalidInput for a convolution that the layer does not have.
        """
        return self._found(self._convs, (layer_id, index), "a convolution of a layer")

    def copy(self, source: int, target: int) -> None:
        """Give row `target` the states of row `source`, as for a fork of a request.

        Raises InvalidInput for padding's row and for others than there are.
        """
        last = self.size + self.kept_size
        for name, row in (("source", source), ("target", target)):
            if not 1 <= row <= last:
                raise InvalidInput(name, got=row, expected=f"a row from 1 to {last}")
        for buffer in self.buffers:
            buffer[target].copy_(buffer[source])

    def _found(self, buffers: dict, key: object, expected: str) -> torch.Tensor:  # type: ignore[type-arg]  # of either dict
        try:
            found: torch.Tensor = buffers[key]
        except KeyError:
            raise InvalidInput("layer_id", got=key, expected=expected) from None
        return found
