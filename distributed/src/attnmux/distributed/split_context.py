"""The context of the backends that attend to the parts of a split step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnmux.core import BackendContext, InvalidInput, LayerSpec, Request, expanded_context


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """How the layers of parts may differ."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    scaling: float
    logit_cap: float

    @classmethod
    def of(cls, layer: LayerSpec) -> _Shape:
        heads, dims = (layer.tp_q_head_num, layer.tp_k_head_num), (0, 0)
        if layer.kind == "mla":  # the expanded heads are alike in all layers
            heads = layer.tp_q_head_num, 1
        else:
            dims = layer.qk_head_dim, layer.v_head_dim
        return cls(heads=heads, dims=dims, scaling=layer.scaling, logit_cap=layer.logit_cap)


def is_mergeable(layer: LayerSpec) -> bool:
    """Whether a token sees either all keys of an earlier chunk or none, so that its attention to
    chunks can be merged. Windows and attention chunks end within one."""
    limited = layer.sliding_window_size >= 0 or layer.attention_chunk_size > 0
    return layer.kind in ("mha", "mla") and not limited


def split_request(request: Request) -> Request:
    """The demands on the backend of parts, for an engine that lets the solver choose it.

    K and V come with each call, in the dtype of Q. Earlier chunks are read as cross attention reads
    an encoder, and everything returns LSE. Sinks are added when parts are merged. MLA runs with
    expanded heads.
    """
    if request.latent:
        return request.expanded_prompts()
    nothing = dict.fromkeys(
        ("sliding_window", "attention_chunk", "spec_topk", "spec_draft_tokens"), None
    )
    flags = ("sinks", "custom_mask", "multi_item", "multimodal", "graph", "strided_kv")
    return request.replace(
        origin="model",
        kv_dtype=request.dtype,
        phases=("extend",),
        cross_attention=True,
        lse=True,
        linear_layers=(),
        two_batches=False,
        **nothing,
        **dict.fromkeys(flags, False),
    )


def split_context(context: BackendContext) -> BackendContext:
    """The context of the backends of parts, for a model's context.

    For each shape among the layers that can be merged it has two layers, which no pool holds: one
    for a chunk's tokens on themselves, and one for other chunks.
    Raises InvalidInput for a context without such layers, for an encoder's layers and cross
    attention, and as `expanded_context` does.
    """
    for layer in context.layers:
        if not layer.is_causal or layer.is_cross_attention:
            got = f"layer {layer.layer_id}, of an encoder or with cross attention"
            raise InvalidInput("layers", got=got, expected="causal layers of a decoder")
    # A chunk of a step has two pieces of each request
    most = 2 * context.max_batch_size
    if context.layers[0].kind == "mla":
        return replace(expanded_context(context), max_batch_size=most)
    mergeable = [layer for layer in context.layers if is_mergeable(layer)]
    if not mergeable:
        expected = "a layer without a window and attention chunks"
        raise InvalidInput("layers", got="none that can be merged", expected=expected)
    number = max(context.token_to_kv_pool.layer_ids) + 1
    layers: list[LayerSpec] = []
    for layer in {_Shape.of(layer): layer for layer in mergeable}.values():
        own = replace(layer, layer_id=number + len(layers), sinks=None, k_scale=None, v_scale=None)
        layers += [own, replace(own, layer_id=own.layer_id + 1, is_cross_attention=True)]
    request = split_request(context.request)
    # The parts of a step contradict the request table, and the step was checked as a whole
    return replace(context, request=request, layers=tuple(layers), max_batch_size=most, debug=False)


def layers_of_parts(
    context: BackendContext, parts: BackendContext
) -> dict[int, tuple[LayerSpec, LayerSpec]]:
    """By layer id of `context`, the two layers of `split_context(context)` that serve it. Layers
    that cannot be merged have none.

    Raises InvalidInput where `parts` is not such a context.
    """
    pool, pairs = context.token_to_kv_pool, zip(parts.layers[::2], parts.layers[1::2], strict=False)
    of_shape = {
        _of_pair(own, context.layers[0]): (own, cross)
        for own, cross in pairs
        if own.layer_id not in pool.layer_ids and cross.is_cross_attention
    }
    served = {layer.layer_id: _Shape.of(layer) for layer in context.layers if is_mergeable(layer)}
    if parts.token_to_kv_pool is not pool or of_shape.keys() != set(served.values()):
        expected = "backends of split_context(inner.context)"
        raise InvalidInput("parts", got="backends of another context", expected=expected)
    return {layer_id: of_shape[shape] for layer_id, shape in served.items()}


def _of_pair(own: LayerSpec, model: LayerSpec) -> _Shape:
    """The shape of the model's layers that `own` serves."""
    shape = _Shape.of(own)
    if model.kind == "mla":
        return replace(shape, heads=(own.tp_q_head_num, 1), dims=(0, 0))
    return shape
