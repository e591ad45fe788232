"""The decision for a model: its request with the user's options, solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attnmux.core import (
    BackendFailed,
    Chooser,
    Decision,
    InvalidInput,
    NoBackend,
    Offer,
    Platform,
    Request,
)
from attnmux.parts import expanded_request
from attnmux.transformers.load.model_request import without_indexer
from attnmux.transformers.options import RunnerOptions

SPARSE_PAGE_SIZE = 16
"""Tokens that share their bounds: those of Quest's paper."""


def decide_first(
    requests: Sequence[Request],
    platform: Platform,
    offers: Sequence[Offer],
    options: RunnerOptions,
) -> Decision:
    """The decision for the first of the requests that is served by more than a last resort, else
    for the first that is served.

    Raises what `decide` raises for the first of them if none is.
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
    """Solve a request with the options' constraints and this machine's measurements."""
    wanted = {
        "page_size": options.page_size,
        "kv_dtype": options.kv_dtype,
        "graph": options.graph or None,
        "deterministic": options.deterministic or None,
    }
    for name, value in wanted.items():
        if value is not None:
            request = request.replace(origin="user", **{name: value})
    if options.sparse is not None or options.sparse_budget is not None:
        if request.page_size is None:
            request = request.replace(origin="default", page_size=SPARSE_PAGE_SIZE)
        chosen = {"sparse": options.sparse, "sparse_budget": options.sparse_budget}
        request = request.replace(origin="user", **chosen)
    # Text alone runs here, whatever else the model can read, unless images are asked for.
    phases = ("extend", "decode", *(("encoder",) if options.images else ()))
    request = request.replace(origin="model", multimodal=options.images, phases=phases)
    if request.kind == "mla":
        request = request.replace(origin="model", chunked_prefix=True)
    request = _with_drafts(request, options)
    if options.graph is None:
        request = Chooser.with_graphs(request, platform)
    decision = options.ranks.building.solve(
        request, platform, offers, options.policy, options.measurements
    )
    if decision.unserved_layers:
        kinds = ", ".join(f"{count} {kind}" for kind, count in decision.unserved_layers)
        kinds += decision.unserved_hint
        raise NoBackend(f"no backend serves these layers of the model: {kinds}")
    return decision


def _with_drafts(request: Request, options: RunnerOptions) -> Request:
    """The request, with the needs of drafts. Raises InvalidInput for who verifies without any."""
    if options.draft_tokens is not None:
        request = request.replace(
            origin="user",
            phases=("extend", "decode", "verify"),
            spec_topk=options.draft_topk,
            spec_draft_tokens=options.draft_tokens,
        )
    if options.speculative_attention_mode is not None:
        mode = options.speculative_attention_mode
        if options.draft_tokens is None:
            expected = "draft_tokens with it: there is nothing to verify"
            raise InvalidInput("speculative_attention_mode", got=mode, expected=expected)
        request = request.replace(origin="user", speculative_attention_mode=mode)
    return request


def stated_ways(stated: Request, options: RunnerOptions) -> list[Request]:
    """How the model may run by its config.json, the way that is preferred first."""
    if stated.index_reach is not None:
        if stated.index_reach < options.max_context_len:
            return [stated]
        stated = without_indexer(stated)
    if stated.kind != "mla" or options.mla == "expanded":
        return [expanded_request(stated) if stated.latent else stated]
    return [stated] if options.mla == "absorbed" else [stated, expanded_request(stated)]


def without(failed: Mapping[str, BackendFailed], options: RunnerOptions) -> RunnerOptions:
    """The options, without the backends that failed to be made."""
    return replace(options, policy=replace(options.policy, failed=failed))
