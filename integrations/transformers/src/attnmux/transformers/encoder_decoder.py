"""Encoder-decoder models: the encoder once a request, the decoder's packed rows on the backend.

Self- and cross-attention of the decoder go to the backend, over one KV pool in which each has
layer ids of its own: in a request's row the encoder's slots come first. The encoder runs with
transformers' own scaled-dot-product attention, one request at a time: it leaves only its
states, from which cross-attention's K and V are made in the request's first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from attnmux.core import InvalidInput, LayerSpec, current_forward_context
from attnmux.transformers.attention import (
    ModelCall,
    check_recorded,
    read_arguments,
    refuse_mask,
    set_attention,
)
from attnmux.transformers.layers import check_capacities, check_independence, layer_of
from attnmux.transformers.positions import PositionTable
from attnmux.transformers.probe import Probe, Reach, Recorder

ENCODER_DECODER = "attnmux_encoder_decoder"
"""The attention implementation of these models' layers. It has no mask function, so that
transformers makes no masks, not even those that some decoders ask for."""

LAYER_ID = "attnmux_layer_id"
"""Attribute of a decoder's attention module. Its own `layer_idx` does not tell self- from
cross-attention."""

STAND_IN = 4
"""The number of zero encoder states in a step without a new encoder. A decoder layer without any
would skip cross-attention. Their K and V are not used. No probe has as many tokens, so that the
number of keys identifies cross-attention."""


class PackedDecoder(torch.nn.Module):
    """An encoder-decoder model with the interface of a decoder model: tokens packed into one
    row."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.generation_config = model.generation_config
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers' own
        self._takes_positions = (
            "decoder_position_ids" in inspect.signature(model.forward).parameters
        )
        embedding = getattr(decoder, "embed_positions", None)
        self._table: PositionTable | None = None
        if isinstance(embedding, torch.nn.Module):
            self._table = PositionTable(type(model).__name__, embedding)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def width(self) -> int:
        """Dims of an encoder state at the decoder."""
        return int(self.config.get_text_config(decoder=True).hidden_size)

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The encoder's states [E, width] of one request.

        inputs: the encoder's arguments, with a batch dimension of 1 and without padding:
        `input_ids` [1, E], or `input_features` as the model's feature extractor makes them.
        Raises InvalidInput for other inputs.
        """
        given = {name: value.to(self.device) for name, value in inputs.items()}
        mask = given.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise InvalidInput(
                "encoder", got="an attention_mask with padding", expected="inputs without any"
            )
        encoder: Any = self.model.get_encoder()
        taken = inspect.signature(encoder.forward).parameters
        for name, value in given.items():
            if name not in taken or value.shape[:1] != (1,):
                raise InvalidInput(
                    "encoder",
                    got=f"{name} of shape {tuple(value.shape)}",
                    expected=f"some of {', '.join(taken)}, each of one request: [1, …]",
                )
            if value.is_floating_point():
                given[name] = value.to(self.model.dtype)
        if not given:
            raise InvalidInput("encoder", got="nothing", expected="the encoder's inputs")
        try:
            states = encoder(**given).last_hidden_state
        except ValueError as error:
            # Whisper raises it for sound of another length than it takes
            raise InvalidInput("encoder", got=str(error), expected="inputs it can read") from error
        assert isinstance(states, torch.Tensor)
        return states[0]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        encoder_states: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> Seq2SeqLMOutput:
        """The model's output, with logits, for tokens [1, T] at positions [1, T].

        encoder_states: [E, width] of the requests whose encoder is new, one after another.
        position_ids: None takes the model's own count.
        """
        if encoder_states is None:
            shape = (STAND_IN, self.width)
            encoder_states = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        own = {"decoder_position_ids": position_ids} if self._takes_positions else {}
        with nullcontext() if self._table is None else self._table.given(position_ids):
            output: Seq2SeqLMOutput = self.model(
                decoder_input_ids=input_ids,
                encoder_outputs=BaseModelOutput(last_hidden_state=encoder_states.unsqueeze(0)),
                use_cache=use_cache,
                **own,
            )
            return output


def number_layers(modules: Mapping[torch.nn.Module, int]) -> None:
    """Number the decoder's attention modules; `decoder_forward` reads a module's layer there."""
    for module, layer_id in modules.items():
        setattr(module, LAYER_ID, layer_id)


def decoder_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of an encoder-decoder model. The decoder's runs on the backend of the running step.

    Cross-attention reads K and V of the step's new encoder states and those that earlier steps
    wrote to the pool. A module without a number belongs to the encoder.
    """
    layer_id = getattr(module, LAYER_ID, None)
    if layer_id is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[arg-type]  # unchanged
    kwargs.pop("is_causal", None)
    call = read_arguments(query, key, value, attention_mask, layer_id=layer_id, **kwargs)
    refuse_mask(call)
    step = current_forward_context()
    layer = step.backend.context.layer(layer_id)
    check_recorded(call, layer)
    loc = step.batch.encoder_out_cache_loc
    if layer.is_cross_attention and (loc is None or not loc.shape[0]):
        out = step.backend.forward(call.q, None, None, layer, step.batch)
    else:
        out = step.backend.forward(call.q, call.k, call.v, layer, step.batch)
    return out.unsqueeze(0), None


