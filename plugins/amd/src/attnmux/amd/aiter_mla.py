"""AITER's assembly kernels for MLA, by the slots of the keys, whatever the page size.

`mla_decode_fwd` splits the keys of decode steps and of chains of a few drafts. It takes 16 or 128
query heads of 512 + 64 dims, in bfloat16 or, with the pool, in the device's e4m3. Other steps are
`mla_prefill_fwd`, in bfloat16 alone. Both write NaN for a request without keys, and fill no LSE.
Decode takes other multiples of 16 heads if its work is planned ahead (`aiter_mla_work.py`).

How many parts it splits keys into lies in a tensor of `get_meta_param`, whose cache forgets all but
the last: a captured launch would read memory that others use. It is made before the capture, which
then finds it in the cache, and kept for as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from attnmux.amd.aiter_mla_steps import (
    AiterMLABuffers,
    AiterMLALayer,
    AiterMLAStep,
    one_each,
)
from attnmux.amd.aiter_mla_work import HEADS as PLANNED_HEADS
from attnmux.amd.aiter_mla_work import PlannedWork
from attnmux.amd.slot_lists import SlotLists, slot_groups, slot_lists, without_keys
from attnmux.core import InvalidInput, KVPool
from attnmux.core.plugin import (
    KernelLibrary,
    LatentRows,
    LibraryBackend,
    PageTables,
    Rows,
    rehearse,
)

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

HEADS = (16, 128)
"""`get_meta_param` refuses other numbers; for some of them, work is planned ahead."""
DRAFTS: Mapping[tuple[int, bool], Collection[int]] = MappingProxyType(
    {(16, True): range(1, 5), (16, False): (1, 2, 4), (128, False): (1, 2, 4)}
)
"""By heads, and whether rows are bfloat16: queries of each request that `mla_decode_fwd` takes, by
the names of the code objects that asm_mla.cu launches. That of 128 heads in bfloat16 has no mask in
its name, and asm_mla.cu sends 3 queries over e4m3 to the code object of 4."""
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
"""`aiter.dtypes.fp8`: the matrix units of each read their own e4m3."""
MOST_BYTES = 1 << 32
"""Bytes of a layer's rows, at most. asm_mla.cu passes the stride of a row in 32 bits, and AITER's
tests of 0.1.7 stay below. The kernels' behaviour beyond it is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AiterMLAKernels:
    """Functions of `aiter.mla`, and two of `aiter` that plan its work."""

    mla_decode_fwd: Callable[..., Any]
    """Attention of as many packed queries of each request to latents by their slots; writes `o`."""
    mla_prefill_fwd: Callable[..., Any]
    """The same for any number of queries of each request."""
    get_meta_param: Callable[..., Any]
    """The parts of each request's keys, which `mla_decode_fwd` asks for too."""
    get_mla_metadata_info_v1: Callable[..., Any]
    """Shapes and dtypes of a plan."""
    get_mla_metadata_v1: Callable[..., Any]
    """Plans on the device."""


