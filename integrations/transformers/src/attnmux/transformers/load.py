"""Loads a checkpoint into a runner: decides, loads, records the layers, decides again and
builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    BackendFailed,
    Decision,
    GraphUnsupported,
    InvalidInput,
    LayerSpec,
    LinearLayerSpec,
    Offer,
    Platform,
    Request,
    dtype_name,
    in_brief,
    make_first,
)
from attnmux.transformers.absorbed import absorb, absorbed_layers, expand
from attnmux.transformers.attention import SERVED, set_attention
from attnmux.transformers.capacity import Capacity
from attnmux.transformers.checkpoint import LOADING, Checkpoint, load_model, warn_in_python
from attnmux.transformers.decision import decide, decide_first, stated_ways, without
from attnmux.transformers.eagle_head import EagleHead
from attnmux.transformers.encoder_decoder import PackedDecoder, record_decoder
from attnmux.transformers.images.capture import ImageReader
from attnmux.transformers.indexers import Indexers, bound_indexers
from attnmux.transformers.layers import record_layers
from attnmux.transformers.mixers import Mixer, mixers_of, serve
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.pools import bytes_per_token
from attnmux.transformers.requests import (
    check_against_config,
    latent_request,
    request_of,
    stated_request,
)
from attnmux.transformers.rotary import check_rotary
from attnmux.transformers.runner import ModelRunner
from attnmux.transformers.served_model import ServedModel


def load_runner(
    checkpoint: Checkpoint,
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
    *,
    progress: bool = False,
    warn: Callable[[str], None] = warn_in_python,
) -> ModelRunner:
    """Load a checkpoint's weights and build its runner on the backend that fits.

    The backend is chosen for the layers that were recorded while the model ran. config.json is
    checked first, so that errors appear before any weight is read. Threads load in turn.
    warn: called with a sentence about tensors that the model does not read, latent attention that
    runs expanded, and backends that could not be made.
    Raises NoBackend, UnknownBackend or InvalidInput for a choice that cannot be made, InvalidInput
    for a checkpoint that cannot be used, PoolExhausted for too little memory, and GraphUnsupported
    if graphs are required but unavailable.
    """
    check_rotary(checkpoint.config, options.max_context_len)
    _check_images(checkpoint, options)
    load = _load_encoder_decoder if checkpoint.config.is_encoder_decoder else _load_decoder
    _check_ranks(checkpoint, offers, options)
    options = replace(options, launches=options.ranks.launches(options.launches))
    with LOADING:
        runner = load(checkpoint, platform, offers, options, progress, warn)
        if options.compile:
            _compile(runner, warn)
        if options.graph is not False:
            _capture_graphs(runner, options, warn)
    return runner


def load_head_runner(
    head: EagleHead,
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
    *,
    warn: Callable[[str], None] = warn_in_python,
) -> ModelRunner:
    """The runner of an EAGLE head, on the backend that fits. Raises as `load_runner` does."""
    with LOADING:
        layers = record_layers(head, max_context_len=options.max_context_len)
        request = request_of(layers, head.dtype)
        return make_first(
            lambda failed: decide(request, platform, offers, without(failed, options)),
            lambda decision: _make(head, layers, decision, options, head=head),
            lambda failure, decision: warn(f"{failure}; instead {decision.summary()}"),
        )


def _check_images(checkpoint: Checkpoint, options: RunnerOptions) -> None:
    """Refuse images with what runs text alone."""
    if not options.images:
        return
    hindrances = {
        f"{checkpoint.source}, which reads text alone": not checkpoint.reads_images,
        "ranks that split more than weights": not options.ranks.run_images,
        "drafts": options.draft_tokens is not None,
    }
    found = [name for name, hinders in hindrances.items() if hinders]
    if found:
        expected = "a model with a vision tower, without drafts, on one rank or with --tp alone"
        raise InvalidInput("images", got=found[0], expected=expected)


def _check_ranks(checkpoint: Checkpoint, offers: Sequence[Offer], options: RunnerOptions) -> None:
    """Refuse what several ranks cannot run, and ranks with other plugins or libraries."""
    if options.ranks.size == 1:
        return
    options.ranks.check_libraries(offers)
    if options.hidden_states:
        got = f"{options.ranks.size}, with hidden states"
        raise InvalidInput("ranks", got=got, expected="1 rank: an EAGLE head runs on one alone")
    got = "compile" if options.compile else "an encoder-decoder model"
    if options.compile or checkpoint.config.is_encoder_decoder:
        expected = "1 rank: layers that are compiled, and encoders, run on one alone"
        raise InvalidInput("ranks", got=f"{options.ranks.size}, with {got}", expected=expected)


def _load_decoder(
    checkpoint: Checkpoint,
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
    progress: bool,
    warn: Callable[[str], None],
) -> ModelRunner:
    dtype = checkpoint.dtype(options.dtype)
    ranks = options.ranks
    stated = stated_request(checkpoint, head_ranks=ranks.head_ranks)
    if stated is not None:
        known = stated.replace(origin="model", dtype=dtype_name(dtype))
        by_config = stated_ways(known, options)
        ranks.decided(lambda: decide_first(by_config, platform, offers, options), platform, offers)
    device = torch.device(options.device or platform.device_type)
    model = load_model(
        checkpoint, dtype=dtype, device=device, split=ranks.split, progress=progress, warn=warn
    )
    mixers = mixers_of(model)
    for mixer in mixers:
        mixer.bind()
    indexers = bound_indexers(model)
    layers = record_layers(model, max_context_len=options.max_context_len, mixers=mixers)
    linear = serve(mixers)
    images = ImageReader(model, layers) if options.images else None
    request = _with_images(request_of(layers, dtype, linear), images)
    if stated is not None:
        check_against_config(request, stated, max_context_len=options.max_context_len)
    latent = _latent_layers(model, layers, mixers, options)
    if indexers is not None and indexers.topk >= options.max_context_len:
        indexers = None  # of such a context they pick every key
    ways = _ways(request, latent, indexers, options)

    def make(decision: Decision) -> ModelRunner:
        if latent is None or not decision.request.latent:
            set_attention(model, SERVED)
            return _make(model, layers, decision, options, linear=linear, images=images)
        absorb(model, layers)
        try:
            return _make(
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
    return runner


def _ways(
    request: Request,
    latent: Sequence[LayerSpec] | None,
    indexers: Indexers | None,
    options: RunnerOptions,
) -> list[Request]:
    """How the model may run as it was recorded, the way that is preferred first.

    Raises InvalidInput for what does not go together with indexers.
    """
    if indexers is None:
        expanded = [request] if options.mla != "absorbed" else []
        return expanded if latent is None else [latent_request(request, latent), *expanded]
    if latent is None:
        expected = "absorbed, with a plain linear kv_b_proj: an indexer picks latent rows"
        raise InvalidInput("mla", got=options.mla or "another projection", expected=expected)
    if options.draft_topk > 1:
        expected = "1, chains of drafts: an indexer counts places"
        raise InvalidInput("draft_topk", got=options.draft_topk, expected=expected)
    if not options.ranks.run_indexers:
        expected = "1, or --tp alone: an indexer reads all keys of a request"
        raise InvalidInput("ranks", got=options.ranks.size, expected=expected)
    return [latent_request(request, latent, index_topk=indexers.topk)]


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


def _load_encoder_decoder(
    checkpoint: Checkpoint,
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
    progress: bool,
    warn: Callable[[str], None],
) -> ModelRunner:
    _check_lens(checkpoint, options)
    dtype = checkpoint.dtype(options.dtype)
    device = torch.device(options.device or platform.device_type)
    model = load_model(checkpoint, dtype=dtype, device=device, progress=progress, warn=warn)
    decoder = PackedDecoder(model)
    layers = record_decoder(decoder, max_context_len=options.max_context_len)
    request = request_of(layers, dtype)
    max_encoder_len = (
        options.max_encoder_len or checkpoint.max_encoder_len or options.max_context_len
    )
    return make_first(
        lambda failed: decide(request, platform, offers, without(failed, options)),
        lambda decision: _make(decoder, layers, decision, options, max_encoder_len),
        lambda failure, decision: warn(f"{failure}; instead {decision.summary()}"),
    )


def _check_lens(checkpoint: Checkpoint, options: RunnerOptions) -> None:
    """Refuse lengths beyond the tables of positions that these models have."""
    for name, wanted, limit in (
        ("max_context_len", options.max_context_len, checkpoint.max_context_len),
        ("max_encoder_len", options.max_encoder_len, checkpoint.max_encoder_len),
    ):
        if wanted is not None and limit is not None and wanted > limit:
            raise InvalidInput(name, got=wanted, expected=f"at most the model's limit, {limit}")


def _compile(runner: ModelRunner, warn: Callable[[str], None]) -> None:
    try:
        runner.compile()
    except Exception as error:  # a compiler may raise anything
        warn(f"the model runs uncompiled: {in_brief(error)}")


def _capture_graphs(
    runner: ModelRunner, options: RunnerOptions, warn: Callable[[str], None]
) -> None:
    """Capture decode steps, and those that verify drafts. Without graphs they run eagerly, unless
    graphs are required."""
    try:
        runner.capture_graphs(draft_tokens=options.draft_tokens, draft_topk=options.draft_topk)
    except GraphUnsupported as error:
        if options.graph is True:
            raise
        if runner.context.device.type != "cpu" and not runner.context.debug:
            what = "decode runs" if runner.graphs is None else "steps that verify drafts run"
            warn(f"{what} without graphs: {error}")


def _make(
    model: PreTrainedModel | PackedDecoder,
    layers: Sequence[LayerSpec],
    decision: Decision,
    options: RunnerOptions,
    max_encoder_len: int = 0,
    linear: Sequence[LinearLayerSpec] = (),
    indexers: Indexers | None = None,
    images: ImageReader | None = None,
    head: EagleHead | None = None,
) -> ModelRunner:
    window_step_tokens = options.window_step_tokens
    if images is not None and images.has_spans:
        # A window pool might have too little room for tokens that run in one step
        window_step_tokens = None
    if options.check is not None:
        options.check(decision)
    served = ServedModel(
        module=model,
        layers=layers,
        linear=linear,
        indexers=indexers,
        keeps_hidden=options.hidden_states,
        hidden_layers=options.hidden_layers,
        head=head,
        images=images,
    )
    capacity = Capacity(
        max_batch_size=options.max_batch_size,
        max_context_len=options.max_context_len,
        max_total_tokens=options.max_total_tokens,
        spare_pages=options.spare_pages,
        memory=options.memory,
        max_encoder_len=max_encoder_len,
        kept_states=options.max_batch_size if options.kept_states is None else options.kept_states,
        window_step_tokens=window_step_tokens,
    )
    return ModelRunner(
        served,
        decision,
        capacity,
        launches=options.launches,
        debug=options.debug,
        wrap=options.wrap,
        ranks=options.ranks,
    )


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
