"""What SGLang 0.5.23 forces or refuses after it chose, as it is answered here: one row each.

There a page size or a backend is often replaced; here the request is refused, with the value that
helps as the hint. Rules of DEVIATIONS are answered otherwise on purpose.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request, parse_fields
from attnmux.core.choosing.find.plugins import load_plugins
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.solver import solve
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.errors import NoBackend

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
    "linear": "kind=linear,dtype=bf16",
    "falcon_h1": "dtype=bf16,head_dim=128,num_q_heads=12,num_kv_heads=2",
}
"""What the first word of a row's request stands for."""
FLAGS = {
    "base": "backend",
    "prefill": "prefill_backend",
    "decode": "decode_backend",
    "encoder": "mm_backend",
}

RULES = """
flashmla: 64
    nvidia:sm90 | mla,page_size=32 | base=flashmla | refused: page_size=64
flashmla: 64 for decode alone
    nvidia:sm90 | mla,page_size=32 | decode=flashmla | refused: page_size=64
flashmla: 64 for prefill alone
    nvidia:sm90 | mla,page_size=32 | prefill=flashmla | refused: phase
flashmla: 64 where it is open
    nvidia:sm90 | mla | base=flashmla | extend=flashinfer_mla decode=flashmla page=64
trtllm_mla: 32 or 64
    nvidia:sm100 | mla,page_size=128 | base=trtllm_mla | refused: page_size=64
trtllm_mla: 32 is kept by its companion
    nvidia:sm100 | mla,page_size=32 | base=trtllm_mla | extend=flashinfer_mla page=32
trtllm_mla: 32 is kept
    nvidia:sm100 | mla,page_size=32 | base=trtllm_mla | decode=trtllm_mla page=32
trtllm_mha: 16, 32, 64 or 128
    nvidia:sm100 | gqa,page_size=8 | base=trtllm_mha    | refused: page_size=16
    nvidia:sm100 | gqa,page_size=8 | prefill=trtllm_mha | refused: page_size=16
    nvidia:sm100 | gqa,page_size=8 | decode=trtllm_mha  | refused: page_size=16
trtllm_mha: where it verifies too
    nvidia:sm100 | gqa,page_size=8,spec_topk=1 | base=trtllm_mha | refused: page_size=16
trtllm_mha: each of these is kept
    nvidia:sm100 | gqa,page_size=16  | base=trtllm_mha | all=trtllm_mha page=16
    nvidia:sm100 | gqa,page_size=32  | base=trtllm_mha | all=trtllm_mha page=32
    nvidia:sm100 | gqa,page_size=64  | base=trtllm_mha | all=trtllm_mha page=64
    nvidia:sm100 | gqa,page_size=128 | base=trtllm_mha | all=trtllm_mha page=128
trtllm_mha: 64 where it is open
    nvidia:sm100 | gqa | base=trtllm_mha | all=trtllm_mha page=64
trtllm_mha: 1 goes to another
    nvidia:sm100 | gqa,page_size=1 |  | decode=flashinfer
trtllm_mha: 128 is for grouped heads
    nvidia:sm100 | mha,page_size=128 | base=trtllm_mha | refused: page_size=64
trtllm_mha: 128 is for groups of a power of two
    nvidia:sm100 | sixes,page_size=128 | base=trtllm_mha | refused: page_size=64
trtllm_mha: 128 is for K and V of one dim
    nvidia:sm100 | gqa,v_head_dim=64,page_size=128 | base=trtllm_mha | refused: v_head_dim
trtllm_mha: 128 in XQA's decode with any heads
    nvidia:sm90  | mha,page_size=128 | decode=trtllm_mha | decode=trtllm_mha page=128
    nvidia:sm120 | mha,page_size=128 | decode=trtllm_mha | decode=trtllm_mha page=128
fa4: 128
    nvidia:sm103 | gqa,page_size=64 | prefill=fa4 | refused: page_size=128
    nvidia:sm100 | gqa,page_size=32 | prefill=fa4 | refused: page_size=128
fa4: 128 where it is open
    nvidia:sm100 | gqa | prefill=fa4 | extend=fa4 page=128
fa4: any page over a latent
    nvidia:sm100 | mla,page_size=32 | prefill=fa4 decode=trtllm_mla | extend=fa4 page=32
intel_xpu: 64 or 128
    intel:xe2 | gqa,page_size=32 | base=intel_xpu | refused: page_size=64
intel_xpu: 128 where it is open
    intel:xe2 | gqa | base=intel_xpu | all=intel_xpu page=128
intel_xpu: 16 over a latent
    intel:xe2 | mla,page_size=16 | base=intel_xpu | all=intel_xpu page=16
ascend: 128
    ascend:910b | gqa,page_size=64 | base=ascend | refused: page_size=128
ascend: 128 where it is open
    ascend:910b | gqa | base=ascend | all=ascend page=128
ascend: 128 over a latent
    ascend:910b | mla | base=ascend | all=ascend page=128
nsa: 64
    nvidia:sm90 | nsa,page_size=1 | base=nsa | refused: page_size=64
nsa: 64 where it is open
    nvidia:sm90 | nsa | base=nsa | all=nsa page=64
1 where nothing asks for another
    nvidia:sm90 | gqa |  | decode=fa3 page=1
fa3: SM90
    nvidia:sm100 | gqa | base=fa3 | refused: version
    nvidia:sm110 | gqa | base=fa3 | refused: version
    nvidia:sm120 | gqa | base=fa3 | refused: version
fa3: no latent on SM80
    nvidia:sm80 | mla | base=fa3_mla | refused: version
fa3: CUDA 12.3
    nvidia:sm90,cuda=12.2 | gqa | base=fa3 | refused: runtime
trtllm_mla: Blackwell
    nvidia:sm80 | mla | base=trtllm_mla | refused: version
    nvidia:sm90 | mla | base=trtllm_mla | refused: version
trtllm_mha: SM90, SM100, SM120
    nvidia:sm80  | gqa | prefill=trtllm_mha | refused: version
    nvidia:sm80  | gqa | decode=trtllm_mha  | refused: version
    nvidia:sm110 | gqa | prefill=trtllm_mha | refused: version
    nvidia:sm110 | gqa | decode=trtllm_mha  | refused: version
trtllm_mha: no prefill over e4m3 on SM120
    nvidia:sm120 | gqa,kv_dtype=fp8_e4m3 | prefill=trtllm_mha | refused: kv_dtype=bfloat16
trtllm_mha: decode over e4m3 on SM120
    nvidia:sm120 | gqa,kv_dtype=fp8_e4m3 | decode=trtllm_mha | decode=trtllm_mha
intel_amx: AMX
    cpu:x86_64,features=avx2 | gqa | base=intel_amx | refused: features
intel_amx: torch_native without AMX
    cpu:x86_64,features=avx2 | gqa |  | decode=torch_native
intel_xpu: XMX
    intel:xe1 | gqa | base=intel_xpu | refused: version
intel_xpu: triton without XMX
    intel:xe1 | gqa |  | decode=triton
MPS: torch_native alone
    apple:m3,device=mps | gqa |  | all=torch_native
MPS: no other
    apple:m3,device=mps | gqa | base=triton         | refused: vendor
    apple:m3,device=mps | gqa | base=flex_attention | refused: vendor
fa4: prefill alone
    nvidia:sm100 | gqa | decode=fa4 | refused: phase
    nvidia:sm100 | gqa | base=fa4   | extend=fa4 decode=flashinfer page=128
cutlass_mla: 128
    nvidia:sm100 | mla,page_size=64 | base=cutlass_mla | refused: page_size=128
    nvidia:sm100 | mla              | base=cutlass_mla | decode=cutlass_mla page=128
chunked prefix: served, by a companion where the backend only decodes
    nvidia:sm90  | mla,chunked_prefix=1 | base=fa3            | all=fa3_mla
    nvidia:sm90  | mla,chunked_prefix=1 | base=flashinfer_mla | all=flashinfer_mla
    nvidia:sm90  | mla,chunked_prefix=1 | base=flashmla       | extend=flashinfer_mla
    nvidia:sm100 | mla,chunked_prefix=1 | base=trtllm_mla     | extend=flashinfer_mla
    nvidia:sm100 | mla,chunked_prefix=1 | base=cutlass_mla    | extend=flashinfer_mla
chunked prefix: not these
    nvidia:sm90  | mla,chunked_prefix=1 | base=triton | refused: chunked_prefix=none
    nvidia:sm100 | mla,chunked_prefix=1 | prefill=fa4 | refused: chunked_prefix=none
    ascend:910b  | mla,chunked_prefix=1 | base=ascend | refused: chunked_prefix=none
aiter: no RDNA
    amd:gfx1100 | gqa | base=aiter | refused: arch
triton: no encoder-decoder
    nvidia:sm90 | gqa,cross_attention=1 | base=triton | refused: cross_attention
trtllm_mla: a latent
    nvidia:sm100 | gqa | base=trtllm_mla | refused: kind
trtllm_mha: no latent
    nvidia:sm100 | mla | base=trtllm_mha | refused: kind
sinks: served
    nvidia:sm80             | sinks | base=triton               | all=triton
    nvidia:sm100            | sinks | base=trtllm_mha           | all=trtllm_mha
    nvidia:sm90             | sinks | base=fa3                  | all=fa3
    ascend:910b             | sinks | base=ascend               | all=ascend
    cpu:x86_64,features=amx | sinks | base=intel_amx            | all=intel_amx
    intel:xe2               | sinks | base=intel_xpu            | all=intel_xpu
    amd:gfx942              | sinks | base=aiter                | all=aiter
    nvidia:sm100            | sinks | prefill=fa4 decode=triton | extend=fa4
sinks: refused
    amd:gfx942  | sinks | base=wave | refused: sinks
sinks beside a window: served
    nvidia:sm80  | sinks,sliding_window=127 | base=triton     | all=triton
    nvidia:sm90  | sinks,sliding_window=127 | base=fa3        | all=fa3
    nvidia:sm100 | sinks,sliding_window=127 | base=trtllm_mha | all=trtllm_mha
    intel:xe2    | sinks,sliding_window=127 | base=intel_xpu  | all=intel_xpu
chunks: served
    nvidia:sm90 | chunks | base=fa3    | all=fa3
    nvidia:sm90 | chunks | base=triton | all=triton
    cpu:x86_64 | chunks | base=torch_native | all=torch_native
chunks: refused
    nvidia:sm90  | chunks | base=flashinfer | refused: attention_chunk
    nvidia:sm100 | chunks | base=fa4        | refused: attention_chunk
    amd:gfx942   | chunks | base=wave       | refused: attention_chunk
torch_native: no graphs
    nvidia:sm90 | gqa,graph=1 | base=torch_native   | refused: graph=none
    nvidia:sm90 | gqa,graph=1 | decode=torch_native | refused: graph=none
flex_attention: no graphs
    cpu:x86_64,features=avx2+cxx_compiler | gqa,graph=1 | base=flex_attention | refused: graph=none
linear attention: none of these
    nvidia:sm100 | linear | base=trtllm_mha | refused: kind
trtllm_mha: a chain, in whichever phase
    nvidia:sm100 | gqa,page_size=64,spec_topk=4 | base=trtllm_mha    | refused: spec_topk=1
    nvidia:sm100 | gqa,page_size=64,spec_topk=4 | prefill=trtllm_mha | refused: spec_topk=1
    nvidia:sm100 | gqa,page_size=64,spec_topk=4 | decode=trtllm_mha  | refused: spec_topk=1
trtllm_mha: a chain is served
    nvidia:sm100 | gqa,spec_topk=1 | base=trtllm_mha | all=trtllm_mha
trees over pages: flashinfer
    nvidia:sm90 | gqa,page_size=64,spec_topk=4 | base=flashinfer | all=flashinfer
multi-item scoring: flashinfer
    nvidia:sm90 | gqa,multi_item=1 | base=flashinfer | all=flashinfer
    nvidia:sm90 | gqa,multi_item=1 |                 | extend=flashinfer
trees over pages: no other
    amd:gfx942  | gqa,page_size=64,spec_topk=4  | base=wave   | refused: spec_topk=none
    amd:gfx942  | gqa,page_size=64,spec_topk=4  | base=aiter  | refused: page_size=1
    ascend:910b | gqa,page_size=128,spec_topk=4 | base=ascend | refused: spec_topk=none
a backend without draft steps
    amd:gfx942  | gqa,spec_topk=1 | base=wave      | refused: spec_topk=none
    ascend:910b | gqa,spec_topk=1 | base=ascend    | refused: spec_topk=none
    intel:xe2   | gqa,spec_topk=1 | base=intel_xpu | refused: spec_topk=none
    cpu:x86_64,features=amx | gqa,spec_topk=1 | base=intel_amx | refused: spec_topk=none
verify and draft are prefill's
    nvidia:sm90 | gqa,spec_topk=4 | prefill=fa3     | verify=fa3 draft=fa3
    nvidia:sm90 | mla,spec_topk=1 | decode=flashmla | verify=fa3_mla draft=fa3_mla
a prefill that verifies nothing meets no drafts
    nvidia:sm100 | mla-by-decode,spec_topk=1 | base=trtllm_mla prefill=fa4 | extend=fa4
    nvidia:sm100 | gqa-by-decode,spec_topk=4 | prefill=fa4 | extend=fa4 verify=flashinfer
verify and draft are decode's where it is said
    nvidia:sm90 | mla,spec_topk=1,speculative_attention_mode=decode | base=flashmla | draft=flashmla
fa3: no e5m2
    nvidia:sm90 | gqa,kv_dtype=fp8_e5m2 | base=fa3    | refused: kv_dtype=bfloat16
    nvidia:sm90 | gqa,kv_dtype=fp8_e5m2 | prefill=fa3 | refused: kv_dtype=bfloat16
    nvidia:sm90 | gqa,kv_dtype=fp8_e5m2 | decode=fa3  | refused: kv_dtype=bfloat16
trtllm_mla: bf16 or e4m3
    nvidia:sm100 | mla,kv_dtype=fp8_e5m2 | base=trtllm_mla | refused: kv_dtype=bfloat16
trtllm_mla: e4m3
    nvidia:sm100 | mla,kv_dtype=fp8_e4m3 | base=trtllm_mla | decode=trtllm_mla
4 bits: CUDA
    amd:gfx942  | gqa,kv_dtype=fp4_e2m1 | base=aiter     | refused: kv_dtype=bfloat16
    amd:gfx942  | gqa,kv_dtype=fp4_e2m1 | base=wave      | refused: kv_dtype=bfloat16
    ascend:910b | gqa,kv_dtype=fp4_e2m1 | base=ascend    | refused: kv_dtype=bfloat16
    intel:xe2   | gqa,kv_dtype=fp4_e2m1 | base=intel_xpu | refused: kv_dtype=bfloat16
    amd:gfx942  | gqa,kv_dtype=fp4_e2m1 | base=triton    | refused: kv_dtype=bfloat16
    intel:xe2   | gqa,kv_dtype=fp4_e2m1 | base=triton    | refused: kv_dtype=bfloat16
4 bits: not these
    nvidia:sm100 | gqa,kv_dtype=fp4_e2m1 | base=flashinfer  | refused: kv_dtype=bfloat16
    nvidia:sm100 | mla,kv_dtype=fp4_e2m1 | base=triton      | refused: kv_dtype=bfloat16
    nvidia:sm100 | mla,kv_dtype=fp4_e2m1 | base=cutlass_mla | refused: kv_dtype=bfloat16
4 bits: served
    nvidia:sm100 | gqa,kv_dtype=fp4_e2m1 | base=triton         | all=triton
    nvidia:sm100 | gqa,kv_dtype=fp4_e2m1 | base=trtllm_mha     | all=trtllm_mha
    nvidia:sm100 | mla,kv_dtype=fp4_e2m1 | base=flashinfer_mla | all=flashinfer_mla
4 bits: trtllm_mha from SM100 on
    nvidia:sm90 | gqa,kv_dtype=fp4_e2m1 | base=trtllm_mha | refused: kv_dtype=bfloat16
4 bits: triton beside fa4
    nvidia:sm100 | gqa,kv_dtype=fp4_e2m1 | prefill=fa4 | extend=fa4 decode=triton
4 bits: flashinfer beside fa4 over a latent
    nvidia:sm100 | mla,kv_dtype=fp4_e2m1 | prefill=fa4 | extend=fa4 decode=flashinfer_mla
nsa: bf16 or e4m3
    nvidia:sm90 | nsa,kv_dtype=fp8_e4m3 | base=nsa | all=nsa
    nvidia:sm90 | nsa,kv_dtype=fp8_e5m2 | base=nsa | refused: kv_dtype=bfloat16
deterministic: served
    ascend:910b  | gqa,deterministic=1 | base=ascend               | all=ascend
    nvidia:sm90  | gqa,deterministic=1 | base=fa3                  | all=fa3
    intel:xe2    | gqa,deterministic=1 | base=intel_xpu            | all=intel_xpu
    nvidia:sm80  | gqa,deterministic=1 | base=triton               | all=triton
    nvidia:sm100 | gqa,deterministic=1 | prefill=fa4 decode=triton | extend=fa4
    nvidia:sm90  | gqa,deterministic=1 | decode=flashinfer         | decode=flashinfer
deterministic: no other
    nvidia:sm100 | gqa,deterministic=1 | base=trtllm_mha | refused: deterministic=none
    nvidia:sm100 | gqa,deterministic=1 | prefill=trtllm_mha | refused: deterministic=none
    nvidia:sm100 | gqa,deterministic=1 | decode=trtllm_mha | refused: deterministic=none
    nvidia:sm90 | gqa,deterministic=1 | base=flex_attention | refused: deterministic=none
    nvidia:sm90 | gqa,deterministic=1 | prefill=flex_attention | refused: deterministic=none
    nvidia:sm90 | gqa,deterministic=1 | decode=flex_attention | refused: deterministic=none
    amd:gfx942 | gqa,deterministic=1 | base=wave | refused: deterministic=none
    amd:gfx942 | gqa,deterministic=1 | prefill=wave | refused: deterministic=none
    amd:gfx942 | gqa,deterministic=1 | decode=wave | refused: deterministic=none
    amd:gfx942 | gqa,deterministic=1 | base=aiter | refused: deterministic=none
    amd:gfx942 | gqa,deterministic=1 | prefill=aiter | refused: deterministic=none
    amd:gfx942 | gqa,deterministic=1 | decode=aiter | refused: deterministic=none
    cpu:x86_64,features=amx | gqa,deterministic=1 | base=intel_amx | refused: deterministic=none
    cpu:x86_64,features=amx | gqa,deterministic=1 | prefill=intel_amx | refused: deterministic=none
    cpu:x86_64,features=amx | gqa,deterministic=1 | decode=intel_amx | refused: deterministic=none
deterministic over a latent: served
    ascend:910b  | mla,deterministic=1 | base=ascend  | all=ascend
    nvidia:sm90  | mla,deterministic=1 | base=fa3_mla | all=fa3_mla
    nvidia:sm80  | mla,deterministic=1 | base=triton  | all=triton
    nvidia:sm100 | mla,deterministic=1 | prefill=fa4  | extend=fa4 decode=triton
deterministic over a latent: no other
    nvidia:sm90  | mla,deterministic=1 | decode=flashinfer_mla | refused: deterministic=none
    nvidia:sm90  | mla,deterministic=1 | decode=flashmla       | refused: deterministic=none
    nvidia:sm100 | mla,deterministic=1 | decode=trtllm_mla     | refused: deterministic=none
    nvidia:sm100 | mla,deterministic=1 | decode=cutlass_mla    | refused: deterministic=none
    amd:gfx942   | mla,deterministic=1 | decode=aiter          | refused: deterministic=none
encoder: fa3 on SM90
    nvidia:sm90 | gqa,multimodal=1 |  | encoder=fa3
encoder: aiter on CDNA 3
    amd:gfx942 | gqa,multimodal=1 |  | encoder=aiter
encoder: no fa3 on Blackwell
    nvidia:sm100 | gqa,multimodal=1 | encoder=fa3 | refused: version
encoder: triton with heads that no vendor's kernel takes
    nvidia:sm80  | gqa,multimodal=1,encoder_head_dim=72 |  | decode=flashinfer encoder=triton
    nvidia:sm120 | gqa,multimodal=1,encoder_head_dim=80 |  | decode=flashinfer encoder=triton
encoder: ascend on Ascend
    ascend:910b | gqa,multimodal=1 |  | encoder=ascend
encoder: no aiter on RDNA
    amd:gfx1100 | gqa,multimodal=1 |  | encoder=triton
encoder: torch operations elsewhere
    cpu:x86_64,features=avx2 | gqa,multimodal=1 |  | encoder=torch_native
    apple:m3,device=mps      | gqa,multimodal=1 |  | encoder=torch_native
"""
"""A rule, and below it rows: platform | request | backends that are named | what comes of it.

"refused: page_size=64" is the hint of the backend that is named, "refused: version" the axis of a
reason that the asker cannot mend. Else it says who serves which phase (all: extend and decode).
"""

