"""The library's wrapper for MLA, as flashinfer 0.6 and 0.7 have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.plugin import LatentRows


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashInferMLAKernels:
    """The wrapper of `flashinfer.mla`, and how it is called.

    0.7 checks lengths by a loop over tiles and wants the pages of a plan's requests end to end. Its
    flat arguments, those of 0.6, are deprecated.
    """

    BatchMLAPagedAttentionWrapper: Callable[..., Any]
    plan_metadata: Callable[..., Any] | None = None
    """`MLAPlanMetadata.csr`: makes an object of a plan's lengths. None before 0.7."""

    def plan(
        self,
        wrapper: Any,  # noqa: ANN401  # the library's class
        lens: Mapping[str, torch.Tensor],
        indices: torch.Tensor,
        *,
        num_heads: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        dtype: torch.dtype,
        again: bool = False,
    ) -> None:
        """Plan a step.

        lens: `qo_indptr` and `kv_indptr` [B + 1] from 0 on, and `kv_len_arr` [B], int32 on the
        host. indices: [pages] int32 or more, on the device. dtype: of Q and of the keys.
        again: the wrapper's last plan had as many rows and requests, and the same other arguments.
        Then 0.7 plans into the workspace that is there: its `plan` allocates one of 8 MiB, and as
        much of pinned memory.
        """
        if again and self.plan_metadata is not None:
            planned = wrapper._planned_backend
            planned._plan_info = self.replan(wrapper, lens, num_heads=num_heads, causal=causal)
            planned._kv_indices_buf = indices
            return
        metadata: dict[str, Any] = {"kv_indices": indices, **lens}
        if self.plan_metadata is not None:
            metadata = {
                "metadata": self.plan_metadata(**metadata),
                "query_layout": "split",
                "kv_cache_layout": "split",
                "lse_mode": "basee",
            }
        wrapper.plan(
            **metadata,
            num_heads=num_heads,
            head_dim_ckv=LatentRows.LATENT_DIM,
            head_dim_kpe=LatentRows.ROPE_DIM,
            page_size=page_size,
            causal=causal,
            sm_scale=sm_scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def replan(
        self,
        wrapper: Any,  # noqa: ANN401  # the library's class
        lens: Mapping[str, torch.Tensor],
        *,
        num_heads: int,
        causal: bool,
    ) -> object:
        """Plan into the workspace that the wrapper's last `plan` left, for as many rows, requests
        and heads. Returns what the kernels' launch reads of a plan. The wrapper keeps these
        attributes for such replays (`_MIRRORED_BACKEND_ATTRS` in mla/_batch_mla/_wrapper.py of
        0.7)."""
        return wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            lens["qo_indptr"],
            lens["kv_indptr"],
            lens["kv_len_arr"],
            num_heads,
            LatentRows.LATENT_DIM,
            causal,
        )

    def run(
        self,
        wrapper: Any,  # noqa: ANN401  # the library's class
        query: tuple[torch.Tensor, torch.Tensor],
        latents: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write `out` [T, Hq, 512], and natural LSE [T, Hq] if there is room for it.

        query: of 512 and 64 dims. latents: pages of both parts.
        """
        results = {
            "out": out,
            "lse": lse,
            "return_lse": lse is not None,
            "return_lse_base_on_e": True,
        }
        if self.plan_metadata is None:
            wrapper.run(*query, *latents, **results)
        else:
            wrapper.run(query=query, kv_cache=latents, **results)


def from_flashinfer(library: Any) -> FlashInferMLAKernels:  # noqa: ANN401  # a module
    """`flashinfer.mla`."""
    metadata = getattr(library, "MLAPlanMetadata", None)
    return FlashInferMLAKernels(
        BatchMLAPagedAttentionWrapper=library.BatchMLAPagedAttentionWrapper,
        plan_metadata=None if metadata is None else metadata.csr,
    )
