"""The operators of FlashAttention 3 in vLLM's build and in FlashAttention's own, in plain torch.

Parameters have the names and the order of the schemas. The attention is `sgl_flash_attn`'s, which
carries the same kernels. vLLM's build takes no attention chunks, and sinks for at most 64 heads
whose V has the dims of K; FlashAttention's takes chunks and no sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnmux.emulators.nvidia import sgl_flash_attn
from attnmux.emulators.nvidia.sgl_flash_attn.attention import check

Optional = torch.Tensor | None


class VllmFA3:
    """`torch.ops._vllm_fa3_C`."""

    @staticmethod
    def fwd(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_new: Optional,
        v_new: Optional,
        q_v: Optional,
        out: Optional,
        cu_seqlens_q: Optional,
        cu_seqlens_k: Optional,
        cu_seqlens_k_new: Optional,
        seqused_q: Optional,
        seqused_k: Optional,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        page_table: Optional,
        kv_batch_idx: Optional,
        leftpad_k: Optional,
        rotary_cos: Optional,
        rotary_sin: Optional,
        seqlens_rotary: Optional,
        q_descale: Optional,
        k_descale: Optional,
        v_descale: Optional,
        softmax_scale: float,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        is_rotary_interleaved: bool,
        scheduler_metadata: Optional,
        num_splits: int,
        pack_gqa: bool | None,
        sm_margin: int,
        s_aux: Optional,
        cp_world_size: int,
        cp_rank: int,
        cp_tot_seqused_k: Optional,
    ) -> list[torch.Tensor]:
        check((cp_world_size, cp_rank, cp_tot_seqused_k) == (1, 0, None), "context parallelism")
        if s_aux is not None:
            check(q.shape[-1] == v.shape[-1], "We don't support S aux with hdim != hdim_v")
            check(q.shape[-2] <= 64, "We only support query heads <= 64 with S aux")
        return _fwd(locals(), sinks=s_aux)

    @staticmethod
    def get_scheduler_metadata(
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads: int,
        num_heads_k: int,
        headdim: int,
        headdim_v: int,
        qkv_dtype: torch.dtype,
        seqused_k: torch.Tensor,
        cu_seqlens_q: Optional,
        cu_seqlens_k: Optional,
        cu_seqlens_k_new: Optional,
        seqused_q: Optional,
        leftpad_k: Optional,
        page_size: int | None,
        max_seqlen_k_new: int,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        has_softcap: bool,
        num_splits: int,
        pack_gqa: bool | None,
        sm_margin: int,
    ) -> torch.Tensor:
        return FlashAttn3.get_scheduler_metadata(**locals())


class FlashAttn3:
    """`torch.ops.flash_attn_3`."""

    @staticmethod
    def fwd(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_new: Optional = None,
        v_new: Optional = None,
        q_v: Optional = None,
        out: Optional = None,
        cu_seqlens_q: Optional = None,
        cu_seqlens_k: Optional = None,
        cu_seqlens_k_new: Optional = None,
        seqused_q: Optional = None,
        seqused_k: Optional = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        page_table: Optional = None,
        kv_batch_idx: Optional = None,
        leftpad_k: Optional = None,
        rotary_cos: Optional = None,
        rotary_sin: Optional = None,
        seqlens_rotary: Optional = None,
        q_descale: Optional = None,
        k_descale: Optional = None,
        v_descale: Optional = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        attention_chunk: int = 0,
        softcap: float = 0.0,
        is_rotary_interleaved: bool = False,
        scheduler_metadata: Optional = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> list[torch.Tensor]:
        return _fwd(locals(), attention_chunk=attention_chunk)

    @staticmethod
    def get_scheduler_metadata(
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads: int,
        num_heads_k: int,
        headdim: int,
        headdim_v: int,
        qkv_dtype: torch.dtype,
        seqused_k: torch.Tensor,
        cu_seqlens_q: Optional = None,
        cu_seqlens_k: Optional = None,
        cu_seqlens_k_new: Optional = None,
        seqused_q: Optional = None,
        leftpad_k: Optional = None,
        page_size: int | None = None,
        max_seqlen_k_new: int = 0,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        attention_chunk: int = 0,
        has_softcap: bool = False,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> torch.Tensor:
        refuse(cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, pack_gqa)
        refuse(max_seqlen_k_new or None, sm_margin or None)
        return sgl_flash_attn.get_scheduler_metadata(
            *(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, seqused_k),
            qkv_dtype=qkv_dtype,
            headdim_v=headdim_v,
            page_size=page_size,
            causal=is_causal,
            window_size=(window_size_left, window_size_right),
            attention_chunk=attention_chunk,
            has_softcap=has_softcap,
            num_splits=num_splits,
        )


def refuse(*values: object) -> None:
    if any(value is not None for value in values):
        raise NotImplementedError("an argument that the emulator does not know")


def _fwd(given: Mapping[str, Any], **more: Any) -> list[torch.Tensor]:  # noqa: ANN401  # of one build
    """The attention that both builds have. given: the arguments of either's `fwd`, by name; more:
    what one build has alone."""
    unknown = "k_new v_new cu_seqlens_k_new seqused_q kv_batch_idx leftpad_k pack_gqa"
    refuse(*(given[name] for name in f"{unknown} rotary_cos rotary_sin seqlens_rotary".split()))
    refuse(given["sm_margin"] or None)
    same = "page_table scheduler_metadata out max_seqlen_q q_descale k_descale v_descale"
    lens = "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_k"
    return _attend(
        given["q"],
        given["k"],
        given["v"],
        lens=tuple(given[name] for name in lens),
        qv=given["q_v"],
        causal=given["is_causal"],
        window_size=(given["window_size_left"], given["window_size_right"]),
        **{name: given[name] for name in f"{same} softmax_scale softcap num_splits".split()},
        **more,
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lens: tuple[Optional, Optional, Optional, int | None],
    page_table: Optional,
    scheduler_metadata: Optional,
    **arguments: Any,  # noqa: ANN401  # of both functions
) -> list[torch.Tensor]:
    """lens: where packed Q and K begin, keys of each request, and the most of one."""
    cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_k = lens
    arguments["return_softmax_lse"] = True
    if cu_seqlens_k is not None and cu_seqlens_q is not None:
        refuse(page_table, seqused_k, scheduler_metadata)
        bounds = cu_seqlens_q, cu_seqlens_k
        return list(
            sgl_flash_attn.flash_attn_varlen_func(
                *(q, k, v, *bounds), max_seqlen_k=max_seqlen_k, **arguments
            )
        )
    refuse(max_seqlen_k, cu_seqlens_k)
    return list(
        sgl_flash_attn.flash_attn_with_kvcache(
            *(q, k, v),
            cache_seqlens=seqused_k,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            scheduler_metadata=scheduler_metadata,
            **arguments,
        )
    )
