"""Why attnmux chooses otherwise than an engine, for each kind of difference that was looked at."""

from __future__ import annotations

from collections.abc import Mapping

DIMS = {
    "flashinfer": "its kernels over pages are made for heads of 64, 128 and 256 with V like K",
    "trtllm_mha": "its kernels are made for heads of 64, 128 and 256",
    "aiter": "with keys split, its kernel compiles for powers of two alone, K and V alike",
    "fa3": "it is not built for heads of 80 and 112, and pads in its own copy of K and V alone",
    "intel_amx": "its kernels transpose 32 values at a time",
}
ALIBI = "its kernels take no bias by distance, which the engine passes to none; Triton's do"
FOREIGN = "it serves NVIDIA's devices alone, whatever the chooser says"
BIAS = "its kernels take no relative position bias: the engine has no T5"
AMX = "the CPU's kernels for AMX lack it or get it wrong (the card says which); native has it"
FA2 = "FlashAttention 2 is no backend here: flashinfer's kernels come first on these devices"
FEWER = "the card's kernels are made for SM90 and SM100; other devices get the latent from Triton"
VENDOR = "the vendor's kernels come first on its own devices"
XPU = "a limit of vllm-xpu-kernels' attention, by its card"
DIFFERENT_V = "K and V of different dims, which it has for one model by name; or T5, which it lacks"

LOOKED_AT: Mapping[tuple[str, str, str], str] = {
    **{
        (engine, name, why): because
        for engine in ("SGLang",)
        for name, because in DIMS.items()
        for why in ("head_dim", "head_dim, alibi", "head_dim, v_head_dim")
    },
    **{("SGLang", name, "alibi"): ALIBI for name in ("aiter", "fa3", "flashinfer", "trtllm_mha")},
    ("SGLang", "aiter", "attention_chunk"): "its kernels have no chunks; Triton's do",
    **{
        ("SGLang", name, "kv_lora_rank, qk_rope_head_dim"): "made for latents of 512 and 64"
        for name in ("fa3", "flashinfer")
    },
    ("SGLang", "fa4", "phase"): "fa4 is for prefill; Triton decodes K and V of different dims",
    (
        "SGLang",
        "fa4",
        "sliding_window",
    ): "a window with K of 192 and V of 128 on one rank: Triton's",
    ("SGLang", "flashinfer", "ranks later"): "fa3 serves cross attention and ranks first on SM90",
    **{
        ("SGLang", "flashinfer", f"{where}{more}"): FOREIGN
        for where in ("vendor, version", "vendor, runtime")
        for more in ("", ", relative_bias")
    },
    ("SGLang", "flashinfer", "relative_bias"): BIAS,
    **{
        ("SGLang", "intel_amx", why): AMX
        for why in (
            *("attention_chunk", "dtype, kv_dtype", "logit_cap", "qk_rope_head_dim"),
            *("sliding_window", "sliding_window, logit_cap", "alibi", "alibi, dtype, kv_dtype"),
        )
    },
    **{("SGLang", "nsa", why): FEWER for why in ("vendor", "vendor, version", "version")},
    ("SGLang", "triton", "ranks later"): VENDOR,
    ("SGLang", "trtllm_mha", "logit_cap"): "its kernels take no cap; flashinfer's do",
    ("vLLM", "FLASHINFER_MLA_SPARSE_SM120", "version"): FEWER,
    ("vLLM", "ROCM_AITER_MLA_SPARSE", "vendor"): FEWER,
    ("vLLM", "XPU_MLA_SPARSE", "vendor, version"): FEWER,
    ("vLLM", "FLASH_ATTN", "version"): FA2,
    ("vLLM", "FLASH_ATTN", "version, alibi"): f"{FA2}, and take no bias by distance",
    ("vLLM", "FLASH_ATTN", "vendor, version, alibi"): f"{FA2}, and take no bias by distance",
    ("vLLM", "FLASH_ATTN", "alibi"): "FlashAttention 2 has ALiBi; 3 and 4, and the XPU's, do not",
    ("vLLM", "FLASH_ATTN", "ranks later"): "heads of 80 or 96: Triton decodes them, by rank",
    **{
        ("vLLM", "FLASH_ATTN", why): XPU
        for why in (
            *("attention_chunk", "cross_attention", "group_size", "head_dim", "logit_cap"),
            "head_dim, alibi",
        )
    },
    **{
        ("vLLM", name, "ranks later"): VENDOR for name in ("ROCM_ATTN", "TRITON_ATTN", "TRITON_MLA")
    },
    ("vLLM", "nothing", "the engine has no backend for it"): DIFFERENT_V,
}
"""By the engine, its backend, and what the card of that backend says here."""
