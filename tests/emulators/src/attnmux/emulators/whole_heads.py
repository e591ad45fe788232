"""A group of ranks as one backend, so that a suite for one backend tests the group.

Every rank makes the same calls with the heads of all ranks, over a pool with all keys. The view
cuts them, runs this rank's part, and puts the results together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    KVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    Request,
    UpProjection,
    Workspace,
)
from attnmux.distributed import (
    HeadSplit,
    InterleavedAttnBackend,
    InterleavedKVPool,
    Interleaving,
    decode_context,
    draft_context,
    prompt_context,
)
from attnmux.parts import parts_request, undrafted_request
from attnmux.testing import Candidate, Case


class WholeHeadsView(AttentionBackend):
    """`InterleavedAttnBackend` of a group, called with all heads over an ordinary pool."""

    def __init__(
        self,
        context: BackendContext,
        heads: HeadSplit,
        *,
        decode: Callable[[BackendContext], AttentionBackend],
        prompts: Callable[[BackendContext], AttentionBackend],
        interleave: int = 1,
        chunk_bytes: int = 1 << 29,
        lanes: int = 2,
    ) -> None:
        """context: of one backend alone; pages are of all ranks. decode, prompts: make the decode
        backend and each of those of prompts."""
        super().__init__(context)
        group, whole = heads.group, context.token_to_kv_pool
        self._heads = heads
        self._interleaving = Interleaving(
            rank=group.rank,
            size=group.size,
            page_size=whole.page_size // group.size,
            interleave=interleave,
        )
        self._own = _pool_like(whole, context.layers[0], self._interleaving)
        # A workspace of its own, so that nothing is shared by accident
        mine = replace(
            context,
            layers=tuple(self._mine(layer) for layer in context.layers),
            token_to_kv_pool=InterleavedKVPool(self._own, self._interleaving),
            workspace=Workspace(context.device),
        )
        request = context.request.replace(page_size=self._interleaving.page_size)
        of_prompts = prompt_context(mine, _of_prompts(request, context.layers[0]))
        whole_request = undrafted_request(request).replace(phases=("decode",), lse=True)
        of_decode = decode_context(mine, heads, whole_request)
        self.ranks = InterleavedAttnBackend(
            mine,
            heads=heads,
            decode=decode(of_decode),
            prompts=[prompts(of_prompts) for _ in range(lanes)],
            prefixes=decode(draft_context(of_decode, request)) if request.spec_topk else None,
            chunk_bytes=chunk_bytes,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.ranks.get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.ranks.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self._take_keys()
        self.ranks.init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.ranks.init_forward_metadata_in_graph(batch)

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        """Nothing: the ranks write their own part, which `forward` gives back."""

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._run(call, batch)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._run(call, batch)

    def _run(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        layer = self.ranks.context.layer(call.layer.layer_id)
        q = self._own_heads(call.q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        prompt = batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        if prompt and layer.kind == "mla" and call.k is not None and call.k_rope is not None:
            assert call.q_rope is not None
            rows = torch.cat((q, self._own_heads(call.q_rope)), -1)
            projection = _identity(layer, q.dtype, q.device)
            out = self.ranks.forward_latent(rows, call.k, call.k_rope, layer, batch, projection)
            lse.fill_(torch.nan)
        else:
            shared = layer.kind == "mla"
            out = self.ranks.forward(
                q,
                call.k if shared or call.k is None else self._own_kv_heads(call.k),
                None if call.v is None else self._own_kv_heads(call.v),
                layer,
                batch,
                q_rope=None if call.q_rope is None else self._own_heads(call.q_rope),
                k_rope=call.k_rope,
                lse=lse,
            )
        if call.k is not None:
            self._give_back(layer.layer_id, batch)
        if call.lse is not None:
            call.lse.copy_(self._heads.gather_queries(lse.unsqueeze(-1)).squeeze(-1))
        return self._heads.gather_queries(out.contiguous())

    def _mine(self, layer: LayerSpec) -> LayerSpec:
        size = self._heads.group.size
        kv_heads = layer.tp_k_head_num * self._heads.kv_copies // size
        sinks = None if layer.sinks is None else self._of_rank(layer.sinks, layer.tp_q_head_num)
        return replace(
            layer,
            tp_q_head_num=layer.tp_q_head_num // size,
            tp_k_head_num=kv_heads,
            tp_v_head_num=kv_heads,
            sinks=sinks,
        )

    def _of_rank(self, values: torch.Tensor, heads: int) -> torch.Tensor:
        each = heads // self._heads.group.size
        first = self._heads.group.rank * each
        return values[first : first + each].contiguous()

    def _own_heads(self, q: torch.Tensor) -> torch.Tensor:
        each = q.shape[1] // self._heads.group.size
        return q.narrow(1, self._heads.group.rank * each, each)

    def _own_kv_heads(self, k: torch.Tensor) -> torch.Tensor:
        copies, group = self._heads.kv_copies, self._heads.group
        each = k.shape[1] * copies // group.size
        return k.narrow(1, group.rank // copies * each, each)

    def _take_keys(self) -> None:
        """Copy this rank's keys from the whole pool."""
        whole = self.context.token_to_kv_pool
        slots = torch.arange(whole.num_slots, device=whole.device)
        slots = slots[self._interleaving.owners(slots) == self._interleaving.rank]
        for layer_id in whole.layer_ids:
            pairs = zip(
                self._own.get_kv_buffer(layer_id), whole.get_kv_buffer(layer_id), strict=True
            )
            for own, of_all in pairs:
                _raw(own)[self._interleaving.local(slots)] = _raw(of_all)[slots]

    def _give_back(self, layer_id: int, batch: ForwardBatch) -> None:
        """Copy the new tokens' keys from their owners to the whole pool."""
        whole, loc = self.context.token_to_kv_pool, batch.out_cache_loc
        owners, local = self._interleaving.owners(loc), self._interleaving.local(loc)
        pairs = zip(self._own.get_kv_buffer(layer_id), whole.get_kv_buffer(layer_id), strict=True)
        for own, of_all in pairs:
            rows = self._heads.group.all_gather(_raw(own)[local].contiguous())
            every = torch.arange(len(loc), device=loc.device)
            _raw(of_all)[loc] = rows[owners, every]


