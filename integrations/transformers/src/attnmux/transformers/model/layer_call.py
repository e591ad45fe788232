"""The needs of a model's layer, read from the arguments of transformers' attention functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.model.repeated import CALLS, NumberedCalls

LAYER_ID = "_attnmux_layer_id"
"""The attribute of a marked attention module: its number as a tensor."""


NOT_ATTENTION = frozenset(
    {
        "cache_position",
        "hidden_states",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keyword arguments that models hand down to every layer and that no attention depends on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """The needs of a model's layer, checked and in the contract's terms."""

    layer_id: int
    q: torch.Tensor
    """[T, Hq, D]"""
    k: torch.Tensor
    """[T, Hkv, D]; in cross-attention of as many tokens as the encoder's"""
    v: torch.Tensor
    """[T, Hkv, Dv], likewise"""
    mask: torch.Tensor | None
    """The mask function's result for the model."""
    scaling: float
    sliding_window_size: int
    logit_cap: float
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None = None
    relative_bias: torch.Tensor | None = None


def read_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    is_causal: bool | None = None,
    **kwargs: object,
) -> LayerCall:
    """Read what transformers passes to an attention function for a decoder's self-attention.

    query: [1, Hq, T, D]; key, value: [1, Hkv, T, D or Dv]. Raises InvalidInput for whatever the
    contract's layer has no word for: nothing is ignored but `NOT_ATTENTION`. A mask tells by itself
    whether it is causal: its reader finds out.
    """
    layer_id = layer_id_of(module)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal and attention_mask is None:
        raise InvalidInput("is_causal", got=False, expected="causal self-attention")
    if key.shape[2] != query.shape[2]:
        raise InvalidInput(
            "query",
            got=f"query {tuple(query.shape)} and key {tuple(key.shape)}",
            expected="[1, heads, T, dim] both: the tokens of all requests in one row, no cache "
            "of transformers (use_cache=False)",
        )
    return read_arguments(query, key, value, attention_mask, layer_id=layer_id, **kwargs)


def read_arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layer_id: int,
    **kwargs: object,
) -> LayerCall:
    """Read what transformers passes for any layer: K and V of as many tokens as they come with.

    Raises InvalidInput as `read_call` does.
    """
    if query.shape[0] != 1:
        raise InvalidInput(
            "query",
            got=f"query {tuple(query.shape)}",
            expected="[1, heads, T, dim]: the tokens of all requests in one row",
        )
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    return read_rows(q, k, v, attention_mask, layer_id=layer_id, **kwargs)  # type: ignore[arg-type]  # checked there


def read_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layer_id: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    relative_bias: torch.Tensor | None = None,
    **kwargs: object,
) -> LayerCall:
    """The same for q [T, Hq, D], k [S, Hkv, D] and v [S, Hkv, Dv]."""
    for name, passed in kwargs.items():
        if passed is not None and passed is not False and name not in NOT_ATTENTION:
            raise InvalidInput(
                name,
                got=shown(passed),
                expected="nothing: attention through attnmux does not know this argument",
            )
    if torch.is_grad_enabled():
        biases = {"alibi_slopes": alibi_slopes, "relative_bias": relative_bias}
        _refuse_gradients(query=q, key=k, value=v, s_aux=s_aux, **biases)
    if dropout:
        raise InvalidInput("dropout", got=dropout, expected="0: call model.eval() first")
    return LayerCall(
        layer_id=layer_id,
        q=q,
        k=k,
        v=v,
        mask=attention_mask,
        scaling=q.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window_size=window_of(sliding_window),
        logit_cap=softcap or 0.0,
        sinks=s_aux,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
    )


def _refuse_gradients(**tensors: torch.Tensor | None) -> None:
    """Raise InvalidInput for a tensor that needs gradients: backends compute none, so that training
    would go on without them."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise InvalidInput(
                name,
                got="a tensor that needs gradients",
                expected="inference: call the model inside torch.inference_mode()",
            )


def layer_id_of(module: torch.nn.Module) -> int:
    """The number of a decoder's layer. Raises InvalidInput if it has none.

    Call it once for a call of attention: see `NumberedCalls`.

    -1 while a compiler traces a marked layer, see `traced_layer_id`.
    """
    if torch.compiler.is_compiling() and hasattr(module, LAYER_ID):
        return -1
    calls: NumberedCalls | None = getattr(module, CALLS, None)
    if calls is not None:
        return calls.take(module)
    layer_id = getattr(module, "layer_idx", None)
    if not isinstance(layer_id, int):
        raise InvalidInput(
            f"{type(module).__name__}.layer_idx",
            got=layer_id,
            expected="the layer's number: only a decoder's layers have a place in the KV cache",
        )
    return layer_id


def replace_function(module: torch.nn.Module, name: str, function: Callable[..., object]) -> None:
    """Give a module another function in place of its class's. Raises InvalidInput if the class has
    none of that name: the module would go on with code of its own."""
    if not callable(getattr(module, name, None)):
        raise InvalidInput(
            f"{type(module).__name__}.{name}",
            got="no such function in the installed transformers",
            expected="the function that attnmux replaces: install another release of transformers",
        )
    setattr(module, name, function)


def mark_layer(module: torch.nn.Module, layer_id: int) -> None:
    """Let compiled code of this layer serve all layers that are alike."""
    setattr(module, LAYER_ID, torch.tensor(layer_id))


def traced_layer_id(module: torch.nn.Module) -> torch.Tensor:
    """The layer's number for the op, [] int64. A compiler that reads `layer_idx` makes code for
    that layer alone; the tensor of `mark_layer` is an input of the code."""
    traced = getattr(module, LAYER_ID, None)
    return torch.tensor(layer_id_of(module)) if traced is None else traced


def window_of(sliding_window: int | None) -> int:
    """transformers' n counts the token itself; the contract's w counts the ones before it."""
    if sliding_window is None:
        return -1
    if sliding_window < 2:
        expected = "at least 2, or None: by a window of 1 a token sees itself alone"
        raise InvalidInput("sliding_window", got=sliding_window, expected=expected)
    return sliding_window - 1


def shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)
