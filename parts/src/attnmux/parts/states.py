"""The states of linear layers: one row for each request."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from attnmux.core import InvalidInput, KVPool, LinearLayerSpec
from attnmux.core.plugin import StatePool, check_tensor

Key = TypeVar("Key", bound=Hashable)

COPIED_BYTES = 256 << 20
"""Bytes of states that `accept` copies at once: layers are copied together, to take few launches,
but not so many that the copies need much memory."""


class LinearStatePool(StatePool):
    """The states of all linear layers that an engine keeps, see `StatePool`.

    The rows after those of requests belong to states that are kept for later requests. After a step
    that verified drafts, `accept` takes the states after the last accepted token. With d
    `draft_tokens`, these take d times the recurrent states of each request, and d more inputs of
    its convolutions.
    """

    def __init__(
        self,
        *,
        size: int,
        layers: Sequence[LinearLayerSpec],
        conv_dtype: torch.dtype,
        device: torch.device | str,
        kept_size: int = 0,
        draft_tokens: int = 0,
    ) -> None:
        """Rows for `size` requests, and for `kept_size` states that outlive their request.

        draft_tokens: of a request and step that verifies them, at most; 0 if none does.
        Raises InvalidInput for a size below 1, fewer kept states or draft tokens than 0 and two
        layers with one id, and PoolExhausted when memory does not suffice.
        """
        InvalidInput.check_at_least(1, "size", size)
        for name, value in (("kept_size", kept_size), ("draft_tokens", draft_tokens)):
            InvalidInput.check_at_least(0, name, value)
        ids = [layer.layer_id for layer in layers]
        if len(set(ids)) != len(ids):
            raise InvalidInput("layers", got=f"ids {ids}", expected="a different id for each")
        self.size = size
        self.kept_size: int = kept_size
        self.draft_tokens = draft_tokens
        self.layers = tuple(layers)
        # That of its tensors, which have an index where "cuda" has none.
        self.device = torch.empty(0, device=device).device
        self.conv_dtype = conv_dtype
        states = {
            layer.layer_id: (layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
            for layer in self.layers
            if layer.has_state
        }
        convs = {
            (layer.layer_id, index): (layer.conv_size - 1, dim)
            for layer in self.layers
            for index, dim in enumerate(layer.conv_dims)
        }
        rows, d = 1 + size + kept_size, draft_tokens
        self._states, self._state_stacks = self._stacked(
            {key: (rows, *shape) for key, shape in states.items()}, torch.float32
        )
        self._convs, self._conv_stacks = self._stacked(
            {key: (rows, *shape) for key, shape in convs.items()}, conv_dtype
        )
        self._draft_states, self._draft_state_stacks = self._stacked(
            {key: (1 + size, d, *shape) for key, shape in states.items() if d}, torch.float32
        )
        self._draft_convs, self._draft_conv_stacks = self._stacked(
            {key: (1 + size, taps + d, dim) for key, (taps, dim) in convs.items() if d}, conv_dtype
        )

    def alike(self, layers: Sequence[LinearLayerSpec], *, draft_tokens: int) -> LinearStatePool:
        return LinearStatePool(
            size=1,
            layers=layers,
            conv_dtype=self.conv_dtype,
            device=self.device,
            draft_tokens=draft_tokens,
        )

    def _stacked(
        self, shapes: Mapping[Key, tuple[int, ...]], dtype: torch.dtype
    ) -> tuple[dict[Key, torch.Tensor], tuple[torch.Tensor, ...]]:
        """A buffer by key, and the stacks of those that are alike, whose first dim they are."""
        alike: dict[tuple[int, ...], list[Key]] = {}
        for key, shape in shapes.items():
            alike.setdefault(shape, []).append(key)
        what, hint = self.described
        views: dict[Key, torch.Tensor] = {}
        stacks = []
        for shape, keys in alike.items():
            (stack,) = KVPool.allocate_zeroed(
                [(len(keys), *shape)], dtype=dtype, device=self.device, what=what, hint=hint
            )
            views |= dict(zip(keys, stack.unbind(), strict=True))
            stacks.append(stack)
        return {key: views[key] for key in shapes}, tuple(stacks)

    @property
    def described(self) -> tuple[str, str]:
        """The pool's contents, and a hint if memory is short."""
        what = f"linear states of {self.size} requests, and {self.kept_size} kept ones"
        if not self.draft_tokens:
            return what, "lower the number of requests, or of kept states"
        what += f", with {self.draft_tokens} draft tokens of each request"
        return what, "lower the number of requests, of kept states, or of draft tokens"

    @property
    def nbytes(self) -> int:
        """Bytes held, all rows and those of drafts included."""
        return sum(buffer.nbytes for buffer in self.buffers) + self.draft_nbytes

    @property
    def draft_nbytes(self) -> int:
        """Bytes of the states after draft tokens, which `nbytes` includes."""
        return sum(buffer.nbytes for buffer in self.draft_buffers)

    @property
    def kept_rows(self) -> range:
        """The rows of kept states."""
        return range(self.size + 1, 1 + self.size + self.kept_size)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Every buffer but those of drafts; the first dim of each is the rows."""
        return (*self._states.values(), *self._convs.values())

    @property
    def draft_buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers of states after draft tokens; the first dim of each is 1 + size rows."""
        return (*self._draft_states.values(), *self._draft_convs.values())

    def state(self, layer_id: int) -> torch.Tensor:
        return self._found(self._states, layer_id, "a layer with a recurrent state")

    def conv(self, layer_id: int, index: int = 0) -> torch.Tensor:
        return self._found(self._convs, (layer_id, index), "a convolution of a layer")

    def draft_state(self, layer_id: int) -> torch.Tensor:
        expected = "a layer with a recurrent state, of a pool with draft_tokens"
        return self._found(self._draft_states, layer_id, expected)

    def draft_conv(self, layer_id: int, index: int = 0) -> torch.Tensor:
        expected = "a convolution of a layer, of a pool with draft_tokens"
        return self._found(self._draft_convs, (layer_id, index), expected)

    def accept(self, rows: torch.Tensor, num_accepted_tokens: torch.Tensor) -> None:
        """Give each request the states after the draft tokens that it keeps.

        rows: [B] int64, of the step that verified them; row 0 for padding.
        num_accepted_tokens: [B] int32 or int64, from 0 to the step's draft tokens, the root
        included; 0 leaves the request's states unchanged. Both on the pool's device, which is not
        waited for, so that a device graph can hold the call, and whose values are not checked.
        Engines call it after each step that verifies, before any other step of these requests.
        Raises InvalidInput for a pool without draft tokens, and for other shapes, dtypes and
        devices.
        """
        self._check_accepted(rows, num_accepted_tokens)
        kept, last = num_accepted_tokens.long(), (num_accepted_tokens - 1).clamp(min=0)
        for states, drafted in _chunks(self._state_stacks, self._draft_state_stacks, len(rows)):
            _put(states, rows, drafted[:, rows, last], kept > 0)
        for convs, drafted in _chunks(self._conv_stacks, self._draft_conv_stacks, len(rows)):
            taps = torch.arange(convs.shape[2], device=self.device)
            after = drafted[:, rows.unsqueeze(1), kept.unsqueeze(1) + taps]
            _put(convs, rows, after, kept > 0)

    def _check_accepted(self, rows: torch.Tensor, counts: torch.Tensor) -> None:
        if not self.draft_tokens:
            expected = "draft_tokens of a LinearStatePool whose drafts are accepted"
            raise InvalidInput("draft_tokens", got=0, expected=expected)
        check_tensor("rows", rows, ("B",), self.device, torch.int64)
        check_tensor(
            "num_accepted_tokens", counts, rows.shape, self.device, torch.int32, torch.int64
        )

    def copy(self, source: int, target: int) -> None:
        """Give row `target` the states of row `source`, as for a fork of a request.

        Raises InvalidInput for padding's row and for others than there are.
        """
        last = self.size + self.kept_size
        for name, row in (("source", source), ("target", target)):
            if not 1 <= row <= last:
                raise InvalidInput(name, got=row, expected=f"a row from 1 to {last}")
        for stack in (*self._state_stacks, *self._conv_stacks):
            stack[:, target].copy_(stack[:, source])

    def _found(self, buffers: dict, key: object, expected: str) -> torch.Tensor:  # type: ignore[type-arg]  # of either dict
        try:
            buffer: torch.Tensor = buffers[key]
        except KeyError:
            raise InvalidInput("layer_id", got=key, expected=expected) from None
        return buffer


def _put(
    stack: torch.Tensor, rows: torch.Tensor, after: torch.Tensor, is_kept: torch.Tensor
) -> None:
    """Write after [L, B, ...] to the rows [B] of stack [L, rows, ...] that keep [B] a token."""
    is_kept = is_kept.view(-1, *[1] * (stack.dim() - 2))
    stack.index_copy_(1, rows, torch.where(is_kept, after, stack[:, rows]))


def _chunks(
    stacks: Sequence[torch.Tensor], drafts: Sequence[torch.Tensor], num_rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Layers of a stack [L, rows, ...] with those after drafts, as many as are copied at once."""
    for stack, drafted in zip(stacks, drafts, strict=True):
        most = max(COPIED_BYTES // max(stack[0, 0].nbytes * num_rows, 1), 1)
        yield from zip(torch.split(stack, most), torch.split(drafted, most), strict=True)
