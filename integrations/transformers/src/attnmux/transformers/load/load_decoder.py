"""Loads a decoder: decides by config.json, loads, records the layers, and decides again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    BackendFailed,
    Decision,
    InvalidInput,
    LayerSpec,
    Offer,
    Platform,
    Request,
    make_first,
)
from attnmux.transformers.draft.hidden_states import noting_states
from attnmux.transformers.load.checkpoint import Checkpoint
from attnmux.transformers.load.decision import decide_first, stated_ways, without
from attnmux.transformers.load.making import make_runner
from attnmux.transformers.load.model_request import (
    check_against_config,
    folder_of,
    latent_request,
    request_of,
    stated_request,
    stored_scheme,
    with_kept_dtype,
)
from attnmux.transformers.load.options import RunnerOptions
from attnmux.transformers.load.quantised import with_kv_scales
from attnmux.transformers.load.weights import load_model
from attnmux.transformers.model.absorbed import absorb, absorbed_layers, expand
from attnmux.transformers.model.attention import SERVED, set_attention
from attnmux.transformers.model.dual_chunks import WITHOUT, DualChunks
from attnmux.transformers.model.images.capture import ImageReader
from attnmux.transformers.model.layers import record_layers
from attnmux.transformers.model.mixers.mixer import Mixer
from attnmux.transformers.model.mixers.mixers import bind, mixers_of, serve
from attnmux.transformers.model.sparse.compressors import Compressors, bound_compressors
from attnmux.transformers.model.sparse.indexers import Indexers, bound_indexers
from attnmux.transformers.requests.pools import bytes_per_token
from attnmux.transformers.run.runner import ModelRunner


def load_decoder(
    checkpoint: Checkpoint,
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
    progress: bool,
    warn: Callable[[str], None],
) -> ModelRunner:
    dtype = checkpoint.dtype(options.dtype)
    ranks = options.ranks
    chunks = _chunks(checkpoint, options)
    stated = _stated(checkpoint, chunks, options, dtype)
    if stated is not None:
        by_config = stated_ways(stated, options)
        ranks.decided(lambda: decide_first(by_config, platform, offers, options), platform, offers)
    device = options.device_on(platform)
    model = load_model(
        checkpoint, dtype=dtype, device=device, split=ranks.split, progress=progress, warn=warn
    )
    mixers = mixers_of(model)
    for mixer in mixers:
        bind(mixer)
    indexers = bound_indexers(model)
    compressors = bound_compressors(model)
    with noting_states(model, options.hidden_layers if options.hidden_states else ()):
        layers = record_layers(model, max_context_len=options.max_context_len, mixers=mixers)
    layers = _marked(layers, model, compressors, chunks)
    linear = serve(mixers)
    indexers, layers = _picking(indexers, layers, options)
    scheme = stored_scheme(checkpoint) if stated is None else stated.kv_dtype
    layers = with_kept_dtype(layers, dtype, options, scheme)
    if (folder := folder_of(checkpoint)) is not None:
        # A latent is stored by k_scale, as in vLLM and SGLang
        layers = with_kv_scales(layers, folder, warn)
    images = ImageReader(model, layers) if options.images else None
    request = _with_images(request_of(layers, dtype, linear), images)
    request = request.replace(origin="model", kv_dtype=scheme)
    if stated is not None:
        check_against_config(request, stated, max_context_len=options.max_context_len)
    latent = _latent_layers(model, layers, mixers, options)
    ways = _ways(request, latent, indexers, compressors, options)

    def make(decision: Decision) -> ModelRunner:
        if latent is None or not decision.request.latent:
            set_attention(model, SERVED)
            return make_runner(
                model,
                layers,
                decision,
                options,
                linear=linear,
                indexers=indexers,
                compressors=compressors,
                chunks=chunks,
                images=images,
            )
        absorb(model, layers)
        try:
            return make_runner(
                model,
                latent,
                decision,
                options,
                linear=linear,
                indexers=indexers,
                images=images,
            )
        except BaseException:
            expand(model, layers)
            raise

    def choose(failed: Mapping[str, BackendFailed]) -> Decision:
        chosen = without(failed, options)
        return ranks.decided(lambda: decide_first(ways, platform, offers, chosen), platform, offers)

    runner = make_first(
        choose,
        lambda decision: ranks.together(lambda: make(decision)),
        lambda failure, decision: warn(f"{failure}; instead {decision.summary()}"),
    )
    if stated is not None and stated.latent and options.mla is None:
        _warn_if_expanded(runner, latent, warn)
    _warn_of_chunks(chunks, warn)
    return runner


def _chunks(checkpoint: Checkpoint, options: RunnerOptions) -> DualChunks | None:
    """The model's dual chunks. Raises InvalidInput for them compiled."""
    chunks = DualChunks.of(checkpoint.config, options.max_context_len)
    if chunks is not None and options.compile:
        expected = "no compile: queries of dual chunks are made in Python"
        raise InvalidInput("compile", got=True, expected=expected)
    return chunks


