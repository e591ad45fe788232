"""How vLLM calls a layer's attention."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionImplBase,
    AttentionType,
    MLAAttentionImpl,
)

from attnmux.vllm.group import Step


class Impl(AttentionImplBase):
    """The implementation of a layer: `LatentImpl` for MLA, whose layers name the latent's rank, and
    `DenseImpl` for all others. vLLM asks for one class before it says which."""

    def __new__(cls, *args: Any, **kwargs: Any) -> DenseImpl | LatentImpl:  # noqa: ANN401  # theirs
        made = LatentImpl if "kv_lora_rank" in kwargs else DenseImpl
        return made(*args, **kwargs)


class DenseImpl(AttentionImpl):
    """Attention of an MHA or GQA layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes = alibi_slopes
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.shares_kv = kv_sharing_target_layer_name is not None
        self.sinks = sinks

    def forward(
        self,
        layer: Any,  # noqa: ANN401  # vLLM's Attention
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # a run that only measures memory
            return output.zero_()
        n = attn_metadata.num_actual_tokens
        if self.shares_kv or key is None or value is None:  # they are in the cache
            attn_metadata.forward(layer.layer_name, query[:n], None, None, out=output[:n])
        else:
            attn_metadata.forward(layer.layer_name, query[:n], key[:n], value[:n], out=output[:n])
        return output


class LatentImpl(MLAAttentionImpl):
    """Attention of an MLA layer: of prompts by `forward_mha`, and on the latent of all other
    tokens, for which vLLM multiplies K's half of `kv_b_proj` into Q and V's half into the
    output."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,  # noqa: ANN401  # dims and projections, which the layer has too
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError("attnmux serves no ALiBi slopes in layers of MLA")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = latent["kv_lora_rank"]
        self.q_pad_num_heads = None
        self._new: tuple[torch.Tensor, ...] = ()

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Keep the new latents [T, rank] and rotary keys [T, 1, rope] for the `forward_mqa` that
        follows: the backend writes them, at the slots of the step."""
        self._new = kv_c_normed.unsqueeze(1), k_pe

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Step,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """q: [T, Hq, nope + rope] of the step's prompts, with their latents [T, rank] and rotary
        keys [T, 1, rope]; output: [T, Hq * Dv]."""
        if not attn_metadata.num_decode_tokens:
            self._new = ()
        out = attn_metadata.forward_latent(self, q, kv_c_normed.unsqueeze(1), k_pe)
        output.view(out.shape).copy_(out)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Step,
        layer: Any,  # noqa: ANN401  # vLLM's MLAAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q: the absorbed queries [T, Hq, rank] and their rotary parts [T, Hq, rope]."""
        if isinstance(q, tuple):
            nope, rope = q
        else:
            nope, rope = q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :]
        k, k_rope = (new[: nope.shape[0]] for new in self._new)
        self._new = ()
        out = attn_metadata.forward(layer.layer_name, nope, k, None, q_rope=rope, k_rope=k_rope)
        return out, None
