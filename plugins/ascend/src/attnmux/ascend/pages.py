"""`npu_fused_infer_attention_score_v2` for MHA and GQA: packed queries, over pages or own keys.

Layout TND: queries of all requests end to end, with the ends as a list. One call serves prefill,
decode and drafts. Causality is `sparse_mode` 3 with a fixed mask of 2048 x 2048; without a mask the
operator ignores the mode, and every query sees every key. In graphs its lists are renewed before a
replay (`graph_tasks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.ascend.host_lens import HostLens
from attnmux.ascend.npu_kernels import (
    CAUSAL,
    INT32,
    MOST_REQUESTS,
    NO_MASK,
    NPUKernels,
    causal_mask,
)
from attnmux.core import ForwardMode, InvalidInput
from attnmux.core.plugin import (
    DecodeBuffers,
    KeyGroup,
    KeyLens,
    PagedBackend,
    PagedLayer,
    PageTables,
)

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

PAGE_SIZES = (128, 256, 384, 512)
"""With more than one query a request: 128 to 512 tokens, and a multiple of 128."""
HEAD_DIMS = (64, 128)
"""Dims of K and V alike, in layout TND, with sinks and without."""
MOST_HEADS = 256
MOST_GROUP = 64
MOST_ROW = 65535
"""Numbers of a token's K in a cache [pages, page, Hkv * D]: a hardware instruction's limit."""
DTYPE = torch.bfloat16
"""The only one of layout TND with other dims than the latent's."""


@dataclass(kw_only=True, slots=True, eq=False)
class PagedStep:
    """A step of any phase."""

    tables: PageTables
    lens: HostLens
    buffers: DecodeBuffers | None = None
    """Fixed tensors of a step in a graph."""
    tasks: list[Any] | None = None
    """Captured calls; None for an eager step."""
    key_lens: KeyLens | None = None
    """Key lengths of a decode step in a graph, whose requests may be without keys in a replay."""


