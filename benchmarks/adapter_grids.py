"""The workloads of `adapters.py`, and tiny ones for its dry run, by what a backend serves."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.adapter_workloads import Workload

DENSE = (
    Workload(batch_size=1, keys=4096),
    Workload(batch_size=16, keys=4096),
    Workload(batch_size=64, keys=4096),
    Workload(batch_size=16, keys=4096, page_size=1),
    Workload(batch_size=1, keys=4096, max_context_len=131072),
    Workload(batch_size=16, keys=4096, max_context_len=131072),
    Workload(batch_size=1, keys=4096, new=4096),
    Workload(batch_size=4, keys=8704, new=512),
)
DENSE_TINY = (
    Workload(batch_size=2, keys=20),
    Workload(batch_size=2, keys=20, max_context_len=64),
    Workload(batch_size=2, keys=20, new=5, page_size=4),
    Workload(batch_size=2, keys=20, new=20),
)
LATENT_DECODE = tuple(
    Workload(batch_size=size, keys=keys, page_size=64, kind="mla", q_heads=heads)
    for size, keys, heads in ((1, 8192, 16), (64, 4096, 16), (64, 4096, 128), (128, 8192, 16))
)
LATENT = (
    *LATENT_DECODE,
    Workload(batch_size=4, keys=4096, new=512, page_size=64, kind="mla", q_heads=16),
)
WHOLE_ROWS = (*LATENT_DECODE, replace(LATENT_DECODE[1], is_apart=True))
LATENT_DECODE_TINY = (Workload(batch_size=2, keys=70, page_size=64, kind="mla", q_heads=16),)
WHOLE_ROWS_TINY = (*LATENT_DECODE_TINY, replace(LATENT_DECODE_TINY[0], is_apart=True))
LATENT_TINY = (
    *LATENT_DECODE_TINY,
    Workload(batch_size=2, keys=70, new=5, page_size=64, kind="mla", q_heads=16),
)
EXTEND = (
    Workload(batch_size=1, keys=4096, new=4096, page_size=128),
    Workload(batch_size=4, keys=8704, new=512, page_size=128),
)
EXTEND_TINY = (Workload(batch_size=2, keys=130, new=5, page_size=128),)
PAGED = tuple(each for each in DENSE if each.page_size > 1)
PAGED_TINY = (
    Workload(batch_size=2, keys=20),
    Workload(batch_size=2, keys=20, max_context_len=64),
    Workload(batch_size=2, keys=20, new=5),
)
_SPARSE = tuple(
    Workload(batch_size=size, keys=8192, new=new, page_size=64, kind="nsa", q_heads=128, topk=2048)
    for size, new in ((1, 1), (16, 1), (64, 1), (1, 512))
)
SPARSE = (*_SPARSE, replace(_SPARSE[1], is_apart=True))
_SPARSE_TINY = tuple(
    Workload(batch_size=2, keys=150, new=new, page_size=64, kind="nsa", q_heads=64, topk=128)
    for new in (1, 3)
)
SPARSE_TINY = (*_SPARSE_TINY, replace(_SPARSE_TINY[0], is_apart=True))
