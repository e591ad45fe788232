"""Decoding over a few pages of each request (Quest, arXiv:2406.10774), on any backend.

A query decides which pages its layer reads, and a backend prepares its metadata once a step, before
there are queries. So the chosen pages are copied to a small pool with a fixed place for each
request. The wrapped backend attends over that pool: its table and lengths hold for the whole step,
whatever is chosen. Copying also lets each KV head have pages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec import structs

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    BackendContext,
    Decision,
    ForwardBatch,
    GraphUnsupported,
    InvalidInput,
    KVPool,
    LayerSpec,
    ReqToTokenPool,
    foreign_pool,
)
from attnmux.core.plugin import (
    CompositeBackend,
    FixedTensors,
    MakeBackend,
    MemberSteps,
    Route,
    shared_kernel,
)
from attnmux.parts.page_choice import PageBounds, PageKernels, PlainPages, RequestPages


def sparse_context(context: BackendContext, budget: int) -> BackendContext:
    """The context of the backend that attends over chosen pages: `budget` tokens of each request.

    The budget is whole pages: `solve` refuses others. Raises InvalidInput for layers that are not
    plain and causal, and a pool with gaps or of another dtype than the model's; PoolExhausted when
    memory for the pages' copies does not suffice.
    """
    pool = context.token_to_kv_pool
    page_size = pool.page_size
    for layer in context.layers:
        layer.check_features("sinks", "logit_cap", "index_block_size")
    if pool.is_strided or not pool.dtype.is_floating_point or pool.dtype.itemsize == 1:
        got = f"{pool.dtype}{', with gaps' if pool.is_strided else ''}"
        expected = "16 or 32 bits a value and no gaps between slots"
        raise InvalidInput("token_to_kv_pool", got=got, expected=expected)
    pages = RequestPages.of_budget(
        budget, page_size=page_size, max_context_len=context.max_context_len
    )
    size, width = context.max_batch_size, pages * page_size
    table = ReqToTokenPool(size, width, context.device)
    slots = torch.arange(size * width, dtype=torch.int32, device=context.device) + page_size
    table.req_to_token[1:] = slots.view(size, width)
    layer, tokens = context.layers[0], size * width
    shape = (tokens + page_size, layer.tp_k_head_num)
    copies = KVPool.allocate_zeroed(
        [(*shape, layer.qk_head_dim), (*shape, layer.v_head_dim)],
        dtype=pool.dtype,
        device=pool.device,
        what=f"copies of chosen pages, {tokens} tokens",
        hint="lower the budget, or the number of requests",
    )
    # All layers share one buffer, since each fills it anew
    pairs = {plain.layer_id: (copies[0], copies[1]) for plain in context.layers}
    return replace(
        context,
        request=context.request.replace(
            origin="model", sparse=None, sparse_budget=None, phases=("decode",)
        ),
        req_to_token_pool=table,
        token_to_kv_pool=foreign_pool(pairs, page_size=page_size),
        kv_writer=None,
        max_context_len=width,
        # The new tokens' slots are the engine's, and the step was checked whole
        debug=False,
    )


class SparseAttnBackend(CompositeBackend):
    """Decodes over the pages of a request with the largest bounds, a fixed number of them.

    Each KV head of each layer chooses its own. The first page and the last two are always among
    them, and a request of no more pages than the budget is read whole: its answers are those of
    dense attention. Other steps go to `whole`; those of drafts are refused. The engine writes K by
    this backend, which keeps the pages' bounds.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        whole: AttentionBackend,
        chosen: AttentionBackend,
        kernels: PageKernels | None = None,
    ) -> None:
        """whole: serves the prompts of this context. chosen: decodes, of a `sparse_context`.
        kernels: choose and copy; plain torch operations do if there are none.

        Raises PoolExhausted when the memory for the bounds does not suffice.
        """
        super().__init__(context, (chosen,))
        self.whole = whole
        self.chosen = chosen
        self._kernels = PlainPages() if kernels is None else kernels
        self.bounds = PageBounds(
            context.token_to_kv_pool, [layer.layer_id for layer in context.layers], kernels
        )
        self._page_size = context.token_to_kv_pool.page_size
        self._pages = chosen.context.max_context_len // self._page_size
        self._most = -(-context.max_context_len // self._page_size)
        self._width = self._most
        self._fixed = FixedTensors()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_num_tokens > max_bs:
            raise GraphUnsupported("drafts over chosen pages are not captured")
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._fixed.add_decoding(max_bs, self.context.device)

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        if eager:
            self.check_step(batch)
        if not self._decodes(batch):
            return ((self.whole, batch),)
        step, self._width = self._virtual(batch), self._most
        if not eager:
            step = self._fixed.holding(step)
        elif batch.seq_lens_cpu is not None and batch.batch_size:
            longest = -(-int(batch.seq_lens_cpu.max()) // self._page_size)
            self._width = min(max(longest, self._pages), self._most)
        return ((self.chosen, step),)

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        super().save_kv(k, v, layer, batch, k_rope=k_rope)
        self.bounds.update(layer.layer_id, batch.out_cache_loc)

    def route(self, call: AttentionCall, batch: ForwardBatch) -> Route:
        if not batch.forward_mode.is_decode():
            return self.whole, call, batch
        if call.has_own_kv:
            expected = "True: decoding chooses among the pages of the pool"
            raise InvalidInput("save_kv_cache", got=False, expected=expected)
        layer_id = call.layer.layer_id
        requests = RequestPages(
            table=self.context.req_to_token_pool.req_to_token,
            rows=batch.req_pool_indices,
            lens=batch.seq_lens,
            page_size=self._page_size,
            width=self._width,
        )
        # Places in the sequence, ascending, so that a page that is partly filled comes last
        scores = self._kernels.score(call.q, *self.bounds.of(layer_id), requests)
        self._kernels.copy(
            self.context.token_to_kv_pool.get_kv_buffer(layer_id),
            self.chosen.context.token_to_kv_pool.get_kv_buffer(layer_id),
            self._kernels.choose(scores, requests, self._pages),
            requests,
        )
        return self.chosen, structs.replace(call, k=None, v=None), self.step_of(self.chosen)

    def _decodes(self, batch: ForwardBatch) -> bool:
        """Raises InvalidInput for steps of drafts."""
        mode = batch.forward_mode
        if mode.is_target_verify() or mode.is_draft_extend():
            expected = "no drafts, if decoding chooses pages"
            raise InvalidInput("forward_mode", got=mode.name, expected=expected)
        return mode.is_decode()

    def _virtual(self, batch: ForwardBatch) -> ForwardBatch:
        """The decode step over the chosen pages, whose rows of the table never change."""
        lens, on_host = self._kept(batch.seq_lens), batch.seq_lens_cpu
        on_host = None if on_host is None else self._kept(on_host)
        size = batch.batch_size
        return replace(
            batch,
            req_pool_indices=torch.arange(1, size + 1, device=lens.device),
            seq_lens=lens,
            positions=lens.long() - 1,
            seq_lens_cpu=on_host,
            seq_lens_sum=None if on_host is None else int(on_host.sum()),
        )

    def _kept(self, lens: torch.Tensor) -> torch.Tensor:
        """Tokens of the chosen pages: all are full but the last one, as it is in the sequence."""
        missing = -lens % self._page_size
        return torch.minimum(lens, self._pages * self._page_size - missing)


def make_chosen_pages(
    inner: MakeBackend, decision: Decision, context: BackendContext, phases: Sequence[str]
) -> AttentionBackend:
    """The factory of the part `chosen_pages`."""
    budget = decision.request.sparse_budget
    if budget is None or "decode" not in phases:
        return inner(context, phases)
    of_pages = sparse_context(context, budget)
    return SparseAttnBackend(
        context,
        whole=inner(context, [phase for phase in phases if phase != "decode"] or phases),
        chosen=inner(of_pages, ["decode"]),
        kernels=shared_kernel("chosen_pages", context),
    )
