"""Random steps of attention: shapes, features and lengths, drawn from a stated space."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from attnmux.core import Request
from attnmux.testing.bench import Workload
from attnmux.testing.bench.recipe import LEAST_FLOPS

DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256))
"""Widths of a head's K and of its V."""
KV_HEADS = (1, 2, 4, 8, 16, 32)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Query heads that share a KV head."""
MOST_HEADS = 128
LATENT_HEADS = (8, 16, 32, 64, 128)
PAGES = (1, 16, 64)
WINDOWS = (127, 511, 1023, 4095)
CAPS = (30.0, 50.0)
MOST_BYTES = 1.2e9
"""Of K and V in one layer."""
MOST_FLOPS = 2e12
"""Of one layer: a few milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A step, and the shapes and features of its attention. Of a mixed step, phases are those of
    its parts."""

    family: str
    request: Request
    workload: Workload

    def __str__(self) -> str:
        asked = self.request
        heads = f"{asked.num_q_heads}/{asked.num_kv_heads}"
        dims = f"D {asked.head_dim}"
        if asked.latent:
            heads, dims = f"{asked.num_q_heads} heads", "MLA"
        elif asked.v_head_dim not in (None, asked.head_dim):
            dims = f"{dims}/{asked.v_head_dim}"
        parts = [str(self.workload), f"page {asked.page_size}", heads, dims, str(asked.dtype)]
        if asked.kv_dtype != asked.dtype:
            parts.append(f"KV {asked.kv_dtype}")
        if asked.sliding_window is not None:
            parts.append(f"window {asked.sliding_window}")
        if asked.logit_cap:
            parts.append(f"cap {asked.logit_cap:g}")
        return ", ".join([*parts, *(["sinks"] if asked.sinks else [])])


def _dense(rng: random.Random) -> dict[str, Any]:
    dim, v_dim = rng.choice(DIMS)
    kv_heads = rng.choice(KV_HEADS)
    group = rng.choice([each for each in GROUPS if each * kv_heads <= MOST_HEADS])
    dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
    return {
        "num_q_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "v_head_dim": v_dim,
        "dtype": dtype,
        "kv_dtype": rng.choice((dtype, dtype, dtype, "fp8_e4m3")),
        "page_size": rng.choice(PAGES),
        "sliding_window": rng.choice((None, None, None, rng.choice(WINDOWS))),
        "logit_cap": rng.choice((None, None, None, rng.choice(CAPS))),
        "sinks": rng.choice((False, False, False, True)),
    }


def _plain(rng: random.Random) -> dict[str, Any]:
    """Without features, K and V of 8 bits."""
    features = {"sliding_window": None, "logit_cap": None, "sinks": False}
    return {**_dense(rng), **features, "kv_dtype": "fp8_e4m3"}


def _latent(rng: random.Random) -> dict[str, Any]:
    return {
        "kind": "mla",
        "num_q_heads": rng.choice(LATENT_HEADS),
        "num_kv_heads": 1,
        "head_dim": 192,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "page_size": rng.choice(PAGES),
    }


def _between(rng: random.Random, least: int, most: int) -> int:
    """Every order of magnitude is as likely as another."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def _step(
    rng: random.Random, phase: str, sizes: range, news: range, prefixes: range, empty: float
) -> Workload:
    """empty: the share of steps without a prefix; the others have uneven ones half of the time."""
    batch_size = _between(rng, sizes.start, sizes.stop)
    new = _between(rng, news.start, news.stop)
    if rng.random() < empty:
        return Workload(phase=phase, batch_size=batch_size, new=new, prefix=0)
    prefix = _between(rng, prefixes.start, prefixes.stop)
    if batch_size == 1 or rng.random() < 0.5:
        return Workload(phase=phase, batch_size=batch_size, new=new, prefix=prefix)
    lens = tuple(new + rng.randint(prefix // 10, prefix) for _ in range(batch_size))
    return Workload(phase=phase, batch_size=batch_size, new=new, prefix=max(lens) - new, lens=lens)


def _mixed(rng: random.Random, phase: str) -> Workload:
    """One prompt, or two, beside decoding requests."""
    prompts = rng.choice((1, 1, 2))
    new, prefix = _between(rng, 256, 4096), rng.choice((0, _between(rng, 256, 16_384)))
    decoding, ctx = _between(rng, 4, 64), _between(rng, 256, 32_768)
    return Workload(
        phase="extend", batch_size=prompts, new=new, prefix=prefix, decoding=decoding, ctx=ctx
    )


def _steps(sizes: range, news: range, prefixes: range, empty: float = 0.0) -> Steps:
    return partial(_step, sizes=sizes, news=news, prefixes=prefixes, empty=empty)


Shapes = Callable[[random.Random], dict[str, Any]]
Steps = Callable[[random.Random, str], Workload]
SPACE: Mapping[str, tuple[Shapes, Steps]] = {
    "decode": (_dense, _steps(range(1, 128), range(1, 1), range(256, 65_536))),
    "verify": (_dense, _steps(range(1, 64), range(2, 16), range(256, 32_768))),
    "extend": (_dense, _steps(range(1, 8), range(256, 8192), range(256, 16_384), 0.5)),
    "mixed": (_dense, _mixed),
    "mla decode": (_latent, _steps(range(1, 128), range(1, 1), range(256, 32_768))),
    "mla extend": (_latent, _steps(range(1, 8), range(128, 4096), range(256, 8192), 0.5)),
    "fp8 decode": (_plain, _steps(range(1, 128), range(1, 1), range(4096, 65_536))),
    "fp8 extend": (_plain, _steps(range(1, 8), range(256, 8192), range(256, 16_384), 0.5)),
}
"""By family: its shapes, and its steps: the least and the most of requests, new tokens of each and
cached tokens of each, and the share of steps that have none. Verification is of chains of
drafts."""


def draws(family: str, count: int, seed: int) -> Iterator[Draw]:
    """`count` steps, the same ones for the same seed. Too large ones are drawn again."""
    rng = random.Random(f"{family} {seed}")
    shapes, step = SPACE[family]
    while count:
        phase = family.rpartition(" ")[2]
        phases = ("extend", "decode") if phase == "mixed" else (phase,)
        request, workload = Request(**shapes(rng), phases=phases), step(rng, phase)
        if phase == "verify":
            request = request.replace(spec_topk=1, spec_draft_tokens=workload.new)
        flops = workload.flops(request)
        if flops < LEAST_FLOPS * (workload.phase == "extend"):
            continue
        if flops <= MOST_FLOPS and workload.stored_bytes(request, 2) <= MOST_BYTES:
            count -= 1
            yield Draw(family=family, request=request, workload=workload)
