"""Encoder-decoder models: the encoder once a request, the decoder's packed rows on the backend.

Self- and cross-attention of the decoder go to the backend, over one KV pool in which each has
layer ids of its own: in a request's row the encoder's slots come first. The encoder runs with
transformers' own scaled-dot-product attention, several requests in a call if `BatchedEncoder`
can: it leaves only its states, from which cross-attention's K and V are made in the request's first
step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from attnmux.core import InvalidInput, LayerSpec
from attnmux.transformers.model.attention import set_attention
from attnmux.transformers.model.encoder_decoder_attention import ENCODER_DECODER, number_layers
from attnmux.transformers.model.layer_call import LayerCall, read_arguments
from attnmux.transformers.model.layers import (
    check_capacities,
    check_independence,
    check_table,
    counts_from,
    layer_of,
)
from attnmux.transformers.model.packed_decoder import STAND_IN, PackedDecoder, embeddings_of
from attnmux.transformers.model.positions import count_from_own_start
from attnmux.transformers.model.probe import Probe, Recorder, are_alike
from attnmux.transformers.model.reach import Reach
from attnmux.transformers.model.unserved_attention import check_own_attention


@dataclass(kw_only=True, slots=True)
class DecoderRecorder(Recorder):
    """Numbers the decoder's attention modules in the order in which they run.

    A module that attends to its own tokens and the encoder's in one call has two layers.
    """

    modules: dict[torch.nn.Module, int] = field(default_factory=dict)
    """The first layer of each module."""

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        kwargs.pop("is_causal", None)
        layer_id = self.modules.setdefault(module, len(self.calls))
        call = read_arguments(query, key, value, attention_mask, layer_id=layer_id, **kwargs)
        if call.k.shape[0] == call.q.shape[0] + STAND_IN:
            call, cross = _parted(call)
            self.calls += [call, cross]
        else:
            self.calls.append(call)
        # All keys are equal: each query yields their common V. For self-attention see `Recorder`
        v = call.v[:1].expand(call.q.shape[0], -1, -1) if is_cross(call) else call.v
        group = call.q.shape[1] // v.shape[1]
        return v.repeat_interleave(group, dim=1).unsqueeze(0), None

    def of_tokens(self, call: LayerCall) -> tuple[torch.Tensor, ...]:
        return (call.q,) if is_cross(call) else (call.q, call.k)


def _parted(call: LayerCall) -> tuple[LayerCall, LayerCall]:
    """A call over the decoder's tokens and then the encoder's, as two. Its mask is two masks."""
    decoder_keys = slice(0, call.q.shape[0])
    encoder_keys = slice(decoder_keys.stop, None)
    masks = (None, None) if call.mask is None else call.mask.chunk(2, dim=-1)
    first = replace(call, k=call.k[decoder_keys], v=call.v[decoder_keys], mask=masks[0])
    k, v = call.k[encoder_keys], call.v[encoder_keys]
    return first, replace(call, layer_id=call.layer_id + 1, k=k, v=v, mask=masks[-1])


def is_cross(call: LayerCall) -> bool:
    """Whether a probe's call is cross-attention, by its number of keys."""
    return call.k.shape[0] == STAND_IN


@torch.inference_mode()
def record_decoder(decoder: PackedDecoder, *, max_context_len: int) -> tuple[LayerSpec, ...]:
    """The decoder's self- and cross-attention layers.

    Numbers the decoder's attention modules and switches the model to `decoder_forward`.
    Windows and chunks are valid for sequences of up to `max_context_len` tokens.
    Raises InvalidInput, with the reason, for a model whose attention the contract cannot serve.
    """
    model = decoder.model
    check_own_attention(type(model), model.config)
    check_capacities(model)
    decoder.count_to(max_context_len)
    probe = Probe(
        model=model,
        call=decoder,
        embeddings=embeddings_of(model.get_decoder()),  # type: ignore[no-untyped-call]  # as above
        recorder=DecoderRecorder,
        inputs="decoder_input_ids and encoder_outputs alone",
    )
    logits, recorder = probe.run([probe.token], [0])
    assert isinstance(recorder, DecoderRecorder)
    num_cross = sum(map(is_cross, recorder.calls))
    numbers = [call.layer_id for call in recorder.calls]
    if not num_cross or len(numbers) != 2 * num_cross or len(set(numbers)) < len(numbers):
        raise InvalidInput(
            probe.name,
            got=f"{len(recorder.calls)} attention calls of {len(recorder.modules)} modules, "
            f"{num_cross} of them cross-attention",
            expected="self- and cross-attention once in each layer, through transformers' "
            "AttentionInterface",
        )
    if decoder.takes_positions:
        own: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # as above
        count_from_own_start(own, partial(counts_from, probe))
        check_table(probe, max_context_len)
    check_independence(probe, logits, recorder.calls)
    layers = tuple(_layer(call, recorder, max_context_len) for call in recorder.calls)
    decoder.joins_attention = len(recorder.modules) < len(layers)
    number_layers(recorder.modules)
    set_attention(model, ENCODER_DECODER)
    return layers


def _layer(call: LayerCall, recorder: DecoderRecorder, max_context_len: int) -> LayerSpec:
    if not is_cross(call):
        return layer_of(call, recorder.reach_of(call, max_context_len))
    _check_sees_all(call, recorder)
    _check_places(call)
    return replace(layer_of(call, Reach()), is_cross_attention=True)


def _check_places(call: LayerCall) -> None:
    """Raise InvalidInput if equal encoder states have K that differ by their place in the row.

    In a step, the states of several requests lie one after another.
    """
    if not are_alike(call.k[:1], call.k):
        raise InvalidInput(
            f"cross-attention layer {call.layer_id}",
            got="encoder states to which the decoder adds their places in the row",
            expected="states that are final when the encoder returns them",
        )


def _check_sees_all(call: LayerCall, recorder: DecoderRecorder) -> None:
    """Raise InvalidInput unless every query sees every encoder token."""
    number = -1 if call.mask is None or call.mask.numel() != 1 else int(call.mask)
    sees_all = call.mask is None
    if 0 <= number < len(recorder.masks):
        zero = torch.zeros(1, dtype=torch.long, device=call.q.device)
        keys = torch.arange(STAND_IN, device=call.q.device)
        sees_all = bool(recorder.masks[number](zero, zero, zero, keys).all())
    if not sees_all or call.sliding_window_size >= 0:
        raise InvalidInput(
            f"cross-attention layer {call.layer_id}",
            got="a mask or a window over the encoder's tokens",
            expected="every encoder token visible to every query",
        )
