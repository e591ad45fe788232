"""Kernels and scratch memory, from the options and the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attnmux.core import BackendContext, InvalidInput, torch_dtype
from attnmux.nvidia.flashinfer.layers import PlanGroup
from attnmux.nvidia.flashinfer.shared import MIB

CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
"""Query heads a KV head that decode kernels without tensor cores are made for
(`DISPATCH_GQA_GROUP_SIZE`)."""

HOPPER = 9
"""The major number of its SM version."""

TENSOR_CORE_GROUP = 4
"""From this many query heads a KV head on, tensor cores are faster."""

SPLIT_CTAS = 2 * 160
"""Most parts that keys are cut into: two thread blocks on each SM of the largest devices."""

DECODE_CTAS = 32 * 160
"""Most thread blocks that the largest devices hold at once: of decode without tensor cores."""

_USE = {"on": True, "off": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings that all plans of one backend have in common."""

    dtype: torch.dtype
    """Dtype of Q, of the output, and of K and V that come with a call."""
    kv_dtype: torch.dtype
    """Dtype of the pool."""
    page_size: int
    """Page size of the kernels' view of the pool."""
    prefill_backend: str
    reads_tiles: bool
    """Prefill over K and V of the call loads a request's last tile whole, as fa3 does by TMA
    (`mainloop.cuh`); fa2 and the paged kernels fill the rest with zeros. The library takes fa3 for
    "auto" on Hopper."""
    decode_backend: str
    tensor_cores: bool
    """In decode."""
    deterministic: bool
    """Decode does not split keys: how they are split depends on the rest of the batch."""
    workspace_bytes: int


def read_settings(
    context: BackendContext, options: Mapping[str, object], groups: Sequence[PlanGroup]
) -> Settings:
    """Raises InvalidInput for settings that no kernel serves."""
    request, pool = context.request, context.token_to_kv_pool
    if request.dtype is None:
        raise InvalidInput("request.dtype", got=None, expected="the dtype of Q, for the plans")
    dtype = torch_dtype(request.dtype)
    is_hopper = context.platform.version[:1] == (HOPPER,)
    prefill = str(options.get("prefill_backend", "auto"))
    if prefill == "auto" and not is_hopper:
        # From 0.7 on the library's "auto" also takes cuDNN and CUTLASS on Blackwell. Their rules
        # for rows without keys and for memory past them were not tried.
        prefill = "fa2"
    decode = str(options.get("decode_backend", "auto"))
    for option, chosen in (("prefill_backend", prefill), ("decode_backend", decode)):
        if chosen == "fa3" and pool.dtype != dtype:
            raise InvalidInput(
                f"flashinfer.{option}",
                got=f"'fa3' with a pool of {pool.dtype}",
                expected=f"'fa2' or 'auto': fa3 reads K and V in the dtype of Q, {dtype}",
            )
    use_tensor_cores = str(options.get("use_tensor_cores", "auto"))
    # In an encoder-decoder model decoder tokens begin after the encoder's, in mid-page.
    has_encoder = any(group.view.cross for group in groups)
    return Settings(
        dtype=dtype,
        kv_dtype=pool.dtype,
        page_size=1 if has_encoder else pool.page_size,
        prefill_backend=prefill,
        reads_tiles=prefill in ("auto", "fa3"),
        decode_backend=decode,
        tensor_cores=_tensor_cores(use_tensor_cores, groups, dtype, pool.dtype)
        or request.deterministic,
        deterministic=request.deterministic,
        workspace_bytes=int(str(options.get("workspace_bytes", 0))) or _workspace_bytes(groups),
    )


def _tensor_cores(
    option: str, groups: Sequence[PlanGroup], dtype: torch.dtype, kv_dtype: torch.dtype
) -> bool:
    sizes = {group.group_size for group in groups}
    used = _USE.get(option, kv_dtype != dtype or max(sizes) >= TENSOR_CORE_GROUP)
    unserved = sizes.difference(CUDA_CORE_GROUPS)
    if not used and unserved:
        raise InvalidInput(
            "flashinfer.use_tensor_cores",
            got=f"{option!r} with {max(unserved)} query heads a KV head",
            expected=f"'on' or 'auto': kernels without them serve {CUDA_CORE_GROUPS} heads",
        )
    return used


def _workspace_bytes(groups: Sequence[PlanGroup]) -> int:
    """256 MiB, or 512 MiB if a step that is split over a large device does not fit.

    64 query heads over 4 KV heads of 128 (Qwen3-235B-A22B) take more than 256.
    """
    most = max(
        _scratch_bytes(group, tiles=SPLIT_CTAS // group.num_kv_heads, rows=_tile_rows(group, 1024))
        for group in groups
    )
    return 512 * MIB if most > 256 * MIB else 256 * MIB


def graph_workspace_bytes(
    groups: Sequence[PlanGroup], max_batch_size: int, max_num_tokens: int
) -> int:
    """Scratch of the largest captured step.

    In a graph `PrefillSplitQOKVIndptr` in scheduler.cuh reserves a tile for every `rows` rows of
    all requests together, and one more a request.
    """
    sizes = []
    for group in groups:
        rows = _tile_rows(group, max_num_tokens - max_batch_size + 1)
        tiles = -(-max_num_tokens * group.group_size // rows) + max_batch_size
        tiles = max(tiles, SPLIT_CTAS // group.num_kv_heads)
        sizes.append(_scratch_bytes(group, tiles=tiles, rows=rows))
    return max(sizes)


def graph_plan_bytes(group: PlanGroup, max_batch_size: int, max_num_tokens: int) -> int:
    """The most bytes of the int workspace that a plan of the largest captured step takes.

    In scheduler.cuh `PrefillPlan` lists tiles of 16 rows or more, `PrefillSM90Plan` tiles of 128
    for each head, `DecodePlan` up to `DECODE_CTAS` parts; four, seven and four numbers each.
    """
    tiles = -(-max_num_tokens * group.group_size // 16) + max_batch_size + DECODE_CTAS
    of_heads = group.num_q_heads * (-(-max_num_tokens // 128) + max_batch_size)
    return 4 * (4 * tiles + 7 * of_heads + max_num_tokens + max_batch_size) + (64 << 10)


def _scratch_bytes(group: PlanGroup, *, tiles: int, rows: int) -> int:
    """Partial outputs and their LSE in float32, as `PrefillPlan` in scheduler.cuh counts them."""
    return group.num_q_heads * tiles * rows * (group.v_head_dim + 1) * 4


def _tile_rows(group: PlanGroup, num_tokens: int) -> int:
    """Rows of Q that a thread block takes: `FA2DetermineCtaTileQ` in utils.cuh."""
    rows = num_tokens * group.group_size
    if rows > 64 and group.v_head_dim < 256:
        return 128
    return 64 if rows > 16 else 16
