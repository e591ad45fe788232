"""Attention of a model that runs packed: in the running step's forward context, over its KV pool.

The tokens of all requests are in one row, `input_ids [1, T]` and `position_ids [1, T]`, without a
transformers cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import AttentionInterface, PreTrainedModel

from attnmux.core import ForwardContext, InvalidInput, RadixAttention
from attnmux.transformers.model.layer_call import LayerCall, read_call, shown, traced_layer_id

if TYPE_CHECKING:
    from attnmux.core import LayerSpec

SERVED = "attnmux_served"
"""The attention implementation of a model that a runner calls. It has no mask function: before it
asks for a mask, transformers reads positions on the host, and so waits for the device."""


MORE_KEYS = "_attnmux_more_keys"
"""The attribute of an attention module that sees more than the backend shows it: a function of its
call, the batch, and the attention so far, [T, Hq, Dv] and its LSE [T, Hq], both float32, to which
it adds the rest in place. Sinks are part of the rest."""

QUERIES = "_attnmux_queries"
"""The attribute of an attention module whose backend meets keys with other queries than its own: a
function of its call and the batch that returns them, [T, Hq, layer.query_dim]."""

UNMASKED = torch.empty((1, 1, 1, 0))
"""A mask for layers that index theirs whatever it is: as None, it hides nothing."""


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Give a model and all its parts an attention implementation.

    `set_attn_implementation` of transformers before 5.23 leaves out parts whose config is a copy of
    the model's, as the decoders of T5.
    """
    model.set_attn_implementation(name)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part.config) is type(model.config):
            part.config._attn_implementation = name


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of `module`'s layer in the running step: K and V go to the pool, then the backend.

    Returns ([1, T, Hq, Dv], None), as transformers expects it.
    Raises AttnmuxError outside `ForwardContext.enter`; InvalidInput for arguments that the contract
    does not have, and for a layer that changed after the backend's layers were recorded.
    """
    call = read_call(module, query, key, value, attention_mask, **kwargs)  # type: ignore[arg-type]  # checked there
    refuse_mask(call)
    if torch.compiler.is_compiling():
        out = call.q.new_empty((*call.q.shape[:2], call.v.shape[-1]))
        layer_id = traced_layer_id(module)
        RadixAttention.op(call.q, call.k, call.v, None, None, out, None, layer_id, True)
        return out.unsqueeze(0), None
    step = ForwardContext.current()
    layer = step.backend.context.layer(call.layer_id)
    more: Callable[..., None] | None = getattr(module, MORE_KEYS, None)
    if more is None:
        check_recorded(call, layer)
        queries: Callable[..., torch.Tensor] | None = getattr(module, QUERIES, None)
        q = call.q if queries is None else queries(call, step.batch)
        out = step.backend.forward(q, call.k, call.v, layer, step.batch)
        return out.unsqueeze(0), None
    check_recorded(replace(call, sinks=None), layer)
    lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
    seen = step.backend.forward(call.q, call.k, call.v, layer, step.batch, lse=lse).float()
    more(call, step.batch, seen, lse)
    return seen.to(call.v.dtype).unsqueeze(0), None


def refuse_mask(call: LayerCall) -> None:
    """Raise InvalidInput for a call that brings a mask."""
    if call.mask is not None and call.mask.numel():
        raise InvalidInput(
            "attention_mask",
            got=shown(call.mask),
            expected="None: lengths and positions of the packed requests say what is visible",
        )


def check_recorded(call: LayerCall, layer: LayerSpec) -> None:
    """Raise InvalidInput for a layer that changed after it was recorded."""
    # A window that only the model's mask imposes is not passed here.
    window = layer.sliding_window_size if call.sliding_window_size < 0 else call.sliding_window_size
    now = (call.scaling, window, call.logit_cap, _has(call))
    recorded = (layer.scaling, layer.sliding_window_size, layer.logit_cap, _has(layer))
    if now != recorded:
        raise InvalidInput(
            f"layer {call.layer_id}",
            got=f"(scaling, window, logit cap, tensors of heads) = {now}",
            expected=f"{recorded}, as recorded when the backend was built",
        )


def _has(one: LayerCall | LayerSpec) -> tuple[str, ...]:
    """The values that each of its heads has."""
    values = {
        "sink": one.sinks,
        "ALiBi slope": one.alibi_slopes,
        "relative position bias": one.relative_bias,
    }
    return tuple(name for name, value in values.items() if value is not None)


def no_mask(
    *, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **_: object
) -> None:
    """A mask function that builds nothing, and refuses masks that it would have to honour.

    Raises InvalidInput for a padding mask and for a mask function of the model's own.
    """
    if attention_mask is not None:
        raise InvalidInput(
            "attention_mask",
            got=shown(attention_mask),
            expected="None: pack the requests' tokens into one row instead of padding them",
        )
    if use_vmap:
        raise InvalidInput(
            "mask_function",
            got="a mask function of the model's own",
            expected="causal attention, with a sliding window or chunks at most",
        )


AttentionInterface.register(SERVED, attention_forward)
