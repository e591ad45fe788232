"""The hidden states of cached tokens, which an EAGLE head reads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from attnmux.core import InvalidInput, current_forward_context


class HiddenStates:
    """What a model's decoder returns for each cached token, in the token's slot.

    A state lies beside the K and V of its token: who shares, moves or frees the slot has it, and
    graphs write it as they write these.
    """

    def __init__(self, model: PreTrainedModel, *, num_slots: int) -> None:
        """model: one that runs on attnmux; a hook of its decoder writes the states.

        Raises InvalidInput for a model without a decoder of its own below the output embeddings.
        """
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers' own
        if decoder is None or decoder is model:
            got = f"{type(model).__name__}, which has no decoder below its logits"
            raise InvalidInput("hidden_states", got=got, expected="a model with one")
        self.states = torch.zeros(
            num_slots, width_of(model), dtype=model.dtype, device=model.device
        )
        """[slots, width]"""
        decoder.register_forward_hook(self._write)

    def _write(self, module: object, args: object, output: Any) -> None:  # noqa: ANN401  # transformers'
        slots = current_forward_context().batch.out_cache_loc
        self.states.index_copy_(0, slots, output.last_hidden_state[0].to(self.states.dtype))

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, width]: those of the tokens in slots [n]."""
        return self.states.index_select(0, slots)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the states of slots [n] to others."""
        self.states.index_copy_(0, targets, self.at(sources))


def width_of(model: PreTrainedModel) -> int:
    """Values of a hidden state."""
    return int(model.config.get_text_config(decoder=True).hidden_size)


def bytes_per_token(model: PreTrainedModel) -> int:
    """Of a token's hidden state."""
    return width_of(model) * model.dtype.itemsize
