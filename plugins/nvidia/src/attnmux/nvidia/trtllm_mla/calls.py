"""Which kernel serves a device, and what it is told at every call of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from attnmux.core.choosing.platform import Platform
from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.kv.quantise import quantise
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.latent import RANK, ROPE, check_plain, latent_pages
from attnmux.nvidia.page_tables import Keys
from attnmux.nvidia.pools import FP8
from attnmux.nvidia.trtllm_mla.kernels import Kernels

NOPE = 128
"""Dim of an expanded head without its rotary part: the library asks for it and reads it nowhere."""

XQA_HEADS = 128
"""xqa.py, `xqa_mla`: the one number of query heads."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    cache: torch.Tensor
    """[pages, page, 576], the pool's memory."""
    kv_scale: float
    """What rows of the cache are multiplied by."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> LayerCall:
        """Raises InvalidInput for a layer with more than scaled, causal attention."""
        check_plain(layer)
        pool = context.token_to_kv_pool
        scale, _ = pool.read_scales(layer.k_scale, layer.v_scale)
        pages = latent_pages(layer, context, pool.page_size)
        return cls(layer=layer, cache=pages.squeeze(2), kv_scale=scale)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Q in the dtype of the cache, unscaled: beyond 448 e4m3 saturates."""
        return quantise(q, FP8, None) if self.cache.dtype == FP8 else q


class Decode(ABC):
    """The kernel of one kind of device."""

    def __init__(self, kernels: Kernels, workspace: torch.Tensor) -> None:
        self._kernels = kernels
        self._workspace = workspace

    @abstractmethod
    def __call__(
        self,
        q: torch.Tensor,
        call: LayerCall,
        keys: Keys,
        max_seqlen_k: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """q: [B, d, Hq, 576] bfloat16. Returns [B, d, Hq, 512] bfloat16: `out` where it could be
        written, which is contiguous."""


class GenDecode(Decode):
    """trtllm-gen: causal from the end of the keys."""

    def __call__(
        self,
        q: torch.Tensor,
        call: LayerCall,
        keys: Keys,
        max_seqlen_k: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        result: torch.Tensor = self._kernels.trtllm_batch_decode_with_kv_cache_mla(
            call.queries(q),
            call.cache,
            self._workspace,
            NOPE,
            RANK,
            ROPE,
            keys.page_table,
            keys.lens,
            max_seqlen_k,
            out=out,
            bmm1_scale=call.layer.scaling * call.kv_scale,
            bmm2_scale=call.kv_scale,
            backend="trtllm-gen",
        )
        return result


class XQADecode(Decode):
    """XQA: one query a request, of 128 heads. It multiplies logits by the scale of the keys itself
    (mla_sm120.cu, `qkScaleLog2e`)."""

    def __call__(
        self,
        q: torch.Tensor,
        call: LayerCall,
        keys: Keys,
        max_seqlen_k: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        heads = q.shape[2]
        if q.shape[1] != 1 or heads > XQA_HEADS:
            raise InvalidInput(
                "q",
                came=f"{q.shape[1]} queries a request of {heads} heads",
                expected=f"one of at most {XQA_HEADS}",
            )
        if heads < XQA_HEADS:
            q = torch.nn.functional.pad(q, (0, 0, 0, XQA_HEADS - heads))
        result: torch.Tensor = self._kernels.xqa_batch_decode_with_kv_cache_mla(
            call.queries(q),
            call.cache,
            self._workspace,
            NOPE,
            RANK,
            ROPE,
            keys.page_table,
            keys.lens,
            max_seqlen_k,
            out=q.new_empty((len(q), XQA_HEADS, RANK)),
            bmm1_scale=call.layer.scaling,
            bmm2_scale=call.kv_scale,
        )
        return result[:, None, :heads]


BY_MAJOR: dict[int, type[Decode]] = {10: GenDecode, 12: XQADecode}
"""By the major number of the compute capability, as the library dispatches."""


def decode_of(platform: Platform) -> type[Decode]:
    """Raises InvalidInput for a platform that no kernel runs on."""
    major = platform.version[0] if platform.version else None
    if major not in BY_MAJOR:
        raise InvalidInput("platform", came=platform.arch, expected="compute capability 10 or 12")
    return BY_MAJOR[major]
