"""What the library is told at every call of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.context import BackendContext
from attnmux.core.kv.quantise import quantise
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.flashmla.kernels import Kernels
from attnmux.nvidia.latent import check_latent, check_plain, joined, latent_pages
from attnmux.nvidia.page_tables import KeyGroup
from attnmux.nvidia.pools import FP8, check_own_or_fp8, check_page_size

PAGE = 64
"""Tokens of a page: the one size that the kernels read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGroup:
    """Layers that share a step's plan: their keys are in the same places, and as many heads read
    them."""

    keys: KeyGroup
    num_heads: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    group: PlanGroup
    k_cache: torch.Tensor
    """[pages, 64, 1, 576], the pool's memory."""
    is_fp8: bool
    """The cache holds 8-bit floats, and the kernels want Q to be so too."""
    arguments: dict[str, Any]
    """By the library's names."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext, kernels: Kernels) -> LayerCall:
        """Raises InvalidInput for other layers than a latent's, for other pages than of 64 tokens,
        and for a KV dtype that is neither Q's nor e4m3."""
        check_latent(layer)
        check_plain(layer)
        check_page_size(context, PAGE)
        check_own_or_fp8(context)
        pool = context.token_to_kv_pool
        is_fp8 = pool.dtype == FP8
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            # A single query is the last one: the kernels know.
            "causal": True,
            "is_fp8_kvcache": is_fp8,
            **kernels.constants,
        }
        if is_fp8:
            scale, _ = pool.read_scales(layer.k_scale, None)
            # Whatever torch's default dtype is while the model is loaded.
            one = torch.ones(1, dtype=torch.float32, device=context.device)
            arguments["descale_q"] = one
            # Of V too, which is the front of the same rows.
            arguments["descale_k"] = one * scale
        return cls(
            group=PlanGroup(keys=KeyGroup.of(layer, context), num_heads=layer.tp_q_head_num),
            k_cache=latent_pages(layer, context, PAGE),
            is_fp8=is_fp8,
            arguments=arguments,
        )

    def queries(
        self, q: torch.Tensor, q_rope: torch.Tensor | None, queries_each: int
    ) -> torch.Tensor:
        """[R, queries_each, Hq, 576] as the kernel reads them: e4m3 saturates beyond 448."""
        rows = joined(q, q_rope)
        if self.is_fp8:
            rows = quantise(rows, FP8, None)
        return rows.view(-1, queries_each, *rows.shape[1:])
