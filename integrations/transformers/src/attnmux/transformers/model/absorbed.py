"""Latent attention (MLA) on the latent itself, which the KV cache holds.

A model that expands its latent with a linear `kv_b_proj` into every head's K and V runs absorbed
instead: K's half of that matrix is multiplied into Q, and V's half into the output. Attention then
has one latent head, and the cache holds rank + rope values a token and layer: in DeepSeek-V3 576,
where the expanded heads take 40,960 (DeepSeek-V2, arXiv:2405.04434, section 2.1). A backend may
still expand the latent of long prompts (`ChunkedPrefixBackend`).

The model's own code still runs, with its rotary embeddings, norms and low-rank Q. Only `kv_b_proj`
gets another forward, which passes the latent on in the shape of a few heads. Its weight is read in
place. No model is recognised by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from attnmux.core import ForwardContext, LayerSpec, RadixAttention, UpProjection
from attnmux.transformers.model.attention import SERVED, check_recorded, refuse_mask
from attnmux.transformers.model.layer_call import LayerCall, read_call, traced_layer_id
from attnmux.transformers.model.mixers.mixer import Mixer
from attnmux.transformers.model.probe import Probe, Recorder, are_alike
from attnmux.transformers.model.repeated import has_numbered_calls

ABSORBED = "attnmux_absorbed"
"""The attention implementation of absorbed layers. Like `SERVED`, it has no mask function."""


def latent_of(call: LayerCall, projection: UpProjection) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent [T, 1, rank], rotary K [T, 1, rope]) of a call whose latent was passed on."""
    rows = torch.cat([call.k[..., : projection.nope_dim], call.v], dim=-1).flatten(1)
    return rows[:, None, : projection.rank], call.k[:, :1, projection.nope_dim :]


@torch.inference_mode()
def absorbed_layers(
    model: PreTrainedModel, layers: Sequence[LayerSpec], *, mixers: Sequence[Mixer] = ()
) -> tuple[LayerSpec, ...] | None:
    """The layers of `record_layers` as MLA layers; None if the model cannot run absorbed.

    It can if every layer has a plain linear `kv_b_proj`, and if Q, K and V in a probe are those
    that the latent and this matrix give. The model is unchanged afterwards.
    """
    if has_numbered_calls(model):
        return None
    by_layer = _linears(model)
    if any(not _divides(by_layer.get(layer.layer_id), layer) for layer in layers):
        return None
    projections = {layer.layer_id: _of_layer(by_layer[layer.layer_id], layer) for layer in layers}
    probe = Probe.of(model, mixers)
    expanded = _calls(probe)
    absorb(model, layers)
    try:
        absorbed = _calls(
            replace(probe, recorder=partial(_LatentRecorder, projections=projections))
        )
    finally:
        expand(model, layers)
    if not all(map(_agree, expanded, absorbed)):
        return None
    return tuple(_latent_layer(layer, projections[layer.layer_id]) for layer in layers)


def absorb(model: PreTrainedModel, layers: Sequence[LayerSpec]) -> None:
    """Switch the model to absorbed attention.

    layers: from `record_layers`, accepted by `absorbed_layers`.
    """
    by_layer = _linears(model)
    for layer in layers:
        _pass_latent(by_layer[layer.layer_id], _of_layer(by_layer[layer.layer_id], layer))
    model.set_attn_implementation(ABSORBED)


def expand(model: PreTrainedModel, layers: Sequence[LayerSpec]) -> None:
    """Undo `absorb`."""
    by_layer = _linears(model)
    for layer in layers:
        del by_layer[layer.layer_id].forward  # the class's own is back
    model.set_attn_implementation(SERVED)


