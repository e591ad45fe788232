"""Which attention backend SGLang 0.5.23 and vLLM 0.33.0 take by themselves, by their own rules.

SGLang: `get_default_attn_backend` in `arg_groups/model_override_base.py`. vLLM: the lists and the
flow of `platforms/cuda.py` and `platforms/rocm.py`, with what each class of `v1/attention/backends`
declares. Rules for a model's name are left out: a request knows none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attnmux.core import Platform, Request

NOTHING = "nothing"
"""The engine finds no backend and stops."""


def sglang(request: Request, platform: Platform) -> str:
    """The default of the phases that read the KV cache."""
    if request.index_topk is not None:
        return "nsa"
    if request.latent:
        return _sglang_latent(request, platform)
    asymmetric = request.v_head_dim not in (None, request.head_dim)
    major = platform.version[0] if platform.vendor == "nvidia" else 0
    if request.cross_attention:
        return "flashinfer"  # Whisper's rule, on every platform
    if major == 9:
        return "fa3"
    if major == 10:
        return "fa4" if asymmetric else "trtllm_mha"
    if platform.vendor == "amd":
        return "aiter"
    if platform.vendor == "cpu":
        return "intel_amx" if "amx" in platform.features else "torch_native"
    return "flashinfer" if platform.vendor == "nvidia" and not request.sinks else "triton"


def _sglang_latent(request: Request, platform: Platform) -> str:
    major = platform.version[0] if platform.vendor == "nvidia" else 0
    if platform.vendor == "amd":
        return "aiter" if request.num_q_heads in (16, 128) else "triton"
    if platform.vendor == "cpu":
        return "intel_amx" if "amx" in platform.features else "torch_native"
    return {9: "fa3", 10: "flashinfer"}.get(major, "triton")


def vllm(request: Request, platform: Platform) -> str:
    """The first backend of the platform's list whose declarations admit the request."""
    found = (name for name in _listed(request, platform) if _admits(name, request, platform))
    return next(found, NOTHING)


def _listed(request: Request, platform: Platform) -> Iterator[str]:
    major = platform.version[0] if platform.version else 0
    latent, sparse = request.latent, request.index_topk is not None
    if platform.vendor == "cpu":
        yield "CPU_ATTN"
    elif platform.vendor == "intel":
        yield from ("XPU_MLA_SPARSE",) if sparse else ("TRITON_MLA",) if latent else ("FLASH_ATTN",)
        yield from () if latent else ("TRITON_ATTN",)
    elif platform.vendor == "amd":
        mla = ("ROCM_AITER_MLA_SPARSE",) if sparse else ("TRITON_MLA",)
        yield from mla if latent else ("ROCM_ATTN", "TRITON_ATTN")
    elif sparse:
        yield "FLASHINFER_MLA_SPARSE_SM120" if major == 12 else "FLASHMLA_SPARSE"
    elif latent:
        yield from ("FLASHINFER_MLA",) if major == 10 else ()
        yield from ("CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA") if major != 12 else ()
        yield "TRITON_MLA"
    else:
        first = ("FLASHINFER", "FLASH_ATTN") if major == 10 else ("FLASH_ATTN", "FLASHINFER")
        yield from (*first, "TRITON_ATTN", "FLEX_ATTENTION")


def _admits(name: str, request: Request, platform: Platform) -> bool:
    major = platform.version[0] if platform.version else 0
    head_dim = request.head_dim or 0
    of_latent = (request.kv_lora_rank or 0) + (request.qk_rope_head_dim or 0)
    plain_v = request.v_head_dim in (None, request.head_dim)
    rules: Mapping[str, Any] = {
        # FA3 alone has sinks; windows, caps, ALiBi and cross-attention are in all of its versions
        "FLASH_ATTN": head_dim % 8 == 0
        and head_dim <= 256
        and plain_v
        and (not request.sinks or major == 9 or platform.vendor == "intel"),
        "FLASHINFER": head_dim in (64, 128, 256)
        and plain_v
        and not request.alibi
        and not request.cross_attention
        and (not request.sinks or major == 10),
        "TRITON_ATTN": head_dim >= 32 and plain_v,
        "ROCM_ATTN": head_dim in (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
        and plain_v
        and not request.sinks,
        "FLEX_ATTENTION": plain_v and not request.sinks and not request.logit_cap,
        "FLASHINFER_MLA": of_latent == 576 and major == 10,
        "CUTLASS_MLA": of_latent == 576 and major == 10,
        "FLASH_ATTN_MLA": of_latent == 576 and major == 9,
        "FLASHMLA": of_latent == 576 and major in (9, 10),
        "FLASHMLA_SPARSE": of_latent == 576 and major in (9, 10),
    }
    return bool(rules.get(name, True)) and not (request.relative_bias and name != "CPU_ATTN")


COUNTERPARTS: Mapping[str, tuple[str, ...]] = {
    "FLASH_ATTN": ("fa3", "fa4", "intel_xpu", "vllm_xpu"),
    "FLASHINFER": ("flashinfer", "trtllm_mha"),
    "TRITON_ATTN": ("triton",),
    "ROCM_ATTN": ("triton",),
    "FLEX_ATTENTION": ("flex_attention",),
    "FLASHINFER_MLA": ("flashinfer_mla", "trtllm_mla"),
    "CUTLASS_MLA": ("cutlass_mla",),
    "FLASH_ATTN_MLA": ("fa3_mla", "fa3"),
    "FLASHMLA": ("flashmla",),
    "TRITON_MLA": ("triton",),
    **dict.fromkeys(
        (
            *("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"),
            *("ROCM_AITER_MLA_SPARSE", "XPU_MLA_SPARSE"),
        ),
        ("nsa", "nsa_fa3"),
    ),
    "CPU_ATTN": ("native", "intel_amx", "torch_native"),
}
"""The backends here with the kernels of vLLM's, or made for the same device."""
