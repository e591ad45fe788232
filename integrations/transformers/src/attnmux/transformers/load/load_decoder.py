"""Loads a decoder: decides by config.json, loads, records the layers, and decides again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

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
from attnmux.transformers.load.ahead import Ahead
from attnmux.transformers.load.checkpoint import Checkpoint
from attnmux.transformers.load.decision import decide_first, stated_ways, without
from attnmux.transformers.load.model_request import (
    check_against_config,
    folder_of,
    stated_request,
    stored_scheme,
    with_kept_dtype,
)
from attnmux.transformers.load.quantised import with_kv_scales
from attnmux.transformers.load.weights import load_model
from attnmux.transformers.model.absorbed import absorb, absorbed_layers, expand
from attnmux.transformers.model.asked import latent_request, request_of
from attnmux.transformers.model.attention import SERVED, set_attention
from attnmux.transformers.model.dual_chunks import DualChunks
from attnmux.transformers.model.hidden_states import HiddenStates
from attnmux.transformers.model.images.capture import ImageReader
from attnmux.transformers.model.layers import record_layers
from attnmux.transformers.model.mixers.mixer import Mixer
from attnmux.transformers.model.mixers.mixers import Mixers
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.part import ModelPart, part_of
from attnmux.transformers.model.sparse.compressors import Compressors, check_blocks
from attnmux.transformers.model.sparse.indexers import Indexers
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.requests.pools import bytes_per_token
from attnmux.transformers.run.memory import ServedModel
from attnmux.transformers.run.runner import ModelRunner


def make_runner(
    model: PreTrainedModel | PackedDecoder,
    layers: Sequence[LayerSpec],
    decision: Decision,
    options: RunnerOptions,
    parts: Sequence[ModelPart] = (),
) -> ModelRunner:
    """The runner of `model`, whose recorded `layers` run on the decided backend.

    parts: those of the model, bound. Raises as `ModelRunner` does.
    """
    if options.check is not None:
        options.check(decision)
    if not isinstance(model, PackedDecoder):
        options = replace(options, max_encoder_len=None)
    served = ServedModel(module=model, layers=layers, parts=parts)
    return ModelRunner(served, decision, options)


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
    stated = _stated(checkpoint, options, dtype)
    ahead = _begun(stated, platform, offers, options)
    device = options.device_on(platform)
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        split=ranks.building.split,
        progress=progress,
        warn=warn,
    )
    parts = parts_of(model, options)
    mixers = _mixers(parts)
    layers = record_layers(model, max_context_len=options.max_context_len, mixers=mixers)
    for part in parts:
        layers = part.mark(layers)
    scheme = stored_scheme(checkpoint) if stated is None else stated.kv_dtype
    layers = with_kept_dtype(layers, dtype, options, scheme)
    if (folder := folder_of(checkpoint)) is not None:
        # A latent is stored by k_scale, as in vLLM and SGLang
        layers = with_kv_scales(layers, folder, warn)
    linear = [layer for part in parts for layer in part.linear]
    request = request_of(layers, dtype, linear).replace(origin="model", kv_dtype=scheme)
    if stated is not None:
        check_against_config(request, stated, max_context_len=options.max_context_len)
    latent = _latent_layers(model, layers, mixers, options)
    ways = _ways(request, latent, parts, options)

    def make(decision: Decision) -> ModelRunner:
        if latent is None or not decision.request.latent:
            set_attention(model, SERVED)
            return make_runner(model, layers, decision, options, parts)
        absorb(model, layers)
        try:
            return make_runner(model, latent, decision, options, parts)
        except BaseException:
            expand(model, layers)
            raise

    def choose(failed: Mapping[str, BackendFailed]) -> Decision:
        chosen = without(failed, options)
        return ranks.building.decided(
            lambda: decide_first(ways, platform, offers, chosen), platform, offers
        )

    ahead.join()
    runner = make_first(
        choose,
        lambda decision: ranks.building.together(lambda: make(decision)),
        lambda failure, decision: warn(f"{failure}; instead {decision.summary()}"),
    )
    if options.mla is None:
        _warn_if_expanded(runner, stated, latent, warn)
    _tell_notes(parts, warn)
    return runner


def _begun(
    stated: Request | None, platform: Platform, offers: Sequence[Offer], options: RunnerOptions
) -> Ahead:
    """What the backends that config.json decides do ahead, begun. Raises as `decide_first`."""
    ranks, decision = options.ranks, None
    if stated is not None:
        ways = stated_ways(stated, options)
        decision = ranks.building.decided(
            lambda: decide_first(ways, platform, offers, options), platform, offers
        )
        decision.begin_ahead(offers)
    ahead = Ahead(decision, options)
    ahead.begin()
    return ahead


def _tell_notes(parts: Sequence[ModelPart], warn: Callable[[str], None]) -> None:
    for part in parts:
        if part.note:
            warn(part.note)


def _mixers(parts: Sequence[ModelPart]) -> tuple[Mixer, ...]:
    mixers = part_of(parts, Mixers)
    return () if mixers is None else mixers.each


def _ways(
    request: Request,
    latent: Sequence[LayerSpec] | None,
    parts: Sequence[ModelPart],
    options: RunnerOptions,
) -> list[Request]:
    """How the model may run as it was recorded, the way that is preferred first.

    Raises InvalidInput for options that its parts do not support.
    """
    ways = [] if latent is None else [latent_request(request, latent)]
    ways += [request] if options.mla != "absorbed" else []
    for part in parts:
        ways = part.ask(ways, options)
    return ways


def _stated(checkpoint: Checkpoint, options: RunnerOptions, dtype: torch.dtype) -> Request | None:
    """Like `stated_request`, without chunks that the context does not reach.

    Raises InvalidInput if the options exclude the part's request.
    """
    chunks = DualChunks.of(checkpoint.config, options.max_context_len)
    if chunks is not None and options.compile:
        expected = "no compile: queries of dual chunks are made in Python"
        raise InvalidInput("compile", got=True, expected=expected)
    stated = stated_request(checkpoint, options, dtype=dtype)
    if stated is not None and stated.compressed_layers:
        check_blocks(options)
    if stated is not None and stated.kind == "dual_chunk" and chunks is None:
        return stated.replace(origin="model", kind="mha")
    return stated


def _latent_layers(
    model: PreTrainedModel,
    layers: Sequence[LayerSpec],
    mixers: Sequence[Mixer],
    options: RunnerOptions,
) -> tuple[LayerSpec, ...] | None:
    """The layers as they run absorbed; None if they cannot, or shall not."""
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


def _warn_if_expanded(
    runner: ModelRunner,
    stated: Request | None,
    latent: Sequence[LayerSpec] | None,
    warn: Callable[[str], None],
) -> None:
    if stated is None or not stated.latent or runner.decision.request.latent:
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


KINDS: tuple[type[ModelPart], ...] = (
    Mixers,
    Indexers,
    Compressors,
    HiddenStates,
    DualChunks,
    ImageReader,
)


def parts_of(model: PreTrainedModel, options: RunnerOptions) -> tuple[ModelPart, ...]:
    """The parts of a loaded model, bound. Raises InvalidInput as `ModelPart.find` does."""
    parts = tuple(part for kind in KINDS if (part := kind.find(model, options)) is not None)
    for part in parts:
        part.bind()
    return parts
