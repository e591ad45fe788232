"""Loads a checkpoint into a runner: decides, loads, records the layers, decides again and
builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from attnmux.core import (
    AttnmuxError,
    Chooser,
    GraphUnsupported,
    InvalidInput,
    Offer,
    Platform,
    make_first,
)
from attnmux.transformers.load.checkpoint import LOADING, Checkpoint
from attnmux.transformers.load.context_limit import (
    check_context,
    longrope_switch,
    with_long_factors,
)
from attnmux.transformers.load.decision import decide, without
from attnmux.transformers.load.load_decoder import load_decoder, make_runner
from attnmux.transformers.load.model_request import folder_of, stored_scheme, with_kept_dtype
from attnmux.transformers.load.quantised import with_kv_scales
from attnmux.transformers.load.weights import load_model, warn_in_python
from attnmux.transformers.model.asked import request_of
from attnmux.transformers.model.eagle_head import EagleHead
from attnmux.transformers.model.encoder_decoder import record_decoder
from attnmux.transformers.model.encoder_decoder_attention import numbers_by_name
from attnmux.transformers.model.hidden_states import HiddenStates
from attnmux.transformers.model.layers import record_layers
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.run.runner import ModelRunner


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
    check_context(checkpoint.config, options.max_context_len)
    switch = longrope_switch(checkpoint.config)
    if switch is not None and options.max_context_len > switch:
        checkpoint = replace(checkpoint, config=with_long_factors(checkpoint.config))
        warn(
            f"every request rotates by the long factors of the model's longrope, for a context of "
            f"{options.max_context_len} tokens: with at most {switch}, by the short ones"
        )
    _check_images(checkpoint, options)
    if options.deterministic:
        # Absorbed products have a row a token, and a pool of windows cuts prompts by what is free
        options = replace(options, mla="expanded", window_step_tokens=None)
    _check_ranks(checkpoint, offers, options)
    options = replace(options, launches=options.ranks.building.launches(options.launches))
    with LOADING:
        load = _load_encoder_decoder if checkpoint.config.is_encoder_decoder else load_decoder
        runner = load(checkpoint, platform, offers, options, progress, warn)
        hint = Chooser.dtype_hint(runner.decision, offers, options.policy)
        if hint and options.dtype is None:
            warn(hint)
        if options.compile:
            _compile(runner, warn)
        if options.graph is not False:
            _capture_graphs(runner, options, warn)
            _capture_pieces(runner, options, warn)
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
        states = HiddenStates.find(head, options)
        layers = record_layers(head, max_context_len=options.max_context_len)
        layers = with_kept_dtype(layers, head.dtype, options)
        request = request_of(layers, head.dtype)
        return make_first(
            lambda failed: decide(request, platform, offers, without(failed, options)),
            lambda decision: make_runner(
                head, layers, decision, options, [states] if states else []
            ),
            lambda failure, decision: warn(f"{failure}; instead {decision.summary()}"),
        )


def _check_images(checkpoint: Checkpoint, options: RunnerOptions) -> None:
    """Refuse images together with options that run only text."""
    if not options.images:
        return
    hindrances = {
        f"{checkpoint.source}, which reads only text": not checkpoint.reads_images,
        "ranks that split more than weights": not options.ranks.building.run_images,
        "drafts": options.draft_tokens is not None,
    }
    hinderers = [name for name, hinders in hindrances.items() if hinders]
    if hinderers:
        expected = "a model with a vision tower, without drafts, on one rank or with --tp alone"
        raise InvalidInput("images", got=hinderers[0], expected=expected)


def _check_ranks(checkpoint: Checkpoint, offers: Sequence[Offer], options: RunnerOptions) -> None:
    """Refuse options that several ranks cannot run, and ranks with other plugins or libraries."""
    if options.ranks.size == 1:
        return
    options.ranks.building.check_libraries(offers)
    if options.hidden_states:
        got = f"{options.ranks.size}, with hidden states"
        raise InvalidInput("ranks", got=got, expected="1 rank: an EAGLE head runs on only one")
    got = "compile" if options.compile else "an encoder-decoder model"
    if options.compile or checkpoint.config.is_encoder_decoder:
        expected = "1 rank: layers that are compiled, and encoders, run on only one"
        raise InvalidInput("ranks", got=f"{options.ranks.size}, with {got}", expected=expected)


def _load_encoder_decoder(
    checkpoint: Checkpoint,
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
    progress: bool,
    warn: Callable[[str], None],
) -> ModelRunner:
    _check_lens(checkpoint, options)
    for name, is_set in (
        ("drafts", options.draft_tokens is not None),
        ("hidden_states", options.hidden_states),
    ):
        if is_set:
            got = f"{name} for an encoder-decoder model"
            raise InvalidInput(name, got=got, expected="a decoder-only model")
    dtype = checkpoint.dtype(options.dtype)
    device = options.device_on(platform)
    model = load_model(checkpoint, dtype=dtype, device=device, progress=progress, warn=warn)
    decoder = PackedDecoder(model)
    layers = record_decoder(decoder, max_context_len=options.max_context_len)
    scheme = stored_scheme(checkpoint)
    layers = with_kept_dtype(layers, dtype, options, scheme)
    if (folder := folder_of(checkpoint)) is not None:
        layers = with_kv_scales(layers, folder, warn, numbers_by_name(model))
    request = request_of(layers, dtype)
    request = request.replace(origin="model", kv_dtype=scheme, lse=decoder.joins_attention)
    longest = options.max_encoder_len or checkpoint.max_encoder_len or options.max_context_len
    options = replace(options, max_encoder_len=longest)
    return make_first(
        lambda failed: decide(request, platform, offers, without(failed, options)),
        lambda decision: make_runner(decoder, layers, decision, options),
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
        warn(f"the model runs uncompiled: {AttnmuxError.in_brief(error)}")


def _capture_graphs(
    runner: ModelRunner, options: RunnerOptions, warn: Callable[[str], None]
) -> None:
    """Capture decode steps, and those that verify drafts. Without graphs they run eagerly, unless
    graphs are required."""
    try:
        runner.capture_graphs(
            batch_sizes=options.graph_sizes,
            draft_tokens=options.draft_tokens,
            draft_topk=options.draft_topk,
            pads=options.graph_padding,
        )
    except GraphUnsupported as error:
        if options.graph is True:
            raise
        if runner.context.device.type != "cpu" and not runner.context.debug:
            what = "decode runs" if runner.graphs is None else "steps that verify drafts run"
            warn(f"{what} without graphs: {error}")


def _capture_pieces(
    runner: ModelRunner, options: RunnerOptions, warn: Callable[[str], None]
) -> None:
    """Capture steps over prompts in pieces. Without them they run eagerly, unless their sizes are
    given."""
    if options.piece_sizes == ():
        return
    try:
        runner.capture_pieces(sizes=options.piece_sizes)
    except GraphUnsupported as error:
        if options.piece_sizes is not None:
            raise
        if runner.context.device.type != "cpu" and not runner.context.debug:
            warn(f"prompts run without graphs: {error}")
