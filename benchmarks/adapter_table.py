"""The table of `adapters.py`: each backend's library, its calls by hand, and workloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import libraries, library_flashinfer
from benchmarks.cases import Case, decode, extend

from attnmux.testing.bench import Step
from attnmux.testing.bench.timing import Run

SAME = "same calls"
"""Those that the adapter makes, and the work that makes the library's arguments of the
contract's."""
ALONE = "kernel alone"
"""The kernel's call, on arguments that were made before."""
ONE = "one call"
"""Over all keys in the pool, where the adapter makes several calls."""

Ways = Mapping[str, list[Run]]
"""The library's calls of each layer, by how they are made."""

DENSE = (
    *(decode(batch_size, 4096) for batch_size in (1, 16, 64)),
    decode(16, 4096, page_size=1),
    *(decode(batch_size, 4096, max_context_len=131072) for batch_size in (1, 16)),
    extend(1, 4096),
    extend(4, 512, 8192),
)
PAGED = tuple(each for each in DENSE if each.page_size > 1)
PAGED_TINY = (decode(2, 20), decode(2, 20, max_context_len=64), extend(2, 5, 15))
DENSE_TINY = (*PAGED_TINY[:2], extend(2, 5, 15, page_size=4), extend(2, 20))
LATENT_DECODE = tuple(
    decode(batch_size, ctx, page_size=64, kind="mla", q_heads=heads)
    for batch_size, ctx, heads in ((1, 8192, 16), (64, 4096, 16), (64, 4096, 128), (128, 8192, 16))
)
LATENT = (*LATENT_DECODE, extend(4, 512, 3584, page_size=64, kind="mla", q_heads=16))
LATENT_TINY = (
    decode(2, 70, page_size=64, kind="mla", q_heads=16),
    extend(2, 5, 65, page_size=64, kind="mla", q_heads=16),
)
WHOLE_ROWS = (*LATENT_DECODE, replace(LATENT_DECODE[1], is_apart=True))
WHOLE_ROWS_TINY = (LATENT_TINY[0], replace(LATENT_TINY[0], is_apart=True))
EXTEND = tuple(replace(each, page_size=128) for each in DENSE if not each.is_decode)
EXTEND_TINY = (extend(2, 5, 125, page_size=128),)
_SPARSE: dict[str, Any] = {"page_size": 64, "kind": "nsa", "q_heads": 128, "topk": 2048}
SPARSE = (
    *(decode(batch_size, 8192, **_SPARSE) for batch_size in (1, 16, 64)),
    extend(1, 512, 7680, **_SPARSE),
    decode(16, 8192, **_SPARSE, is_apart=True),
)
_TINY: dict[str, Any] = {**_SPARSE, "q_heads": 64, "topk": 128}
SPARSE_TINY = (
    decode(2, 150, **_TINY),
    extend(2, 3, 147, **_TINY),
    decode(2, 150, **_TINY, is_apart=True),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """A backend and its library."""

    modules: tuple[str, ...]
    """Packages of the library, in the order in which the adapter tries them."""
    distributions: tuple[str, ...]
    """That the figures depend on."""
    cases: tuple[Case, ...]
    tiny: tuple[Case, ...]
    """For a dry run."""
    ways: Callable[[Any, Step], Ways]
    """Calls by hand of the library's module."""


def _same(calls: Callable[[Any, Step], list[Run]]) -> Callable[[Any, Step], Ways]:
    def ways(library: Any, step: Step) -> Ways:  # noqa: ANN401  # a module
        return {SAME: libraries.after_writes(step, calls(library, step))}

    return ways


def _flashinfer(library: Any, step: Step) -> Ways:  # noqa: ANN401  # a module
    one = libraries.after_writes(step, library_flashinfer.flashinfer(library, step))
    if step.workload.phase == "decode":
        return {SAME: one}
    merged = library_flashinfer.flashinfer_merged(library, step)
    return {SAME: libraries.after_writes(step, merged), ONE: one}


def _trtllm(library: Any, step: Step) -> Ways:  # noqa: ANN401  # a module
    if step.workload.phase == "decode":
        return {SAME: library_flashinfer.xqa(library, step)}
    same, alone = library_flashinfer.fmha_v2(library, step)
    return {
        SAME: libraries.after_writes(step, same),
        ALONE: libraries.after_writes(step, alone),
    }


def _flashmla(library: Any, step: Step) -> Ways:  # noqa: ANN401  # a module
    same, alone = libraries.flashmla(library, step)
    is_apart = step.q.is_contiguous()
    return {SAME: same, ALONE: alone} if is_apart else {SAME: alone}


def _nsa(library: Any, step: Step) -> Ways:  # noqa: ANN401  # a module
    same, alone = libraries.flashmla_sparse(library, step)
    return {
        SAME: libraries.after_writes(step, same),
        ALONE: libraries.after_writes(step, alone),
    }


_FLASH_ATTENTION: dict[str, Any] = {
    "modules": ("sgl_kernel.flash_attn",),
    "distributions": ("sglang-kernel",),
}
_FLASHINFER: dict[str, Any] = {
    "modules": ("flashinfer",),
    "distributions": ("flashinfer-python",),
}
_FLASHMLA: dict[str, Any] = {"modules": ("flash_mla", "sgl_kernel.flash_mla")}
_PACKAGES = ("sgl-flash-mla", "sglang-kernel")
ADAPTERS: Mapping[str, Adapter] = {
    "fa3": Adapter(**_FLASH_ATTENTION, cases=DENSE, tiny=DENSE_TINY, ways=_same(libraries.fa3)),
    "flashinfer": Adapter(**_FLASHINFER, cases=DENSE, tiny=DENSE_TINY, ways=_flashinfer),
    "trtllm_mha": Adapter(**_FLASHINFER, cases=PAGED, tiny=PAGED_TINY, ways=_trtllm),
    "fa4": Adapter(
        modules=("flash_attn.cute",),
        distributions=("flash-attn-4",),
        cases=EXTEND,
        tiny=EXTEND_TINY,
        ways=_same(libraries.fa4),
    ),
    "fa3_mla": Adapter(
        **_FLASH_ATTENTION, cases=LATENT, tiny=LATENT_TINY, ways=_same(libraries.fa3_mla)
    ),
    "flashinfer_mla": Adapter(
        **_FLASHINFER, cases=LATENT, tiny=LATENT_TINY, ways=_same(library_flashinfer.flashinfer_mla)
    ),
    "flashmla": Adapter(
        **_FLASHMLA,
        distributions=_PACKAGES,
        cases=WHOLE_ROWS,
        tiny=WHOLE_ROWS_TINY,
        ways=_flashmla,
    ),
    "nsa": Adapter(
        **_FLASHMLA,
        # The last two look slots up
        distributions=(*_PACKAGES, "triton", "attnmux-triton"),
        cases=SPARSE,
        tiny=SPARSE_TINY,
        ways=_nsa,
    ),
}
