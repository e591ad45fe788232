"""Choosing and making the backends of a KV cache that is interleaved over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from attnmux.core import (
    BackendContext,
    Decision,
    FrozenMapping,
    InvalidInput,
    Measurement,
    Offer,
    Platform,
    Policy,
    Request,
    build,
    make_backend,
    solve_measured,
)
from attnmux.distributed.heads import HeadSplit
from attnmux.distributed.interleaved_backend import InterleavedAttnBackend, unscaled
from attnmux.distributed.interleaved_kv import InterleavedKVPool, InterleavedTable
from attnmux.parts import (
    PartAttention,
    parts_request,
    prefix_context,
    prefixes_request,
    undrafted_request,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class InterleavedDecision:
    """The decisions for both phases."""

    decode: Decision
    """For the heads of all ranks. Its page size is that of each rank's pool. With drafts, its
    `trees` attends to their prefixes."""
    prompts: Decision
    """For this rank's heads, with K and V in the call; in MLA with expanded heads."""

    @property
    def hash(self) -> str:
        return f"{self.decode.hash}-{self.prompts.hash}"

    def summary(self) -> str:
        """Both, in a line each."""
        return f"{self.decode.summary()}\n{self.prompts.summary()}"


def decide_interleaved(
    request: Request,
    platform: Platform,
    offers: Sequence[Offer],
    policy: Policy | None = None,
    *,
    size: int,
    kv_copies: int = 1,
    interleave: int = 1,
    measurements: Sequence[Measurement] = (),
) -> InterleavedDecision:
    """Choose the backends for a group of `size` ranks.

    request: of one rank. kv_copies: as in `HeadSplit`. interleave: as in `Interleaving`.
    Raises InvalidInput for a request whose keys cannot lie on several ranks, and NoBackend.
    """
    _check_request(request)
    policy = policy or Policy()
    solved = partial(solve_measured, platform=platform, offers=offers, measurements=measurements)
    heads = {"num_q_heads": request.num_q_heads, "num_kv_heads": request.num_kv_heads}
    if heads["num_q_heads"] is not None:
        heads["num_q_heads"] *= size
    if heads["num_kv_heads"] is not None and not request.latent:
        heads["num_kv_heads"] = heads["num_kv_heads"] * size // kv_copies
    whole = undrafted_request(request).replace(
        origin="model", **heads, phases=("decode",), lse=True, chunked_prefix=False
    )
    if whole.page_size is None and interleave > 1:
        whole = whole.replace(origin="default", page_size=interleave)
    decode = solved(whole, policy=policy)
    of_parts = parts_request(request).replace(origin="default", page_size=decode.page_size)
    prompts = solved(of_parts, policy=policy)
    if request.spec_topk is not None:
        fixed = replace(policy, allow_coercion=False)
        decode = _with_drafts(decode, request, partial(solved, policy=fixed))
    return InterleavedDecision(decode=decode, prompts=prompts)


def _with_drafts(
    decode: Decision, request: Request, solved: Callable[[Request], Decision]
) -> Decision:
    """The decision, with the backend that attends to the prefixes of drafts. Raises NoBackend."""
    asked = decode.request.replace(
        origin="model",
        phases=("decode", "verify"),
        spec_topk=request.spec_topk,
        spec_draft_tokens=request.spec_draft_tokens,
    )
    decided = {"page_size": decode.page_size, "kv_dtype": decode.kv_dtype}
    of_prefixes = prefixes_request(asked).replace(origin="user", **decided)
    trees = solved(of_prefixes).phases
    phases = FrozenMapping({**decode.phases, "verify": trees["decode"]})
    parts = FrozenMapping({"draft_trees": FrozenMapping({"prefixes": trees})})
    return replace(decode, request=asked, phases=phases, parts=parts)


