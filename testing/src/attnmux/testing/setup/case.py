"""The setup of a case: layers, pools and the context that a backend is built with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from attnmux.core import (
    BackendContext,
    DeviceGraphs,
    KVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    Platform,
    ReqToTokenPool,
    SWAKVPool,
    TunedLaunch,
    Workspace,
    foreign_pool,
    torch_dtype,
)
from attnmux.testing.cases.case import Case, Step

GAP = 64
"""Values between the rows of a strided MLA pool."""

SPARE_PAGES = 5
"""Pages of a pool that no request of a step uses, without the reserved one."""

Graphs: TypeAlias = Callable[[torch.device], DeviceGraphs]
"""Makes the graphs of a device."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseSetup:
    """A case with the context of its backend and the generator of its random numbers.

    Numbers are drawn on the host, so that a seed gives the same setup on every device.
    """

    case: Case
    context: BackendContext
    generator: torch.Generator = field(repr=False)
    graphs: Graphs | None = None
    """See `Candidate.graphs`."""

    def random(self, *shape: int) -> torch.Tensor:
        """Standard normal values of the case's dtype, on the device."""
        values = torch.randn(shape, generator=self.generator)
        return values.to(device=self.context.device, dtype=torch_dtype(self.case.dtype))


def make_setup(
    case: Case,
    platform: Platform,
    device: torch.device | str,
    *,
    seed: int = 0,
    launches: tuple[TunedLaunch, ...] = (),
    graphs: Graphs | None = None,
) -> CaseSetup:
    """The setup of a case: pools with room for each of its steps, and a context over them.

    device: torch's name of the device for all tensors. seed: of all random numbers. launches: as
    `BackendContext.launches`. graphs: as in `Candidate`.
    """
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    # A graph may pad a batch to up to twice its size.
    max_batch_size = max(1, 2 * max(len(step.lens) + step.padding for step in case.steps))
    layers = make_layers(case, device, generator)
    context = BackendContext(
        request=case.request,
        platform=platform,
        device=device,
        layers=layers,
        req_to_token_pool=ReqToTokenPool(
            case.first_row - 1 + max_batch_size, case.max_context_len + case.spare_columns, device
        ),
        token_to_kv_pool=_make_pool(case, layers, device),
        workspace=Workspace(device),
        max_batch_size=max_batch_size,
        max_context_len=case.max_context_len,
        launches=launches,
    )
    return CaseSetup(case=case, context=context, generator=generator, graphs=graphs)


def make_layers(
    case: Case, device: torch.device, generator: torch.Generator
) -> tuple[LayerSpec, ...]:
    """The case's layers. Ids have gaps, settings differ from layer to layer, and cross attention is
    the last layer."""
    latent, ids = case.latent, case.layer_ids or range(1, 2 * len(case.windows), 2)
    rank, rope = case.kv_lora_rank or 0, case.qk_rope_head_dim or 0
    last = len(case.windows) - 1
    return tuple(
        LayerSpec(
            layer_id=layer_id,
            tp_q_head_num=case.num_q_heads,
            tp_k_head_num=case.num_kv_heads,
            tp_v_head_num=case.num_kv_heads,
            qk_head_dim=rank + rope if latent else case.head_dim,
            v_head_dim=rank if latent else case.v_head_dim,
            scaling=case.head_dim**-0.5 if case.scaling is None else case.scaling * (index + 1),
            kind="mla" if case.kind == "nsa" else case.kind,
            dual_chunk_len=case.dual_chunk_len,
            logit_cap=(case.logit_cap or 0.0) * (index + 1),
            sliding_window_size=-1 if window is None else window,
            attention_chunk_size=case.attention_chunk or 0 if index % 2 == 0 else 0,
            is_causal=not case.is_encoder,
            k_scale=case.kv_scales[0] * (index + 1) if case.kv_scales else None,
            v_scale=case.kv_scales[1] * (index + 1) if case.kv_scales else None,
            is_cross_attention=case.cross_attention and index == last,
            sinks=_sinks(case, generator).to(device) if case.sinks else None,
            alibi_slopes=_slopes(case, generator).to(device)
            if case.alibi and not (case.cross_attention and index == last)
            else None,
            relative_bias=_table(case, generator).to(device)
            if case.relative_reach is not None and not (case.cross_attention and index == last)
            else None,
        )
        for index, (layer_id, window) in enumerate(zip(ids, case.windows, strict=True))
    )