def _raw(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer in a dtype that torch can index."""
    return buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer


def _pool_like(whole: KVPool, layer: LayerSpec, interleaving: Interleaving) -> KVPool:
    size = whole.size // interleaving.size
    if layer.kind == "mla":
        return MLATokenToKVPool(
            size=size,
            page_size=interleaving.page_size,
            dtype=whole.dtype,
            layer_ids=whole.layer_ids,
            kv_lora_rank=layer.v_head_dim,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            device=whole.device,
        )
    return MHATokenToKVPool(
        size=size,
        page_size=interleaving.page_size,
        dtype=whole.dtype,
        layer_ids=whole.layer_ids,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        device=whole.device,
    )


def _of_prompts(request: Request, layer: LayerSpec) -> Request:
    """For latent layers, the expanded heads are the latent itself, see `_identity`."""
    if layer.kind == "mla":
        request = request.replace(head_dim=layer.qk_head_dim, v_head_dim=layer.v_head_dim)
    return parts_request(request)


def _identity(layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> UpProjection:
    """Expands the latent to itself, so that expanded heads do what absorbed ones do."""
    rank = layer.v_head_dim
    eye = torch.eye(rank, dtype=dtype, device=device)
    weight = eye.repeat(2 * layer.tp_q_head_num, 1)
    return UpProjection.of(weight, num_heads=layer.tp_q_head_num, v_head_dim=rank)


MODES = (
    *(ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE),
    ForwardMode.TARGET_VERIFY,
)
"""Modes of steps whose keys may lie on several ranks."""


def can_be_split(case: Case, size: int) -> bool:
    """Whether the case's keys may lie on several ranks, and its heads too.

    Cases that repeat a step are none: how often depends on what grows in a rank's own process.
    """
    modes = {step.mode for step in case.steps}
    return (
        modes.issubset(MODES)
        and not case.repeats
        and not case.has_trees
        and case.kind in ("mha", "mla")
        and case.kv_dtype != "fp4_e2m1"
        and not any(case.windows)
        and not case.attention_chunk
        and not case.alibi
        and case.relative_reach is None
        and not case.cross_attention
        and not case.multi_item
        and not case.is_encoder
        and case.save_kv_cache
        and not (case.kv_in_pool and modes != {ForwardMode.DECODE})
        and case.num_q_heads % size == 0
        and case.page_size % size == 0
    )


def copies_of(case: Case, size: int) -> int:
    """How many ranks hold the same KV heads."""
    return 1 if case.num_kv_heads % size == 0 else size // case.num_kv_heads


def viewed(
    context: BackendContext,
    options: Mapping[str, object],
    *,
    heads: HeadSplit,
    candidate: Candidate,
    prompts: Candidate | None = None,
    **settings: int,
) -> WholeHeadsView:
    """The factory of a candidate that tests a group of ranks.

    prompts: attends to the parts of prompts, by default `candidate`. settings: of `WholeHeadsView`.
    """
    of_prompts = candidate if prompts is None else prompts
    return WholeHeadsView(
        context, heads, decode=candidate.build, prompts=of_prompts.build, **settings
    )
