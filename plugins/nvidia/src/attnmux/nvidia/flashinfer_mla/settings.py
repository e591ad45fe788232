"""What the options, the request and the layers come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from attnmux.core.context import BackendContext
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.flashinfer_mla.heads import MOST
from attnmux.nvidia.latent import check_latent, check_plain
from attnmux.nvidia.pools import SIXTEEN_BITS

MIB = 1 << 20

WORKSPACE_BYTES = 256 * MIB

LEAST_WORKSPACE_BYTES = 2 * 160 * 64 * (512 * 2 + 4)
"""What `MLAPlan` in scheduler.cuh takes on the largest devices, of 160 SMs, whatever the step: for
each SM twice 64 rows of partial output and their LSE."""

WIDENED = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all plans of one backend have in common."""

    dtype: torch.dtype
    """Of Q, of the output and of the keys that kernels read."""
    widens: bool
    """The pool's rows are of 8 bits, and copied to `dtype` before a kernel reads them."""
    page_size: int
    """Of the view that the kernels have of the pool; 1 of rows that are copied."""
    backend: str
    """Kernels, by the library's names."""
    workspace_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGroup:
    """What a plan fixes. Layers that agree on it share one."""

    num_heads: int
    scaling: float
    pool_group: int
    """As `KVPool.group_of`."""
    layer_id: int = field(compare=False)
    """One of the layers."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> PlanGroup:
        """Raises InvalidInput for a layer that the kernels do not serve."""
        check_latent(layer)
        check_plain(layer)
        if layer.tp_q_head_num > MOST:
            raise InvalidInput(
                f"layer {layer.layer_id}: tp_q_head_num",
                came=layer.tp_q_head_num,
                expected=f"at most {MOST} heads, the rows of a tile",
            )
        return cls(
            num_heads=layer.tp_q_head_num,
            scaling=layer.scaling,
            pool_group=context.token_to_kv_pool.group_of(layer.layer_id),
            layer_id=layer.layer_id,
        )


def read_settings(context: BackendContext, options: Mapping[str, object]) -> Settings:
    """Raises InvalidInput for what no kernel serves."""
    request, pool = context.request, context.token_to_kv_pool
    dtype = torch_dtype(request.dtype) if request.dtype else None
    if dtype not in SIXTEEN_BITS:
        raise InvalidInput("request.dtype", came=request.dtype, expected="bfloat16 or float16")
    widens = pool.dtype == WIDENED
    if not widens and pool.dtype != dtype:
        raise InvalidInput(
            "token_to_kv_pool", came=pool.dtype, expected=f"{dtype}, as Q is, or {WIDENED}"
        )
    workspace_bytes = int(str(options["workspace_bytes"])) or WORKSPACE_BYTES
    if workspace_bytes < LEAST_WORKSPACE_BYTES:
        raise InvalidInput(
            "flashinfer_mla.workspace_bytes",
            came=workspace_bytes,
            expected=f"{LEAST_WORKSPACE_BYTES - workspace_bytes} bytes more, "
            f"{LEAST_WORKSPACE_BYTES}, or 0 for {WORKSPACE_BYTES}",
        )
    return Settings(
        dtype=dtype,
        widens=widens,
        page_size=1 if widens else pool.page_size,
        backend=str(options["backend"]),
        workspace_bytes=workspace_bytes,
    )