def absorbed_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of an absorbed layer in the running step.

    query: [1, H, T, nope + rope]. key and value: the latent as `_pass_latent` shaped it.
    Returns ([1, T, H, v], None), and raises as `attention_forward` does.
    """
    call = read_call(module, query, key, value, attention_mask, **kwargs)  # type: ignore[arg-type]  # checked there
    refuse_mask(call)
    projection = UpProjection.of(
        module.get_submodule("kv_b_proj").weight,  # type: ignore[arg-type]  # a parameter
        num_heads=call.q.shape[1],
        v_head_dim=call.v.shape[2],
    )
    latent, k_rope = latent_of(call, projection)
    if torch.compiler.is_compiling():
        q, q_rope = projection.absorbed_queries(call.q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        layer_id = traced_layer_id(module)
        RadixAttention.op(q, latent, None, q_rope, k_rope, out, None, layer_id, True)
        return projection.outputs(out).unsqueeze(0), None
    step = ForwardContext.current()
    layer = step.backend.context.layer(call.layer_id)
    check_recorded(call, layer)
    out = step.backend.forward_latent(call.q, latent, k_rope, layer, step.batch, projection)
    return out.unsqueeze(0), None


def _linears(model: PreTrainedModel) -> dict[int, torch.nn.Linear]:
    """`kv_b_proj` by layer, if it is a plain linear map without quantisation or adapters."""
    linears: dict[int, torch.nn.Linear] = {}
    for module in model.modules():
        inner, layer_id = getattr(module, "kv_b_proj", None), getattr(module, "layer_idx", None)
        if type(inner) is torch.nn.Linear and inner.bias is None and isinstance(layer_id, int):
            linears[layer_id] = inner
    return linears


def _divides(found: torch.nn.Linear | None, layer: LayerSpec) -> bool:
    if found is None or layer.tp_k_head_num != layer.tp_q_head_num:
        return False
    head_dim, rest = divmod(found.out_features, layer.tp_q_head_num)
    nope_dim = head_dim - layer.v_head_dim
    return not rest and 0 < nope_dim < layer.qk_head_dim


def _of_layer(found: torch.nn.Linear, layer: LayerSpec) -> UpProjection:
    return UpProjection.of(found.weight, num_heads=layer.tp_q_head_num, v_head_dim=layer.v_head_dim)


def _latent_layer(layer: LayerSpec, projection: UpProjection) -> LayerSpec:
    return replace(
        layer,
        kind="mla",
        tp_k_head_num=1,
        tp_v_head_num=1,
        qk_head_dim=projection.rank + layer.qk_head_dim - projection.nope_dim,
        v_head_dim=projection.rank,
    )


def _pass_latent(found: torch.nn.Linear, projection: UpProjection) -> None:
    """Give `kv_b_proj` a forward that returns its input, filled up to whole heads.

    The model divides the result by head, so that few heads carry the latent: two in DeepSeek-V3.
    """
    head_dim = projection.nope_dim + projection.v_head_dim
    found.forward = _filling(-projection.rank % head_dim)  # type: ignore[assignment,method-assign]  # of this instance


@cache
def _filling(fill: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same object for all layers: a compiler makes code for each object that it meets."""
    return partial(_filled_up, fill)


def _filled_up(fill: int, latent: torch.Tensor) -> torch.Tensor:
    return pad(latent, (0, fill)) if fill else latent


def _calls(probe: Probe) -> list[LayerCall]:
    """The layers' attention calls for three tokens, in the order of the layers."""
    _, recorder = probe.run([0, 1, 2], [0, 1, 2])
    return sorted(recorder.calls, key=lambda call: call.layer_id)


@dataclass(kw_only=True, slots=True)
class _LatentRecorder(Recorder):
    """Expands the latent that was passed on, so that later layers get the same input as before."""

    projections: Mapping[int, UpProjection]

    def read(self, call: LayerCall) -> LayerCall:
        projection = self.projections[call.layer_id]
        latent, k_rope = latent_of(call, projection)
        k, v = projection.expand(latent.squeeze(1), k_rope.squeeze(1))
        return replace(call, k=k, v=v)


def _agree(expanded: LayerCall, absorbed: LayerCall) -> bool:
    pairs = ((expanded.q, absorbed.q), (expanded.k, absorbed.k), (expanded.v, absorbed.v))
    return all(ours.shape == theirs.shape and are_alike(ours, theirs) for theirs, ours in pairs)


AttentionInterface.register(ABSORBED, absorbed_forward)
