"""Cases of the suite and their steps, as plain data. Importing this module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from attnmux.core import ForwardMode, Request
from attnmux.core.plugin import OptionValue

PHASES = {
    ForwardMode.EXTEND: "extend",
    ForwardMode.MIXED: "extend",
    ForwardMode.DECODE: "decode",
    ForwardMode.IDLE: "decode",
    ForwardMode.TARGET_VERIFY: "verify",
    ForwardMode.DRAFT_EXTEND: "draft",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The lengths of one step's requests."""

    mode: ForwardMode
    lens: tuple[int, ...]
    """Keys of each request, the new tokens included."""
    new: tuple[int, ...]
    """New tokens of each request."""
    encoder: tuple[int, ...] = ()
    """Encoder tokens of each request. They are new if no other tokens are cached."""
    items: tuple[tuple[int, ...], ...] = ()
    """Lengths of the items that end each request, delimiters included."""
    shared_prefix: int = 0
    """Leading tokens that requests share; whole pages of them have the same slots."""
    sharing: int | None = None
    """Only so many first requests share the prefix; None: all."""
    padding: int = 0
    """Padding requests after the real ones."""
    trailing: int = 0
    """Padding tokens after those of all requests."""

    @property
    def cached(self) -> tuple[int, ...]:
        """Tokens before the new ones; -1 for a decoding request of length 0."""
        return tuple(length - new for length, new in zip(self.lens, self.new, strict=True))

    @property
    def can_be_captured(self) -> bool:
        """Whether a device graph can serve it: the same number of tokens for each request."""
        return self.mode.is_decode() or self.mode.is_target_verify()

    @property
    def totals(self) -> tuple[int, ...]:
        """Tokens that each request has in the KV pool after the step."""
        encoder = self.encoder or (0,) * len(self.lens)
        return tuple(length + more for length, more in zip(self.lens, encoder, strict=True))

    def halved(self) -> Step:
        """A step of as many requests in reverse order, each with half of its cached tokens."""
        new = self.new[::-1]
        cached = [before // 2 for before in reversed(self.cached)]
        return replace(
            self,
            lens=tuple(before + more for before, more in zip(cached, new, strict=True)),
            new=new,
            encoder=tuple(length // 2 for length in reversed(self.encoder)),
            items=(),
            shared_prefix=0,
        )

    def varied(self, max_len: int) -> Step:
        """A step of as many requests in reverse order, each a token longer if that fits."""
        lens = [
            min(length + 1, max_len - total + length)
            for length, total in zip(self.lens, self.totals, strict=True)
        ]
        return replace(
            self,
            lens=tuple(reversed(lens)),
            new=self.new[::-1],
            encoder=self.encoder[::-1],
            items=self.items[::-1],
            shared_prefix=0 if self.sharing else self.shared_prefix,
        )


def decode(*lens: int, **settings: Any) -> Step:  # noqa: ANN401  # as they are
    """A decode step with one new token for each request, which `lens` counts.

    settings: further fields of `Step`.
    """
    return Step(mode=ForwardMode.DECODE, lens=lens, new=(1,) * len(lens), **settings)


def extend(
    *requests: tuple[int, int],
    mode: ForwardMode = ForwardMode.EXTEND,
    **settings: Any,  # noqa: ANN401  # as they are
) -> Step:
    """An extend step with (cached, new) tokens for each request.

    settings: further fields of `Step`.
    """
    return Step(
        mode=mode,
        lens=tuple(cached + new for cached, new in requests),
        new=tuple(new for _, new in requests),
        **settings,
    )


def verify(num_draft_tokens: int, *prefixes: int, **settings: Any) -> Step:  # noqa: ANN401  # as they are
    """A verify step with the same number of draft tokens after each prefix.

    settings: further fields of `Step`.
    """
    requests = ((prefix, num_draft_tokens) for prefix in prefixes)
    return extend(*requests, mode=ForwardMode.TARGET_VERIFY, **settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Successive steps of one model's attention on one backend instance."""

    name: str
    steps: tuple[Step, ...]
    kind: Literal["mha", "mla", "nsa", "dual_chunk"] = "mha"
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    """Dim of Q and K; in MLA, that of the expanded heads."""
    v_head_dim: int = 128
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    index_topk: int = 0
    """Keys that an indexer picks for each token and layer at most, in kind "nsa"."""
    dual_chunk_len: int = 0
    """Tokens of a chunk of every layer, in kind "dual_chunk"."""
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    """None: as `dtype`."""
    page_size: int = 1
    max_context_len: int = 128
    scaling: float | None = None
    """Scaling of the first layer; the next has twice that. None: head_dim ** -0.5 in all."""
    windows: tuple[int | None, ...] = (None, None)
    """The sliding window of each layer."""
    window_pool: bool = False
    """Layers with a window have a pool of their own, without tokens that fell out of the window."""
    attention_chunk: int | None = None
    """Attention chunk of every other layer."""
    logit_cap: float | None = None
    """Logit cap of the first layer; the next has twice that."""
    kv_scales: tuple[float, float] | None = None
    """k_scale and v_scale of the first layer; the next has twice those. Only a pool of 8-bit floats
    divides by them."""
    sinks: bool = False
    alibi: bool = False
    """Self attention has slopes of ALiBi."""
    relative_reach: int | None = None
    """R of the table of relative position biases that self attention has; None without one."""
    spec_topk: int | None = None
    """Above 1 the drafts are random trees with a mask."""
    tree_mask: str = "full"
    """The form of the mask. Other forms count windows and chunks by positions."""
    lse: bool = False
    strided_kv: bool = False
    """K and V of a slot lie side by side; in MLA, rows have a gap after them."""
    kv_in_pool: bool = False
    """K and V are written before the call, which has neither."""
    save_kv_cache: bool = True
    host_lens: bool = False
    """Batches have their host mirrors, as they always do for a backend that needs them."""
    deterministic: bool = False
    """A request's result must have the same bits whatever else is in the batch."""
    layer_ids: tuple[int, ...] = ()
    """The layers' ids; none: 1, 3, and so on."""
    first_row: int = 1
    """Requests have rows of the request table from here on."""
    spare_columns: int = 0
    """Columns of the request table besides those of the longest context."""
    first_page: int = 1
    """Requests have pages of the pool from here on. Those before it are zero."""
    options: tuple[tuple[str, OptionValue], ...] = ()
    """Options of the backend, besides the candidate's."""
    nan_request: int | None = None
    """The request of the first step whose new tokens have NaN in Q, K and V. Its pages are then
    zeroed, and the first request of the next step gets them."""
    is_encoder: bool = False
    """The layers are an encoder's: without causality and without a KV cache."""
    graph: bool = False
    """Steps that device graphs serve are captured and replayed."""
    max_graph_batch_size: int | None = None
    """Larger steps run eagerly on the backend with the graphs. None: all steps have graphs."""
    repeats: int = 0
    """Repetitions of the first step after all steps, as `growth.check_steady` makes them. Eager
    ones run in grad mode, as a trainer's process may be."""

    @property
    def execution(self) -> Literal["eager", "graph"]:
        """How the steps are run."""
        return "graph" if self.graph else "eager"

    @property
    def latent(self) -> bool:
        """Whether layers are MLA's."""
        return self.kind in ("mla", "nsa")

    @property
    def cross_attention(self) -> bool:
        return any(step.encoder for step in self.steps)

    @property
    def multi_item(self) -> bool:
        return any(step.items for step in self.steps)

    @property
    def has_trees(self) -> bool:
        return self.spec_topk is not None and self.spec_topk > 1

    @property
    def custom_mask(self) -> bool:
        return self.has_trees and self.tree_mask == "full"

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of the steps, each once."""
        if self.is_encoder:
            return ("encoder",)
        return tuple({PHASES[step.mode]: None for step in self.steps})

    @property
    def request(self) -> Request:
        """An engine's request for these steps."""
        return _request(self)


@lru_cache(maxsize=8192)
def _request(case: Case) -> Request:
    """Each backend asks for those of the same cases."""
    drafts = [step.new for step in case.steps if step.mode is ForwardMode.TARGET_VERIFY]
    return Request(
        kind=case.kind,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.qk_rope_head_dim,
        encoder_head_dim=case.head_dim if case.is_encoder else None,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype or case.dtype,
        page_size=case.page_size,
        phases=case.phases,
        multimodal=case.is_encoder,
        spec_topk=case.spec_topk,
        spec_draft_tokens=max((new[0] for new in drafts), default=None),
        sliding_window=next((window for window in case.windows if window), None),
        attention_chunk=case.attention_chunk,
        cross_attention=case.cross_attention,
        sinks=case.sinks,
        alibi=case.alibi,
        relative_bias=case.relative_reach is not None,
        logit_cap=case.logit_cap,
        custom_mask=case.custom_mask,
        multi_item=case.multi_item,
        lse=case.lse,
        strided_kv=case.strided_kv,
        deterministic=case.deterministic,
        graph=case.graph,
    )


def case_of(
    name: str, page_size: int, *steps: Step, max_context_len: int = 0, **settings: object
) -> Case:
    """A case named `<name>-page<page_size>`. A single step is followed by a variation of it, which
    reveals stale metadata."""
    max_context_len = max_context_len or longest(page_size)
    if len(steps) == 1:
        steps = (*steps, steps[0].varied(max_context_len))
    return Case(
        name=f"{name}-page{page_size}",
        steps=steps,
        page_size=page_size,
        max_context_len=max_context_len,
        **settings,  # type: ignore[arg-type]  # fields of Case by name
    )


def longest(page_size: int) -> int:
    """The usual `max_context_len`, with room for a few pages."""
    return max(256, 5 * page_size)
