"""Attention of a step in parts, each over keys that come with the call, merged by LSE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from attnmux.core import AttentionBackend, BackendContext, InvalidInput, KVPool, LayerSpec, Request
from attnmux.parts.key_parts import KeyPart

K = TypeVar("K")
"""How the parts of a step name their keys."""


class PartAttention(Generic[K]):
    """Runs the parts of a step on backends of `context_of`, and merges the results."""

    MOST_LANES = 4
    """Backends of one step. Each keeps its part prepared for all layers; the last one prepares the
    parts that are left over in every layer again."""

    def __init__(
        self, backends: Sequence[AttentionBackend], layers: Sequence[LayerSpec], pool: KVPool
    ) -> None:
        """backends: one or more, all alike. layers, pool: of the context that
        `PartAttention.context_of` got.
        Raises InvalidInput for no backend, and for backends of other contexts."""
        contexts = [context.context for context in backends]
        if not contexts or any(context.token_to_kv_pool is not pool for context in contexts):
            got = "backends of another context" if contexts else "none"
            raise InvalidInput("backends", got=got, expected="backends of a part context")
        for context in contexts:
            self.layers = part_layers(layers, context)
        self.backends = tuple(backends)
        self.begin(())

    def begin(self, parts: Iterable[KeyPart[K]]) -> None:
        """Take the parts of a new step. The first has every new token, and its own keys.
        None: the step has no tokens, or is not run in parts."""
        self.parts: tuple[KeyPart[K], ...] = tuple(parts)
        self._prepared: list[KeyPart[K] | None] = [None] * len(self.backends)

    def attend(
        self,
        q: torch.Tensor,
        read: Callable[[K], tuple[torch.Tensor, ...] | None],
        layer: LayerSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention [T, Hq, Dv] of one layer, q [T, Hq, D]; rows of no request are 0.

        read: K [n, Hkv, D] and V [n, Hkv, Dv] of keys, in the dtype of Q; None leaves their parts
        out. Parts in a row with the same keys read them once. lse: [T, Hq] float32, written if
        given, sinks included.
        """
        new_layer, cross = self.layers[layer.layer_id]
        if not self.parts:
            return q.new_empty((*q.shape[:2], new_layer.v_head_dim))
        first, *others = self.parts
        is_merged = bool(others) or layer.sinks is not None
        if lse is None and is_merged:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        keys, kv = first.keys, read(first.keys)
        assert kv is not None  # every token sees itself
        out = self._of_part(0, first, q, kv, new_layer, lse)
        out[first.tokens.stop :] = 0  # kernels may leave them as the memory was
        if lse is None or not is_merged:
            return out
        merged = out.float()
        for number, part in enumerate(others, start=1):
            if part.keys is not keys:
                keys, kv = part.keys, read(part.keys)
            if kv is None:
                continue
            rows = part.tokens
            part_lse = torch.empty_like(lse[rows])
            out = self._of_part(number, part, q[rows], kv, cross, part_lse)
            merge_into(merged[rows], lse[rows], out, part_lse)
        if layer.sinks is not None:
            add_sinks(merged, lse, layer.sinks)
        return merged.to(q.dtype)

    def _of_part(
        self,
        number: int,
        part: KeyPart[K],
        q: torch.Tensor,
        keys: tuple[torch.Tensor, ...],
        layer: LayerSpec,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        lane = min(number, len(self.backends) - 1)
        backend = self.backends[lane]
        if self._prepared[lane] is not part:
            backend.init_forward_metadata_out_graph(part.batch)
            backend.init_forward_metadata_in_graph(part.batch)
            self._prepared[lane] = part
        k, v = keys
        return backend.forward(q, k, v, layer, part.batch, save_kv_cache=False, lse=lse)

    @staticmethod
    def context_of(context: BackendContext, request: Request) -> BackendContext:
        """The context of backends that attend to the parts of steps of `context`.

        For each shape among its layers it has two layers that no pool holds: one for new tokens,
        which see each other causally, and one for keys that every new token sees. Sinks are added
        when parts are merged. request: for these backends, as `parts_request` makes it; MLA runs
        with its `head_dim` and `v_head_dim`. Raises InvalidInput for an MLA request without
        `head_dim`, and for layers whose parts cannot be merged by LSE.
        """
        for layer in context.layers:
            if not layer.is_mergeable or not layer.is_causal or layer.is_cross_attention:
                expected = (
                    "causal self attention of kind mha or mla, without windows, chunks and biases"
                )
                raise InvalidInput("layers", got=f"layer {layer.layer_id}", expected=expected)
        number = max(context.token_to_kv_pool.layer_ids) + 1
        layers: list[LayerSpec] = []
        for shaped in {
            _shape(each): each for each in _own_layers(context.layers, request)
        }.values():
            own_id = number + len(layers)
            layers.append(replace(shaped, layer_id=own_id))
            layers.append(replace(shaped, layer_id=own_id + 1, is_cross_attention=True))
        # The parts of a step contradict the request table, and the step was checked as a whole
        return replace(context, request=request, layers=tuple(layers), debug=False)


def part_layers(
    layers: Sequence[LayerSpec], of_parts: BackendContext
) -> dict[int, tuple[LayerSpec, LayerSpec]]:
    """The two layers of `of_parts`, a `PartAttention.context_of`, for each of these layers by its
    id.

    Raises InvalidInput for a context that was not made for them.
    """
    held = of_parts.token_to_kv_pool.layer_ids
    by_shape = {
        _shape(layer): (layer, cross)
        for layer, cross in zip(of_parts.layers[::2], of_parts.layers[1::2], strict=False)
        if layer.layer_id not in held and cross.is_cross_attention
    }
    shapes = list(map(_shape, _own_layers(layers, of_parts.request)))
    if set(shapes) != by_shape.keys():
        expected = "backends of a part context of these layers"
        raise InvalidInput("backends", got="backends of another context", expected=expected)
    return {layer.layer_id: by_shape[shape] for layer, shape in zip(layers, shapes, strict=True)}


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add attention over other keys to `out` [T, H, D] and `lse` [T, H], both float32, in place.

    lse = logaddexp(lse, part_lse); out = e^(old lse - lse) out + e^(part_lse - lse) part. Rows of
    neither have LSE -inf.
    """
    share = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)
    out.lerp_(part.float(), share.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add a key without a value to `out` [T, H, D] and `lse` [T, H], both float32, in place.

    sinks: [H] float32, its logit for each head. Rows of no request have any LSE.
    """
    share = torch.sigmoid(lse - sinks).nan_to_num_(0.0)
    out.mul_(share.unsqueeze(-1))
    torch.logaddexp(lse, sinks.expand_as(lse), out=lse)


def _own_layers(layers: Sequence[LayerSpec], request: Request) -> list[LayerSpec]:
    """The layers for a call's own tokens, whose K and V have no scales."""
    return [
        _expanded(layer, request)
        if layer.kind == "mla"
        else replace(layer, sinks=None, k_scale=None, v_scale=None)
        for layer in layers
    ]


def _expanded(layer: LayerSpec, request: Request) -> LayerSpec:
    if request.head_dim is None:
        raise InvalidInput("head_dim", got=None, expected="the dim of the expanded heads")
    heads = layer.tp_q_head_num
    return LayerSpec(
        layer_id=layer.layer_id,
        tp_q_head_num=heads,
        tp_k_head_num=heads,
        tp_v_head_num=heads,
        qk_head_dim=request.head_dim,
        v_head_dim=request.v_head_dim or request.head_dim,
        scaling=layer.scaling,
        logit_cap=layer.logit_cap,
    )


def _shape(layer: LayerSpec) -> tuple[float, ...]:
    """How the layers of parts may differ."""
    heads = layer.tp_q_head_num, layer.tp_k_head_num
    return (*heads, layer.qk_head_dim, layer.v_head_dim, layer.scaling, layer.logit_cap)
