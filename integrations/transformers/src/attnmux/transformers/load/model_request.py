"""A model's request to a backend: by its layers as recorded, and by its config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from attnmux.configs import UnknownModel, kept_layers, request_from_model, stored_kv_dtype
from attnmux.core import (
    InvalidInput,
    LayerSpec,
    Request,
)
from attnmux.parts import expanded_request
from attnmux.transformers.load.checkpoint import Checkpoint
from attnmux.transformers.options import RunnerOptions


def with_kept_dtype(
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
    options: RunnerOptions,
    scheme: str | None = None,
) -> tuple[LayerSpec, ...]:
    """The layers, of which those that `RunnerOptions.kv_dtype_skip` names store K and V in `dtype`.

    scheme: the checkpoint's KV dtype.
    Raises InvalidInput as `kept_layers` does.
    """
    if options.kv_dtype_skip is None:
        return tuple(layers)
    own, kinds = Request.canonical_dtype(dtype), {layer.layer_id: _kind(layer) for layer in layers}
    kv_dtype = options.kv_dtype or scheme
    kv_dtype = kv_dtype and Request.canonical_dtype(kv_dtype, "kv_dtype")
    kept = kept_layers(options.kv_dtype_skip, kinds, dtype=own, kv_dtype=kv_dtype)
    return tuple(
        replace(layer, kv_dtype=own) if layer.layer_id in kept else layer for layer in layers
    )


def _kind(layer: LayerSpec) -> str:
    """The word of `kept_layers` for a layer."""
    if layer.kind != "mha":
        return layer.kind
    others = ("index_block_size", "cross_attention", "sliding_window", "attention_chunk")
    return next((name for name in others if name in layer.features), "full_attention")


def without_indexer(stated: Request) -> Request:
    """The same for contexts of which the indexer picks every key: plain MLA or MHA."""
    kind = "mla" if stated.latent else stated.kind
    return stated.replace(origin="model", kind=kind, index_topk=None, index_block_size=None)


def check_against_config(recorded: Request, config: Request, *, max_context_len: int) -> None:
    """Refuse a model that does not do what its config.json says.

    recorded: from `request_of`. config: from `request_from_model`; a latent model is recorded
    expanded and compared as such. A feature that config.json does not mention is no contradiction
    (what runs is what was recorded), nor is a window or chunk that the context never fills.
    Raises InvalidInput naming the field.
    """
    stated = expanded_request(config) if config.latent else config
    groups, said = recorded.groups(), stated.groups()
    if len(groups) != len(said):
        got = f"{len(groups)} groups of layers when the model runs"
        raise InvalidInput("layers", got=got, expected=f"{len(said)}, by config.json")
    for ran, told in zip(groups, said, strict=True):
        _check_group(ran, told, max_context_len)


def _check_group(recorded: Request, stated: Request, max_context_len: int) -> None:
    """The same for layers that are alike."""
    for name in ("num_q_heads", "head_dim"):
        _compare(name, getattr(recorded, name), getattr(stated, name))
    # A model may repeat K and V itself, as JetMoE does for each expert
    if not _repeats_heads(recorded.num_kv_heads, stated.num_kv_heads):
        _compare("num_kv_heads", recorded.num_kv_heads, stated.num_kv_heads)
    _compare(
        "v_head_dim",
        recorded.v_head_dim or recorded.head_dim,
        stated.v_head_dim or stated.head_dim,
    )
    for name in ("sliding_window", "attention_chunk", "logit_cap", "sinks"):
        reach = getattr(stated, name) if name in ("sliding_window", "attention_chunk") else None
        if getattr(stated, name) and (reach is None or reach < max_context_len):
            _compare(name, getattr(recorded, name), getattr(stated, name))


def _repeats_heads(recorded: int | None, stated: int | None) -> bool:
    return recorded is not None and stated is not None and recorded % stated == 0


def _compare(name: str, recorded: object, stated: object) -> None:
    if recorded != stated:
        raise InvalidInput(
            name, got=f"{recorded!r} when the model runs", expected=f"{stated!r}, by config.json"
        )


def folder_of(checkpoint: Checkpoint) -> Path | None:
    """The folder of its files, for an id on the hub in the cache, or the GGUF file; None without a
    config.json."""
    if checkpoint.gguf is not None:
        return Path(checkpoint.source) / checkpoint.gguf
    file = cached_file(checkpoint.source, "config.json", revision=checkpoint.revision)
    return None if file is None else Path(file).parent


def stored_scheme(checkpoint: Checkpoint) -> str | None:
    """The KV dtype that the checkpoint's files state; None if they state none.

    Raises InvalidInput for one that no KV cache has.
    """
    folder = folder_of(checkpoint)
    return None if folder is None else stored_kv_dtype(folder)


def stated_request(
    checkpoint: Checkpoint, options: RunnerOptions, *, dtype: torch.dtype
) -> Request | None:
    """The request that config.json makes for attention; None if it uses words of its own.

    Such models, and those of unknown types, are known only once they run. dtype: of the model.
    Raises InvalidInput for heads that the ranks do not divide, and for layers that cannot be
    skipped.
    """
    folder = folder_of(checkpoint)
    if folder is None:
        return None
    try:
        known = request_from_model(
            folder,
            tp=options.ranks.building.head_ranks,
            dtype=Request.canonical_dtype(dtype),
            kv_dtype=options.kv_dtype,
            kv_dtype_skip=options.kv_dtype_skip,
        )
        return known.replace(origin="model", dtype=Request.canonical_dtype(dtype))
    except UnknownModel:
        return None
    except InvalidInput as error:
        if error.argument in ("tp", "kv_dtype_skip"):
            raise
        return None
