"""What acme-attnmux offers, as data. Importing this module imports no torch and no kernels."""

from __future__ import annotations

from acme_attnmux import driver
from attnmux.core import Platform
from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Option,
    Prior,
    at_most,
    hookimpl,
    includes,
    one_of,
    runtimes,
)

FEATURES = {"m1": frozenset[str](), "m2": frozenset({"fp8"})}
"""What a generation's cores can do beyond the first one's."""


@hookimpl
def attnmux_platforms() -> list[Platform]:
    found = driver.devices()
    return [
        Platform(
            vendor="acme",
            device_type="cpu",  # torch's word for where this vendor's tensors lie
            arch=generation,
            features=FEATURES[generation],
            runtime=f"acmert {driver.runtime_version()}",
            name=f"Acme {generation.upper()}",
            count=sum(device.generation == generation for device in found),
            memory_bytes=min(d.memory_bytes for d in found if d.generation == generation),
            core_count=min(d.core_count for d in found if d.generation == generation),
        )
        for generation in sorted({device.generation for device in found})
    ]


def _paged(dtype: str, kv_dtype: str, **more: Condition) -> Clause:
    """What the library serves of one dtype over one KV dtype."""
    return Clause(
        vendor=one_of("acme"),
        arch=one_of("m1", "m2"),
        runtime=runtimes("acmert>=3.0"),
        phase=one_of("extend", "decode", "verify", "draft"),
        kind=one_of("mha"),
        dtype=one_of(dtype),
        kv_dtype=one_of(kv_dtype),
        page_size=one_of(64, 16),  # the preferred one comes first
        head_dim=one_of(64, 128),
        group_size=at_most(16),
        spec_topk=one_of(1),
        sliding_window=ANY,
        graph=ANY,
        lse=ANY,
        strided_kv=ANY,
        **more,
    )


PAGED = BackendCard(
    name="acme_paged",
    summary="Acme's paged attention: pages of 16 or 64, windows, FP8 KV on M2, graphs",
    factory="acme_attnmux.factory:make",
    requires=("torch>=2.11",),
    extra="torch",
    options=(
        Option(
            name="keys_per_step",
            type=int,
            default=128,
            choices=(64, 128, 256),
            summary="keys that a core holds at a time",
        ),
    ),
    sources={
        "arch": "the generations that the library is built for",
        "runtime": "library.paged_attention appeared in acmert 3.0",
        "dtype": "library.paged_attention: fp16 and bf16",
        "kv_dtype": "as dtype; cores of M2 read fp8_e4m3 too",
        "features": "cores of M1 cannot read fp8",
        "page_size": "library.PAGE_SIZES: what a DMA descriptor can move",
        "head_dim": "library.HEAD_DIMS",
        "group_size": "library.MAX_GROUP_SIZE: a core's registers hold its accumulators",
        "spec_topk": "a tree needs a custom mask, which the library does not take",
    },
    clauses=(
        *(_paged(dtype, dtype) for dtype in ("bfloat16", "float16")),
        *(_paged(dtype, "fp8_e4m3", features=includes("fp8")) for dtype in ("bfloat16", "float16")),
    ),
    priors=(Prior(rank=10, source="the only backend that runs on the device's own cores"),),
)


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [PAGED]