AttentionInterface.register(ENCODER_DECODER, decoder_forward)


@dataclass(kw_only=True, slots=True)
class DecoderRecorder(Recorder):
    """Numbers the decoder's attention modules in the order in which they run."""

    modules: dict[torch.nn.Module, int] = field(default_factory=dict)

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
        layer_id = self.modules.setdefault(module, len(self.modules))
        call = read_arguments(query, key, value, attention_mask, layer_id=layer_id, **kwargs)
        self.calls.append(call)
        # All keys are equal: each query yields their common V. For self-attention see `Recorder`
        v = call.v[:1].expand(call.q.shape[0], -1, -1) if is_cross(call) else call.v
        group = call.q.shape[1] // v.shape[1]
        return v.repeat_interleave(group, dim=1).unsqueeze(0), None

    def of_tokens(self, call: ModelCall) -> tuple[torch.Tensor, ...]:
        return (call.q,) if is_cross(call) else (call.q, call.k)


def is_cross(call: ModelCall) -> bool:
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
    check_capacities(model)
    probe = Probe(
        model=model,
        call=decoder,
        embeddings=_embeddings(model),
        recorder=DecoderRecorder,
        inputs="decoder_input_ids and encoder_outputs alone",
    )
    logits, recorder = probe.run([0], [0])
    assert isinstance(recorder, DecoderRecorder)
    num_cross = sum(map(is_cross, recorder.calls))
    if not num_cross or not len(recorder.modules) == len(recorder.calls) == 2 * num_cross:
        raise InvalidInput(
            probe.name,
            got=f"{len(recorder.calls)} attention calls of {len(recorder.modules)} modules, "
            f"{num_cross} of them cross-attention",
            expected="self- and cross-attention once in each layer, through transformers' "
            "AttentionInterface",
        )
    check_independence(probe, logits, recorder.calls)
    layers = tuple(_layer(call, recorder, max_context_len) for call in recorder.calls)
    number_layers(recorder.modules)
    set_attention(model, ENCODER_DECODER)
    return layers


def _embeddings(model: PreTrainedModel) -> torch.nn.Module:
    """The input embedding of the decoder."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers' own
    if not isinstance(decoder, PreTrainedModel):
        got = f"a decoder of class {type(decoder).__name__}"
        expected = "one that is a model of transformers itself, and calls its AttentionInterface"
        raise InvalidInput(type(model).__name__, got=got, expected=expected)
    embeddings: torch.nn.Module = decoder.get_input_embeddings()
    return embeddings


def _layer(call: ModelCall, recorder: DecoderRecorder, max_context_len: int) -> LayerSpec:
    if not is_cross(call):
        return layer_of(call, recorder.reach_of(call, max_context_len))
    _check_sees_all(call, recorder)
    return replace(layer_of(call, Reach()), is_cross_attention=True)


def _check_sees_all(call: ModelCall, recorder: DecoderRecorder) -> None:
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
