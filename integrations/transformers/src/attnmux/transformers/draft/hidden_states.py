"""The hidden states of cached tokens, which an EAGLE head reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from attnmux.core import ForwardContext, InvalidInput
from attnmux.transformers.model.decoder_layers import decoder_layers

STATES_DIMS = 3
"""[1, T, width]"""


class HiddenStates:
    """What a model's decoder, or some of its layers, return for each cached token, in the token's
    slot.

    A state lies beside the K and V of its token: who shares, moves or frees the slot has it, and
    graphs write it as they write these.
    """

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, layers: Sequence[int] = ()
    ) -> None:
        """model: one that runs on attnmux; hooks of its modules write the states. layers: numbers
        of the layers whose outputs lie one after another in a state; none: what the decoder
        returns.

        Raises InvalidInput for a model without a decoder of its own below the output embeddings,
        and for layers that it lacks.
        """
        decoder = _decoder_of(model)
        self._width = width_of(model)
        self.states = torch.zeros(
            num_slots, width_of(model, layers), dtype=model.dtype, device=model.device
        )
        """[slots, width]"""
        if not layers:
            decoder.register_forward_hook(self._hook(0, lambda output: output.last_hidden_state))
        for place, layer in enumerate(_layers_of(model, layers)):
            layer.register_forward_hook(self._hook(place, _first))

    def _hook(self, place: int, read: Callable[[Any], torch.Tensor]) -> Callable[..., None]:
        """Writes what `read` finds in a module's output to the states' place."""
        return partial(self._write, place, read)

    def _write(
        self,
        place: int,
        read: Callable[[Any], torch.Tensor],
        module: object,
        args: object,
        output: Any,  # noqa: ANN401  # transformers'
    ) -> None:
        slots = ForwardContext.current().batch.out_cache_loc
        columns = self.states.narrow(1, place * self._width, self._width)
        columns.index_copy_(0, slots, read(output)[0].to(columns.dtype))

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, width]: those of the tokens in slots [n]."""
        return self.states.index_select(0, slots)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the states of slots [n] to others."""
        self.states.index_copy_(0, targets, self.at(sources))


@contextmanager
def noting_states(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[None]:
    """A block in which the model runs, to see whether its layers return a state for each token.

    Raises InvalidInput at the end for those that return something else, and at once for layers that
    the model lacks.
    """
    shapes: dict[int, tuple[int, ...]] = {}

    def note(number: int, module: object, args: object, output: object) -> None:
        shapes[number] = tuple(_first(output).shape)

    hooks = [
        layer.register_forward_hook(partial(note, number))
        for number, layer in zip(layers, _layers_of(model, layers), strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    width = width_of(model)
    for number, shape in shapes.items():
        if len(shape) != STATES_DIMS or shape[0] != 1 or shape[2] != width:
            got = f"layer {number} of {type(model).__name__}, which returns {list(shape)}"
            expected = f"layers that return a state for each token: [1, T, {width}]"
            raise InvalidInput("hidden_layers", got=got, expected=expected)


def _decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """What computes the last hidden states. Raises InvalidInput for a model without."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers' own
    if decoder is None or decoder is model:
        got = f"{type(model).__name__}, which has no decoder below its logits"
        raise InvalidInput("hidden_states", got=got, expected="a model with one")
    assert isinstance(decoder, torch.nn.Module)
    return decoder


def _layers_of(model: PreTrainedModel, layers: Sequence[int]) -> list[torch.nn.Module]:
    """The layers by their numbers. Raises InvalidInput for those that the model lacks."""
    if not layers:
        return []
    found = {number: layer for layer, _, number in decoder_layers(_decoder_of(model))}
    lacking = set(layers) - found.keys()
    if lacking:
        numbers = ", ".join(map(str, sorted(found)))
        expected = f"layers of {type(model).__name__} that mix tokens: {numbers or 'it has none'}"
        raise InvalidInput("hidden_layers", got=sorted(lacking), expected=expected)
    return [found[number] for number in layers]


def _first(output: Any) -> torch.Tensor:  # noqa: ANN401  # transformers'
    """The hidden states of a layer, which may return more."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states


def width_of(model: PreTrainedModel, layers: Sequence[int] = ()) -> int:
    """Values of a hidden state; layers: as in `HiddenStates`."""
    width = int(model.config.get_text_config(decoder=True).hidden_size)
    return width * (len(layers) or 1)


def bytes_per_token(model: PreTrainedModel, layers: Sequence[int] = ()) -> int:
    """Of a token's hidden state."""
    return width_of(model, layers) * model.dtype.itemsize
