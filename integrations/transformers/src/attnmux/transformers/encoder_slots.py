"""Where a request's encoder tokens lie: in front of its own, in the same sequence of pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.errors import InvalidInput
from attnmux.transformers.sequence import SequenceState


def check_encoder_len(encoder_len: int, max_encoder_len: int) -> None:
    """Raise InvalidInput unless a request has an encoder's states where, and only where, the model
    has an encoder, and no more of them than there is room for."""
    if bool(encoder_len) != bool(max_encoder_len) or encoder_len > max_encoder_len:
        raise InvalidInput(
            "encoder_states",
            came=f"{encoder_len} of them",
            expected=f"1 to {max_encoder_len}" if max_encoder_len else "none without an encoder",
        )


def split_encoder(
    slots: torch.Tensor, states: Sequence[SequenceState], counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Of slots in which each request's lie together: (the tokens', the new encoders', the new
    encoders' states [E, width]), one request behind the other; None where no encoder is new.

    To be called before the step counts as run. counts: new tokens of each request.
    """
    new = [
        state.encoder_states
        for state in states
        if state.encoder_states is not None and not state.encoder_cached
    ]
    if not new:
        return slots, None, None
    sizes: list[int] = []
    for state, count in zip(states, counts, strict=True):
        sizes += [state.columns_for(count) - count, count]
    parts = slots.tensor_split(torch.tensor(sizes).cumsum(0)[:-1].tolist())
    return torch.cat(parts[1::2]), torch.cat(parts[::2]), torch.cat(new)
