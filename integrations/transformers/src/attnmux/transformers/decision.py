"""The backend for a model: what its user and its layers ask for, and the decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils.hub import cached_file

from attnmux.core import (
    AttentionBackend,
    BackendFailed,
    Decision,
    InvalidInput,
    LayerGroup,
    LayerSpec,
    LinearLayerSpec,
    Measurement,
    NoBackend,
    Offer,
    Platform,
    Policy,
    Request,
    TunedLaunch,
    dtype_name,
)
from attnmux.transformers.checkpoint import Checkpoint
from attnmux.transformers.pools import WINDOW_STEP_TOKENS, MemoryBudget
from attnmux.transformers.ranks import ONE_RANK, Ranks
from attnmux.transformers.shapes import SHAPE, STORED, by_shape

SPARSE_PAGE_SIZE = 16
"""Tokens that share their bounds: those of Quest's paper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """How to run a checkpoint. What is None is left to the checkpoint or to the solver."""

    max_batch_size: int
    """Requests at a time."""
    max_context_len: int
    """Tokens of one request, prompt and answer."""
    max_encoder_len: int | None = None
    """Encoder tokens of one request in an encoder-decoder model, beside its `max_context_len`; None
    takes the model's limit, or `max_context_len` where it has none."""
    max_total_tokens: int | None = None
    """Tokens of all requests together, their encoders' included, for which the KV pool has room."""
    spare_pages: int = 0
    """Pages of the KV pool beside those of `max_total_tokens`. The branches of a draft model take
    topk * (steps - 1) for each request, see `ModelProposer`."""
    kept_states: int | None = None
    """Prefixes whose linear layers' states are kept, so that later prompts can begin with them;
    None: as many as `max_batch_size`. Each takes the memory of a request's states."""
    memory: MemoryBudget | None = None
    """What the KV pool may take, with the bounds and copies of chosen pages. Of this and
    `max_total_tokens` one is needed; of both the smaller counts."""
    window_step_tokens: int | None = WINDOW_STEP_TOKENS
    """Layers with windows or chunks get a KV pool of their own where that saves memory, with room
    for a prompt's step of at least so many tokens. None for callers that do not use the engine,
    which frees the tokens that fell out of the windows."""
    images: bool = False
    """Whether prompts may hold images. The vision tower then runs on the backend of the phase
    "encoder"; without them a model that reads images runs text alone, and needs none."""
    draft_tokens: int | None = None
    """Nodes of a request's draft tree, the root included; None without speculative decoding."""
    draft_topk: int = 1
    """Branches of a draft tree; 1 for chains."""
    speculative_attention_mode: Literal["prefill", "decode"] | None = None
    """Whether the backend for prefill or that for decode verifies drafts and, in a draft model,
    reads what was accepted; None: that for prefill. Needs `draft_tokens`."""
    hidden_states: bool = False
    """Whether to keep the last hidden state of every cached token, which an EAGLE head reads."""
    hidden_layers: tuple[int, ...] = ()
    """Numbers of the layers whose outputs `hidden_states` keeps instead, one after another: those
    that `hidden_layers` finds for an EAGLE 3 head."""
    sparse: str | None = None
    """"quest": decode steps read the pages of each request whose keys may score highest; see
    `Request.sparse`. Pages have `SPARSE_PAGE_SIZE` tokens where `page_size` says nothing else."""
    sparse_budget: int | None = None
    """Tokens of each request that such a step reads, in whole pages."""
    graph: bool | None = None
    """Whether decode steps are replayed from device graphs; None: where device, backend and model
    can."""
    compile: bool = False
    """Whether the model's layers are compiled with torch.compile, which takes up to a minute at the
    first start. Where they cannot be, they run as they are, with a warning."""
    dtype: str | None = None
    kv_dtype: str | None = None
    mla: Literal["absorbed", "expanded"] | None = None
    """How latent attention runs. Absorbed, the KV cache holds the latent; expanded, every head's
    K and V. None: absorbed where a backend serves it, unless only as a last resort (see
    `LAST_RESORT`) while expanded has a better one."""
    page_size: int | None = None
    device: str | None = None
    """torch's name, such as "cuda:1"; None takes the platform's current device."""
    policy: Policy = field(default_factory=Policy)
    measurements: tuple[Measurement, ...] = ()
    """Of this machine; those that hold for the model move the ranks that backends are chosen by."""
    launches: tuple[TunedLaunch, ...] = ()
    """As `BackendContext.launches`: everything that was tuned on this machine."""
    ranks: Ranks = ONE_RANK
    """The ranks that run the model together."""
    debug: bool = False
    """Check every batch's values, at the cost of synchronising."""
    check: Callable[[Decision], None] | None = None
    """Called with each decision before its backend is made, such as `attnmux.testing.FirstUse`;
    BackendFailed takes the next candidate."""
    wrap: Callable[[AttentionBackend, Decision], AttentionBackend] | None = None
    """Called with the backend that was made; the runner uses what it returns, such as a canary."""


