"""The card of double sparsity: decode over the tokens that matter.

Limits and defaults are those of SGLang, which had it until April 2026: `sparse_flash_decode_stage1`
and `stage2` of double_sparsity_attention.py, and its server's arguments `--ds-…`.
"""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard, Clause, Option, Prior
from attnmux.core.choosing.conditions import anything_but, emulated, one_of
from attnmux.triton.cards.triton import REQUIRES

DOUBLE_SPARSITY = BackendCard(
    name="double_sparsity",
    summary="an approximation: decode reads a request's heaviest tokens, found by a few channels",
    status="planned",
    requires=REQUIRES,
    extra="triton",
    companions=("triton",),
    # All of them say how far the result may be from that of dense attention.
    options=(
        Option(
            name="channel_config_path",
            type=str,
            default="",
            summary="file with each layer's channels, heaviest first; without one it cannot run",
        ),
        Option(
            name="heavy_channel_num",
            type=int,
            default=32,
            choices=(16, 32, 64, 128),
            summary="channels of K that the first, approximate scores are made of",
        ),
        Option(
            name="heavy_token_num",
            type=int,
            default=256,
            summary="tokens that are read; requests with fewer are served densely",
        ),
        Option(
            name="sparse_decode_threshold",
            type=int,
            default=4096,
            summary="batches whose longest request is shorter are served densely",
        ),
    ),
    sources={
        "dtype": "SGLang's kernels: fp16 and bf16",
        "kv_dtype": "they read K and V in the dtype of Q",
        "page_size": "they gather by token index",
        "head_dim": "`sparse_flash_decode_stage1` and `stage2` assert these",
    },
    clauses=tuple(
        # Nothing here that the triton card does not serve: the last rank then means that only who
        # names it gets an approximation.
        Clause(
            vendor=anything_but("cpu", "ascend", "apple"),
            # Prefill fills the labels and is dense: the companion's.
            phase=one_of("decode"),
            kind=one_of("mha"),
            dtype=one_of(dtype),
            kv_dtype=one_of(dtype),
            page_size=emulated(1),
            head_dim=one_of(128, 64, 32, 16),
        )
        for dtype in ("bfloat16", "float16")
    ),
    priors=(Prior(rank=2000, source="an approximation is for those who ask for it by name"),),
)
