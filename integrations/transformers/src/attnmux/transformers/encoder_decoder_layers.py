"""The attention layers of an encoder-decoder model's decoder, recorded from the model itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.transformers.attention import AttentionCall, read_arguments
from attnmux.transformers.encoder_decoder import (
    ENCODER_DECODER,
    STAND_IN,
    PackedDecoder,
    number_layers,
)
from attnmux.transformers.layers import check_independence, layer_of
from attnmux.transformers.masks import MaskFunction, Reach
from attnmux.transformers.probe import Probe, Recorder


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
        call = read_arguments(query, key, value, attention_mask, layer_id=layer_id, **kwargs)  # type: ignore[arg-type]  # checked there
        self.calls.append(call)
        # Of equal keys, each query makes their common V; in self-attention see `Recorder`.
        v = call.v[:1].expand(call.q.shape[0], -1, -1) if is_cross(call) else call.v
        group = call.q.shape[1] // v.shape[1]
        return v.repeat_interleave(group, dim=1).unsqueeze(0), None

    def mask(
        self, *, mask_function: MaskFunction, device: torch.device, **kwargs: object
    ) -> torch.Tensor:
        """Some decoders make up an attention_mask themselves: ones, since none is given here."""
        given = kwargs.pop("attention_mask", None)
        if isinstance(given, torch.Tensor) and not bool(given.all()):
            raise InvalidInput("attention_mask", came="padding", expected="ones: nothing is padded")
        return Recorder.mask(self, mask_function=mask_function, device=device, **kwargs)

    def of_tokens(self, call: AttentionCall) -> tuple[torch.Tensor, ...]:
        return (call.q,) if is_cross(call) else (call.q, call.k)


def is_cross(call: AttentionCall) -> bool:
    """Whether a probe's call is cross-attention: no probe has as many tokens."""
    return call.k.shape[0] == STAND_IN


@torch.inference_mode()
def record_decoder(decoder: PackedDecoder, *, max_context_len: int) -> tuple[LayerSpec, ...]:
    """The decoder's self- and cross-attention layers, and their numbers given to its modules.

    From here on the model's attention is `decoder_forward`.
    Window and chunk hold for sequences of up to `max_context_len` tokens.
    Raises InvalidInput for a model whose attention the contract cannot serve, saying why.
    """
    model = decoder.model
    probe = Probe(
        model=model,
        call=decoder,
        embeddings=model.get_decoder().get_input_embeddings(),  # type: ignore[no-untyped-call]  # transformers' own
        recorder=DecoderRecorder,
    )
    try:
        logits, recorder = probe.run([0], [0])
    except (AttributeError, TypeError, RuntimeError) as error:
        raise InvalidInput(
            probe.name,
            came=f"{type(error).__name__}: {error}",
            expected="a model that runs on decoder_input_ids and encoder_outputs",
        ) from error
    assert isinstance(recorder, DecoderRecorder)
    num_cross = sum(map(is_cross, recorder.calls))
    if not num_cross or not len(recorder.modules) == len(recorder.calls) == 2 * num_cross:
        raise InvalidInput(
            probe.name,
            came=f"{len(recorder.calls)} attention calls of {len(recorder.modules)} modules, "
            f"{num_cross} of them cross-attention",
            expected="self- and cross-attention once in each layer, through transformers' "
            "AttentionInterface",
        )
    check_independence(probe, logits, recorder.calls)
    layers = tuple(_layer(call, recorder, max_context_len) for call in recorder.calls)
    number_layers(recorder.modules)
    model.set_attn_implementation(ENCODER_DECODER)
    return layers


def _layer(call: AttentionCall, recorder: DecoderRecorder, max_context_len: int) -> LayerSpec:
    if not is_cross(call):
        return layer_of(call, recorder.reach_of(call, max_context_len))
    _check_sees_all(call, recorder)
    return replace(layer_of(call, Reach()), is_cross_attention=True)


def _check_sees_all(call: AttentionCall, recorder: DecoderRecorder) -> None:
    """Cross-attention shows every encoder token to every query."""
    number = -1 if call.mask is None or call.mask.numel() != 1 else int(call.mask)
    sees_all = call.mask is None
    if 0 <= number < len(recorder.masks):
        zero = torch.zeros(1, dtype=torch.long, device=call.q.device)
        keys = torch.arange(STAND_IN, device=call.q.device)
        sees_all = bool(recorder.masks[number](zero, zero, zero, keys).all())
    if not sees_all or call.sliding_window_size >= 0:
        raise InvalidInput(
            f"cross-attention layer {call.layer_id}",
            came="a mask or a window over the encoder's tokens",
            expected="every encoder token visible to every query",
        )