def request_of(
    layers: Sequence[LayerSpec], dtype: torch.dtype, linear: Sequence[LinearLayerSpec] = ()
) -> Request:
    """What the layers need, every value with the origin "model".

    Where windows or chunks differ between layers of the same heads and dims, the largest is asked
    for. Layers of other heads or dims than the first are the request's `other_layers`.
    Raises InvalidInput where latent layers or linear layers of a kind differ.
    """
    first, *others = by_shape(layers, *SHAPE)
    given: dict[str, object] = {
        "kind": first[0].kind,
        **_needs(first),
        "other_layers": [LayerGroup(layers=len(each), **_needs(each)) for each in others],
        "dtype": dtype_name(dtype),
        "cross_attention": any(layer.is_cross_attention for layer in layers),
        "alibi": any(layer.alibi_slopes is not None for layer in layers),
        "relative_bias": any(layer.relative_bias is not None for layer in layers),
        **_linear_needs(linear),
    }
    return Request().replace(origin="model", **given)


def _needs(layers: Sequence[LayerSpec]) -> dict[str, Any]:
    """What layers of one shape ask for."""
    first = layers[0]
    windows = [layer.sliding_window_size for layer in layers if layer.sliding_window_size >= 0]
    return {
        "num_q_heads": first.tp_q_head_num,
        "num_kv_heads": first.tp_k_head_num,
        "head_dim": first.qk_head_dim,
        "v_head_dim": None if first.v_head_dim == first.qk_head_dim else first.v_head_dim,
        "sliding_window": max(windows, default=None),
        "attention_chunk": max(layer.attention_chunk_size for layer in layers) or None,
        "logit_cap": max(layer.logit_cap for layer in layers) or None,
        "sinks": any(layer.sinks is not None for layer in layers),
    }


def _linear_needs(linear: Sequence[LinearLayerSpec]) -> dict[str, object]:
    dims = {(layer.head_k_dim, layer.head_v_dim) for layer in linear if layer.has_state}
    if len(dims) > 1:
        got = f"dims {sorted(dims)} of K and V"
        raise InvalidInput("linear layers", got=got, expected="the same in all of them")
    k_dim, v_dim = next(iter(dims), (None, None))
    return {
        "linear_layers": Counter(layer.kind for layer in linear),
        "linear_head_dim": k_dim,
        "linear_v_head_dim": None if v_dim == k_dim else v_dim,
    }


def latent_request(
    expanded: Request, layers: Sequence[LayerSpec], *, index_topk: int | None = None
) -> Request:
    """What `absorbed_layers` need, with the expanded heads of `request_of` as MLA states them.

    index_topk: keys that the model's indexers pick for each token; None where all are seen.
    """
    first = by_shape(layers, *STORED)[0][0]
    return expanded.replace(
        origin="model",
        kind="mla" if index_topk is None else "nsa",
        index_topk=index_topk,
        num_kv_heads=1,
        v_head_dim=expanded.v_head_dim or expanded.head_dim,
        kv_lora_rank=first.v_head_dim,
        qk_rope_head_dim=first.qk_rope_head_dim,
    )


def without_indexer(stated: Request) -> Request:
    """The same for contexts of which the indexer picks every key: plain MLA."""
    return stated.replace(origin="model", kind="mla", index_topk=None)


def check_against_config(recorded: Request, config: Request, *, max_context_len: int) -> None:
    """Refuse a model that does not do what its config.json says.

    recorded: from `request_of`. config: from `Request.from_model`; a latent model is recorded
    expanded and compared as such. A feature that config.json does not mention is no contradiction
    (what runs is what was recorded), nor is a window or chunk that the context never fills.
    Raises InvalidInput naming the field.
    """
    stated = config.expanded() if config.latent else config
    groups, said = recorded.of_groups(), stated.of_groups()
    if len(groups) != len(said):
        got = f"{len(groups)} shapes of layers when the model runs"
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
    decision = options.ranks.solve(request, platform, offers, options.policy, options.measurements)
    if decision.unserved_layers:
        kinds = ", ".join(f"{count} {kind}" for kind, count in decision.unserved_layers)
        raise NoBackend(f"no backend serves these layers of the model: {kinds}")
    return decision


def stated_request(checkpoint: Checkpoint, *, head_ranks: int = 1) -> Request | None:
    """What config.json says of the model's attention; None where it says it in words of its own.

    Such models (GPT-2's `n_head`) are known only once they run. head_ranks: ranks that the heads
    are split over. Raises InvalidInput for heads that these do not divide.
    """
    file = cached_file(checkpoint.source, "config.json", revision=checkpoint.revision)
    if file is None:
        return None
    try:
        return Request.from_model(Path(file), tp=head_ranks)
    except InvalidInput as error:
        if error.argument == "tp":
            raise
        return None


def stated_ways(stated: Request, options: RunnerOptions) -> list[Request]:
    """How the model may run by its config.json, the way that is preferred first."""
    if stated.kind == "dual_chunk":
        # transformers runs Qwen2.5-1M as a Qwen2, without its chunks.
        return [stated.replace(origin="model", kind="mha")]
    if stated.index_topk is not None:
        if stated.index_topk < options.max_context_len:
            return [stated]
        stated = without_indexer(stated)
    if stated.kind != "mla" or options.mla == "expanded":
        return [stated.expanded() if stated.latent else stated]
    return [stated] if options.mla == "absorbed" else [stated, stated.expanded()]


def without(failed: Mapping[str, BackendFailed], options: RunnerOptions) -> RunnerOptions:
    """The options, without the backends that failed to be made."""
    return replace(options, policy=replace(options.policy, failed=failed))
