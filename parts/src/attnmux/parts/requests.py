"""Requests that parts make in addition to the one that they leave."""

from __future__ import annotations

from attnmux.core import InvalidInput, Request


def expanded_request(request: Request) -> Request:
    """The same model's prefill with K and V expanded from the latent: kind "mha"."""
    return request.replace(
        origin="model",
        kind="mha",
        num_kv_heads=request.num_q_heads,
        kv_lora_rank=None,
        qk_rope_head_dim=None,
        index_topk=None,
        index_block_size=None,
        chunked_prefix=False,
    )


def parts_request(request: Request) -> Request:
    """The attention of a model's prompts in parts, over K and V of the call.

    Over a chunk of a cached prefix it is not causal and returns LSE, as cross attention does.
    MLA runs with expanded heads. Sinks are added when parts are merged; layers with windows,
    attention chunks and biases by distance have no parts.
    """
    limits = (
        *("sliding_window", "attention_chunk", "spec_topk", "spec_draft_tokens"),
        *("index_topk", "index_block_size"),
    )
    flags = ("sinks", "alibi", "relative_bias", "custom_mask", "multi_item", "multimodal")
    return (expanded_request(request) if request.latent else request).replace(
        origin="model",
        kv_dtype=request.dtype,
        phases=("extend",),
        cross_attention=True,
        lse=True,
        graph=False,
        strided_kv=False,
        two_batches=False,
        linear_layers=(),
        sparse=None,
        sparse_budget=None,
        **dict.fromkeys(limits),
        **dict.fromkeys(flags, False),
    )


def has_separable_trees(request: Request) -> bool:
    """Whether attention to the prefix and among the drafts can be merged by LSE.

    Windows, chunks and biases by distance count places in the row, where the nodes of a tree lie
    one after another. A mask of the user may hide the prefix. Products among drafts depend on the
    step's size, so no request is deterministic.
    """
    hindered = (
        *(request.sliding_window, request.attention_chunk, request.custom_mask),
        *(request.cross_attention, request.multi_item, request.deterministic),
        *(request.alibi, request.relative_bias),
    )
    known = request.spec_draft_tokens is not None and request.num_q_heads is not None
    return request.has_trees and known and request.kind in ("mha", "mla") and not any(hindered)


def undrafted_request(request: Request) -> Request:
    """The same for extend and decode alone."""
    left = {*request.phases, "extend", "decode"}.difference(("verify", "draft"))
    return request.replace(
        origin="default",
        spec_topk=None,
        spec_draft_tokens=None,
        phases=tuple(phase for phase in Request.PHASES if phase in left),
    )


def prefixes_request(request: Request) -> Request:
    """The attention of all drafts of a request to its prefix, as one decode step.

    The drafts are further query heads of one token, so that the prefix is read once. See
    `Decision.trees`. Raises InvalidInput without `spec_draft_tokens` or `num_q_heads`.
    """
    if request.spec_draft_tokens is None or request.num_q_heads is None:
        missing = "num_q_heads" if request.num_q_heads is None else "spec_draft_tokens"
        raise InvalidInput(missing, got=None, expected="a number, to verify draft trees")
    return undrafted_request(request).replace(
        origin="model",
        num_q_heads=request.num_q_heads * request.spec_draft_tokens,
        phases=("decode",),
        lse=True,
        chunked_prefix=False,
        two_batches=False,
        linear_layers=(),
    )


def linear_request(request: Request, kind: str) -> Request:
    """The request of the model's linear layers of one kind."""
    is_recurrent = kind != "conv"
    return Request().replace(
        origin="model",
        kind=kind,
        head_dim=request.linear_head_dim if is_recurrent else None,
        v_head_dim=request.linear_v_head_dim if is_recurrent else None,
        dtype=request.dtype,
        kv_dtype=request.dtype,
        page_size=1,
        # No draft model has such layers: what it ran would have to be taken back
        phases=tuple(phase for phase in request.phases if phase not in ("draft", "encoder")),
        spec_topk=request.spec_topk,
        spec_draft_tokens=request.spec_draft_tokens,
        speculative_attention_mode=request.speculative_attention_mode,
        deterministic=request.deterministic,
        graph=request.graph,
    )
