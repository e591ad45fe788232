"""FlashAttention 4 (CuTe DSL) for prefill: one call of the library for each layer, over the pool's
own pages.

LSE is a natural logarithm, [Hq, T], with `qv` [T, Hq]; sinks are included. Causality counts from
the end of the keys. Over a latent, a logit is q · k + qv · v, the absorbed one: `q` and K are the
rotary parts, `qv` and V the latents. The library gives garbage for a request with queries and
without keys; in an extend step there is none, as each token sees itself. It allocates its output.
Rows that no request owns keep the allocator's leftovers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from attnmux.core import ForwardMode, GraphUnsupported, InvalidInput
from attnmux.core.plugin import (
    KernelLibrary,
    KeyGroup,
    LatentRows,
    PagedBackend,
    PagedLayer,
    PageTables,
    Rows,
    rehearse,
)
from attnmux.nvidia.kernel_rows import store_lse
from attnmux.nvidia.packed_values import bounded

if TYPE_CHECKING:
    from attnmux.core import (
        AttentionBackend,
        AttentionCall,
        ForwardBatch,
        LayerSpec,
    )

REGULAR = 16
"""For dims that are multiples of it, the library does not check where a row ends."""
TILE = 128
"""Rows of a tile of the kernel over latents, which heads are packed into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FA4Kernels:
    """Functions of `flash_attn.cute`."""

    flash_attn_varlen_func: Callable[..., Any]
    """Attention of packed queries, over a paged cache or over packed K and V. It returns a new
    output, and LSE or None."""


@dataclass(kw_only=True, slots=True, eq=False)
class FA4Step:
    """A prefill step."""

    tables: PageTables
    may_pad: bool
    """Whether tokens of no request may follow those of all requests."""
    unowned: torch.Tensor | None = None
    """[T, 1, 1] bool: the rows of no request. Set by `fill_step` if there may be one."""


class FA4Backend(PagedBackend[FA4Kernels, PagedLayer, FA4Step, None]):
    """Prefill of MHA, GQA and MLA; decoding, verification and drafts are another backend's."""

    def prepare_layer(self, layer: LayerSpec) -> PagedLayer:
        _check_layer(layer)
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "causal": True,
            "softcap": layer.logit_cap,
            # The library reads no other dtype.
            "learnable_sink": layer.sinks_in(torch.bfloat16),
            # In one part, a request's bits depend on nothing else in its batch.
            "num_splits": 1,
        }
        heads = layer.tp_q_head_num
        if layer.qk_head_dim % REGULAR or layer.v_head_dim % REGULAR:
            # Unpacked heads are loaded by TMA; packed ones that do not fill a tile do not compile.
            arguments["pack_gqa"] = False
        elif layer.kind == "mla" and TILE % heads and heads % TILE:
            arguments["pack_gqa"] = False  # by default heads are packed, and tiles must be whole
        if layer.layer_id not in self.context.token_to_kv_pool.layer_ids:
            return PagedLayer(arguments=arguments)
        self.context.check_sixteen_bits()
        group = KeyGroup.of(layer, self.context)
        if layer.kind == "mla":
            rows = self.context.latent_pages(layer, group.page_size)
            kv = rows[..., LatentRows.LATENT_DIM :], rows[..., : LatentRows.LATENT_DIM]
        else:
            kv = self.context.kv_pages(layer, group.page_size)
        return PagedLayer(arguments=arguments, group=group, kv=kv)

    def plan_step(self, batch: ForwardBatch, buffers: None) -> FA4Step:
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            raise InvalidInput(
                "forward_mode",
                got=batch.forward_mode.name,
                expected="EXTEND or MIXED: other steps are for the backends of their phases",
            )
        lens = batch.extend_seq_lens_cpu
        return FA4Step(
            tables=PageTables.of(batch, self.context, {}),
            may_pad=lens is None or int(lens.sum()) < batch.num_tokens,
        )

    def fill_step(self, step: FA4Step, batch: ForwardBatch) -> None:
        step.tables.fill(batch, self.key_groups, self.context)
        if step.may_pad:
            step.unowned = step.tables.unowned_rows(batch)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> None:
        raise GraphUnsupported("fa4 serves prefill, which is not captured in a graph")

    def attend(
        self, call: AttentionCall, layer: PagedLayer, step: FA4Step, batch: ForwardBatch
    ) -> torch.Tensor:
        is_latent = call.layer.kind == "mla"
        if is_latent:
            q, qv = Rows.aligned(call.rotary_queries()), Rows.aligned(call.q)
        else:
            q, qv = Rows.aligned(call.q), None
        result, lse = self.kernels.flash_attn_varlen_func(
            q=q,
            qv=qv,
            cu_seqlens_q=step.tables.query_bounds(q.device),
            max_seqlen_q=step.tables.max_seqlen_q,
            return_lse=call.lse is not None,
            **_keys(call, layer, step.tables),
            **layer.arguments,
        )
        if call.lse is not None:
            if is_latent:
                call.lse.copy_(lse)
            else:
                store_lse(lse, call.lse, None)
        attended: torch.Tensor = result
        return attended if step.unowned is None else attended.masked_fill_(step.unowned, 0)


def _keys(call: AttentionCall, layer: PagedLayer, tables: PageTables) -> dict[str, Any]:
    """The keys of the call, or the layer's in the pool, by the library's names."""
    k, v = (call.k_rope, call.k) if call.layer.kind == "mla" else (call.k, call.v)
    if k is not None and v is not None and not call.save_kv_cache:
        call.check_keys_dtype(k, v)
        return {
            "k": Rows.aligned(k),
            "v": Rows.aligned(bounded(v, tables.batch_size)),
            "cu_seqlens_k": tables.query_bounds(k.device),
            "max_seqlen_k": tables.max_seqlen_q,
        }
    if layer.group is None or layer.kv is None:
        raise call.layer.not_in_pool()
    keys = tables.keys[layer.group]
    return {
        "k": layer.kv[0],
        "v": layer.kv[1],
        "seqused_k": keys.lens,
        "page_table": keys.page_table,
        "max_seqlen_k": tables.max_seqlen_k,
    }


def _check_layer(layer: LayerSpec) -> None:
    if layer.kind == "mla":
        LatentRows.check(layer)
        return
    unserved = {
        "is_causal=False": not layer.is_causal,
        "is_cross_attention": layer.is_cross_attention,
        "sliding_window_size": layer.sliding_window_size >= 0,
        "attention_chunk_size": layer.attention_chunk_size > 0,
    }
    got = [name for name, is_set in unserved.items() if is_set]
    if got:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=" and ".join(got),
            expected="causal attention to all keys before a token",
        )


def compile_kernels(backend: AttentionBackend) -> None:
    """Rehearse short steps and long ones: on SM100 a kernel takes one tile of queries or two.

    If results must not depend on the batch, a step counts as long as the longest context.
    """
    rehearse(backend)
    context = backend.context
    longest = replace(context, request=replace(context.request, deterministic=True))
    rehearse(FA4Backend(longest, backend.options, cast("FA4Backend", backend).kernels))


make = KernelLibrary(
    address="nvidia/fa4",
    backend=FA4Backend,
    providers={"flash_attn.cute": partial(KernelLibrary.imported, FA4Kernels, "flash_attn.cute")},
    trial=compile_kernels,
    hint="flash_attn.cute compiles its kernels when they are first called, with the releases of "
    "nvidia-cutlass-dsl and quack-kernels that it was made for; pip install 'attnmux-nvidia[fa4]'",
)
