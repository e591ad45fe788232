"""Cases of what every engine does within its first hour: requests that share cached pages, steps
whose mode and size change, large batches, layers, rows and pages with large numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.core import ForwardMode
from attnmux.testing.cases.case import Case, Step, case_of, decode, extend, longest, verify
from attnmux.testing.cases.variants import LATENT

CHAIN: dict[str, Any] = {"spec_topk": 1}
TREE: dict[str, Any] = {"spec_topk": 4, "tree_mask": "qlen_only"}

SMALL: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "windows": (None,)}
"""For cases in which the number of requests, tokens or slots matters alone."""
SMALL_LATENT: dict[str, Any] = {**LATENT, "windows": (None,)}

FAR_SLOT = 1 << 20
"""The first slot of requests far into a pool."""
FAR_PAGE = 1 << 15
"""The first page whose number 16 bits do not hold, for pages of up to `MOST_FAR` slots."""
MOST_FAR = 64


def engine_cases(page: int) -> Iterator[Case]:
    for make in (_shared_pages, _instances, _numbers, _places, _shapes, _of_nothing):
        yield from make(page)


def far_page(page: int) -> int:
    """The first page of requests that lie far into a pool of pages of this size."""
    first = -(-FAR_SLOT // page)
    return max(first, FAR_PAGE) if page <= MOST_FAR else first


def _shared_pages(page: int) -> Iterator[Case]:
    """Requests with one prefix whose pages are cached once, all or some of a step's."""
    whole, some = 3 * page, {"shared_prefix": 2 * page, "sharing": 2}
    decoding = decode(whole + 5, whole + 1, whole + 9, shared_prefix=whole)
    drafted = verify(4, whole, whole + 6, whole + 1, shared_prefix=whole)
    joined = extend((2 * page, 1), (2 * page, 7), (0, 9), mode=ForwardMode.MIXED, **some)
    # One window ends within the shared pages, the other before them
    windows: dict[str, Any] = {"windows": (2, page + 2)}
    yield case_of("decode-shared-prefix", page, decoding)
    yield case_of("decode-shared-prefix-windows", page, decoding, **windows)
    yield case_of("decode-shared-by-some", page, decode(2 * page + 4, 2 * page + 1, 7, 33, **some))
    yield case_of("verify-shared-prefix", page, drafted, **CHAIN)
    yield case_of("verify-shared-by-some", page, verify(3, 2 * page, 2 * page, 5, **some), **CHAIN)
    yield case_of("verify-tree-shared-prefix", page, drafted, **TREE)
    yield case_of("mixed-shared-by-some", page, joined)
    caught_up = extend((whole, 3), (whole, 1), mode=ForwardMode.DRAFT_EXTEND, shared_prefix=whole)
    yield case_of("draft-extend-shared-prefix", page, caught_up, **CHAIN)
    yield case_of("mla-decode-shared-prefix", page, decoding, **LATENT)
    yield case_of("mla-verify-shared-prefix", page, drafted, **LATENT, **CHAIN)


def _instances(page: int) -> Iterator[Case]:
    """Many steps on one instance: what an earlier one left must not matter."""
    whole = 2 * page
    decoding = [decode(9, 40, 22), decode(31), decode(2, 60, 17, 5), decode(8, 41), decode(70)]
    decoding += decode(1, 23, 4, 19, 33, 6), decode(12, 3, 44)
    prompts = [extend((0, 9), (0, 30)), extend((0, 4)), extend((0, 17), (0, 2), (0, 33))]
    prompts += extend((0, 40)), extend((0, 3), (0, 21)), extend((0, 5), (0, 1), (0, 8))
    drafts = [verify(4, 9, 30), verify(2, 10, 31), verify(5, 4, whole), verify(1, 17, 3)]
    drafts += verify(4, 21), verify(3, 6, 40), verify(4, 12, 7)
    serving = [extend((0, 30), (page, 11)), decode(31, page + 12), extend((0, 7), (9, 3), (0, 2))]
    serving += decode(32, page + 13, 8, 13, 3), extend(mode=ForwardMode.IDLE), decode(14, 4)
    serving += extend((whole, 5), (13, 1), mode=ForwardMode.MIXED), decode(whole + 6, 15)
    caught_up = extend((13, 3), (41, 1), mode=ForwardMode.DRAFT_EXTEND)
    speculating = [extend((0, 12), (page, 9)), verify(4, 12, page + 9), caught_up, decode(17, 42)]
    speculating += verify(4, 17, 42), verify(2, 18, 43, 5), extend((0, 6)), verify(4, 6, whole)
    speculating += decode(7, 3, 20), caught_up, verify(4, 30, 8)
    # Some backends serve no prompts
    drafting = [step for step in speculating if step.mode is not ForwardMode.EXTEND]
    yield case_of("decode-seven-steps", page, *decoding)
    yield case_of("extend-six-steps", page, *prompts)
    yield case_of("verify-other-drafts", page, *drafts, **CHAIN)
    yield case_of("verify-tree-other-drafts", page, *drafts, **TREE)
    yield case_of("serving", page, *serving)
    yield case_of("serving-windows", page, *serving, windows=(8, None))
    yield case_of("serving-drafts", page, *speculating, **CHAIN)
    yield case_of("drafting", page, *drafting, **CHAIN)
    yield case_of("mla-drafting", page, *drafting, **LATENT, **CHAIN)
    yield case_of("mla-decode-seven-steps", page, *decoding, **LATENT)
    yield case_of("mla-serving", page, *serving, **LATENT)
    yield case_of("mla-serving-drafts", page, *speculating, **LATENT, **CHAIN)
    yield case_of("mla-verify-other-drafts", page, *drafts, **LATENT, **CHAIN)


