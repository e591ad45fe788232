"""The shapes that are timed where a request leaves them open. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from attnmux.core import InvalidInput, Request
from attnmux.parts import linear_request

DENSE_SHAPES = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
LATENT_SHAPES = {
    **{"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"},
}
"""Defaults for shapes that a request leaves open: a dense model's of 8 billion parameters, and
DeepSeek-V3's on one of eight ranks."""

LINEAR_SHAPES: dict[str, dict[str, object]] = {
    "gdn": {"num_q_heads": 32, "num_kv_heads": 16, "head_dim": 128},
    "kda": {"num_q_heads": 32, "num_kv_heads": 32, "head_dim": 128},
    "mamba1": {"num_q_heads": 1024, "num_kv_heads": 1, "head_dim": 16, "v_head_dim": 1},
    "mamba2": {"num_q_heads": 128, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 64},
    "lightning": {"num_q_heads": 64, "num_kv_heads": 64, "head_dim": 128},
    "conv": {},
}
"""The same of linear layers, V heads, K heads and dims: those of Qwen3-Next, Kimi-Linear,
Falcon-Mamba-7B on one of eight ranks, Nemotron-H-8B and MiniMax-Text-01."""

TIMED = ("mha", "mla", *Request.LINEAR_KINDS)
"""The kinds that workloads have."""

UNTIMED = ("cross_attention", "custom_mask", "multi_item")
"""Features that no workload exercises."""


def completed(request: Request) -> Request:
    """The request with default shapes where it leaves them open.

    Raises InvalidInput for a request whose steps cannot be timed.
    """
    if request.kind not in TIMED:
        expected = f"kind={' or kind='.join(TIMED)}"
        raise InvalidInput("request", got=f"kind={request.kind}", expected=expected)
    for name in UNTIMED:
        if getattr(request, name):
            expected = "none of " + ", ".join(UNTIMED) + ": no workload has them"
            raise InvalidInput("request", got=f"{name}=yes", expected=expected)
    unset = {name: value for name, value in _shapes(request) if getattr(request, name) is None}
    if request.linear_layers:  # attention alone is timed
        unset["linear_layers"] = ()
    return request.replace(origin="default", **unset) if unset else request


def check_stated(request: Request) -> None:
    """Raise InvalidInput, naming them, for shapes that the request leaves open.

    Measurements of default shapes say nothing about other shapes. No request states the channels of
    kind "conv", whose measurements are refused.
    """
    if request.kind == "conv":
        expected = "a kind whose request has all shapes: none has a convolution's channels"
        raise InvalidInput("request", got="kind=conv to keep", expected=expected)
    missing = [name for name, _ in _shapes(request) if getattr(request, name) is None]
    if missing:
        got, expected = f"no {', '.join(missing)}", "--model, or all of them in --request"
        raise InvalidInput("request", got=got, expected=expected)


def kept_shape(request: Request) -> Request:
    """The request that measurements are kept for.

    Engines choose the backend of linear layers by kind and dims, whatever their heads.
    """
    if not request.is_linear:
        return request
    own = replace(request, kind="mha", linear_head_dim=request.head_dim)
    own = replace(own, linear_v_head_dim=request.v_head_dim)
    return linear_request(own, request.kind)


def _shapes(request: Request) -> Iterable[tuple[str, object]]:
    if request.is_linear:
        return {**LINEAR_SHAPES[request.kind], "dtype": "bfloat16"}.items()
    return (LATENT_SHAPES if request.latent else DENSE_SHAPES).items()


def value_bytes(dtype: torch.dtype) -> float:
    """Bytes of a value of K or V in a pool of a dtype, with its share of its block's scale."""
    # Packed two an element; 16 of them share a scale of a byte
    return 0.5 + 1 / 16 if dtype == torch.float4_e2m1fn_x2 else dtype.itemsize