def build_interleaved(
    decision: InterleavedDecision, context: BackendContext, heads: HeadSplit
) -> InterleavedAttnBackend:
    """The backend of a decision. Every rank of the group calls it.

    context: with this rank's heads, the engine's table, an `InterleavedKVPool` and a `Workspace`.
    Raises what `build` raises.
    """
    decode = decision.decode
    trees = decode.answer("draft_trees", "prefixes", "decode")
    if trees is not None:
        undrafted = undrafted_request(decode.request).replace(origin="model", phases=("decode",))
        served = FrozenMapping({"decode": decode.phases["decode"]})
        decode = replace(decode, request=undrafted, phases=served, parts=FrozenMapping())
    whole = decode_context(context, heads, decode.request)
    of_prompts = prompt_context(context, decision.prompts.request)
    choice = decision.prompts.phases["extend"]
    return InterleavedAttnBackend(
        context,
        heads=heads,
        decode=build(decode, whole),
        prompts=[make_backend(choice, of_prompts) for _ in range(PartAttention.MOST_LANES)],
        prefixes=None
        if trees is None
        else make_backend(trees, draft_context(whole, decision.decode.request)),
    )


def decode_context(context: BackendContext, heads: HeadSplit, request: Request) -> BackendContext:
    """The context of the backend that decodes over this rank's keys with the heads of all ranks.

    Raises InvalidInput for a pool that is not interleaved. Every rank calls it.
    """
    pool = _interleaved(context)
    table = InterleavedTable(context.req_to_token_pool, pool.interleaving)
    # The steps of one rank contradict the engine's table, and each step was checked as a whole
    return replace(
        context,
        request=request,
        layers=tuple(heads.whole(layer) for layer in context.layers),
        token_to_kv_pool=pool.own,
        kv_writer=None,  # one that was given writes to another pool
        req_to_token_pool=table,
        max_context_len=table.max_context_len,
        debug=False,
    )


def draft_context(whole: BackendContext, request: Request) -> BackendContext:
    """The context of the backend that attends to the prefixes of drafts over this rank's keys, with
    the heads of all ranks and drafts.

    whole: of `decode_context`. request: with `spec_draft_tokens`.
    """
    drafts = request.spec_draft_tokens
    drafted = whole.request.replace(origin="model", spec_topk=1, spec_draft_tokens=drafts)
    return prefix_context(replace(whole, request=drafted))


def prompt_context(context: BackendContext, request: Request) -> BackendContext:
    """The context of the backends of prompts.

    Raises InvalidInput for a pool that is not interleaved, and as `PartAttention.context_of` does.
    """
    pool = _interleaved(context).own
    own = replace(
        context, token_to_kv_pool=pool, kv_writer=None, layers=unscaled(context.layers, pool)
    )
    return PartAttention.context_of(own, request)


def _interleaved(context: BackendContext) -> InterleavedKVPool:
    pool = context.token_to_kv_pool
    if not isinstance(pool, InterleavedKVPool):
        raise InvalidInput("context", got=type(pool).__name__, expected="an InterleavedKVPool")
    return pool


def _check_request(request: Request) -> None:
    limits = ("sliding_window", "attention_chunk", "alibi", "relative_bias")
    for name in (*limits, "custom_mask", "multi_item"):
        value = getattr(request, name)
        if value:
            expected = "nothing: KV is interleaved over ranks"
            raise InvalidInput(name, got=value, expected=expected)
    if request.kv_dtype == "fp4_e2m1":
        expected = "8 bits or more: KV is interleaved over ranks"
        raise InvalidInput("kv_dtype", got=request.kv_dtype, expected=expected)
    if request.other_layers:
        got = f"{len(request.other_layers) + 1} groups of layers"
        raise InvalidInput("other_layers", got=got, expected="one: KV is interleaved over ranks")
    if request.spec_topk is not None:
        _check_drafts(request)
    if request.kind not in ("mha", "mla") or request.cross_attention or request.linear_layers:
        expected = "self attention of kind mha or mla in every layer: KV is interleaved over ranks"
        raise InvalidInput("request", got=request.kind, expected=expected)


def _check_drafts(request: Request) -> None:
    if request.has_trees:
        expected = "1, chains: the drafts of a tree would have to move to other ranks"
        raise InvalidInput("spec_topk", got=request.spec_topk, expected=expected)
    if request.spec_draft_tokens is None:
        raise InvalidInput("spec_draft_tokens", got=None, expected="a number, with spec_topk")
    if request.deterministic:
        expected = "False with drafts: what they add depends on the size of a step"
        raise InvalidInput("deterministic", got=True, expected=expected)