def _numbers(page: int) -> Iterator[Case]:
    """More requests and tokens than kernels have in a table of fixed size."""
    lens = tuple(1 + 7 * index % 41 for index in range(300))
    wide = decode(*lens), decode(*lens[:130])
    drafted = verify(2, *lens[:270]), verify(2, *lens[:100])
    prompts = extend(*((0, 1 + length % 4) for length in lens[:270])), extend((0, 3))
    long = extend((3 * page, 1100)), extend((0, 3), (0, 5))
    # Graphs keep tables for the whole batch that are as wide as the longest context
    few: dict[str, Any] = {"max_context_len": -(-64 // page) * page, "max_graph_batch_size": 130}
    for name, shape in {"": SMALL, "mla-": SMALL_LATENT}.items():
        yield case_of(f"{name}decode-300-requests", page, *wide, **few, **shape)
        yield case_of(f"{name}verify-270-requests", page, *drafted, **few, **CHAIN, **shape)
        yield case_of(f"{name}extend-270-requests", page, *prompts, **few, **shape)
        most = max(longest(page), 3 * page + 1152)
        yield case_of(f"{name}extend-1100-new", page, *long, max_context_len=most, **shape)


def _places(page: int) -> Iterator[Case]:
    """Layers, rows of a wider request table, and pages, with large numbers and with 0."""
    decoding, prompts = decode(45, 3, 17), extend((0, 41), (page + 3, 20))
    steps: dict[str, tuple[Step, dict[str, Any]]] = {
        "decode": (decoding, {}),
        "extend": (prompts, {}),
        "verify": (verify(3, 12, page), CHAIN),
    }
    table: dict[str, Any] = {"first_row": 1200, "spare_columns": 37}
    ids = iter(((0, 31), (60, 0), (32, 0), (0, 79), (93, 61), (8, 0)))
    for name, (step, settings) in steps.items():
        for start, latent in (("", {}), ("mla-", LATENT)):
            case: dict[str, Any] = {**settings, **latent}
            yield case_of(f"{start}{name}-layer-ids", page, step, layer_ids=next(ids), **case)
            yield case_of(f"{start}{name}-table", page, step, **table, **case)
            shape = SMALL_LATENT if latent else {**SMALL, "head_dim": 64, "v_head_dim": 64}
            far: dict[str, Any] = {**settings, **shape, "first_page": far_page(page)}
            yield case_of(f"{start}{name}-far-pages", page, step, **far)
    windows: dict[str, Any] = {"windows": (8, None, 21), "layer_ids": (32, 0, 64)}
    yield case_of("decode-layer-ids-windows", page, decoding, **windows)
    yield case_of("extend-layer-ids-windows", page, prompts, **windows)
    yield case_of("decode-table-int16", page, decoding, first_row=FAR_PAGE + 7, **SMALL)


def _shapes(page: int) -> Iterator[Case]:
    shapes: dict[str, dict[str, Any]] = {
        "24x12-heads": {"num_q_heads": 24, "num_kv_heads": 12},
        "40x40-heads": {"num_q_heads": 40, "num_kv_heads": 40},
        "dim-512": {"num_q_heads": 4, "head_dim": 512, "v_head_dim": 512},
    }
    for name, settings in shapes.items():
        yield case_of(f"decode-{name}", page, decode(45, 3), **settings)
        yield case_of(f"extend-{name}", page, extend((0, 41), (page, 7)), **settings)
        yield case_of(f"verify-{name}", page, verify(4, 9, page), **CHAIN, **settings)


def _of_nothing(page: int) -> Iterator[Case]:
    """Steps in which no request has a key."""
    nothing = decode(0, 0), decode(5, 0), decode(0)
    no_tokens = extend((0, 0), (0, 0)), extend((0, 5), (0, 0)), extend((0, 0))
    features: dict[str, dict[str, Any]] = {
        "": {},
        "-lse": {"lse": True},
        "-sinks-lse": {"sinks": True, "lse": True},
        "-windows": {"windows": (2, None)},
    }
    for name, settings in features.items():
        yield case_of(f"decode-no-keys{name}", page, *nothing, **settings)
    yield case_of("decode-no-keys-padding", page, decode(0, 0, padding=2), decode(3, 0, padding=2))
    yield case_of("extend-no-keys", page, *no_tokens)
    yield case_of("mla-decode-no-keys", page, *nothing, **LATENT)
    yield case_of("mla-decode-no-keys-lse", page, *nothing, lse=True, **LATENT)
    yield case_of("mla-extend-no-keys", page, *no_tokens, **LATENT)