DEVIATIONS = """
MUSA: 1 where nothing asks for another
    mthreads:mp_31,device=musa | gqa |  | all=triton page=1
    SGLang: 64
    here: the card that serves it gathers by token
fa3: MUSA
    mthreads:mp_31,device=musa | gqa              | base=fa3    | refused: vendor
    mthreads:mp_31,device=musa | gqa,multimodal=1 | encoder=fa3 | refused: vendor
    SGLang: serves it there with another library
    here: the card is of sgl_kernel's kernels, which are NVIDIA's
aiter: any page
    amd:gfx942 | gqa              | base=aiter | all=aiter page=1
    amd:gfx942 | gqa,page_size=64 | base=aiter | all=aiter page=64
    SGLang: 64 where the KV cache is laid out in five dimensions
    here: K and V have one layout, in which every page size is served
fa3: windows over pages
    nvidia:sm90 | gqa,sliding_window=127,page_size=64 | base=fa3 | all=fa3 page=64
    SGLang: wants pages of 1 where prefill looks at the window
    here: a window's keys are cut in the kernel, whatever page they lie on
Falcon-H1: heads like any others
    nvidia:sm80  | falcon_h1 |  | all=flashinfer
    nvidia:sm100 | falcon_h1 |  | all=trtllm_mha
    SGLang: triton for this model on SM100; its manual, never flashinfer
    here: a request knows no model's name, and its attention asks nothing that these do not serve
fa4: SM90, SM100 and SM103
    nvidia:sm80  | gqa | prefill=fa4 | refused: version
    nvidia:sm110 | gqa | prefill=fa4 | refused: version
    nvidia:sm120 | gqa | prefill=fa4 | refused: version
    SGLang: checks no architecture, so that what is not built fails in the kernel
    here: what else the library is built for takes no pages
trtllm_mla: prefill
    nvidia:sm100 | mla | prefill=trtllm_mla | refused: phase
    SGLang: serves it, without graphs
    here: the card is of the decode kernels; flashinfer_mla is the companion for prefill
nsa: other vendors
    amd:gfx942 | nsa | base=nsa | refused: vendor
    intel:xe2  | nsa | base=nsa | refused: vendor
    SGLang: serves it, over pages of 1 and of 128
    here: the card is of FlashMLA's sparse kernels, which are for SM90 and SM100
fa3: SM80
    nvidia:sm80 | gqa | base=fa3 | refused: version
    SGLang: serves it: the library builds for SM80 to SM89
    here: our adapter was only ever run on SM90
trtllm_mha: prefill over e4m3 on SM90
    nvidia:sm90 | gqa,kv_dtype=fp8_e4m3 | prefill=trtllm_mha | refused: kv_dtype=bfloat16
    nvidia:sm90 | gqa,kv_dtype=fp8_e4m3 | decode=trtllm_mha  | decode=trtllm_mha
    SGLang: serves it
    here: flashinfer 0.6.13 says of these kernels that they hang
trtllm_mha: windows in prefill on SM120
    nvidia:sm120 | gqa,sliding_window=127 | prefill=trtllm_mha | refused: sliding_window
    nvidia:sm120 | gqa,sliding_window=127 | decode=trtllm_mha  | decode=trtllm_mha
    SGLang: does not look
    here: flashinfer 0.6.13 refuses them
trtllm_mla: SM110
    nvidia:sm110 | mla | base=trtllm_mla | refused: version
    SGLang: counts every Blackwell, 10, 11 and 12, as one
    here: trtllm-gen's kernels are for SM100 and SM103, XQA's for SM120
ascend: 256
    ascend:910b | gqa,page_size=256 | base=ascend | all=ascend page=256
    SGLang: forces 128
    here: the operator takes multiples of 128 up to 512
fa3: windows beside cross attention
    nvidia:sm90 | gqa,sliding_window=127,cross_attention=1 | base=fa3 | all=fa3
    SGLang: asserts that a model has one or the other
    here: our tables are kept by whether they are the encoder's, and a window is of a layer
sinks: served
    cpu:x86_64,features=avx2 | sinks | base=torch_native   | all=torch_native
    nvidia:sm90              | sinks | base=flex_attention | all=flex_attention
    nvidia:sm90              | sinks | base=flashinfer     | all=flashinfer
    SGLang: not on its list for gpt-oss
    here: our adapter serves sinks, and the conformance suite runs them
sinks beside a window, which gpt-oss has
    nvidia:sm100            | sinks,sliding_window=127 | prefill=fa4    | refused: sliding_window
    ascend:910b             | sinks,sliding_window=127 | base=ascend    | refused: sliding_window
    amd:gfx942              | sinks,sliding_window=127 | base=aiter     | refused: sliding_window
    cpu:x86_64,features=amx | sinks,sliding_window=127 | base=intel_amx | refused: sliding_window
    SGLang: on its list for gpt-oss
    here: no windows, as in the support matrix of SGLang's own manual
chunks: not cut
    amd:gfx942   | chunks | base=aiter      | refused: attention_chunk
    ascend:910b  | chunks | base=ascend     | refused: attention_chunk
    nvidia:sm100 | chunks | base=trtllm_mha | refused: attention_chunk
    intel:xe2    | chunks | base=intel_xpu  | refused: attention_chunk
    SGLang: on its list for Llama 4, whose chunks it cuts out of the page table
    here: no kernel of it has chunks, and no adapter of ours cuts them
flex_attention: graphs
    nvidia:sm90 | gqa,page_size=16,graph=1 | base=flex_attention | all=flex_attention
    SGLang: switches graphs off
    here: our adapter replays with buffers of fixed sizes
flex_attention: speculation
    nvidia:sm90 | gqa,page_size=64,spec_topk=4 | base=flex_attention | all=flex_attention
    SGLang: asserts that there is none
    here: our adapter compiles the tree into the mask
multi-item scoring: others
    nvidia:sm90 | gqa,multi_item=1 | base=flex_attention | all=flex_attention
    nvidia:sm90 | gqa,multi_item=1 | base=torch_native   | all=torch_native
    SGLang: flashinfer in both phases, and no other
    here: our adapters of these serve it too
trees: trtllm_mha beside the backend that verifies
    nvidia:sm100 | gqa-by-decode,spec_topk=4 | prefill=trtllm_mha | extend=trtllm_mha
    SGLang: refuses it in any phase
    here: where decode's backend verifies, that of extend meets no drafts
trees over pages: fa3
    nvidia:sm90 | gqa,page_size=64,spec_topk=4 | base=fa3 | refused: page_size=1
    SGLang: serves it in two calls; its manual says flashinfer only
    here: by the manual, though our adapter does the same and would serve it
trees over pages: triton
    nvidia:sm80 | gqa,page_size=64,spec_topk=4 | base=triton | refused: page_size=1
    SGLang: serves it; its manual says flashinfer only
    here: masks of trees are laid out by token
trees over pages: torch_native
    nvidia:sm90 | gqa,page_size=64,spec_topk=4 | base=torch_native | all=torch_native
    SGLang: refuses it
    here: masks are plain tensors to our adapter
4 bits: torch operations
    nvidia:sm100 | gqa,kv_dtype=fp4_e2m1 | base=torch_native   | refused: kv_dtype=bfloat16
    nvidia:sm100 | gqa,kv_dtype=fp4_e2m1 | base=flex_attention | refused: kv_dtype=bfloat16
    SGLang: serves it
    here: no pool of attnmux that torch operations read holds 4-bit floats
4 bits: trtllm_mla
    nvidia:sm100 | mla,kv_dtype=fp4_e2m1 | base=trtllm_mla | refused: kv_dtype=bfloat16
    SGLang: on one list of backends and refused by another rule
    here: the kernels take bf16 and e4m3
deterministic: flashinfer's prefill
    nvidia:sm90 | gqa,deterministic=1 | base=flashinfer | refused: deterministic=none
    SGLang: serves it
    here: fa2 takes an extend step's tile from the mean length of its requests
deterministic: torch_native
    nvidia:sm90 | gqa,deterministic=1 | base=torch_native | all=torch_native
    SGLang: refuses it
    here: our adapter attends to each request by itself then, and a test compares the bits
encoder: SM100
    nvidia:sm100 | gqa,multimodal=1 |  | encoder=flashinfer
    SGLang: fa4
    here: fa4's card is for prefill over a cache
encoder: heads of 64, 128 and 256
    nvidia:sm80 | gqa,multimodal=1,encoder_head_dim=64 |  | encoder=flashinfer
    SGLang: triton
    here: an encoder is a ragged prefill that is not causal, which flashinfer has kernels for
encoder: heads of 72 on SM90
    nvidia:sm90 | gqa,multimodal=1,encoder_head_dim=72 |  | decode=fa3 encoder=triton
    SGLang: fa3, which pads them
    here: fa3's card names the dims that kernels are built for
encoder: Intel
    intel:xe2               | gqa,multimodal=1 |  | decode=intel_xpu encoder=triton
    cpu:x86_64,features=amx | gqa,multimodal=1 |  | decode=intel_amx encoder=torch_native
    SGLang: its own kernels for them
    here: the cards of intel_xpu and intel_amx have no encoders
"""
"""As RULES, with what SGLang does instead, and why not here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    rule: str
    on: str
    asked: str
    named: dict[str, str]
    """By flag."""
    served: dict[str, str]
    """By phase, and the page size where that is the point; empty where it is refused."""
    refused: str

    @property
    def id(self) -> str:
        named = " ".join(f"{flag}={name}" for flag, name in self.named.items())
        return f"{self.rule} [{self.on} {self.asked} {named}]"

    def decided(self, offers: tuple[Offer, ...], changes: str = "") -> Decision:
        model, _, more = self.asked.partition(",")
        request = Request.parse(",".join(filter(None, [MODELS[model], more])))
        named = {FLAGS[flag]: name for flag, name in self.named.items()}
        policy = Policy(hypothetical=True, **named)
        changed = request.replace(**parse_fields(changes))
        return solve(changed, Platform.parse(self.on), offers, policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    name: str
    rows: list[Row] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    """What SGLang does and why not here, where the rule is a deviation."""


def pairs(text: str) -> dict[str, str]:
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def read(table: str) -> list[Rule]:
    rules: list[Rule] = []
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            rules.append(Rule(name=line))
            continue
        rule, cells = rules[-1], [cell.strip() for cell in line.split("|")]
        if len(cells) == 1:
            who, _, what = cells[0].partition(": ")
            rule.said[who] = what
            continue
        on, asked, named, outcome = cells
        refused = outcome.partition("refused: ")[2]
        served = {} if refused else pairs(outcome)
        if "all" in served:
            served |= dict.fromkeys(("extend", "decode"), served.pop("all"))
        rule.rows.append(
            Row(
                rule=rule.name,
                on=on,
                asked=asked,
                named=pairs(named),
                served=served,
                refused=refused,
            )
        )
    return rules


ROWS = [row for rule in (*read(RULES), *read(DEVIATIONS)) for row in rule.rows]


@pytest.fixture(scope="module")
def offers() -> tuple[Offer, ...]:
    return load_plugins().offers()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_rule_is_kept_or_answered_as_listed(offers, row) -> None:
    if row.served:
        decision = row.decided(offers)
        came = {phase: choice.backend for phase, choice in decision.phases.items()}
        came["page"] = str(decision.page_size)
        assert {key: came.get(key) for key in row.served} == row.served
        assert "page_size" not in {change.field for change in decision.coercions}
        return
    (backend,) = row.named.values()
    with pytest.raises(NoBackend) as caught:
        row.decided(offers)
    told = {
        reason.hint or reason.axis
        for verdict in caught.value.candidates
        if verdict.backend == backend
        for reason in verdict.reasons
    }
    assert row.refused in told
    if "=" in row.refused:
        followed = row.decided(offers, row.refused)
        assert backend in {choice.backend for choice in followed.phases.values()}


def test_every_row_is_there_once_and_each_deviation_says_why() -> None:
    rules, others = read(RULES), read(DEVIATIONS)
    counts = Counter(row.id for rule in (*rules, *others) for row in rule.rows)
    assert not [name for name, count in counts.items() if count > 1]
    assert all(rule.rows for rule in (*rules, *others))
    assert not any(rule.said for rule in rules)
    assert all(set(rule.said) == {"SGLang", "here"} for rule in others)
