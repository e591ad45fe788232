"""Attention of encoder-decoder models: the decoder's on the backend, the encoder's on torch."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from attnmux.core import ForwardContext
from attnmux.parts import merge_into
from attnmux.transformers.model.attention import UNMASKED, check_recorded, refuse_mask
from attnmux.transformers.model.layer_call import LayerCall, read_arguments

if TYPE_CHECKING:
    from attnmux.core import LayerSpec

ENCODER_DECODER = "attnmux_encoder_decoder"
"""The attention implementation of these models' layers."""

LAYER_ID = "attnmux_layer_id"
"""Attribute of a decoder's attention module. Its own `layer_idx` does not tell self- from
cross-attention."""


def number_layers(modules: Mapping[torch.nn.Module, int]) -> None:
    """Number the decoder's attention modules; `decoder_forward` reads a module's layer there.

    A module with two layers has the number of its first, its self-attention.
    """
    for module, layer_id in modules.items():
        setattr(module, LAYER_ID, layer_id)


def numbers_by_name(model: torch.nn.Module) -> Mapping[str, int]:
    """The numbers that `number_layers` gave, by the modules' names."""
    named = {name: getattr(module, LAYER_ID, None) for name, module in model.named_modules()}
    return {name: number for name, number in named.items() if number is not None}


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
        return _encoder_forward(module, query, key, value, attention_mask, **kwargs)
    kwargs.pop("is_causal", None)
    call = read_arguments(query, key, value, attention_mask, layer_id=layer_id, **kwargs)
    refuse_mask(call)
    step = ForwardContext.current()
    layer = step.backend.context.layer(layer_id)
    check_recorded(call, layer)
    if layer.is_cross_attention:
        out = _attend_to_encoder(call, layer)
    elif call.k.shape[0] > call.q.shape[0]:
        out = _attend_to_both(call, layer)
    else:
        out = step.backend.forward(call.q, call.k, call.v, layer, step.batch)
    return out.unsqueeze(0), None


def _attend_to_encoder(
    call: LayerCall, layer: LayerSpec, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """The keys of the call are those of new encoder states, or stand in for none."""
    step = ForwardContext.current()
    loc = step.batch.encoder_out_cache_loc
    k, v = (None, None) if loc is None or not loc.shape[0] else (call.k, call.v)
    return step.backend.forward(call.q, k, v, layer, step.batch, lse=lse)


def _attend_to_both(call: LayerCall, own: LayerSpec) -> torch.Tensor:
    """The keys of the call are those of the decoder's tokens, then the encoder's."""
    step = ForwardContext.current()
    num = call.q.shape[0]
    lse, theirs = (call.q.new_empty(call.q.shape[:2], dtype=torch.float32) for _ in range(2))
    first = step.backend.forward(call.q, call.k[:num], call.v[:num], own, step.batch, lse=lse)
    out = first.float()
    cross = step.backend.context.layer(own.layer_id + 1)
    rest = replace(call, k=call.k[num:], v=call.v[num:])
    merge_into(out, lse, _attend_to_encoder(rest, cross, theirs), theirs)
    return out.to(first.dtype)


def _encoder_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,  # noqa: ANN401  # the model's
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' own: scaled-dot-product attention, which knows no cap of logits, else eager."""
    if kwargs.get("softcap") is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if mask is not None:
        least = torch.finfo(query.dtype).min
        mask = query.new_zeros(mask.shape).masked_fill(~mask, least)
    eager = pkgutil.resolve_name(f"{type(module).__module__}:eager_attention_forward")
    out: tuple[torch.Tensor, torch.Tensor | None] = eager(module, query, key, value, mask, **kwargs)
    return out


def encoder_mask(**kwargs: Any) -> torch.Tensor | None:  # noqa: ANN401  # of transformers' mask functions
    """An encoder's, with its windows. A step has none, not even those that some decoders ask
    for: `UNMASKED` stands for one that a decoder joins to another."""
    if ForwardContext.is_running():
        may_skip = kwargs.get("allow_is_causal_skip") or kwargs.get("allow_is_bidirectional_skip")
        return None if may_skip else UNMASKED
    masks = AttentionMaskInterface()  # type: ignore[no-untyped-call]  # transformers' own
    mask: torch.Tensor | None = masks["sdpa"](**kwargs)
    return mask


AttentionInterface.register(ENCODER_DECODER, decoder_forward)
AttentionMaskInterface.register(ENCODER_DECODER, encoder_mask)