class AiterMLABackend(
    LibraryBackend[AiterMLAKernels, AiterMLALayer, AiterMLAStep, AiterMLABuffers]
):
    """MLA; draft trees, and over e4m3 prompts, are another backend's."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: AiterMLAKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        layers = [layer for layer in context.layers if layer.kind == "mla"]
        heads = {layer.tp_q_head_num for layer in layers}
        if len(heads) != 1:
            raise InvalidInput(
                "layers", got=f"query heads {sorted(heads)}", expected="mla with one number of them"
            )
        (self._heads,) = heads
        _check_dtypes(context)
        super().__init__(context, options, kernels, layers)
        self._groups = slot_groups(context)

    def prepare_layer(self, layer: LayerSpec) -> AiterMLALayer:
        LatentRows.check(layer)
        if layer.tp_q_head_num not in (*HEADS, *PLANNED_HEADS):
            raise InvalidInput(
                f"layer {layer.layer_id}",
                got=f"{layer.tp_q_head_num} query heads",
                expected="a multiple of 16, at most 128",
            )
        pool = self.context.token_to_kv_pool
        if layer.layer_id not in pool.layer_ids:
            return AiterMLALayer(group=-1, rows=None, scale=layer.scaling)
        rows = self.context.latent_pages(layer, 1)
        if (nbytes := rows.shape[0] * rows.stride(0) * rows.element_size()) > MOST_BYTES:
            raise InvalidInput(
                "token_to_kv_pool",
                got=f"{nbytes} bytes a layer",
                expected=f"at most {MOST_BYTES}: name another backend for decode",
            )
        scales: tuple[torch.Tensor | None, ...] = (None, None)
        if rows.dtype != torch.bfloat16:
            kv_scale, _ = pool.read_scales(layer.k_scale, layer.v_scale)
            scales = tuple(
                rows.new_full((1,), scale, dtype=torch.float32) for scale in (1, kv_scale)
            )
        return AiterMLALayer(
            group=pool.group_of(layer.layer_id),
            rows=rows,
            scale=layer.scaling,
            q_scale=scales[0],
            kv_scale=scales[1],
        )

    def plan_step(self, batch: ForwardBatch, buffers: AiterMLABuffers | None) -> AiterMLAStep:
        tables = PageTables.of(batch, self.context, {})
        mode, batch_size, queries = batch.forward_mode, batch.batch_size, tables.queries_each
        dtype = self.context.token_to_kv_pool.dtype
        splits = mode.is_decode()
        if mode.is_target_verify() and queries is not None:
            splits = queries in DRAFTS.get((self._heads, dtype == torch.bfloat16), ())
        if not splits and (dtype != torch.bfloat16 or self._heads not in HEADS):
            raise InvalidInput(
                "forward_mode",
                got=mode.name if queries is None else f"{mode.name} with {queries} tokens each",
                expected="DECODE or chains of 1, 2 or 4 drafts over e4m3, DECODE alone with other "
                "heads than 16 or 128: other steps are for the backends of their phases",
            )
        if buffers is None:
            ones = torch.ones(batch_size, dtype=torch.int32, device=self.context.device)
            return AiterMLAStep(tables=tables, splits=splits, buffers=None, last_page_lens=ones)
        if self._heads in HEADS and splits:
            # With the arguments of `mla_decode_fwd`, so that it finds them in the cache
            room = len(buffers.slots.slots)
            buffers.kept.append(
                self.kernels.get_meta_param(
                    None, batch_size, room, self._heads, tables.max_seqlen_q, dtype
                )
            )
        buffers.kept.append(work := self._room_for_work(batch_size))
        return AiterMLAStep(
            tables=tables,
            splits=splits,
            buffers=buffers,
            last_page_lens=buffers.ones[:batch_size],
            work=work,
        )

    def _room_for_work(self, batch_size: int) -> PlannedWork | None:
        if self._heads in HEADS or not batch_size:
            return None
        shapes_of, context = self.kernels.get_mla_metadata_info_v1, self.context
        dtype = context.token_to_kv_pool.dtype
        return PlannedWork.of(shapes_of, batch_size, self._heads, dtype, context.device)

    def fill_step(self, step: AiterMLAStep, batch: ForwardBatch) -> None:
        step.tables.fill(batch, (), self.context)
        of_slots = step.buffers.slots if step.buffers else None
        step.cached = slot_lists(batch, self.context, self._groups, of_slots, with_new=True)
        if batch.forward_mode.is_decode():
            step.hidden = without_keys(batch, of_slots)
            step.work = step.work or self._room_for_work(batch.batch_size)
        elif step.tables.queries_each is None:
            step.hidden = step.tables.unowned_rows(batch)
        if step.work is not None:
            lists = next(iter(step.cached.values()))  # all groups have the same lengths
            step.work.fill(self.kernels.get_mla_metadata_v1, lists.indptr, self._heads)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> AiterMLABuffers:
        return AiterMLABuffers.of(max_bs, self.context)

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: the library gives no LSE")

    def attend(
        self, call: AttentionCall, layer: AiterMLALayer, step: AiterMLAStep, batch: ForwardBatch
    ) -> torch.Tensor:
        q, out = LatentRows.joined(call.q, call.q_rope), call.out
        if out is None or not Rows.is_writable(out):
            out = q.new_empty((*q.shape[:2], LatentRows.LATENT_DIM))
        rows, cached = self._keys(call, layer, step)
        arguments = {
            "q": KVPool.quantise(q, rows.dtype, None),
            "kv_buffer": rows,
            "o": out,
            "qo_indptr": step.tables.query_bounds(out.device),
            "kv_indptr": cached.indptr,
            "kv_indices": one_each(cached.indices, batch.batch_size),
            "kv_last_page_lens": step.last_page_lens,
            "max_seqlen_q": step.tables.max_seqlen_q,
            "sm_scale": layer.scale,
        }
        if step.splits:
            more = {"q_scale": layer.q_scale, "kv_scale": layer.kv_scale}
            planned = {} if step.work is None else step.work.arguments()
            self.kernels.mla_decode_fwd(**arguments, **more, **planned)
        else:
            self.kernels.mla_prefill_fwd(**arguments)
        return out if step.hidden is None else out.masked_fill_(step.hidden, 0)

    def _keys(
        self, call: AttentionCall, layer: AiterMLALayer, step: AiterMLAStep
    ) -> tuple[torch.Tensor, SlotLists]:
        """[slots, 1, 1, 576], and the rows of each request: of the pool, or the call's own."""
        if not call.has_own_kv:
            if layer.rows is None:
                raise call.layer.not_in_pool()
            return layer.rows, LibraryBackend.filled(step.cached)[layer.group]
        rows = LatentRows.joined(*call.own_keys(call.k_rope)).unsqueeze(1)
        numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        return rows, SlotLists(indptr=step.tables.query_bounds(rows.device), indices=numbers)


def _check_dtypes(context: BackendContext) -> None:
    stored, dtype = context.token_to_kv_pool.dtype, context.request.dtype
    if dtype not in (None, "bfloat16"):
        raise InvalidInput("dtype", got=dtype, expected="bfloat16")
    fp8 = FP8.get(context.platform.arch)
    if stored not in (torch.bfloat16, fp8):
        expected = f"{torch.bfloat16} or the device's e4m3, {fp8}"
        raise InvalidInput("token_to_kv_pool", got=stored, expected=expected)


make = KernelLibrary(
    address="amd/aiter_mla",
    backend=AiterMLABackend,
    providers={"aiter": partial(KernelLibrary.imported, AiterMLAKernels, "aiter.mla", "aiter")},
    trial=rehearse,
    hint="AITER needs ROCm's PyTorch and Triton, and builds its launcher with hipcc; "
    "pip install 'attnmux-amd[aiter]'",
)
