"""TensorRT-LLM's MLA decode through flashinfer: trtllm-gen on SM100, XQA on SM120.

Queries are one row of latent and rotary part; tables are whole tiles of 128 keys wide; a request
without keys is not allowed; scales multiply. The kernels are called without LSE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import ForwardMode, InvalidInput
from attnmux.core.plugin import (
    DecodeBuffers,
    DecodeStep,
    KernelLibrary,
    KeyGroup,
    Keys,
    LatentRows,
    LibraryBackend,
    Rows,
    rehearse,
)
from attnmux.nvidia.flashinfer.shared import HINT
from attnmux.nvidia.kernel_rows import by_request, check_bfloat16_or_fp8
from attnmux.nvidia.latent.base import LatentDecodeBackend
from attnmux.nvidia.trtllm import by_major, queries_like, workspace

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

WORKSPACE_BYTES = 128 << 20
"""Other engines give TensorRT-LLM's MLA as much."""
TILE = 128
"""Keys: `_check_trtllm_gen_mla_shape` wants tables of whole tiles, 4 pages of 32 or 2 of 64."""
NOPE = 128
"""Dim of an expanded head without its rotary part: the library requires it and does not use it."""
XQA_HEADS = 128
"""xqa.py, `xqa_mla`: the one number of query heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TRTLLMMLAKernels:
    """Functions of `flashinfer.mla`, each for some devices."""

    trtllm_batch_decode_with_kv_cache_mla: Callable[..., Any]
    """On SM100."""
    xqa_batch_decode_with_kv_cache_mla: Callable[..., Any]
    """On SM120, one query a request."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TRTLLMMLALayer:
    """A layer's arguments that no step changes."""

    group: KeyGroup
    cache: torch.Tensor
    """[pages, page, 576], the pool's memory."""
    scale: float
    kv_scale: float
    """The factor of the cache's rows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Padding:
    """B requests padded to `each` queries, for kernels that take the same number of each.

    A request's own queries come first; results of the others are dropped. The kernels count
    causality from the end of the keys, so the length of a request with fewer queries grows by
    their number: only the queries that are dropped see those keys, left-overs of its last page.
    """

    batch_size: int
    each: int
    rows: torch.Tensor
    """[T] int64: the tokens' places among B * each rows, and B * each for tokens of no request."""
    kv_lens: torch.Tensor
    """[B] int32."""

    @classmethod
    def of(
        cls, bounds: torch.Tensor, kv_lens: torch.Tensor, *, each: int, num_tokens: int
    ) -> Padding:
        """bounds: [B + 1] int32, where each request's tokens begin. kv_lens: [B] int32."""
        batch_size = len(kv_lens)
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=bounds.device)
        request = torch.searchsorted(bounds[1:], tokens, right=True)
        rows = request * each + tokens - bounds[request]
        return cls(
            batch_size=batch_size,
            each=each,
            rows=torch.where(request < batch_size, rows, batch_size * each),
            kv_lens=kv_lens + each - bounds.diff(),
        )

    def spread(self, q: torch.Tensor) -> torch.Tensor:
        """[B, each, …] of tokens [T, …]."""
        wide = q.new_zeros((self.batch_size * self.each + 1, *q.shape[1:]))
        wide.index_copy_(0, self.rows, q)
        return wide[:-1].view(self.batch_size, self.each, *q.shape[1:])

    def gather(self, result: torch.Tensor) -> torch.Tensor:
        """Tokens [T, …] of [B, each, …]; those of no request are 0."""
        wide = torch.cat([result.flatten(0, 1), result.new_zeros((1, *result.shape[2:]))])
        return wide.index_select(0, self.rows)


@dataclass(kw_only=True, slots=True, eq=False)
class TRTLLMMLAStep(DecodeStep):
    """A step; its tables are whole tiles wide."""

    padding: Padding | None = None
    """Set by `fill_step` if requests have different numbers of drafts."""


