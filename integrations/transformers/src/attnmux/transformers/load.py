"""From a checkpoint to a runner: decide, load, record, decide on what was recorded, build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from attnmux.core.choosing.card import Offer
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.policy import Policy
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.solver import solve
from attnmux.core.dtypes import dtype_name
from attnmux.core.errors import InvalidInput
from attnmux.transformers.checkpoint import Checkpoint, load_model
from attnmux.transformers.layers import record_layers
from attnmux.transformers.request import check_against_config, request_of
from attnmux.transformers.rotary import check_rotary
from attnmux.transformers.runner import ModelRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """How to run a checkpoint. What is None is left to the checkpoint or to the solver."""

    max_batch_size: int
    """Requests at a time."""
    max_context_len: int
    """Tokens of one request, prompt and answer."""
    max_total_tokens: int
    """Tokens of all requests together, for which the KV pool has room."""
    dtype: str | None = None
    kv_dtype: str | None = None
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
) -> ModelRunner:
    """Load a checkpoint's weights and build its runner on the backend that fits.

    The backend is chosen for the layers that the model shows when it runs; config.json is asked
    first, so that what cannot work is refused before any weight is read.
    Raises NoBackend, UnknownBackend or InvalidInput for a choice that cannot be made,
    InvalidInput for a checkpoint that cannot be used, PoolExhausted for too little memory.
    """
    check_rotary(checkpoint.config, options.max_context_len)
    dtype = checkpoint.dtype(options.dtype)
    stated = stated_request(checkpoint)
    if stated is not None:
        expanded = stated.expanded() if stated.latent else stated
        decide(expanded.replace(origin="model", dtype=dtype_name(dtype)), platform, offers, options)
    device = torch.device(options.device or platform.device_type)
    model = load_model(checkpoint, dtype=dtype, device=device, progress=progress)
    layers = record_layers(model, max_context_len=options.max_context_len)
    request = request_of(layers, dtype)
    if stated is not None:
        check_against_config(request, stated, max_context_len=options.max_context_len)
    return ModelRunner(
        model,
        layers,
        decide(request, platform, offers, options),
        max_batch_size=options.max_batch_size,
        max_context_len=options.max_context_len,
        max_total_tokens=options.max_total_tokens,
        debug=options.debug,
    )


def decide(
    request: Request, platform: Platform, offers: Sequence[Offer], options: RunnerOptions
) -> Decision:
    """Solve for a request with what the options insist on."""
    for name, value in (("page_size", options.page_size), ("kv_dtype", options.kv_dtype)):
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
