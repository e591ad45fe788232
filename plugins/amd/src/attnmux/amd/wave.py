"""Wave's kernels: MHA and GQA by the slots of the keys, whatever the page size.

Decode splits the keys of each request and merges the parts in a second kernel. Other steps attend
to cached rows by their slots, then to the new tokens' own rows. No kernel returns LSE, reads a mask
or skips keys outside of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.amd.slot_lists import SlotBuffers, SlotLists, slot_groups, slot_lists, without_keys
from attnmux.amd.wave_kernels import PROVIDERS, Compiled, Heads, WaveKernels
from attnmux.core import InvalidInput
from attnmux.core.plugin import KernelLibrary, LibraryBackend, PageTables, Rows, rehearse

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WaveLayer:
    """A layer with its compiled kernels."""

    decode: tuple[Compiled, Compiled]
    extend: Compiled
    group: int
    """The result of `KVPool.group_of`."""
    kv: tuple[torch.Tensor, torch.Tensor] | None
    """[slots, Hkv, D] and [slots, Hkv, Dv], the pool's memory; None for a layer that it does not
    store."""


@dataclass(kw_only=True, slots=True, eq=False)
class WaveStep:
    """A step of any phase."""

    tables: PageTables
    """Its shape and the bounds of queries; no tables."""
    buffers: SlotBuffers | None
    cached: dict[int, SlotLists] | None = None
    """By group of the pool; set by `fill_step`, as all that follows."""
    hidden: torch.Tensor | None = None
    """[T, 1, 1] bool: rows that see no key or belong to no request."""


class WaveBackend(LibraryBackend[WaveKernels, WaveLayer, WaveStep, SlotBuffers]):
    """MHA and GQA of 16-bit floats."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: WaveKernels
    ) -> None:
        """options: `num_kv_splits`, parts of each request's keys in decode.

        Raises InvalidInput for layers, pools and options that the kernels do not serve.
        """
        self._splits = int(str(options.get("num_kv_splits", 8)))
        InvalidInput.check_at_least(1, "num_kv_splits", self._splits)
        self._compiled: dict[Heads, tuple[tuple[Compiled, Compiled], Compiled]] = {}
        super().__init__(context, options, kernels)
        self._groups = slot_groups(context)

    def prepare_layer(self, layer: LayerSpec) -> WaveLayer:
        layer.check_features("logit_cap")
        self.context.check_sixteen_bits()
        decode, extend = self._kernels_of(layer)
        pool = self.context.token_to_kv_pool
        if layer.layer_id not in pool.layer_ids:
            return WaveLayer(decode=decode, extend=extend, group=-1, kv=None)
        k, v = (pages.squeeze(1) for pages in self.context.kv_pages(layer, 1))
        for name, rows in (("K", k), ("V", v)):
            if not rows.is_contiguous():
                got = f"strides {rows.stride()} of {name}"
                raise InvalidInput("token_to_kv_pool", got=got, expected="rows side by side")
        group = pool.group_of(layer.layer_id)
        return WaveLayer(decode=decode, extend=extend, group=group, kv=(k, v))

    def plan_step(self, batch: ForwardBatch, buffers: SlotBuffers | None) -> WaveStep:
        return WaveStep(tables=PageTables.of(batch, self.context, {}), buffers=buffers)

    def fill_step(self, step: WaveStep, batch: ForwardBatch) -> None:
        step.tables.fill(batch, (), self.context)
        step.cached = slot_lists(batch, self.context, self._groups, step.buffers)
        if batch.forward_mode.is_decode():
            step.hidden = without_keys(batch, step.buffers)
        else:
            step.hidden = step.tables.unowned_rows(batch)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> SlotBuffers:
        return SlotBuffers.of(max_bs, self.context)

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: the kernels give no LSE")

    def attend(
        self, call: AttentionCall, layer: WaveLayer, step: WaveStep, batch: ForwardBatch
    ) -> torch.Tensor:
        out = call.out
        if out is None or not Rows.is_writable(out):
            out = call.q.new_empty((*call.q.shape[:2], call.layer.v_head_dim))
        if batch.forward_mode.is_decode():
            self._decode(call, out, layer, step)
        else:
            self._extend(call, out, layer, step, batch)
        return out if step.hidden is None else out.masked_fill_(step.hidden, 0)

    def _decode(
        self, call: AttentionCall, out: torch.Tensor, layer: WaveLayer, step: WaveStep
    ) -> None:
        if layer.kv is None:
            raise call.layer.not_in_pool()
        cached = LibraryBackend.filled(step.cached)[layer.group]
        attend, merge = layer.decode
        parts = out.new_empty((self._splits, *out.shape), dtype=torch.float32)
        parts_lse = out.new_empty((self._splits, *out.shape[:2]), dtype=torch.float32)
        q = Rows.aligned(call.q.contiguous())
        attend(q, *layer.kv, cached.indptr, cached.indices, parts, parts_lse)
        merge(parts, parts_lse, cached.indptr, out)

    def _extend(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        layer: WaveLayer,
        step: WaveStep,
        batch: ForwardBatch,
    ) -> None:
        bounds = step.tables.query_bounds(out.device)
        if call.k is not None and call.v is not None:
            k, v = Rows.aligned(call.k.contiguous()), Rows.aligned(call.v.contiguous())
        elif layer.kv is None:
            raise call.layer.not_in_pool()
        else:
            slots = self.context.token_to_kv_pool.translate(
                batch.out_cache_loc, call.layer.layer_id
            )
            k, v = (rows[slots] for rows in layer.kv)
        call.check_keys_dtype(k, v)
        if call.has_own_kv or layer.kv is None:
            rows, cached = (k, v), SlotLists(indptr=torch.zeros_like(bounds), indices=bounds)
        else:
            rows, cached = layer.kv, LibraryBackend.filled(step.cached)[layer.group]
        q, longest = Rows.aligned(call.q.contiguous()), step.tables.max_seqlen_q
        layer.extend(q, k, v, *rows, bounds, cached.indptr, cached.indices, longest, out)

    def _kernels_of(self, layer: LayerSpec) -> tuple[tuple[Compiled, Compiled], Compiled]:
        heads = Heads(
            target=self.context.platform.arch,
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            dtype=self.context.token_to_kv_pool.dtype,
            scaling=layer.scaling,
            logit_cap=layer.logit_cap,
        )
        if heads not in self._compiled:
            decode = self.kernels.decode(heads, self._splits)
            extend = self.kernels.extend(heads, self.context.max_context_len)
            self._compiled[heads] = decode, extend
        return self._compiled[heads]


make = KernelLibrary(
    address="amd/wave",
    backend=WaveBackend,
    providers=PROVIDERS,
    trial=rehearse,
    hint="Wave compiles for MI300 and MI350; pip install 'attnmux-amd[wave]'",
)
