"""A step that is ready to run: filled pools, its batch, and the tensors of every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from attnmux.core import ForwardBatch, KVPool, LayerSpec
from attnmux.testing.cases.case import Step
from attnmux.testing.setup.batches import make_batch, pick_topk
from attnmux.testing.setup.case import CaseSetup
from attnmux.testing.setup.placement import buffers, fill_pool, place, put, stored_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerInput:
    """The arguments of one layer's call."""

    layer: LayerSpec
    q: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    q_rope: torch.Tensor | None = None
    k_rope: torch.Tensor | None = None
    topk_indices: torch.Tensor | None = None
    """[T, topk] int32: the picks of the layer's indexer, written to the batch before the call."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedStep:
    """A step that is ready to run on filled pools: its batch and the inputs of each layer."""

    batch: ForwardBatch
    inputs: tuple[LayerInput, ...]
    num_real_tokens: int
    """Rows of real requests, followed by those of padding requests."""
    num_request_tokens: int
    """Rows of all requests, followed by rows of none."""
    save_kv_cache: bool
    nan_request: int | None = None
    """The request with NaN in Q, K and V. Its results are not compared."""

    def rows_of(self, index: int) -> slice:
        """A request's rows of Q, K, V and output."""
        new = self.batch.extend_seq_lens
        first = index if new is None else int(new[:index].sum())
        return slice(first, first + (1 if new is None else int(new[index])))

    def with_nan(self, index: int) -> PreparedStep:
        """The step after NaN is written to Q, K and V of a request's new tokens.

        K and V of cross-attention belong to the encoder's tokens and stay as they are.
        """
        for given in self.inputs:
            tensors = [given.q, given.q_rope]
            if not given.layer.is_cross_attention:
                tensors += [given.k, given.v, given.k_rope]
            for tensor in tensors:
                if tensor is not None:
                    tensor[self.rows_of(index)] = torch.nan
        return replace(self, nan_request=index)

    def of_request(self, index: int) -> tuple[PreparedStep, slice]:
        """A step of one request alone, whose K and V are in the pool, and its rows in this step."""
        rows = self.rows_of(index)
        first, last = rows.start, rows.stop
        inputs = tuple(
            replace(
                given,
                q=given.q[rows],
                q_rope=None if given.q_rope is None else given.q_rope[rows],
                topk_indices=None if given.topk_indices is None else given.topk_indices[rows],
            )
            for given in self.inputs
        )
        part = replace(
            self,
            batch=self.batch.slice(index, index + 1, first_token=first, last_token=last),
            inputs=inputs,
            num_real_tokens=last - first,
            num_request_tokens=last - first,
        )
        return part, rows


def prepare_step(
    setup: CaseSetup,
    step: Step,
    *,
    seq_len_fill: int = 1,
    host_lens: bool = False,
    zeroed: torch.Tensor | None = None,
) -> PreparedStep:
    """Fill the setup's pools for `step`, and make its batch and the inputs of each layer.

    `seq_len_fill` is the backend's `get_cuda_graph_seq_len_fill_value()`; with `host_lens` the
    batch has its host mirrors. zeroed: pages that the first requests get, with the zeros that they
    hold.
    """
    zeroed = torch.zeros(0, dtype=torch.int64) if zeroed is None else zeroed.cpu()
    requests = place(setup, step, seq_len_fill, first_pages=zeroed)
    has_padding = step.padding + step.trailing > 0
    fill_pool(setup, requests, has_padding=has_padding, zeroed=zeroed)
    batch = make_batch(setup, step, requests, host_lens)
    inputs = tuple(
        _make_input(setup, layer, batch, fused=index % 2 == 1)
        for index, layer in enumerate(setup.context.layers)
    )
    if setup.case.index_topk:
        inputs = tuple(
            replace(given, topk_indices=pick_topk(setup, requests, batch, in_front=index % 2 == 0))
            for index, given in enumerate(inputs)
        )
    return PreparedStep(
        batch=batch,
        inputs=inputs,
        num_real_tokens=sum(step.new),
        num_request_tokens=sum(request.new for request in requests),
        save_kv_cache=setup.case.save_kv_cache,
    )


def kv_rows(
    setup: CaseSetup, given: LayerInput, batch: ForwardBatch
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The writes of the layer's call: slots [n] of its `buffers`, and rows [n, …] of each."""
    loc = batch.encoder_out_cache_loc if given.layer.is_cross_attention else batch.out_cache_loc
    if given.k is None or loc is None or not setup.case.save_kv_cache:
        return batch.out_cache_loc[:0], ()
    if given.k_rope is not None:
        rows = [torch.cat([given.k, given.k_rope], dim=-1)]
    else:
        rows = [tensor for tensor in (given.k, given.v) if tensor is not None]
    pool = setup.context.token_to_kv_pool
    return pool.translate(loc, given.layer.layer_id), stored_rows(setup, given.layer, rows)


def _make_input(
    setup: CaseSetup, layer: LayerSpec, batch: ForwardBatch, *, fused: bool
) -> LayerInput:
    """Random tensors of one layer's call.

    With `fused` the rows of Q, K and V are parts of longer rows, as slices of one projection are,
    and the two parts of MLA's rows are parts of one row. Otherwise MLA's are parts of longer rows.
    For KV in 8-bit floats, Q has values of that format, so that a kernel may round it.
    """
    num_tokens, rope = batch.num_tokens, layer.qk_rope_head_dim
    kv_dtype = setup.context.token_to_kv_pool.dtype
    between = 64 if fused != bool(rope) else 0

    def draw(count: int, heads: int, width: int) -> torch.Tensor:
        made = setup.random(count, between + heads * width)
        return made[:, between:].view(count, heads, width)

    def draw_q(width: int) -> torch.Tensor:
        drawn = draw(num_tokens, layer.tp_q_head_num, width)
        return (
            drawn.copy_(KVPool.quantise(drawn, kv_dtype, None))
            if kv_dtype in KVPool.FP8_DTYPES
            else drawn
        )

    def both(
        drawn: Callable[[int], torch.Tensor], width: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A part of `width`, and the rotary part if there is one."""
        if fused and rope:
            rows = drawn(width + rope)
            return rows[..., :width], rows[..., width:]
        return drawn(width), drawn(rope) if rope else None

    num_keys = num_tokens
    if layer.is_cross_attention and batch.encoder_out_cache_loc is not None:
        num_keys = len(batch.encoder_out_cache_loc)
    q, q_rope = both(draw_q, layer.query_dim)
    if layer.is_cross_attention and not num_keys:
        return LayerInput(layer=layer, q=q)
    k, k_rope = both(partial(draw, num_keys, layer.tp_k_head_num), layer.qk_head_dim - rope)
    v = None if rope else draw(num_keys, layer.tp_v_head_num, layer.v_head_dim)
    given = LayerInput(layer=layer, q=q, q_rope=q_rope, k=k, k_rope=k_rope, v=v)
    if setup.case.kv_in_pool:
        loc, rows = kv_rows(setup, given, batch)
        for buffer, new in zip(buffers(setup, layer.layer_id), rows, strict=True):
            put(buffer, loc, new)
        return LayerInput(layer=layer, q=q, q_rope=q_rope)
    return given
