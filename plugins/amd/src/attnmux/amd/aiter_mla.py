"""AITER's assembly kernels that decode MLA, by the slots of the keys, whatever the page size.

`mla_decode_fwd` takes 16 or 128 query heads of 512 + 64 dims, in bfloat16 or, with the pool, in the
device's e4m3. It writes NaN for a request without keys, and fills no LSE.

How many parts it splits keys into lies in a tensor of `get_meta_param`, whose cache forgets all but
the last: a captured launch would read memory that others use. It is made before the capture, which
then finds it in the cache, and kept for as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attnmux.amd.slot_lists import SlotBuffers, SlotLists, slot_groups, slot_lists, without_keys
from attnmux.core import (
    LATENT_DIM,
    ForwardMode,
    InvalidInput,
    KernelLibrary,
    LibraryBackend,
    check_latent,
    filled,
    imported,
    is_writable,
    joined,
    latent_pages,
    quantise,
    rehearse,
)

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

HEADS = (16, 128)
"""`get_meta_param` refuses other numbers."""
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
"""`aiter.dtypes.fp8`: the matrix units of each read their own e4m3."""
MOST_BYTES = 1 << 32
"""Of a layer's rows. asm_mla.cu passes the stride of a row in 32 bits, and AITER's tests of 0.1.7
stay below: what the kernels do beyond is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AiterMLAKernels:
    """Functions of `aiter.mla`."""

    mla_decode_fwd: Callable[..., Any]
    """Attention of packed queries to latents by their slots; writes `o`."""
    get_meta_param: Callable[..., Any]
    """The parts of each request's keys, which `mla_decode_fwd` asks for too."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AiterMLALayer:
    """A layer's arguments that no step changes."""

    group: int
    """The result of `KVPool.group_of`."""
    rows: torch.Tensor
    """[slots, 1, 1, 576], the pool's memory."""
    scale: float
    q_scale: torch.Tensor | None
    """[1] float32 on the device, 1; None in bfloat16."""
    kv_scale: torch.Tensor | None
    """[1] float32 on the device, what rows are multiplied by; None in bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AiterMLABuffers:
    """What graphs replay with."""

    slots: SlotBuffers
    bounds: torch.Tensor
    """[max_bs + 1] int32: 0, 1, 2, …"""
    ones: torch.Tensor
    """[max_bs] int32."""
    parts: list[object] = field(default_factory=list)
    """What `get_meta_param` returned for each capture."""

    @classmethod
    def of(cls, max_bs: int, context: BackendContext) -> AiterMLABuffers:
        bounds, ones = _each_one(max_bs, context.device)
        return cls(slots=SlotBuffers.of(max_bs, context), bounds=bounds, ones=ones)


@dataclass(kw_only=True, slots=True, eq=False)
class AiterMLAStep:
    """A decode step."""

    buffers: AiterMLABuffers | None
    bounds: torch.Tensor
    """[B + 1] int32, where each request's query begins."""
    last_page_lens: torch.Tensor
    """[B] int32: a page of the kernel is a token."""
    cached: dict[int, SlotLists] | None = None
    """By group of the pool; set by `fill_step`."""
    hidden: torch.Tensor | None = None
    """[B, 1, 1] bool: requests without keys; set by `fill_step`."""


