"""From what a model needs, and what its user insists on, to a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transformers.utils.hub import cached_file

from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.batch_sizes import solve_measured
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.errors import BackendFailed, InvalidInput, NoBackend
from attnmux.transformers.checkpoint import Checkpoint
from attnmux.transformers.options import RunnerOptions


def decide_first(
    requests: Sequence[Request],
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
) -> Decision:
    """The decision for the first of the requests that is served by more than a last resort, else
    for the first that is served.

    Raises what `decide` raises for the first of them where none is.
    """
    last_resorts: list[Decision] = []
    refusals: list[NoBackend] = []
    for request in requests:
        try:
            decision = decide(request, platform, offers, options)
        except NoBackend as refusal:
            refusals.append(refusal)
            continue
        if not decision.is_last_resort:
            return decision
        last_resorts.append(decision)
    if last_resorts:
        return last_resorts[0]
    raise refusals[0]


def decide(
    request: Request, platform: Platform, offers: Sequence[Offer], options: RunnerOptions
) -> Decision:
    """Solve for a request with what the options insist on, and with what was measured."""
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
    return solve_measured(
        request, platform, offers, options.policy, measurements=options.measurements
    )


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


def stated_ways(stated: Request, options: RunnerOptions) -> list[Request]:
    """How the model may run by its config.json, the way that is preferred first."""
    if stated.kind == "dual_chunk":
        # transformers runs Qwen2.5-1M as a Qwen2, without its chunks.
        return [stated.replace(origin="model", kind="mha")]
    if stated.kind != "mla" or options.mla == "expanded":
        return [stated.expanded() if stated.latent else stated]
    return [stated] if options.mla == "absorbed" else [stated, stated.expanded()]


def without(failed: Mapping[str, BackendFailed], options: RunnerOptions) -> RunnerOptions:
    """The options, without the backends that failed to be made."""
    return replace(options, policy=replace(options.policy, failed=failed))
