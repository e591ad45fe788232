"""The card of the Wave kernels."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard, Clause, Prior
from attnmux.core.choosing.conditions import ANY, emulated, multiple_of, one_of

WAVE = BackendCard(
    name="wave",
    summary="kernels written in Wave and compiled through IREE, for MI300 and MI350",
    status="planned",
    requires=("torch>=2.11", "wave-lang>=3.9.1"),
    extra="wave",
    clauses=tuple(
        Clause(
            vendor=one_of("amd"),
            # The templates use MFMA shapes that gfx942 introduced.
            arch=one_of("gfx942", "gfx950"),
            phase=one_of("extend", "decode"),
            kind=one_of("mha"),
            dtype=one_of(dtype),
            kv_dtype=one_of(dtype),
            # Tables hold token slots (block size 1).
            page_size=emulated(1),
            # Whole MFMA tiles. No limit is stated; SGLang's tests of these kernels go up to 128 in
            # extend (test_wave_attention_kernels.py).
            head_dim=multiple_of(16, most=128),
            logit_cap=ANY,
            graph=ANY,
        )
        for dtype in ("float16", "bfloat16")
    ),
    priors=(Prior(rank=40, source="SGLang 0.5.23 takes it only by name"),),
)