class AiterMLABackend(
    LibraryBackend[AiterMLAKernels, AiterMLALayer, AiterMLAStep, AiterMLABuffers]
):
    """Decoding of MLA; prefill, verification and drafts are another backend's."""

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
        check_latent(layer)
        if layer.tp_q_head_num not in HEADS:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                got=f"{layer.tp_q_head_num} query heads",
                expected=" or ".join(map(str, HEADS)),
            )
        pool = self.context.token_to_kv_pool
        rows = latent_pages(layer, self.context, 1)
        if (nbytes := rows.shape[0] * rows.stride(0) * rows.element_size()) > MOST_BYTES:
            raise InvalidInput(
                "token_to_kv_pool",
                got=f"{nbytes} bytes a layer",
                expected=f"at most {MOST_BYTES}: name another backend for decode",
            )
        scales: tuple[torch.Tensor | None, ...] = (None, None)
        if rows.dtype != torch.bfloat16:
            kv_scale, _ = pool.read_scales(layer.k_scale, layer.v_scale)
            scales = tuple(rows.new_full((1,), one, dtype=torch.float32) for one in (1, kv_scale))
        return AiterMLALayer(
            group=pool.group_of(layer.layer_id),
            rows=rows,
            scale=layer.scaling,
            q_scale=scales[0],
            kv_scale=scales[1],
        )

    def plan_step(self, batch: ForwardBatch, buffers: AiterMLABuffers | None) -> AiterMLAStep:
        mode, batch_size = batch.forward_mode, batch.batch_size
        if mode is not ForwardMode.DECODE:
            raise InvalidInput(
                "forward_mode",
                got=mode.name,
                expected="DECODE: other steps are for the backends of their phases",
            )
        if buffers is None:
            bounds, ones = _each_one(batch_size, self.context.device)
            return AiterMLAStep(buffers=None, bounds=bounds, last_page_lens=ones)
        # With the arguments of `mla_decode_fwd`, so that it finds them in the cache
        room, dtype = len(buffers.slots.slots), self.context.token_to_kv_pool.dtype
        parts = self.kernels.get_meta_param(None, batch_size, room, self._heads, 1, dtype)
        buffers.parts.append(parts)
        return AiterMLAStep(
            buffers=buffers,
            bounds=buffers.bounds[: batch_size + 1],
            last_page_lens=buffers.ones[:batch_size],
        )

    def fill_step(self, step: AiterMLAStep, batch: ForwardBatch) -> None:
        of_slots = step.buffers.slots if step.buffers else None
        step.cached = slot_lists(batch, self.context, self._groups, of_slots)
        step.hidden = without_keys(batch, of_slots)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> AiterMLABuffers:
        return AiterMLABuffers.of(max_bs, self.context)

    def attend(
        self, call: AttentionCall, layer: AiterMLALayer, step: AiterMLAStep, batch: ForwardBatch
    ) -> torch.Tensor:
        if call.lse is not None:
            raise InvalidInput("lse", got="a tensor", expected="None: the library gives no LSE")
        q, out = joined(call.q, call.q_rope), call.out
        if out is None or not is_writable(out):
            out = q.new_empty((*q.shape[:2], LATENT_DIM))
        cached = filled(step.cached)[layer.group]
        self.kernels.mla_decode_fwd(
            q=quantise(q, layer.rows.dtype, None),
            kv_buffer=layer.rows,
            o=out,
            qo_indptr=step.bounds,
            kv_indptr=cached.indptr,
            kv_indices=_one_each(cached.indices, batch.batch_size),
            kv_last_page_lens=step.last_page_lens,
            max_seqlen_q=1,
            sm_scale=layer.scale,
            q_scale=layer.q_scale,
            kv_scale=layer.kv_scale,
        )
        return out if step.hidden is None else out.masked_fill_(step.hidden, 0)


def _each_one(batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of one query a request, [B + 1] int32, and as many ones, [B] int32."""
    bounds = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
    return bounds, torch.ones(batch_size, dtype=torch.int32, device=device)


def _one_each(slots: torch.Tensor, batch_size: int) -> torch.Tensor:
    """The list with room for a key of each request at least: over fewer in e4m3, `get_meta_param`
    splits them into 0 parts and fails. Nothing reads what follows the last key."""
    missing = batch_size - len(slots)
    return torch.nn.functional.pad(slots, (0, missing)) if missing > 0 else slots


def _check_dtypes(context: BackendContext) -> None:
    stored, asked = context.token_to_kv_pool.dtype, context.request.dtype
    if asked not in (None, "bfloat16"):
        raise InvalidInput("dtype", got=asked, expected="bfloat16")
    fp8 = FP8.get(context.platform.arch)
    if stored not in (torch.bfloat16, fp8):
        expected = f"{torch.bfloat16} or the device's e4m3, {fp8}"
        raise InvalidInput("token_to_kv_pool", got=stored, expected=expected)


make = KernelLibrary(
    address="amd/aiter_mla",
    backend=AiterMLABackend,
    providers={"aiter": partial(imported, AiterMLAKernels, "aiter.mla")},
    trial=rehearse,
    hint="AITER needs ROCm's PyTorch and Triton, and builds its launcher with hipcc; "
    "pip install 'attnmux-amd[aiter]'",
)