def _sinks(case: Case, generator: torch.Generator) -> torch.Tensor:
    """[Hq] float32. Those of every other head weigh as much as all keys of the longest request
    together: among a thousand keys, one as small as a logit would drown."""
    sinks = torch.randn(case.num_q_heads, generator=generator)
    keys = max((total for step in case.steps for total in step.totals), default=1)
    sinks[::2] += math.log(max(keys, 1))
    return sinks


def _slopes(case: Case, generator: torch.Generator) -> torch.Tensor:
    """[Hq] float32 between 2 ** -8 and 1, as the geometric ones of models are."""
    return torch.exp2(-8 * torch.rand(case.num_q_heads, generator=generator))


def _table(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Random values of relative position biases, as `LayerSpec.relative_bias`."""
    reach = case.relative_reach or 0
    columns = 2 * reach + 1 if case.is_encoder else reach + 1
    return torch.randn((case.num_q_heads, columns), generator=generator)


def pages_of(length: int, page_size: int) -> int:
    """Pages that hold `length` tokens."""
    return -(-length // page_size)


def _make_pool(case: Case, layers: tuple[LayerSpec, ...], device: torch.device) -> KVPool:
    if not case.window_pool:
        return _one_pool(case, layers, device)
    in_window = [layer for layer in layers if layer.sliding_window_size >= 0]
    others = [layer for layer in layers if layer.sliding_window_size < 0]
    return SWAKVPool(
        full=_one_pool(case, tuple(others), device), swa=_one_pool(case, tuple(in_window), device)
    )


def _one_pool(case: Case, layers: tuple[LayerSpec, ...], device: torch.device) -> KVPool:
    pages = SPARE_PAGES + max(_pages_of_step(step, case.page_size) for step in case.steps)
    pages += case.first_page - 1
    size = pages * case.page_size
    dtype = torch_dtype(case.kv_dtype or case.dtype)
    layer_ids = [layer.layer_id for layer in layers]
    if case.strided_kv:
        return _strided_pool(case, layers, size + case.page_size, dtype, device)
    if case.latent:
        return MLATokenToKVPool(
            size=size,
            page_size=case.page_size,
            dtype=dtype,
            layer_ids=layer_ids,
            kv_lora_rank=layers[0].v_head_dim,
            qk_rope_head_dim=layers[0].qk_rope_head_dim,
            device=device,
        )
    return MHATokenToKVPool(
        size=size,
        page_size=case.page_size,
        dtype=dtype,
        layer_ids=layer_ids,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        device=device,
    )


def _strided_pool(
    case: Case,
    layers: tuple[LayerSpec, ...],
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPool:
    """The layout of an engine that keeps K and V of a head in one row; latents have a gap."""
    if not case.latent:
        return side_by_side(layers, num_slots, case.page_size, dtype, device)
    first = layers[0]
    shape = (num_slots, first.tp_k_head_num, first.qk_head_dim + GAP)
    rows = {layer.layer_id: torch.zeros(shape, dtype=dtype, device=device) for layer in layers}
    latents = {layer_id: each[..., : first.qk_head_dim] for layer_id, each in rows.items()}
    return foreign_pool(latents, page_size=case.page_size, kv_lora_rank=first.v_head_dim)


def side_by_side(
    layers: Sequence[LayerSpec],
    num_slots: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPool:
    """A pool of zeros that keeps K and V of a head in one row, as vLLM does."""
    first = layers[0]
    dims = [first.qk_head_dim, first.v_head_dim]
    shape = (num_slots, first.tp_k_head_num, sum(dims))
    buffers = {
        layer.layer_id: torch.zeros(shape, dtype=dtype, device=device).split(dims, dim=-1)  # type: ignore[no-untyped-call]  # torch's own
        for layer in layers
    }
    return foreign_pool(buffers, page_size=page_size)


def _pages_of_step(step: Step, page_size: int) -> int:
    return sum(pages_of(total, page_size) for total in step.totals)
