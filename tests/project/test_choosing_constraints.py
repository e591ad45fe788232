"""SGLang 0.5.23 changes or refuses some choices afterwards: the same requests here, one row each.

SGLang often replaces a page size or a backend. Here the request is refused, with the value that
helps as the hint. The rules of DEVIATIONS differ on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import pytest

from attnmux.core import Decision, NoBackend, Offer, Platform, Plugins, Policy, Request, solve
from attnmux.core.facts.policy import NAMING
from attnmux.core.facts.request import parse_fields
from attnmux.core.facts.values import PHASES


@dataclass(frozen=True)
class Row:
    """A request of a model with changes, the backends that the policy names, and the outcome."""

    platform: str
    model: str
    changes: str = ""
    _: KW_ONLY
    backend: str | None = None
    prefill_backend: str | None = None
    decode_backend: str | None = None
    mm_backend: str | None = None
    linear_backend: str | None = None
    both: str | None = None
    """The backend that serves extend and decode."""
    extend: str | None = None
    decode: str | None = None
    verify: str | None = None
    draft: str | None = None
    encoder: str | None = None
    page: int | None = None
    refused: str | None = None
    """The named backend's hint ("page_size=64"), or the axis of its reason without a hint."""

    @property
    def named(self) -> dict[str, str]:
        return {name: value for name in NAMING if (value := getattr(self, name)) is not None}

    @property
    def phases(self) -> dict[str, str]:
        both = {"extend": self.both, "decode": self.both}
        phases = {phase: getattr(self, phase) or both.get(phase) for phase in PHASES}
        return {phase: backend for phase, backend in phases.items() if backend is not None}

    def decide(self, offers: tuple[Offer, ...], hint: str = "") -> Decision:
        request = Request.parse(",".join(filter(None, [MODELS[self.model], self.changes])))
        platform = Platform.parse(self.platform)
        policy = Policy(**self.named)
        return solve(request.replace(**parse_fields(hint)), platform, offers, policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    sglang: str
    """SGLang's answer."""
    here: str
    """The reason for another answer here."""
    rows: list[Row]


BY_DECODE = "speculative_attention_mode=decode"
LATENT = (
    "dtype=bf16,num_q_heads=16,num_kv_heads=1,head_dim=192,v_head_dim=128,"
    "kv_lora_rank=512,qk_rope_head_dim=64"
)
MODELS = {
    "gqa": "dtype=bf16,head_dim=128,num_q_heads=32,num_kv_heads=8",
    "gqa-by-decode": f"dtype=bf16,head_dim=128,num_q_heads=32,num_kv_heads=8,{BY_DECODE}",
    "mha": "dtype=bf16,head_dim=128,num_q_heads=32,num_kv_heads=32",
    "sixes": "dtype=bf16,head_dim=128,num_q_heads=48,num_kv_heads=8",
    "sinks": "dtype=bf16,head_dim=64,num_q_heads=64,num_kv_heads=8,sinks=true",
    "chunks": "dtype=bf16,head_dim=128,num_q_heads=40,num_kv_heads=8,attention_chunk=8192",
    "mla": f"kind=mla,{LATENT}",
    "mla-by-decode": f"kind=mla,{LATENT},{BY_DECODE}",
    "nsa": f"kind=nsa,{LATENT}",
    "linear": "kind=gdn,dtype=bf16",
    "falcon_h1": "dtype=bf16,head_dim=128,num_q_heads=12,num_kv_heads=2",
}
"""The requests of models, by name."""

# fmt: off
RULES: dict[str, list[Row]] = {
    "flashmla: 64": [
        Row("nvidia:sm90", "mla", "page_size=32", backend="flashmla", refused="page_size=64"),
    ],
    "flashmla: 64 for decode alone": [
        Row("nvidia:sm90", "mla", "page_size=32",
            decode_backend="flashmla", refused="page_size=64"),
    ],
    "flashmla: 64 for prefill alone": [
        Row("nvidia:sm90", "mla", "page_size=32", prefill_backend="flashmla", refused="phase"),
    ],
    "flashmla: 64 where it is open": [
        Row("nvidia:sm90", "mla",
            backend="flashmla", extend="flashinfer_mla", decode="flashmla", page=64),
    ],
    "trtllm_mla: 32 or 64": [
        Row("nvidia:sm100", "mla", "page_size=128", backend="trtllm_mla", refused="page_size=64"),
    ],
    "trtllm_mla: 32 is kept by its companion": [
        Row("nvidia:sm100", "mla", "page_size=32",
            backend="trtllm_mla", extend="flashinfer_mla", page=32),
    ],
    "trtllm_mla: 32 is kept": [
        Row("nvidia:sm100", "mla", "page_size=32",
            backend="trtllm_mla", decode="trtllm_mla", page=32),
    ],
    "trtllm_mha: 16, 32, 64 or 128": [
        Row("nvidia:sm100", "gqa", "page_size=8", backend="trtllm_mha", refused="page_size=16"),
        Row("nvidia:sm100", "gqa", "page_size=8",
            prefill_backend="trtllm_mha", refused="page_size=16"),
        Row("nvidia:sm100", "gqa", "page_size=8",
            decode_backend="trtllm_mha", refused="page_size=16"),
    ],
    "trtllm_mha: where it verifies too": [
        Row("nvidia:sm100", "gqa", "page_size=8,spec_topk=1",
            backend="trtllm_mha", refused="page_size=16"),
    ],
    "trtllm_mha: each of these is kept": [
        Row("nvidia:sm100", "gqa", "page_size=16",
            backend="trtllm_mha", both="trtllm_mha", page=16),
        Row("nvidia:sm100", "gqa", "page_size=32",
            backend="trtllm_mha", both="trtllm_mha", page=32),
        Row("nvidia:sm100", "gqa", "page_size=64",
            backend="trtllm_mha", both="trtllm_mha", page=64),
        Row("nvidia:sm100", "gqa", "page_size=128",
            backend="trtllm_mha", both="trtllm_mha", page=128),
    ],
    "trtllm_mha: 64 where it is open": [
        Row("nvidia:sm100", "gqa", backend="trtllm_mha", both="trtllm_mha", page=64),
    ],
    "trtllm_mha: 1 goes to another": [
        Row("nvidia:sm100", "gqa", "page_size=1", decode="flashinfer"),
    ],
    "trtllm_mha: 128 is for grouped heads": [
        Row("nvidia:sm100", "mha", "page_size=128", backend="trtllm_mha", refused="page_size=64"),
    ],
    "trtllm_mha: 128 is for groups of a power of two": [
        Row("nvidia:sm100", "sixes", "page_size=128", backend="trtllm_mha", refused="page_size=64"),
    ],
    "trtllm_mha: 128 is for K and V of one dim": [
        Row("nvidia:sm100", "gqa", "v_head_dim=64,page_size=128",
            backend="trtllm_mha", refused="v_head_dim"),
    ],
    "trtllm_mha: 128 in XQA's decode with any heads": [
        Row("nvidia:sm90", "mha", "page_size=128",
            decode_backend="trtllm_mha", decode="trtllm_mha", page=128),
        Row("nvidia:sm120", "mha", "page_size=128",
            decode_backend="trtllm_mha", decode="trtllm_mha", page=128),
    ],
    "fa4: 128": [
        Row("nvidia:sm103", "gqa", "page_size=64", prefill_backend="fa4", refused="page_size=128"),
        Row("nvidia:sm100", "gqa", "page_size=32", prefill_backend="fa4", refused="page_size=128"),
    ],
    "fa4: 128 where it is open": [
        Row("nvidia:sm100", "gqa", prefill_backend="fa4", extend="fa4", page=128),
    ],
    "fa4: any page over a latent": [
        Row("nvidia:sm100", "mla", "page_size=32",
            prefill_backend="fa4", decode_backend="trtllm_mla", extend="fa4", page=32),
    ],
    "intel_xpu: 64 or 128": [
        Row("intel:xe2", "gqa", "page_size=32", backend="intel_xpu", refused="page_size=64"),
    ],
    "intel_xpu: 128 where it is open": [
        Row("intel:xe2", "gqa", backend="intel_xpu", both="intel_xpu", page=128),
    ],
    "intel_xpu: 16 over a latent": [
        Row("intel:xe2", "mla", "page_size=16", backend="intel_xpu", both="intel_xpu", page=16),
    ],
    "ascend: 128": [
        Row("ascend:910b", "gqa", "page_size=64", backend="ascend", refused="page_size=128"),
    ],
    "ascend: 128 where it is open": [
        Row("ascend:910b", "gqa", backend="ascend", both="ascend", page=128),
    ],
    "ascend: 128 over a latent": [
        Row("ascend:910b", "mla", backend="ascend", both="ascend", page=128),
    ],
    "nsa: 64": [
        Row("nvidia:sm90", "nsa", "page_size=1", backend="nsa", refused="page_size=64"),
    ],
    "nsa: 64 where it is open": [
        Row("nvidia:sm90", "nsa", backend="nsa", both="nsa", page=64),
    ],
    "1 where nothing asks for another": [
        Row("nvidia:sm90", "gqa", decode="fa3", page=1),
    ],
    "fa3: SM90": [
        Row("nvidia:sm100", "gqa", backend="fa3", refused="version"),
        Row("nvidia:sm110", "gqa", backend="fa3", refused="version"),
        Row("nvidia:sm120", "gqa", backend="fa3", refused="version"),
    ],
    "fa3: no latent on SM80": [
        Row("nvidia:sm80", "mla", backend="fa3_mla", refused="version"),
    ],
    "fa3: CUDA 12.3": [
        Row("nvidia:sm90,cuda=12.2", "gqa", backend="fa3", refused="runtime"),
    ],
    "trtllm_mla: Blackwell": [
        Row("nvidia:sm80", "mla", backend="trtllm_mla", refused="version"),
        Row("nvidia:sm90", "mla", backend="trtllm_mla", refused="version"),
    ],
    "trtllm_mha: SM90, SM100, SM120": [
        Row("nvidia:sm80", "gqa", prefill_backend="trtllm_mha", refused="version"),
        Row("nvidia:sm80", "gqa", decode_backend="trtllm_mha", refused="version"),
        Row("nvidia:sm110", "gqa", prefill_backend="trtllm_mha", refused="version"),
        Row("nvidia:sm110", "gqa", decode_backend="trtllm_mha", refused="version"),
    ],
    "trtllm_mha: no prefill over e4m3 on SM120": [
        Row("nvidia:sm120", "gqa", "kv_dtype=fp8_e4m3",
            prefill_backend="trtllm_mha", refused="kv_dtype=bfloat16"),
    ],
    "trtllm_mha: decode over e4m3 on SM120": [
        Row("nvidia:sm120", "gqa", "kv_dtype=fp8_e4m3",
            decode_backend="trtllm_mha", decode="trtllm_mha"),
    ],
    "intel_amx: AMX": [
        Row("cpu:x86_64,features=avx2", "gqa", backend="intel_amx", refused="features"),
    ],
    "intel_amx: torch_native without AMX": [
        Row("cpu:x86_64,features=avx2", "gqa", decode="torch_native"),
    ],
    "intel_xpu: XMX": [
        Row("intel:xe1", "gqa", backend="intel_xpu", refused="version"),
    ],
    "intel_xpu: triton without XMX": [
        Row("intel:xe1", "gqa", decode="triton"),
    ],
    "MPS: torch_native alone": [
        Row("apple:m3,device=mps", "gqa", both="torch_native"),
    ],
    "MPS: no other": [
        Row("apple:m3,device=mps", "gqa", backend="triton", refused="vendor"),
        Row("apple:m3,device=mps", "gqa", backend="flex_attention", refused="vendor"),
    ],
    "fa4: prefill alone": [
        Row("nvidia:sm100", "gqa", decode_backend="fa4", refused="phase"),
        Row("nvidia:sm100", "gqa", backend="fa4", extend="fa4", decode="flashinfer", page=128),
    ],
    "cutlass_mla: 128": [
        Row("nvidia:sm100", "mla", "page_size=64", backend="cutlass_mla", refused="page_size=128"),
        Row("nvidia:sm100", "mla", backend="cutlass_mla", decode="cutlass_mla", page=128),
    ],
    "chunked prefix: refuses no backend": [
        Row("nvidia:sm90", "mla", "chunked_prefix=1", backend=backend, both=backend)
        for backend in ("flashinfer_mla", "triton")
    ] + [
        Row("nvidia:sm100", "mla", "chunked_prefix=1", prefill_backend="fa4", extend="fa4"),
        Row("ascend:910b", "mla", "chunked_prefix=1", backend="ascend", both="ascend"),
    ],
    "aiter: no RDNA": [
        Row("amd:gfx1100", "gqa", backend="aiter", refused="arch"),
    ],
    "trtllm_mla: a latent": [
        Row("nvidia:sm100", "gqa", backend="trtllm_mla", refused="kind"),
    ],
    "trtllm_mha: no latent": [
        Row("nvidia:sm100", "mla", backend="trtllm_mha", refused="kind"),
    ],
    "sinks: served": [
        Row("nvidia:sm80", "sinks", backend="triton", both="triton"),
        Row("nvidia:sm100", "sinks", backend="trtllm_mha", both="trtllm_mha"),
        Row("nvidia:sm90", "sinks", backend="fa3", both="fa3"),
        Row("ascend:910b", "sinks", backend="ascend", both="ascend"),
        Row("cpu:x86_64,features=amx", "sinks", backend="intel_amx", both="intel_amx"),
        Row("intel:xe2", "sinks", backend="intel_xpu", both="intel_xpu"),
        Row("amd:gfx942", "sinks", backend="aiter", both="aiter"),
        Row("nvidia:sm100", "sinks", prefill_backend="fa4", decode_backend="triton", extend="fa4"),
    ],
    "sinks: refused": [
        Row("amd:gfx942", "sinks", backend="wave", refused="sinks"),
    ],
    "sinks with a window: served": [
        Row("nvidia:sm80", "sinks", "sliding_window=127", backend="triton", both="triton"),
        Row("nvidia:sm90", "sinks", "sliding_window=127", backend="fa3", both="fa3"),
        Row("nvidia:sm100", "sinks", "sliding_window=127", backend="trtllm_mha", both="trtllm_mha"),
        Row("intel:xe2", "sinks", "sliding_window=127", backend="intel_xpu", both="intel_xpu"),
    ],
    "chunks: served": [
        Row("nvidia:sm90", "chunks", backend="fa3", both="fa3"),
        Row("nvidia:sm90", "chunks", backend="triton", both="triton"),
        Row("nvidia:sm100", "chunks", backend="trtllm_mha", both="trtllm_mha"),
        Row("cpu:x86_64", "chunks", backend="torch_native", both="torch_native"),
    ],
    "chunks: refused": [
        Row("amd:gfx942", "chunks", backend="wave", refused="attention_chunk"),
    ],
    "torch_native: no graphs": [
        Row("nvidia:sm90", "gqa", "graph=1", backend="torch_native", refused="graph=none"),
        Row("nvidia:sm90", "gqa", "graph=1", decode_backend="torch_native", refused="graph=none"),
    ],
    "flex_attention: no graphs": [
        Row("cpu:x86_64,features=avx2+cxx_compiler", "gqa", "graph=1",
            backend="flex_attention", refused="graph=none"),
    ],
    "linear attention: none of these": [
        Row("nvidia:sm100", "linear", backend="trtllm_mha", refused="kind"),
    ],
    "trtllm_mha: a chain, in whichever phase": [
        Row("nvidia:sm100", "gqa", "page_size=64,spec_topk=4",
            backend="trtllm_mha", refused="spec_topk=1"),
        Row("nvidia:sm100", "gqa", "page_size=64,spec_topk=4",
            prefill_backend="trtllm_mha", refused="spec_topk=1"),
        Row("nvidia:sm100", "gqa", "page_size=64,spec_topk=4",
            decode_backend="trtllm_mha", refused="spec_topk=1"),
    ],
    "trtllm_mha: a chain is served": [
        Row("nvidia:sm100", "gqa", "spec_topk=1", backend="trtllm_mha", both="trtllm_mha"),
    ],
    "trees over pages: flashinfer": [
        Row("nvidia:sm90", "gqa", "page_size=64,spec_topk=4",
            backend="flashinfer", both="flashinfer"),
    ],
    "multi-item scoring: flashinfer": [
        Row("nvidia:sm90", "gqa", "multi_item=1", backend="flashinfer", both="flashinfer"),
        Row("nvidia:sm90", "gqa", "multi_item=1", extend="flashinfer"),
    ],
    "trees over pages: no other": [
        Row("amd:gfx942", "gqa", "page_size=64,spec_topk=4",
            backend="wave", refused="spec_topk=none"),
        Row("amd:gfx942", "gqa", "page_size=64,spec_topk=4",
            backend="aiter", refused="spec_topk=1"),
        Row("ascend:910b", "gqa", "page_size=128,spec_topk=4",
            backend="ascend", refused="spec_topk=1"),
    ],
    "a backend without draft steps": [
        Row("amd:gfx942", "gqa", "spec_topk=1", backend="wave", refused="spec_topk=none"),
        Row("intel:xe2", "gqa", "spec_topk=1", backend="intel_xpu", refused="spec_topk=none"),
        Row("cpu:x86_64,features=amx", "gqa", "spec_topk=1",
            backend="intel_amx", refused="spec_topk=none"),
    ],
    "verify and draft are prefill's": [
        Row("nvidia:sm90", "gqa", "spec_topk=4", prefill_backend="fa3", verify="fa3", draft="fa3"),
        Row("nvidia:sm90", "mla", "spec_topk=1",
            decode_backend="flashmla", verify="fa3_mla", draft="fa3_mla"),
    ],
    "a prefill that verifies nothing meets no drafts": [
        Row("nvidia:sm100", "mla-by-decode", "spec_topk=1",
            backend="trtllm_mla", prefill_backend="fa4", extend="fa4"),
        Row("nvidia:sm100", "gqa-by-decode", "spec_topk=4",
            prefill_backend="fa4", extend="fa4", verify="flashinfer"),
    ],
    "verify and draft are decode's where it is said": [
        Row("nvidia:sm90", "mla", "spec_topk=1,speculative_attention_mode=decode",
            backend="flashmla", draft="flashmla"),
    ],
    "fa3: no e5m2": [
        Row("nvidia:sm90", "gqa", "kv_dtype=fp8_e5m2", backend="fa3", refused="kv_dtype=bfloat16"),
        Row("nvidia:sm90", "gqa", "kv_dtype=fp8_e5m2",
            prefill_backend="fa3", refused="kv_dtype=bfloat16"),
        Row("nvidia:sm90", "gqa", "kv_dtype=fp8_e5m2",
            decode_backend="fa3", refused="kv_dtype=bfloat16"),
    ],
    "trtllm_mla: bf16 or e4m3": [
        Row("nvidia:sm100", "mla", "kv_dtype=fp8_e5m2",
            backend="trtllm_mla", refused="kv_dtype=bfloat16"),
    ],
    "trtllm_mla: e4m3": [
        Row("nvidia:sm100", "mla", "kv_dtype=fp8_e4m3", backend="trtllm_mla", decode="trtllm_mla"),
    ],
    "4 bits: CUDA": [
        Row("amd:gfx942", "gqa", "kv_dtype=fp4_e2m1", backend="aiter", refused="kv_dtype=bfloat16"),
        Row("amd:gfx942", "gqa", "kv_dtype=fp4_e2m1", backend="wave", refused="kv_dtype=bfloat16"),
        Row("ascend:910b", "gqa", "kv_dtype=fp4_e2m1",
            backend="ascend", refused="kv_dtype=bfloat16"),
        Row("intel:xe2", "gqa", "kv_dtype=fp4_e2m1",
            backend="intel_xpu", refused="kv_dtype=bfloat16"),
    ],
    "4 bits: not these": [
        Row("nvidia:sm100", "gqa", "kv_dtype=fp4_e2m1",
            backend="flashinfer", refused="kv_dtype=bfloat16"),
        Row("nvidia:sm100", "mla", "kv_dtype=fp4_e2m1",
            backend="triton", refused="kv_dtype=bfloat16"),
        Row("nvidia:sm100", "mla", "kv_dtype=fp4_e2m1",
            backend="cutlass_mla", refused="kv_dtype=bfloat16"),
    ],
    "4 bits: not implemented here": [
        Row("nvidia:sm100", "gqa", "kv_dtype=fp4_e2m1", backend="triton", both="triton"),
        Row("nvidia:sm100", "gqa", "kv_dtype=fp4_e2m1",
            backend="trtllm_mha", refused="kv_dtype=bfloat16"),
        Row("nvidia:sm90", "gqa", "kv_dtype=fp4_e2m1",
            backend="trtllm_mha", refused="kv_dtype=bfloat16"),
        Row("nvidia:sm100", "mla", "kv_dtype=fp4_e2m1",
            backend="flashinfer_mla", refused="kv_dtype=bfloat16"),
        Row("nvidia:sm100", "gqa", "kv_dtype=fp4_e2m1",
            prefill_backend="fa4", refused="kv_dtype=bfloat16"),
        Row("nvidia:sm100", "mla", "kv_dtype=fp4_e2m1",
            prefill_backend="fa4", refused="kv_dtype=bfloat16"),
    ],
    "nsa: bf16 or e4m3": [
        Row("nvidia:sm90", "nsa", "kv_dtype=fp8_e4m3", backend="nsa", both="nsa"),
        Row("nvidia:sm90", "nsa", "kv_dtype=fp8_e5m2", backend="nsa", refused="kv_dtype=bfloat16"),
    ],
    "deterministic: served": [
        Row("nvidia:sm90", "gqa", "deterministic=1", backend="fa3", both="fa3"),
        Row("intel:xe2", "gqa", "deterministic=1", backend="intel_xpu", both="intel_xpu"),
        Row("nvidia:sm80", "gqa", "deterministic=1", backend="triton", both="triton"),
        Row("nvidia:sm100", "gqa", "deterministic=1",
            prefill_backend="fa4", decode_backend="triton", extend="fa4"),
        Row("nvidia:sm90", "gqa", "deterministic=1",
            decode_backend="flashinfer", decode="flashinfer"),
    ],
    "deterministic: no other": [
        Row("ascend:910b", "gqa", "deterministic=1",
            backend="ascend", refused="deterministic=none"),
        Row("nvidia:sm100", "gqa", "deterministic=1",
            backend="trtllm_mha", refused="deterministic=none"),
        Row("nvidia:sm100", "gqa", "deterministic=1",
            prefill_backend="trtllm_mha", refused="deterministic=none"),
        Row("nvidia:sm100", "gqa", "deterministic=1",
            decode_backend="trtllm_mha", refused="deterministic=none"),
        Row("nvidia:sm90", "gqa", "deterministic=1",
            backend="flex_attention", refused="deterministic=none"),
        Row("nvidia:sm90", "gqa", "deterministic=1",
            prefill_backend="flex_attention", refused="deterministic=none"),
        Row("nvidia:sm90", "gqa", "deterministic=1",
            decode_backend="flex_attention", refused="deterministic=none"),
        Row("amd:gfx942", "gqa", "deterministic=1", backend="wave", refused="deterministic=none"),
        Row("amd:gfx942", "gqa", "deterministic=1",
            prefill_backend="wave", refused="deterministic=none"),
        Row("amd:gfx942", "gqa", "deterministic=1",
            decode_backend="wave", refused="deterministic=none"),
        Row("amd:gfx942", "gqa", "deterministic=1", backend="aiter", refused="deterministic=none"),
        Row("amd:gfx942", "gqa", "deterministic=1",
            prefill_backend="aiter", refused="deterministic=none"),
        Row("amd:gfx942", "gqa", "deterministic=1",
            decode_backend="aiter", refused="deterministic=none"),
        Row("cpu:x86_64,features=amx", "gqa", "deterministic=1",
            backend="intel_amx", refused="deterministic=none"),
        Row("cpu:x86_64,features=amx", "gqa", "deterministic=1",
            prefill_backend="intel_amx", refused="deterministic=none"),
        Row("cpu:x86_64,features=amx", "gqa", "deterministic=1",
            decode_backend="intel_amx", refused="deterministic=none"),
    ],
    "deterministic over a latent: served": [
        Row("nvidia:sm90", "mla", "deterministic=1", backend="fa3_mla", both="fa3_mla"),
        Row("nvidia:sm80", "mla", "deterministic=1", backend="triton", both="triton"),
        Row("nvidia:sm100", "mla", "deterministic=1",
            prefill_backend="fa4", extend="fa4", decode="triton"),
    ],
    "deterministic over a latent: no other": [
        Row("ascend:910b", "mla", "deterministic=1",
            backend="ascend", refused="deterministic=none"),
        Row("nvidia:sm90", "mla", "deterministic=1",
            decode_backend="flashinfer_mla", refused="deterministic=none"),
        Row("nvidia:sm90", "mla", "deterministic=1",
            decode_backend="flashmla", refused="deterministic=none"),
        Row("nvidia:sm100", "mla", "deterministic=1",
            decode_backend="trtllm_mla", refused="deterministic=none"),
        Row("nvidia:sm100", "mla", "deterministic=1",
            decode_backend="cutlass_mla", refused="deterministic=none"),
        Row("amd:gfx942", "mla", "deterministic=1",
            decode_backend="aiter", refused="deterministic=none"),
    ],
    "encoder: fa3 on SM90": [
        Row("nvidia:sm90", "gqa", "multimodal=1", encoder="fa3"),
    ],
    "encoder: aiter on CDNA 3": [
        Row("amd:gfx942", "gqa", "multimodal=1", encoder="aiter"),
    ],
    "encoder: no fa3 on Blackwell": [
        Row("nvidia:sm100", "gqa", "multimodal=1", mm_backend="fa3", refused="version"),
    ],
    "encoder: triton with heads that no vendor's kernel takes": [
        Row("nvidia:sm80", "gqa", "multimodal=1,encoder_head_dim=72",
            decode="flashinfer", encoder="triton"),
        Row("nvidia:sm120", "gqa", "multimodal=1,encoder_head_dim=80",
            decode="flashinfer", encoder="triton"),
    ],
    "encoder: ascend on Ascend": [
        Row("ascend:910b", "gqa", "multimodal=1", encoder="ascend"),
    ],
    "encoder: no aiter on RDNA": [
        Row("amd:gfx1100", "gqa", "multimodal=1", encoder="triton"),
    ],
    "encoder: torch operations elsewhere": [
        Row("cpu:x86_64,features=avx2", "gqa", "multimodal=1", encoder="torch_native"),
        Row("apple:m3,device=mps", "gqa", "multimodal=1", encoder="torch_native"),
    ],
}

DEVIATIONS: dict[str, Deviation] = {
    "triton: no encoder-decoder": Deviation(
        sglang="refuses it",
        here="the kernels read an encoder's keys as they read others",
        rows=[
            Row("nvidia:sm90", "gqa", "cross_attention=1", backend="triton", both="triton", page=1),
        ],
    ),
    "MUSA: 1 where nothing asks for another": Deviation(
        sglang="64",
        here="the card that serves it gathers by token",
        rows=[
            Row("mthreads:mp_31,device=musa", "gqa", both="triton", page=1),
        ],
    ),
    "fa3: MUSA": Deviation(
        sglang="serves it there with another library",
        here="the card is of sgl_kernel's kernels, which are NVIDIA's",
        rows=[
            Row("mthreads:mp_31,device=musa", "gqa", backend="fa3", refused="vendor"),
            Row("mthreads:mp_31,device=musa", "gqa", "multimodal=1",
                mm_backend="fa3", refused="vendor"),
        ],
    ),
    "aiter: pages of 16 to 128": Deviation(
        sglang="64 where the KV cache is laid out in five dimensions, else any",
        here="K and V have one layout, and a page is a tile of the kernel",
        rows=[
            Row("amd:gfx942", "gqa", backend="aiter", both="aiter", page=64),
            Row("amd:gfx942", "gqa", "page_size=16", backend="aiter", both="aiter", page=16),
            Row("amd:gfx942", "gqa", "page_size=1", backend="aiter", refused="page_size=16"),
        ],
    ),
    "fa3: windows over pages": Deviation(
        sglang="wants pages of 1 where prefill looks at the window",
        here="a window's keys are cut in the kernel, whatever page they lie on",
        rows=[
            Row("nvidia:sm90", "gqa", "sliding_window=127,page_size=64",
                backend="fa3", both="fa3", page=64),
        ],
    ),
    "Falcon-H1: heads like any others": Deviation(
        sglang="triton for this model on SM100; its manual, never flashinfer",
        here="a request has no model's name, and these serve all that its attention needs",
        rows=[
            Row("nvidia:sm80", "falcon_h1", both="flashinfer"),
            Row("nvidia:sm100", "falcon_h1", both="trtllm_mha"),
        ],
    ),
    "fa4: SM90, SM100 and SM103": Deviation(
        sglang="checks no architecture, so that what is not built fails in the kernel",
        here="what else the library is built for takes no pages",
        rows=[
            Row("nvidia:sm80", "gqa", prefill_backend="fa4", refused="version"),
            Row("nvidia:sm110", "gqa", prefill_backend="fa4", refused="version"),
            Row("nvidia:sm120", "gqa", prefill_backend="fa4", refused="version"),
        ],
    ),
    "trtllm_mla: prefill": Deviation(
        sglang="serves it, without graphs",
        here="the card is of the decode kernels; flashinfer_mla is the companion for prefill",
        rows=[
            Row("nvidia:sm100", "mla", prefill_backend="trtllm_mla", refused="phase"),
        ],
    ),
    "nsa: other vendors": Deviation(
        sglang="serves it, over pages of 1 and of 128",
        here="the card is of FlashMLA's sparse kernels, which are for SM90 and SM100",
        rows=[
            Row("amd:gfx942", "nsa", backend="nsa", refused="vendor"),
            Row("intel:xe2", "nsa", backend="nsa", refused="vendor"),
        ],
    ),
    "fa3: SM80": Deviation(
        sglang="serves it: the library builds for SM80 to SM89",
        here="our adapter was only ever run on SM90",
        rows=[
            Row("nvidia:sm80", "gqa", backend="fa3", refused="version"),
        ],
    ),
    "trtllm_mha: prefill over e4m3 on SM90": Deviation(
        sglang="serves it",
        here="flashinfer 0.6.13 says of these kernels that they hang",
        rows=[
            Row("nvidia:sm90", "gqa", "kv_dtype=fp8_e4m3",
                prefill_backend="trtllm_mha", refused="kv_dtype=bfloat16"),
            Row("nvidia:sm90", "gqa", "kv_dtype=fp8_e4m3",
                decode_backend="trtllm_mha", decode="trtllm_mha"),
        ],
    ),
    "trtllm_mha: windows in prefill on SM120": Deviation(
        sglang="does not look",
        here="flashinfer 0.6.13 refuses them",
        rows=[
            Row("nvidia:sm120", "gqa", "sliding_window=127",
                prefill_backend="trtllm_mha", refused="sliding_window"),
            Row("nvidia:sm120", "gqa", "sliding_window=127",
                decode_backend="trtllm_mha", decode="trtllm_mha"),
        ],
    ),
    "trtllm_mla: SM110": Deviation(
        sglang="counts every Blackwell, 10, 11 and 12, as one",
        here="trtllm-gen's kernels are for SM100 and SM103, XQA's for SM120",
        rows=[
            Row("nvidia:sm110", "mla", backend="trtllm_mla", refused="version"),
        ],
    ),
    "ascend: 256": Deviation(
        sglang="forces 128",
        here="the operator takes multiples of 128 up to 512",
        rows=[
            Row("ascend:910b", "gqa", "page_size=256", backend="ascend", both="ascend", page=256),
        ],
    ),
    "fa3: windows with cross attention": Deviation(
        sglang="asserts that a model has one or the other",
        here="tables are kept apart for encoders, and each layer has its own window",
        rows=[
            Row("nvidia:sm90", "gqa", "sliding_window=127,cross_attention=1",
                backend="fa3", both="fa3"),
        ],
    ),
    "sinks: served": Deviation(
        sglang="not on its list for gpt-oss",
        here="our adapter serves sinks, and the conformance suite runs them",
        rows=[
            Row("cpu:x86_64,features=avx2", "sinks", backend="torch_native", both="torch_native"),
            Row("nvidia:sm90", "sinks", backend="flex_attention", both="flex_attention"),
            Row("nvidia:sm90", "sinks", backend="flashinfer", both="flashinfer"),
        ],
    ),
    "sinks with a window, as in gpt-oss": Deviation(
        sglang="on its list for gpt-oss",
        here="no windows, as in the support matrix of SGLang's own manual",
        rows=[
            Row("nvidia:sm100", "sinks", "sliding_window=127",
                prefill_backend="fa4", refused="sliding_window"),
            Row("ascend:910b", "sinks", "sliding_window=127",
                backend="ascend", refused="sliding_window"),
            Row("cpu:x86_64,features=amx", "sinks", "sliding_window=127",
                backend="intel_amx", refused="sliding_window"),
        ],
    ),
    "chunks: cut": Deviation(
        sglang="not on its list for Llama 4",
        here="core cuts prompts at the borders of chunks for these too",
        rows=[
            Row("nvidia:sm90", "chunks", backend="flashinfer", both="flashinfer"),
            Row("nvidia:sm100", "chunks", backend="fa4", extend="fa4", decode="flashinfer"),
        ],
    ),
    "chunks: not cut": Deviation(
        sglang="on its list for Llama 4, whose chunks it cuts out of the page table",
        here="no kernel of it has chunks, and no adapter of ours cuts them",
        rows=[
            Row("amd:gfx942", "chunks", backend="aiter", refused="attention_chunk"),
            Row("ascend:910b", "chunks", backend="ascend", refused="attention_chunk"),
            Row("intel:xe2", "chunks", backend="intel_xpu", refused="attention_chunk"),
        ],
    ),
    "flex_attention: graphs": Deviation(
        sglang="switches graphs off",
        here="our adapter replays with buffers of fixed sizes",
        rows=[
            Row("nvidia:sm90", "gqa", "page_size=16,graph=1",
                backend="flex_attention", both="flex_attention"),
        ],
    ),
    "flex_attention: speculation": Deviation(
        sglang="asserts that there is none",
        here="our adapter compiles the tree into the mask",
        rows=[
            Row("nvidia:sm90", "gqa", "page_size=64,spec_topk=4",
                backend="flex_attention", both="flex_attention"),
        ],
    ),
    "multi-item scoring: others": Deviation(
        sglang="flashinfer in both phases, and no other",
        here="our adapters of these serve it too",
        rows=[
            Row("nvidia:sm90", "gqa", "multi_item=1",
                backend="flex_attention", both="flex_attention"),
            Row("nvidia:sm90", "gqa", "multi_item=1", backend="torch_native", both="torch_native"),
        ],
    ),
    "trees: trtllm_mha with another backend that verifies": Deviation(
        sglang="refuses it in any phase",
        here="if the decode backend verifies, the extend backend gets no drafts",
        rows=[
            Row("nvidia:sm100", "gqa-by-decode", "spec_topk=4",
                prefill_backend="trtllm_mha", extend="trtllm_mha"),
        ],
    ),
    "trees over pages: fa3": Deviation(
        sglang="serves it in two calls; its manual says flashinfer only",
        here="by the manual, though our adapter does the same and would serve it",
        rows=[
            Row("nvidia:sm90", "gqa", "page_size=64,spec_topk=4",
                backend="fa3", refused="page_size=1"),
        ],
    ),
    "trees over pages: triton": Deviation(
        sglang="serves it; its manual says flashinfer only",
        here="masks of trees are laid out by token",
        rows=[
            Row("nvidia:sm80", "gqa", "page_size=64,spec_topk=4",
                backend="triton", refused="page_size=1"),
        ],
    ),
    "trees over pages: torch_native": Deviation(
        sglang="refuses it",
        here="masks are plain tensors to our adapter",
        rows=[
            Row("nvidia:sm90", "gqa", "page_size=64,spec_topk=4",
                backend="torch_native", both="torch_native"),
        ],
    ),
    "4 bits: torch operations": Deviation(
        sglang="serves it",
        here="torch's flex_attention reads K and V in the dtype of Q",
        rows=[
            Row("nvidia:sm100", "gqa", "kv_dtype=fp4_e2m1",
                backend="flex_attention", refused="kv_dtype=bfloat16"),
        ],
    ),
    "4 bits: Triton elsewhere": Deviation(
        sglang="refuses 4 bits without CUDA",
        here="the kernels widen them by operations that Triton compiles for every GPU",
        rows=[
            Row("amd:gfx942", "gqa", "kv_dtype=fp4_e2m1", backend="triton", both="triton"),
            Row("intel:xe2", "gqa", "kv_dtype=fp4_e2m1", backend="triton", both="triton"),
        ],
    ),
    "4 bits: trtllm_mla": Deviation(
        sglang="on one list of backends and refused by another rule",
        here="the kernels take bf16 and e4m3",
        rows=[
            Row("nvidia:sm100", "mla", "kv_dtype=fp4_e2m1",
                backend="trtllm_mla", refused="kv_dtype=bfloat16"),
        ],
    ),
    "deterministic: flashinfer's prefill": Deviation(
        sglang="serves it",
        here="fa2 takes an extend step's tile from the mean length of its requests",
        rows=[
            Row("nvidia:sm90", "gqa", "deterministic=1",
                backend="flashinfer", refused="deterministic=none"),
        ],
    ),
    "deterministic: torch_native": Deviation(
        sglang="refuses it",
        here="our adapter attends to each request by itself then, and a test compares the bits",
        rows=[
            Row("nvidia:sm90", "gqa", "deterministic=1",
                backend="torch_native", both="torch_native"),
        ],
    ),
    "encoder: SM100": Deviation(
        sglang="fa4",
        here="fa4's card is for prefill over a cache",
        rows=[
            Row("nvidia:sm100", "gqa", "multimodal=1", encoder="flashinfer"),
        ],
    ),
    "encoder: heads of 64, 128 and 256": Deviation(
        sglang="triton",
        here="an encoder is a ragged prefill that is not causal, which flashinfer has kernels for",
        rows=[
            Row("nvidia:sm80", "gqa", "multimodal=1,encoder_head_dim=64", encoder="flashinfer"),
        ],
    ),
    "encoder: heads of 72 on SM90": Deviation(
        sglang="fa3, which pads them",
        here="fa3's card names the dims that kernels are built for",
        rows=[
            Row("nvidia:sm90", "gqa", "multimodal=1,encoder_head_dim=72",
                decode="fa3", encoder="triton"),
        ],
    ),
    "encoder: Intel": Deviation(
        sglang="its own kernels for them",
        here="the cards of intel_xpu and intel_amx have no encoders",
        rows=[
            Row("intel:xe2", "gqa", "multimodal=1", decode="intel_xpu", encoder="triton"),
            Row("cpu:x86_64,features=amx", "gqa", "multimodal=1",
                decode="intel_amx", encoder="torch_native"),
        ],
    ),
}
# fmt: on


def cases() -> Iterator[object]:
    deviations = {name: deviation.rows for name, deviation in DEVIATIONS.items()}
    for table in (RULES, deviations):
        for rule, rows in table.items():
            for row in rows:
                words = [row.platform, row.model, row.changes, *row.named.values()]
                yield pytest.param(row, id=f"{rule} [{' '.join(filter(None, words))}]")


@pytest.fixture(scope="module")
def offers() -> tuple[Offer, ...]:
    return Plugins.load().offers()


@pytest.mark.parametrize("row", list(cases()))
def test_the_outcome_is_as_listed(offers, row) -> None:
    if row.refused is None:
        decision = row.decide(offers)
        found = {phase: choice.backend for phase, choice in decision.phases.items()}
        assert found.items() >= row.phases.items()
        assert row.page in (None, decision.page_size)
        assert row.phases or row.page
        assert "page_size" not in {change.field for change in decision.coercions}
        return
    (backend,) = row.named.values()
    with pytest.raises(NoBackend) as caught:
        row.decide(offers)
    said = {
        reason.hint or reason.axis
        for verdict in caught.value.candidates
        if verdict.backend == backend
        for reason in verdict.reasons
    }
    assert row.refused in said
    if "=" in row.refused:
        followed = row.decide(offers, hint=row.refused)
        assert backend in {choice.backend for choice in followed.phases.values()}


def test_every_row_is_listed_once() -> None:
    rows = [case.values[0] for case in cases()]
    assert len(set(rows)) == len(rows)