def _stated(
    checkpoint: Checkpoint, chunks: DualChunks | None, options: RunnerOptions, dtype: torch.dtype
) -> Request | None:
    """As `stated_request`, without chunks that the context does not reach.

    Raises InvalidInput where the options exclude what it asks for.
    """
    stated = stated_request(checkpoint, options, dtype=dtype)
    if stated is not None and stated.compressed_layers:
        _check_compressed(options)
    if stated is not None and stated.kind == "dual_chunk" and chunks is None:
        return stated.replace(origin="model", kind="mha")
    return stated


def _marked(
    layers: tuple[LayerSpec, ...],
    model: PreTrainedModel,
    compressors: Compressors | None,
    chunks: DualChunks | None,
) -> tuple[LayerSpec, ...]:
    """The recorded layers as a backend serves them."""
    if compressors is not None:
        layers = compressors.mark(layers)
    if chunks is not None:
        chunks.bind(model)
        layers = chunks.mark(layers)
    return layers


def _picking(
    indexers: Indexers | None, layers: tuple[LayerSpec, ...], options: RunnerOptions
) -> tuple[Indexers | None, tuple[LayerSpec, ...]]:
    """The indexers, without those that pick every key of any context, and the layers with them."""
    if indexers is None or indexers.shape.reach >= options.max_context_len:
        return None, layers
    return indexers, indexers.mark(layers)


def _ways(
    request: Request,
    latent: Sequence[LayerSpec] | None,
    indexers: Indexers | None,
    compressors: Compressors | None,
    options: RunnerOptions,
) -> list[Request]:
    """How the model may run as it was recorded, the way that is preferred first.

    Raises InvalidInput for what does not go together with indexers or keys of blocks.
    """
    if compressors is not None:
        return [_compressed_way(request, compressors, options)]
    if indexers is None:
        expanded = [request] if options.mla != "absorbed" else []
        return expanded if latent is None else [latent_request(request, latent), *expanded]
    topk = indexers.shape.topk
    if latent is None and not indexers.shape.block_size:
        expected = "absorbed, with a plain linear kv_b_proj: an indexer picks latent rows"
        raise InvalidInput("mla", got=options.mla or "another projection", expected=expected)
    if options.draft_topk > 1:
        expected = "1, chains of drafts: an indexer counts places"
        raise InvalidInput("draft_topk", got=options.draft_topk, expected=expected)
    if not options.ranks.run_indexers:
        expected = "1, or --tp alone: an indexer reads all keys of a request"
        raise InvalidInput("ranks", got=options.ranks.size, expected=expected)
    if latent is not None:
        return [latent_request(request, latent, index_topk=topk)]
    if options.ranks.head_ranks > 1:
        expected = "1: every rank would need only the picks for its own heads"
        raise InvalidInput("ranks", got=options.ranks.head_ranks, expected=expected)
    size = indexers.shape.block_size
    return [request.replace(origin="model", index_topk=topk, index_block_size=size)]


def _compressed_way(request: Request, compressors: Compressors, options: RunnerOptions) -> Request:
    """How a model runs whose layers make keys of blocks. Raises as `_check_compressed` does."""
    _check_compressed(options)
    return request.replace(origin="model", lse=True, compressed_layers=compressors.kinds())


def _check_compressed(options: RunnerOptions) -> None:
    """Raise InvalidInput for what does not go together with keys of blocks."""
    if options.draft_topk > 1:
        expected = "1, chains of drafts: a key stands for a block of places"
        raise InvalidInput("draft_topk", got=options.draft_topk, expected=expected)
    if options.ranks.size > 1:
        expected = "1: what keys are made of is not split"
        raise InvalidInput("ranks", got=options.ranks.size, expected=expected)


def _with_images(request: Request, images: ImageReader | None) -> Request:
    return request if images is None else images.ask(request)


def _latent_layers(
    model: PreTrainedModel,
    layers: Sequence[LayerSpec],
    mixers: Sequence[Mixer],
    options: RunnerOptions,
) -> tuple[LayerSpec, ...] | None:
    """The layers as they run absorbed; None where they cannot, or shall not."""
    if options.mla == "expanded":
        return None
    latent = absorbed_layers(model, layers, mixers=mixers)
    if options.mla == "absorbed" and latent is None:
        raise InvalidInput(
            "mla",
            got=f"absorbed, for {type(model).__name__}",
            expected="expanded: its K and V are not made by a plain linear kv_b_proj",
        )
    return latent


def _warn_of_chunks(chunks: DualChunks | None, warn: Callable[[str], None]) -> None:
    if chunks is not None:
        warn(WITHOUT.format(length=chunks.length))


def _warn_if_expanded(
    runner: ModelRunner, latent: Sequence[LayerSpec] | None, warn: Callable[[str], None]
) -> None:
    if runner.decision.request.latent:
        return
    takes = f"{bytes_per_token(runner.context.layers, runner.decision):,} bytes of KV cache"
    if latent is None:
        reason = "its K and V are not made by a plain linear kv_b_proj"
    else:
        absorbed = bytes_per_token(latent, runner.decision)
        reason = (
            f"no backend that may be chosen serves its latent attention, with {absorbed:,}, "
            "or only as a last resort, which mla=absorbed takes"
        )
    warn(f"the model runs expanded, with {takes} a token: {reason}")
