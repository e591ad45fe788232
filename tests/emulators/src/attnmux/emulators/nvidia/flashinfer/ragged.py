"""Many tokens a request over K and V that lie end to end."""

from __future__ import annotations

import math
from typing import Any

import torch

from attnmux.emulators.nvidia.flashinfer.arguments import dtype_of, refuse, refuse_unusual
from attnmux.emulators.nvidia.flashinfer.numerics import segments
from attnmux.emulators.nvidia.flashinfer.wrapper import Wrapper

_SMALLEST_TILE = 64
"""Keys of a tile of fa3, of heads of 256 dims; others have more."""


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Many tokens a request over K and V that lie end to end."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: object = False,
    ) -> None:
        refuse_unusual((variant_owns_mask, False))
        if use_cuda_graph:
            raise NotImplementedError("the emulator's ragged wrapper runs eagerly")
        refuse(jit_args)
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend, None)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
    ) -> None:
        refuse(
            custom_mask, packed_custom_mask, rope_scale, rope_theta, prefix_len_ptr,
            token_pos_in_items_ptr, max_item_len_ptr, seq_lens, seq_lens_q, v_indptr, o_indptr,
        )  # fmt: skip
        if len(kv_indptr) != len(qo_indptr):
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        self._qo_indptr_buf = qo_indptr.to(self.device)
        self._kv_indptr_buf = kv_indptr.to(self.device)
        self._planned(
            int(qo_indptr[-1]),
            heads=(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk),
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            dtypes=(dtype_of(q_data_type), dtype_of(kv_data_type or q_data_type)),
            pos_encoding_mode=pos_encoding_mode,
            disable_split_kv=disable_split_kv,
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: object = "log2",
        lse_layout: object = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The scales are for 8-bit and 4-bit kernels: these do not read them."""
        refuse_unusual((lse_base, "log2"), (lse_layout, "NH"))
        refuse(*args, kv_cache_sf)
        self._check_run(q, k, v, out, lse, None)
        request, place = segments(self._kv_indptr_buf, len(k))
        scale = 1 / math.sqrt(q.shape[-1]) if self._sm_scale is None else self._sm_scale
        result, base_2 = self._attend(
            q,
            (k, v, request, place, self._kv_indptr_buf.diff()),
            mask=None,
            scale=scale,
            v_scale=None,
            out=out,
            lse=lse,
        )
        return (result, base_2) if return_lse else result

    def _loads(
        self, mine: torch.Tensor, request: torch.Tensor, kv_lens: torch.Tensor
    ) -> torch.Tensor:
        """fa3, which Hopper takes for "auto", loads whole tiles; fa2 puts 0 after the last key."""
        if self._backend == "fa2":
            return mine
        first = self._kv_indptr_buf[request].unsqueeze(1)
        tiles = -(-kv_lens[request] // _SMALLEST_TILE)
        place = torch.arange(mine.shape[1], device=mine.device) - first
        return mine | ((place >= 0) & (place < _SMALLEST_TILE * tiles.unsqueeze(1)))