class TRTLLMMLABackend(
    LatentDecodeBackend[TRTLLMMLAKernels, TRTLLMMLALayer, TRTLLMMLAStep, DecodeBuffers]
):
    """MLA over pages of 32 or 64 tokens: decode, verify and draft; prefill is another backend's."""

    modes = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: TRTLLMMLAKernels
    ) -> None:
        """Raises InvalidInput for a platform, layers, a pool or options that no kernel serves."""
        super().__init__(context, options, kernels)
        self._is_xqa = by_major(context, {10: False, 12: True})
        self._workspace = workspace(context, options, default_bytes=WORKSPACE_BYTES)

    def prepare_layer(self, layer: LayerSpec) -> TRTLLMMLALayer:
        check_bfloat16_or_fp8(self.context)
        pool = self.context.token_to_kv_pool
        if TILE % pool.page_size:
            raise InvalidInput("page_size", got=pool.page_size, expected="32 or 64")
        kv_scale, _ = pool.read_scales(layer.k_scale, layer.v_scale)
        return TRTLLMMLALayer(
            group=KeyGroup.of(layer, self.context),
            cache=self.context.latent_pages(layer, pool.page_size).squeeze(2),
            scale=layer.scaling,
            kv_scale=kv_scale,
        )

    def plan_decode(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> TRTLLMMLAStep:
        step = TRTLLMMLAStep.of(batch, self.context, buffers)
        longest = step.tables.max_seqlen_k
        if batch.forward_mode.is_draft_extend():
            longest += step.tables.max_seqlen_q  # padding's keys
        step.tables = replace(step.tables, max_seqlen_k=_whole_tiles(longest))
        return step

    def fill_step(self, step: TRTLLMMLAStep, batch: ForwardBatch) -> None:
        super().fill_step(step, batch)
        tables, keys = step.tables, LibraryBackend.filled(step.keys)
        for group, key in keys.items():
            _keep_to_own_pages(key, group.page_size)
        if batch.forward_mode.is_draft_extend():
            lens = keys[self._groups[0]].lens
            step.padding = Padding.of(
                tables.query_bounds(lens.device),
                lens,
                each=tables.max_seqlen_q,
                num_tokens=batch.num_tokens,
            )
            step.keys = {
                group: each.with_lens(step.padding.kv_lens) for group, each in keys.items()
            }

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> DecodeBuffers:
        longest = _whole_tiles(self.context.max_context_len)
        return DecodeBuffers.of(
            self._groups, max_bs, replace(self.context, max_context_len=longest)
        )

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: XQA gives none")

    def attend(
        self, call: AttentionCall, layer: TRTLLMMLALayer, step: TRTLLMMLAStep, batch: ForwardBatch
    ) -> torch.Tensor:
        q, out, padding = LatentRows.joined(call.q, call.q_rope), call.out, step.padding
        if padding is not None:
            return padding.gather(self._decode(padding.spread(q), layer, step, None))
        queries = step.tables.queries_each or 1
        into = by_request(out, queries) if out is not None and Rows.is_writable(out) else None
        result = self._decode(by_request(q, queries), layer, step, into)
        step.replace_empty(result)
        if out is not None and result is into:
            return out
        return result.flatten(0, 1)

    def _decode(
        self,
        q: torch.Tensor,
        layer: TRTLLMMLALayer,
        step: TRTLLMMLAStep,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """q: [B, d, Hq, 576] bfloat16. out: [B, d, Hq, 512], contiguous; trtllm-gen writes it.

        XQA multiplies logits by the scale of the keys itself (mla_sm120.cu, `qkScaleLog2e`).
        Returns [B, d, Hq, 512] bfloat16.
        """
        heads = q.shape[2]
        if self._is_xqa:
            q = _padded_heads(q)
        keys = LibraryBackend.filled(step.keys)[layer.group]
        arguments = (
            queries_like(q, layer.cache),
            layer.cache,
            self._workspace,
            NOPE,
            LatentRows.LATENT_DIM,
            LatentRows.ROPE_DIM,
            keys.page_table,
            keys.lens,
            step.tables.max_seqlen_k,
        )
        result: torch.Tensor
        if self._is_xqa:
            result = self.kernels.xqa_batch_decode_with_kv_cache_mla(
                *arguments,
                out=q.new_empty((len(q), XQA_HEADS, LatentRows.LATENT_DIM)),
                bmm1_scale=layer.scale,
                bmm2_scale=layer.kv_scale,
            )
            return result[:, None, :heads]
        result = self.kernels.trtllm_batch_decode_with_kv_cache_mla(
            *arguments,
            out=out,
            bmm1_scale=layer.scale * layer.kv_scale,
            bmm2_scale=layer.kv_scale,
            backend="trtllm-gen",
        )
        return result


def _padded_heads(q: torch.Tensor) -> torch.Tensor:
    """[B, 1, 128, 576], as XQA takes it. Raises InvalidInput for more queries or heads."""
    _, queries, heads, _ = q.shape
    if queries != 1 or heads > XQA_HEADS:
        raise InvalidInput(
            "q",
            got=f"{queries} queries a request of {heads} heads",
            expected=f"one of at most {XQA_HEADS}",
        )
    return torch.nn.functional.pad(q, (0, 0, 0, XQA_HEADS - heads)) if heads < XQA_HEADS else q


def _whole_tiles(num_keys: int) -> int:
    return -(-num_keys // TILE) * TILE


def _keep_to_own_pages(keys: Keys, page_size: int) -> None:
    """Repeat a request's last page to the end of its row: kernels load whole tiles of a table.

    Other pages may hold values that are not finite, and a weight of 0 makes no zero of those.
    """
    table = keys.page_table
    last = (keys.lens.clamp(min=1) - 1).div(page_size, rounding_mode="floor").unsqueeze(1)
    columns = torch.arange(table.shape[1], device=table.device).expand(len(table), -1)
    table.copy_(table.gather(1, torch.minimum(columns, last)))


make = KernelLibrary(
    address="nvidia/trtllm_mla",
    backend=TRTLLMMLABackend,
    providers={"flashinfer": partial(KernelLibrary.imported, TRTLLMMLAKernels, "flashinfer.mla")},
    trial=rehearse,
    hint=HINT,
)
