"""The hidden states of cached tokens, which an EAGLE head reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from attnmux.core import BackendContext, Decision, ForwardContext, InvalidInput, LayerSpec
from attnmux.transformers.model.part import ModelPart, TokenBytes
from attnmux.transformers.options import RunnerOptions

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


STATES_DIMS = 3
"""[1, T, width]"""


class HiddenStates(ModelPart):
    """The results of a model's decoder, or of some of its layers, for each cached token, in the
    token's slot.

    A state is next to the K and V of its token: it is shared, moved and freed with the slot, and
    graphs write it as they write these.
    """

    unpieced = None
    states: torch.Tensor
    """[slots, width], from `attach` on."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()) -> None:
        """layers: numbers of the layers whose outputs lie one after another in a state; none: what
        the decoder returns.

        Raises InvalidInput for a model without a decoder of its own below the output embeddings,
        and for layers that it lacks.
        """
        self._model, self._numbers = model, tuple(layers)
        self._decoder, self._layers = _decoder_of(model), _layers_of(model, layers)
        self._width = int(model.config.get_text_config(decoder=True).hidden_size)
        self._hooks: list[RemovableHandle] = []
        self._shapes: dict[int, tuple[int, ...]] = {}

    @classmethod
    def find(cls, model: PreTrainedModel, options: RunnerOptions) -> HiddenStates | None:
        return cls(model, options.hidden_layers) if options.hidden_states else None

    def bind(self) -> None:
        """Note what the layers return while they are recorded."""

        def note(number: int, module: object, args: object, output: object) -> None:
            self._shapes[number] = tuple(_first(output).shape)

        self._hooks = [
            layer.register_forward_hook(partial(note, number))
            for number, layer in zip(self._numbers, self._layers, strict=True)
        ]

    def mark(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """Raises InvalidInput for layers of the model that return something else than a state for
        each token."""
        self._remove_hooks()
        for number, shape in self._shapes.items():
            if len(shape) != STATES_DIMS or shape[0] != 1 or shape[2] != self._width:
                got = f"layer {number} of {type(self._model).__name__}, which returns {list(shape)}"
                expected = f"layers that return a state for each token: [1, T, {self._width}]"
                raise InvalidInput("hidden_layers", got=got, expected=expected)
        return tuple(layers)

    def bytes_per_token(self, decision: Decision) -> TokenBytes:
        width = self._width * (len(self._layers) or 1)
        return TokenBytes(beside=width * self._model.dtype.itemsize)

    def attach(self, context: BackendContext, decision: Decision) -> None:
        width, num_slots = (
            self._width * (len(self._layers) or 1),
            context.token_to_kv_pool.num_slots,
        )
        self.states = torch.zeros(
            num_slots, width, dtype=self._model.dtype, device=self._model.device
        )
        self._remove_hooks()
        if not self._layers:
            last = partial(self._write, 0, lambda output: output.last_hidden_state)
            self._hooks.append(self._decoder.register_forward_hook(last))
        for place, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_hook(partial(self._write, place, _first)))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _write(
        self,
        place: int,
        read: Callable[[Any], torch.Tensor],
        module: object,
        args: object,
        output: Any,  # noqa: ANN401  # transformers'
    ) -> None:
        """Write what `read` finds in a module's output to the states' place."""
        slots = ForwardContext.current().batch.out_cache_loc
        columns = self.states.narrow(1, place * self._width, self._width)
        columns.index_copy_(0, slots, read(output)[0].to(columns.dtype))

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, width]: those of the tokens in slots [n]."""
        return self.states.index_select(0, slots)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the states of slots [n] to others."""
        self.states.index_copy_(0, targets, self.at(sources))


def _decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The module that computes the last hidden states. Raises InvalidInput for a model without."""
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
    by_number = {number: layer for layer, _, number in decoder_layers(_decoder_of(model))}
    lacking = set(layers) - by_number.keys()
    if lacking:
        numbers = ", ".join(map(str, sorted(by_number)))
        expected = f"layers of {type(model).__name__} that mix tokens: {numbers or 'it has none'}"
        raise InvalidInput("hidden_layers", got=sorted(lacking), expected=expected)
    return [by_number[number] for number in layers]


def _first(output: Any) -> torch.Tensor:  # noqa: ANN401  # transformers'
    """The hidden states of a layer, which may return more."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states


def decoder_layers(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, torch.nn.Module, int]]:
    """Each layer of the model's lists of layers, with its attention module and number."""
    for modules in model.modules():
        if not isinstance(modules, torch.nn.ModuleList):
            continue
        for layer in modules:
            numbered = {
                number: module
                for module in layer.modules()
                if isinstance(number := getattr(module, "layer_idx", None), int)
            }
            if len(numbered) == 1:
                ((number, attention),) = numbered.items()
                yield layer, attention, number
