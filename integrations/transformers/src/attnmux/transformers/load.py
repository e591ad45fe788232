"""From a checkpoint to a runner: decide, load, record, decide on what was recorded, build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from attnmux.core.choosing.card import Offer
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.policy import Policy
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.solver import solve
from attnmux.core.compose.fallback import make_first
from attnmux.core.dtypes import dtype_name
from attnmux.core.errors import BackendFailed, GraphUnsupported, InvalidInput, NoBackend
from attnmux.core.layer import LayerSpec
from attnmux.transformers.absorbed import absorb, absorbed_layers, expand
from attnmux.transformers.attention import SERVED
from attnmux.transformers.checkpoint import Checkpoint, load_model, warn_in_python
from attnmux.transformers.encoder_decoder import PackedDecoder
from attnmux.transformers.encoder_decoder_layers import record_decoder
from attnmux.transformers.layers import record_layers
from attnmux.transformers.memory import MemoryBudget
from attnmux.transformers.pools import bytes_per_token
from attnmux.transformers.request import check_against_config, latent_request, request_of
from attnmux.transformers.rotary import check_rotary
from attnmux.transformers.runner import ModelRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """How to run a checkpoint. What is None is left to the checkpoint or to the solver."""

    max_batch_size: int
    """Requests at a time."""
    max_context_len: int
    """Tokens of one request, prompt and answer."""
    max_encoder_len: int | None = None
    """Encoder tokens of one request in an encoder-decoder model, beside its `max_context_len`; None
    takes the model's limit."""
    max_total_tokens: int | None = None
    """Tokens of all requests together, their encoders' included, for which the KV pool has room."""
    memory: MemoryBudget | None = None
    """What the KV pool may take. Of this and `max_total_tokens` one is needed; of both the smaller
    counts."""
    graph: bool | None = None
    """Whether decode steps are replayed from device graphs; None: where device, backend and model
    can."""
    dtype: str | None = None
    kv_dtype: str | None = None
    mla: Literal["absorbed", "expanded"] | None = None
    """How latent attention runs. Absorbed, the KV cache holds the latent; expanded, every head's
    K and V. None: absorbed where a backend serves it."""
    page_size: int | None = None
    device: str | None = None
    """torch's name, such as "cuda:1"; None takes the platform's current device."""
    policy: Policy = field(default_factory=Policy)
    debug: bool = False
    """Check every batch's values, at the cost of synchronising."""


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

    The backend is chosen for the layers that the model shows when it runs; config.json is asked
    first, so that what cannot work is refused before any weight is read.
    warn: told, in a sentence, of what the model runs without: tensors of the checkpoint that it
    has no place for, latent attention where it runs expanded, a backend that could not be made.
    Raises NoBackend, UnknownBackend or InvalidInput for a choice that cannot be made,
    InvalidInput for a checkpoint that cannot be used, PoolExhausted for too little memory,
    GraphUnsupported where graphs were asked for and cannot be had.
    """
    check_rotary(checkpoint.config, options.max_context_len)
    load = _load_encoder_decoder if checkpoint.config.is_encoder_decoder else _load_decoder
    runner = load(checkpoint, platform, offers, options, progress, warn)
    if options.graph is not False:
        _capture_graphs(runner, warn, required=options.graph is True)
    return runner


def _load_decoder(
    checkpoint: Checkpoint,
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
    progress: bool,
    warn: Callable[[str], None],
) -> ModelRunner:
    dtype = checkpoint.dtype(options.dtype)
    stated = stated_request(checkpoint)
    if stated is not None:
        known = stated.replace(origin="model", dtype=dtype_name(dtype))
        decide_first(_stated_ways(known, options), platform, offers, options)
    device = torch.device(options.device or platform.device_type)
    model = load_model(checkpoint, dtype=dtype, device=device, progress=progress, warn=warn)
    layers = record_layers(model, max_context_len=options.max_context_len)
    request = request_of(layers, dtype)
    if stated is not None:
        check_against_config(request, stated, max_context_len=options.max_context_len)
    latent = None if options.mla == "expanded" else absorbed_layers(model, layers)
    ways = [] if latent is None else [latent_request(request, latent)]
    if options.mla == "absorbed" and latent is None:
        raise InvalidInput(
            "mla",
            came=f"absorbed, for {type(model).__name__}",
            expected="expanded: its K and V are not made by a plain linear kv_b_proj",
        )
    if options.mla != "absorbed":
        ways.append(request)

    def make(decision: Decision) -> ModelRunner:
        if latent is None or not decision.request.latent:
            model.set_attn_implementation(SERVED)
            return _make(model, layers, decision, options)
        absorb(model, layers)
        try:
            return _make(model, latent, decision, options)
        except BaseException:
            expand(model, layers)
            raise

    runner = make_first(
        lambda failed: decide_first(ways, platform, offers, _without(failed, options)),
        make,
        lambda failure, decision: warn(f"{failure}; instead {decision.summary()}"),
    )
    if stated is not None and stated.latent and options.mla is None:
        _warn_if_expanded(runner, latent, warn)
    return runner


def _load_encoder_decoder(
    checkpoint: Checkpoint,
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
    progress: bool,
    warn: Callable[[str], None],
) -> ModelRunner:
    dtype = checkpoint.dtype(options.dtype)
    device = torch.device(options.device or platform.device_type)
    model = load_model(checkpoint, dtype=dtype, device=device, progress=progress, warn=warn)
    decoder = PackedDecoder(model)
    layers = record_decoder(decoder, max_context_len=options.max_context_len)
    request = request_of(layers, dtype)
    max_encoder_len = options.max_encoder_len or checkpoint.max_encoder_len
    if max_encoder_len is None:
        raise InvalidInput("max_encoder_len", came=None, expected="a number: the model states none")
    return make_first(
        lambda failed: decide(request, platform, offers, _without(failed, options)),
        lambda decision: _make(decoder, layers, decision, options, max_encoder_len),
        lambda failure, decision: warn(f"{failure}; instead {decision.summary()}"),
    )


def _capture_graphs(runner: ModelRunner, warn: Callable[[str], None], *, required: bool) -> None:
    """Have decode steps replayed. Where none was asked for, what has no graphs runs eagerly."""
    try:
        runner.capture_graphs()
    except GraphUnsupported as error:
        if required:
            raise
        if runner.context.device.type != "cpu" and not runner.context.debug:
            warn(f"decode runs without graphs: {error}")


def _stated_ways(stated: Request, options: RunnerOptions) -> list[Request]:
    """How the model may run by its config.json, the way that is preferred first."""
    if stated.kind != "mla" or options.mla == "expanded":
        return [stated.expanded() if stated.latent else stated]
    return [stated] if options.mla == "absorbed" else [stated, stated.expanded()]


def _without(failed: Mapping[str, BackendFailed], options: RunnerOptions) -> RunnerOptions:
    return replace(options, policy=replace(options.policy, failed=failed))


def _make(
    model: PreTrainedModel | PackedDecoder,
    layers: Sequence[LayerSpec],
    decision: Decision,
    options: RunnerOptions,
    max_encoder_len: int = 0,
) -> ModelRunner:
    return ModelRunner(
        model,
        layers,
        decision,
        max_batch_size=options.max_batch_size,
        max_context_len=options.max_context_len,
        max_total_tokens=options.max_total_tokens,
        memory=options.memory,
        max_encoder_len=max_encoder_len,
        debug=options.debug,
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
        reason = f"no backend that may be chosen serves its latent attention, with {absorbed:,}"
    warn(f"the model runs expanded, with {takes} a token: {reason}")


def decide_first(
    requests: Sequence[Request],
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
) -> Decision:
    """The decision for the first of the requests that is served.

    Raises what `decide` raises for the first of them where none is.
    """
    refusals = []
    for request in requests:
        try:
            return decide(request, platform, offers, options)
        except NoBackend as refusal:
            refusals.append(refusal)
    raise refusals[0]


def decide(
    request: Request, platform: Platform, offers: Sequence[Offer], options: RunnerOptions
) -> Decision:
    """Solve for a request with what the options insist on."""
    asked = {
        "page_size": options.page_size,
        "kv_dtype": options.kv_dtype,
        "graph": options.graph or None,
    }
    for name, value in asked.items():
        if value is not None:
            request = request.replace(origin="user", **{name: value})
    # Text alone runs here, whatever else the model can read.
    request = request.replace(origin="model", multimodal=False, phases=("extend", "decode"))
    return solve(request, platform, offers, options.policy)


def stated_request(checkpoint: Checkpoint) -> Request | None:
    """What config.json says of the model's attention; None where it says it in words of its own.

    Such models (GPT-2's `n_head`) are known only once they run.
    """
    file = cached_file(checkpoint.source, "config.json")
    if file is None:
        return None
    try:
        return Request.from_model(Path(file))
    except InvalidInput:
        return None
