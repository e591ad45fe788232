"""Attention of a step in parts, each over keys that come with the call, merged by LSE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec

if TYPE_CHECKING:
    from attnmux.core.backend import AttentionBackend
    from attnmux.core.choosing.ask.request import Request
    from attnmux.core.context import BackendContext
    from attnmux.core.expanded_parts import Part

Keys: TypeAlias = "Callable[[Part], tuple[torch.Tensor, torch.Tensor]]"
"""K [n, Hkv, D] and V [n, Hkv, Dv] of a part's keys, in the dtype of Q."""

MOST_LANES = 4
"""Backends of one step. Each keeps its part prepared for all layers; the last one prepares the
parts that are left over in every layer again."""


class PartAttention:
    """Runs the parts of a step on backends of `part_context`, and merges the results."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        """backends: one or more, all alike. Raises InvalidInput for none, and for backends of
        other contexts."""
        if not backends or any(len(each.context.layers) % 2 for each in backends):
            expected = "backends of a part_context"
            raise InvalidInput("backends", got="backends of another context", expected=expected)
        self.backends = tuple(backends)
        self.parts: tuple[Part, ...] = ()
        self._prepared: list[Part | None] = [None] * len(self.backends)

    def begin(self, parts: Iterable[Part]) -> None:
        """Take the parts of a new step, of which the first has every new token. None: the step is
        not run in parts."""
        self.parts = tuple(parts)
        self._prepared = [None] * len(self.backends)

    def attend(
        self,
        q: torch.Tensor,
        keys: Keys,
        layers: tuple[LayerSpec, LayerSpec],
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention [T, Hq, Dv] of one layer, q [T, Hq, D]; rows of no request are 0.

        layers: those of `part_layers`. lse: [T, Hq] float32, written if given.
        """
        own, *others = self.parts
        if lse is None and others:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        out = self._of_part(0, own, q, keys, layers, lse)
        out[own.tokens.stop :] = 0  # kernels may leave them as the memory was
        if lse is None or not others:
            return out
        merged = out.float()
        for number, part in enumerate(others, start=1):
            rows = part.tokens
            part_lse = torch.empty_like(lse[rows])
            out = self._of_part(number, part, q[rows], keys, layers, part_lse)
            merge_into(merged[rows], lse[rows], out, part_lse)
        return merged.to(q.dtype)

    def _of_part(
        self,
        number: int,
        part: Part,
        q: torch.Tensor,
        keys: Keys,
        layers: tuple[LayerSpec, LayerSpec],
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        lane = min(number, len(self.backends) - 1)
        backend = self.backends[lane]
        if self._prepared[lane] is not part:
            backend.init_forward_metadata_out_graph(part.batch)
            backend.init_forward_metadata_in_graph(part.batch)
            self._prepared[lane] = part
        k, v = keys(part)
        layer = layers[part.is_prefix]
        return backend.forward(q, k, v, layer, part.batch, save_kv_cache=False, lse=lse)


def part_context(context: BackendContext, request: Request) -> BackendContext:
    """The context of backends that attend to the parts of steps of `context`.

    For each layer, or once for all that are alike, it has two layers that no pool holds: one for
    new tokens, which see each other causally, and one for keys that every new token sees. Only the
    first has sinks.
    request: for these backends; MLA runs with its `head_dim` and `v_head_dim`.
    Raises InvalidInput for an MLA request without `head_dim`, and for layers of which parts cannot
    be merged by LSE.
    """
    for layer in context.layers:
        limited = layer.sliding_window_size >= 0 or layer.attention_chunk_size > 0
        if layer.kind == "mla" and (limited or layer.sinks is not None):
            expected = "MLA without windows, chunks or sinks"
            raise InvalidInput("layers", got=f"layer {layer.layer_id}", expected=expected)
        if limited or layer.kind == "dual_chunk" or layer.is_cross_attention:
            expected = "self attention of kind mha or mla, without windows and chunks"
            raise InvalidInput("layers", got=f"layer {layer.layer_id}", expected=expected)
    number = max(context.token_to_kv_pool.layer_ids) + 1
    layers: list[LayerSpec] = []
    for layer in {_spec(layer): layer for layer in context.layers}.values():
        own = _own_layer(layer, request, number + len(layers))
        cross = replace(own, layer_id=own.layer_id + 1, is_cross_attention=True, sinks=None)
        layers += [own, cross]
    # The parts of a step contradict the request table, and the step was checked as a whole
    return replace(context, request=request, layers=tuple(layers), debug=False)


def part_layers(
    layers: Sequence[LayerSpec], of_parts: BackendContext
) -> dict[int, tuple[LayerSpec, LayerSpec]]:
    """The two layers of `of_parts`, a `part_context`, for each of these layers by its id.

    Raises InvalidInput for a context that was not made for them.
    """
    specs = dict.fromkeys(map(_spec, layers))
    if len(of_parts.layers) != 2 * len(specs):
        expected = "a part_context of these layers"
        raise InvalidInput("of_parts", got="another context", expected=expected)
    pairs = zip(of_parts.layers[::2], of_parts.layers[1::2], strict=True)
    by_spec = dict(zip(specs, pairs, strict=True))
    return {layer.layer_id: by_spec[_spec(layer)] for layer in layers}


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


def _own_layer(layer: LayerSpec, request: Request, layer_id: int) -> LayerSpec:
    if layer.kind != "mla":
        return replace(layer, layer_id=layer_id, k_scale=None, v_scale=None)
    if request.head_dim is None:
        raise InvalidInput("head_dim", got=None, expected="the dim of the expanded heads")
    heads = layer.tp_q_head_num
    return LayerSpec(
        layer_id=layer_id,
        tp_q_head_num=heads,
        tp_k_head_num=heads,
        tp_v_head_num=heads,
        qk_head_dim=request.head_dim,
        v_head_dim=request.v_head_dim or request.head_dim,
        scaling=layer.scaling,
        logit_cap=layer.logit_cap,
    )


def _spec(layer: LayerSpec) -> tuple[float, ...]:
    """How the layers of parts may differ. Sinks are a layer's own."""
    return (
        layer.tp_q_head_num,
        layer.scaling,
        layer.logit_cap,
        -1 if layer.sinks is None else layer.layer_id,
    )
