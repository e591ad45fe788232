"""Choosing and making the backends of a KV cache that is interleaved over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnmux.core import (
    MOST_LANES,
    BackendContext,
    Decision,
    InvalidInput,
    Measurement,
    Offer,
    Platform,
    Policy,
    Request,
    build,
    make_backend,
    part_context,
    solve_measured,
)
from attnmux.distributed.heads import HeadSplit
from attnmux.distributed.interleaved_backend import InterleavedAttnBackend, unscaled
from attnmux.distributed.interleaved_kv import InterleavedKVPool, InterleavedTable


@dataclass(frozen=True, kw_only=True, slots=True)
class InterleavedDecision:
    """The decisions for both phases."""

    decode: Decision
    """For the heads of all ranks. Its page size is that of each rank's pool."""
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
    heads = {"num_q_heads": request.num_q_heads, "num_kv_heads": request.num_kv_heads}
    if heads["num_q_heads"] is not None:
        heads["num_q_heads"] *= size
    if heads["num_kv_heads"] is not None and not request.latent:
        heads["num_kv_heads"] = heads["num_kv_heads"] * size // kv_copies
    whole = request.without_drafts().replace(
        origin="model", **heads, phases=("decode",), lse=True, chunked_prefix=False
    )
    if whole.page_size is None and interleave > 1:
        whole = whole.replace(origin="default", page_size=interleave)
    decode = solve_measured(whole, platform, offers, policy, measurements=measurements)
    of_parts = request.of_parts().replace(origin="default", page_size=decode.page_size)
    prompts = solve_measured(of_parts, platform, offers, policy, measurements=measurements)
    return InterleavedDecision(decode=decode, prompts=prompts)


def build_interleaved(
    decision: InterleavedDecision, context: BackendContext, heads: HeadSplit
) -> InterleavedAttnBackend:
    """The backend of a decision. Every rank of the group calls it.

    context: with this rank's heads, the engine's table, an `InterleavedKVPool` and a `Workspace`.
    Raises what `build` raises.
    """
    whole = decode_context(context, heads, decision.decode.request)
    of_prompts = prompt_context(context, decision.prompts.request)
    choice = decision.prompts.phases["extend"]
    return InterleavedAttnBackend(
        context,
        heads=heads,
        decode=build(decision.decode, whole),
        prompts=[make_backend(choice, of_prompts) for _ in range(MOST_LANES)],
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


def prompt_context(context: BackendContext, request: Request) -> BackendContext:
    """The context of the backends of prompts.

    Raises InvalidInput for a pool that is not interleaved, and as `part_context` does.
    """
    pool = _interleaved(context).own
    own = replace(
        context, token_to_kv_pool=pool, kv_writer=None, layers=unscaled(context.layers, pool)
    )
    return part_context(own, request)


def _interleaved(context: BackendContext) -> InterleavedKVPool:
    pool = context.token_to_kv_pool
    if not isinstance(pool, InterleavedKVPool):
        raise InvalidInput("context", got=type(pool).__name__, expected="an InterleavedKVPool")
    return pool


def _check_request(request: Request) -> None:
    for name in ("sliding_window", "attention_chunk", "custom_mask", "multi_item", "spec_topk"):
        value = getattr(request, name)
        if value:
            expected = "nothing: KV is interleaved over ranks"
            raise InvalidInput(name, got=value, expected=expected)
    if request.kind not in ("mha", "mla") or request.cross_attention or request.linear_layers:
        expected = "self attention of kind mha or mla in every layer: KV is interleaved over ranks"
        raise InvalidInput("request", got=request.kind, expected=expected)
