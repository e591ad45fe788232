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
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from attnmux.core import InvalidInput, LayerSpec
from attnmux.transformers.attention import set_attention
from attnmux.transformers.encoder_decoder_attention import ENCODER_DECODER, number_layers
from attnmux.transformers.layer_call import LayerCall, read_arguments
from attnmux.transformers.layers import check_capacities, check_independence, layer_of
from attnmux.transformers.positions import PositionTable
from attnmux.transformers.probe import Probe, Recorder
from attnmux.transformers.reach import Reach

STAND_IN = 4
"""The number of zero encoder states in a step without a new encoder. A decoder layer without any
would skip cross-attention. Their K and V are not used. No probe has as many tokens, so that the
number of keys identifies cross-attention."""


@dataclass
class EncoderOutput(BaseModelOutput):
    """An encoder's states, with what some decoders read besides them: nothing is padded."""

    attention_mask: torch.Tensor | None = None
    router_logits: None = None


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
        self.joins_attention = False
        """Whether a call of attention goes to two layers, whose results are joined by LSE. Known
        once it was recorded."""
        self._table: PositionTable | None = None
        if isinstance(embedding, torch.nn.Module):
            self._table = PositionTable(type(model).__name__, embedding)

    def count_to(self, max_context_len: int) -> None:
        """Serve so many positions of a decoder that counts its tokens by itself."""
        if self._table is not None:
            self._table.length = max_context_len

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
                encoder_outputs=EncoderOutput(last_hidden_state=encoder_states.unsqueeze(0)),
                use_cache=use_cache,
                **own,
            )
            return output


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
    own = slice(0, call.q.shape[0])
    theirs = slice(own.stop, None)
    masks = (None, None) if call.mask is None else call.mask.chunk(2, dim=-1)
    first = replace(call, k=call.k[own], v=call.v[own], mask=masks[0])
    k, v = call.k[theirs], call.v[theirs]
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
    check_capacities(model)
    decoder.count_to(max_context_len)
    probe = Probe(
        model=model,
        call=decoder,
        embeddings=_embeddings(model),
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
    check_independence(probe, logits, recorder.calls)
    layers = tuple(_layer(call, recorder, max_context_len) for call in recorder.calls)
    decoder.joins_attention = len(recorder.modules) < len(layers)
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


def _layer(call: LayerCall, recorder: DecoderRecorder, max_context_len: int) -> LayerSpec:
    if not is_cross(call):
        return layer_of(call, recorder.reach_of(call, max_context_len))
    _check_sees_all(call, recorder)
    return replace(layer_of(call, Reach()), is_cross_attention=True)


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
