"""What attnmux-cpu offers, as data. Importing this module imports no torch.

The CPU itself is found by core, since it is on every machine.
"""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard, Clause, Prior, when
from attnmux.core.choosing.conditions import ANY, one_of
from attnmux.core.choosing.plugins import hookimpl

PHASES = one_of("extend", "decode", "verify", "draft", "encoder")


def _torch_native_clause(dtype: str, kind: str) -> Clause:
    """Every feature of the contract, on any device; KV is stored in the dtype of the model."""
    return Clause(
        vendor=ANY,
        phase=PHASES,
        kind=one_of(kind),
        dtype=one_of(dtype),
        kv_dtype=one_of(dtype),
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
        chunked_prefix=ANY,
        deterministic=ANY,
        lse=ANY,
    )


TORCH_NATIVE = BackendCard(
    name="torch_native",
    summary="attention in plain torch operations: every feature, any device, no graphs",
    factory="attnmux.cpu.torch_native:TorchNativeBackend",
    requires=("torch>=2.11",),
    extra="torch",
    clauses=tuple(
        _torch_native_clause(dtype, kind)
        for kind in ("mha", "mla")
        for dtype in ("bfloat16", "float16", "float32")
    ),
    priors=(
        Prior(
            rank=50,
            when=when(vendor=one_of("cpu")),
            source="benchmarks/: a loop over requests, which native kernels beat",
        ),
        Prior(rank=900, source="no accelerator is well used by a loop over requests"),
    ),
    needs_cpu_seq_lens=False,
)


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [TORCH_NATIVE]
