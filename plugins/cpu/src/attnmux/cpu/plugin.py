"""What attnmux-cpu offers, as data. Importing this module imports no torch.

The CPU itself is found by core, since it is on every machine.
"""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard, Clause, Prior, when
from attnmux.core.choosing.conditions import ANY, one_of
from attnmux.core.choosing.plugins import hookimpl

DTYPES = one_of("bfloat16", "float16", "float32")
KV_DTYPES = one_of("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2")

TORCH_NATIVE = BackendCard(
    name="torch_native",
    summary="attention in plain torch operations: every feature, any device, no graphs",
    factory="attnmux.cpu.torch_native:TorchNativeBackend",
    requires=("torch>=2.11",),
    extra="torch",
    clauses=(
        Clause(
            vendor=ANY,
            phase=one_of("extend", "decode", "verify", "draft", "encoder"),
            kind=one_of("mha", "mla"),
            dtype=DTYPES,
            kv_dtype=KV_DTYPES,
            page_size=ANY,
            head_dim=ANY,
            v_head_dim=ANY,
            kv_lora_rank=ANY,
            qk_rope_head_dim=ANY,
            spec_topk=ANY,
            sliding_window=ANY,
            attention_chunk=ANY,
            cross_attention=ANY,
            sinks=ANY,
            logit_cap=ANY,
            custom_mask=ANY,
            multi_item=ANY,
            deterministic=ANY,
            lse=ANY,
        ),
    ),
    priors=(
        Prior(
            rank=50,
            when=when(vendor=one_of("cpu")),
            source="benchmarks/results/torch_native-cpu.md: at best a third of the bandwidth",
        ),
        Prior(rank=900, source="gathers K and V before it multiplies, which a GPU kernel does not"),
    ),
)


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [TORCH_NATIVE]
