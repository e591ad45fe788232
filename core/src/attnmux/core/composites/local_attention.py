"""Attention chunks on backends without them, by virtual requests: SGLang's local attention.

A token sees the keys of its own chunk. So the tokens of a request in one chunk are a request of
their own, whose sequence is that chunk up to its last token. A backend without chunks serves such
requests, over a table with the slots of their chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import structs

from attnmux.core.composites.dispatch import CompositeBackend, MemberSteps, Route
from attnmux.core.composites.virtual_requests import virtual_step
from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.call import AttentionCall
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.steps import FixedTensors
from attnmux.core.facts.errors import GraphUnsupported, InvalidInput
from attnmux.core.kv.request_table import ReqToTokenPool

Make = Callable[[BackendContext], AttentionBackend]


def with_virtual_requests(make: Make, context: BackendContext) -> AttentionBackend:
    """The backend of a context, with virtual requests for its layers with attention chunks.

    make: makes a backend of layers without chunks. Raises InvalidInput for chunks that are not
    whole pages of the pool, and for layers of a decoder with an encoder.
    """
    chunks = sorted({layer.attention_chunk_size for layer in context.layers})
    if chunks[-1] <= 0:
        return make(context)
    if any(layer.is_cross_attention for layer in context.layers):
        expected = "no cross attention next to attention chunks"
        raise InvalidInput("layers", got="an encoder-decoder model's", expected=expected)
    plain = [layer for layer in context.layers if layer.attention_chunk_size <= 0]
    without = context.request.replace(origin="model", attention_chunk=None)
    whole = replace(context, layers=tuple(plain), request=without)
    return LocalAttnBackend(
        context,
        whole=make(whole) if plain else None,
        local={chunk: make(local_context(context, chunk)) for chunk in chunks if chunk > 0},
    )


def local_context(context: BackendContext, chunk: int) -> BackendContext:
    """The context of the layers with chunks of that length, which have none here.

    Its request table is that of virtual requests, with room for all pieces of the longest step:
    about as much as the engine's. Raises as `with_virtual_requests`.
    """
    page_size = context.token_to_kv_pool.page_size
    if chunk % page_size:
        expected = f"a multiple of {page_size}, the page size: virtual requests have whole pages"
        raise InvalidInput("attention_chunk_size", got=chunk, expected=expected)
    layers = [layer for layer in context.layers if layer.attention_chunk_size == chunk]
    longest, most = min(chunk, context.max_context_len), context.max_batch_size
    rows = 2 * most + most * context.max_context_len // chunk + 1  # see `most_pieces`
    return replace(
        context,
        layers=tuple(replace(layer, attention_chunk_size=0) for layer in layers),
        request=context.request.replace(origin="model", attention_chunk=None),
        req_to_token_pool=ReqToTokenPool(rows, longest, context.device),
        max_batch_size=rows,
        max_context_len=longest,
        # Rows of virtual requests without keys contradict the table, and the step was checked whole
        debug=False,
    )


class LocalAttnBackend(CompositeBackend):
    """Serves layers with attention chunks by backends without them, in virtual requests.

    EXTEND and MIXED steps are cut at the borders of chunks; a decode step has one virtual request
    for each. Steps of drafts are refused if layers have chunks.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        whole: AttentionBackend | None,
        local: Mapping[int, AttentionBackend],
    ) -> None:
        """whole: of the layers without chunks. local: of the others, by the length of a chunk, each
        of `local_context`. Raises InvalidInput for padding rows of different lengths."""
        super().__init__(context, [*local.values(), *([] if whole is None else [whole])])
        self.check_padding("local", *self.members)
        self.whole = whole
        self.local = dict(local)
        self._fixed = {chunk: FixedTensors() for chunk in self.local}

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_num_tokens > max_bs:
            raise GraphUnsupported("drafts in layers with attention chunks are not captured")
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        for fixed in self._fixed.values():
            fixed.add_decoding(max_bs, self.context.device)

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        if eager:
            self.check_step(batch)
        if self.whole is not None:
            yield self.whole, batch
        for chunk, backend in self.local.items():
            step = self._virtual(batch, chunk)
            if not eager and batch.forward_mode.is_decode():
                step = self._fixed[chunk].holding(step)
            yield backend, step

    def route(self, call: AttentionCall, batch: ForwardBatch) -> Route:
        layer_id = call.layer.layer_id
        backend = self.local.get(self.context.layer(layer_id).attention_chunk_size)
        if backend is None:
            assert self.whole is not None  # made where a layer has no chunks
            return self.whole, call, batch
        if call.has_own_kv and not _has_no_prefix(batch):
            expected = "True if requests have a prefix, or have no host mirrors"
            raise InvalidInput("save_kv_cache", got=False, expected=expected)
        layer = backend.context.layer(layer_id)
        return backend, structs.replace(call, layer=layer), self.step_of(backend)

    def _virtual(self, batch: ForwardBatch, chunk: int) -> ForwardBatch:
        """The step's virtual requests, whose rows of the table are filled."""
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE:
            return batch
        if mode not in (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED):
            expected = "DECODE, EXTEND or MIXED in layers with attention chunks"
            raise InvalidInput("forward_mode", got=mode.name, expected=expected)
        batch.check_unmasked()
        table = self.local[chunk].context.req_to_token_pool.req_to_token
        engines = self.context.req_to_token_pool.req_to_token
        return virtual_step(batch, chunk, table=table, engines=engines)


def _has_no_prefix(batch: ForwardBatch) -> bool:
    """Whether the host knows that no request has a prefix."""
    cached = batch.extend_prefix_lens_cpu
    if cached is None and batch.extend_prefix_lens is not None and batch.extend_prefix_lens.is_cpu:
        cached = batch.extend_prefix_lens
    return cached is not None and not bool(cached.any())