class AscendPagesBackend(PagedBackend[NPUKernels, PagedLayer, PagedStep, DecodeBuffers]):
    """MHA and GQA; draft trees are another backend's."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: NPUKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the operator does not serve."""
        super().__init__(context, options, kernels)
        self._mask = causal_mask(context.device)
        self._captured: dict[tuple[ForwardMode, int, int], tuple[torch.Tensor, list[Any]]] = {}

    def prepare_layer(self, layer: LayerSpec) -> PagedLayer:
        _check_layer(layer)
        arguments: dict[str, Any] = {
            "num_query_heads": layer.tp_q_head_num,
            "num_key_value_heads": layer.tp_k_head_num,
            "softmax_scale": layer.scaling,
            "input_layout": "TND",
            "learnable_sink": layer.sinks_in(DTYPE),
        }
        pool = self.context.token_to_kv_pool
        if not layer.is_causal or layer.layer_id not in pool.layer_ids:
            return PagedLayer(arguments=arguments)
        if pool.dtype != DTYPE:
            raise InvalidInput("token_to_kv_pool", got=pool.dtype, expected=str(DTYPE))
        self.context.check_page_size(*PAGE_SIZES)
        k, v = pool.get_kv_buffer(layer.layer_id)
        kv = _pages(k, pool.page_size), _pages(v, pool.page_size)
        return PagedLayer(arguments=arguments, group=KeyGroup.of(layer, self.context), kv=kv)

    def plan_step(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> PagedStep:
        if batch.batch_size > MOST_REQUESTS:
            expected = f"at most {MOST_REQUESTS} requests in a step"
            raise InvalidInput("batch_size", got=batch.batch_size, expected=expected)
        lens = HostLens.of(batch)
        # A graph's batch lies at the same address in its capture and its replays. The tensor is
        # kept, so that no other batch gets its address
        key = (batch.forward_mode, batch.batch_size, batch.seq_lens.data_ptr())
        tables = PageTables.of(batch, self.context, buffers.keys if buffers else {})
        if buffers is not None:
            _, tasks = self._captured[key] = (batch.seq_lens, [])
            return PagedStep(tables=tables, lens=lens, buffers=buffers, tasks=tasks)
        for task in self._captured[key][1] if key in self._captured else ():
            self.kernels.graph_tasks.renew(task, lens.bounds, lens.at_least_one_key)
        return PagedStep(tables=tables, lens=lens)

    def fill_step(self, step: PagedStep, batch: ForwardBatch) -> None:
        step.tables.fill(batch, self.key_groups, self.context)
        if step.buffers is not None and batch.forward_mode.is_decode():
            step.key_lens = KeyLens.of(batch.seq_lens, step.buffers.lens)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> DecodeBuffers:
        return DecodeBuffers.of(self.key_groups, max_bs, self.context)

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        if layer.sinks is not None:
            expected = "None for a layer with sinks: whether the operator's LSE has them is unknown"
            raise InvalidInput("lse", got="a tensor", expected=expected)

    def attend(
        self, call: AttentionCall, layer: PagedLayer, step: PagedStep, batch: ForwardBatch
    ) -> torch.Tensor:
        lens, count = step.lens, step.lens.num_queries
        if not count:
            return call.empty_result()
        q = call.q[:count].contiguous()
        if q.dtype != DTYPE:
            raise InvalidInput("q", got=q.dtype, expected=str(DTYPE))
        is_causal = call.layer.is_causal and not lens.has_one_query_each
        arguments = {
            "query": q,
            **self._keys(call, layer, step),
            **layer.arguments,
            "actual_seq_qlen": lens.bounds,
            "atten_mask": self._mask if is_causal else None,
            "sparse_mode": CAUSAL if is_causal else NO_MASK,
            "return_softmax_lse": call.lse is not None,
        }
        if step.tasks is None:
            out, lse = self.kernels.fused_infer_attention_score(**arguments)
        else:
            (out, lse), task = self.kernels.graph_tasks.record(arguments)
            step.tasks += [] if task is None else [task]
        if call.lse is not None:
            call.lse[:count].copy_(lse.squeeze(-1))
        return self._completed(call, out, step)

    def _keys(self, call: AttentionCall, layer: PagedLayer, step: PagedStep) -> dict[str, Any]:
        """Arguments that say where K and V are."""
        lens = step.lens
        if call.has_own_kv:
            own_keys = call.own_keys(call.v)
            k, v = (rows[: lens.num_queries].contiguous() for rows in own_keys)
            return {"key": k, "value": v, "actual_seq_kvlen": lens.bounds}
        if layer.group is None or layer.kv is None:
            raise call.layer.not_in_pool()
        return {
            "key": layer.kv[0],
            "value": layer.kv[1],
            "block_table": step.tables.keys[layer.group].page_table.contiguous(),
            "block_size": layer.group.page_size,
            "actual_seq_kvlen": lens.at_least_one_key,
        }

    def _completed(self, call: AttentionCall, out: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """The result of all tokens: 0 for those without keys and those of no request."""
        lens, rows = step.lens, call.q.shape[0]
        if step.key_lens is not None and not call.has_own_kv:
            step.key_lens.replace(out, 0)
            if call.lse is not None:
                step.key_lens.replace(call.lse, -torch.inf)
            return out
        hidden = [] if call.has_own_kv else lens.rows_without_keys
        if hidden:
            out[hidden] = 0
            if call.lse is not None:
                call.lse[hidden] = -torch.inf
        if lens.num_queries == rows:
            return out
        if call.lse is not None:
            call.lse[lens.num_queries :] = -torch.inf
        whole = out.new_zeros((rows, *out.shape[1:])) if call.out is None else call.out
        whole[: lens.num_queries] = out
        whole[lens.num_queries :] = 0
        return whole


def _pages(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """[pages, page, Hkv * D]: a view of a buffer of the pool, [slots, Hkv, D]."""
    row = rows.shape[1] * rows.shape[2]
    limits = {
        "rows with gaps": not rows.is_contiguous(),
        f"{row} numbers a token": row > MOST_ROW,
        f"{rows.numel()} numbers": rows.numel() > INT32,
    }
    got = [name for name, is_beyond in limits.items() if is_beyond]
    if got:
        raise InvalidInput(
            "token_to_kv_pool",
            got=" and ".join(got),
            expected=f"K and V without gaps, at most {MOST_ROW} numbers a token, {INT32} in all",
        )
    return rows.view(-1, page_size, row)


def _check_layer(layer: LayerSpec) -> None:
    dims = layer.qk_head_dim, layer.v_head_dim
    heads, group = layer.tp_q_head_num, layer.tp_q_head_num // layer.tp_k_head_num
    unserved = {
        f"kind {layer.kind}": layer.kind != "mha",
        f"dims {dims[0]} and {dims[1]}": dims not in [(dim, dim) for dim in HEAD_DIMS],
        f"{heads} heads": heads > MOST_HEADS,
        f"{group} query heads a KV head": group > MOST_GROUP,
        "is_cross_attention": layer.is_cross_attention,
        "sliding_window_size": layer.sliding_window_size >= 0,
        "attention_chunk_size": layer.attention_chunk_size > 0,
        "logit_cap": layer.logit_cap > 0,
    }
    got = [name for name, is_set in unserved.items() if is_set]
    if got:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=" and ".join(got),
            expected=f"mha to all keys; K and V of {' or '.join(map(str, HEAD_DIMS))}; at most "
            f"{MOST_HEADS} heads, {MOST_GROUP} a KV head; no cap, window or chunks",
        )
