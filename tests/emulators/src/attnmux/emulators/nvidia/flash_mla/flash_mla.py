"""`flash_mla` of sgl-flash-mla 1.0.0: the schedule is carried by an object.

Dense decoding is in its legacy half alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.emulators.nvidia.flash_mla.kernel import decode, schedule


@dataclass
class FlashMLASchedMeta:
    """A schedule, empty until the first call makes it or the caller puts one here."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule, whatever it is given."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The schedule: tile_scheduler_metadata [parts, 8] and num_splits [B + 1], int32.

    Raises AssertionError and RuntimeError for what the library refuses, NotImplementedError for
    sparse attention.
    """
    if topk is not None:
        raise NotImplementedError("the emulator knows no sparse attention")
    if is_fp8_kvcache:
        assert use_legacy, "dense fp8 decoding exists only on the legacy side"
    elif not use_legacy:
        raise NotImplementedError("the emulator knows the legacy schedule alone")
    return schedule(seqlens_k, num_q_tokens_per_head_k, h_k, is_fp8=is_fp8_kvcache)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a paged cache. `is_fp8_kvcache` says which kernel, which then looks at Q.

    Raises AssertionError and RuntimeError for what the library refuses, NotImplementedError for
    sparse attention.
    """
    made = tile_scheduler_metadata
    assert isinstance(made, FlashMLASchedMeta), "must be of type FlashMLASchedMeta"
    assert num_splits is None, "num_splits must be None"
    if indices is not None:
        raise NotImplementedError("the emulator knows no sparse attention")
    assert use_legacy, "Dense MLA decoding was removed from the current kernels"
    assert kv_format is None, "kv_format does not apply to dense decoding"
    if block_table is None or cache_seqlens is None:
        raise RuntimeError("expected a Tensor, got None")
    if is_fp8_kvcache:
        assert made.tile_scheduler_metadata is not None, "needs metadata before the first call"
        if q.element_size() != 1:
            raise RuntimeError("q.scalar_type() == Float8_e4m3fn")
    else:
        assert descale_q is None, "descale_q/descale_k apply to the dense fp8 path only"
        assert descale_k is None, "descale_q/descale_k apply to the dense fp8 path only"
        if q.element_size() == 1:
            raise RuntimeError("q_dtype == BFloat16 || q_dtype == Half")
    if made.tile_scheduler_metadata is None or made.num_splits is None:
        num_rows = q.shape[1] * q.shape[2]
        tensors = schedule(cache_seqlens, num_rows, k_cache.shape[2], is_fp8=False)
        made.tile_scheduler_metadata, made.num_splits = tensors
    return decode(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        (made.tile_scheduler_metadata, made.num_splits),
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        descales=(descale_q, descale_k),
    )
