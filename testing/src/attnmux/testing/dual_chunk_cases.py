"""The cases of dual chunk attention: requests that end in the first chunk and in later ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.core.batch import ForwardMode
from attnmux.testing.cases import Case, decode, extend
from attnmux.testing.naming import case_of


def dual_chunk_cases(page: int) -> Iterator[Case]:
    """Chunks are whole pages but in the cases that say otherwise, and the longest request of a case
    has three or more."""
    c = -(-24 // page) * page
    chunks: dict[str, Any] = {"kind": "dual_chunk", "dual_chunk_len": c}
    each = decode(5, c + 9, 2 * c + 3, 3 * c + 17)
    ends = decode(c - 1, c, c + 1, 2 * c, 2 * c + 1, 3 * c, 3 * c + 1)
    yield case_of("dual-chunk-decode", page, each, **chunks)
    yield case_of("dual-chunk-decode-first-chunk", page, decode(3, c - 1, 1), **chunks)
    yield case_of("dual-chunk-decode-chunk-boundaries", page, ends, **chunks)
    yield case_of("dual-chunk-decode-length-0-and-1", page, decode(1, 0, 2 * c + 1), **chunks)
    yield case_of("dual-chunk-decode-padding", page, decode(2 * c + 5, 3, padding=3), **chunks)
    changing = decode(9, 2 * c + 4, c + 2), decode(3 * c), decode(2, c, 2 * c + 9, 5)
    yield case_of("dual-chunk-decode-changing-batch-size", page, *changing, **chunks)
    larger = decode(9, 2 * c), decode(2, c + 1, 17, 3 * c, 33), decode(10, 2 * c + 1)
    yield case_of(
        "dual-chunk-decode-larger-than-graphs", page, *larger, max_graph_batch_size=2, **chunks
    )

    prefixes = extend((c + 3, 5), (2 * c + 1, 9), (0, 11), (4, 2))
    across = extend((0, 3 * c + 5), (c - 2, 4), (c + 7, c))
    boundaries = extend((c, c), (0, c), (2 * c - 1, 1), (2 * c, 1), (c - 1, 2), (0, c + 1))
    yield case_of("dual-chunk-extend-prefix", page, prefixes, **chunks)
    yield case_of("dual-chunk-extend-across-chunks", page, across, **chunks)
    yield case_of("dual-chunk-extend-chunk-boundaries", page, boundaries, **chunks)
    hits = extend((2 * c, 1), (c, 0), (0, 4)), extend((2 * c, 0), (5, 0))
    yield case_of("dual-chunk-extend-nothing-new", page, *hits, **chunks)
    shared = extend((2 * c, 5), (2 * c, 9), (2 * c, c), shared_prefix=2 * c)
    yield case_of("dual-chunk-extend-shared-prefix", page, shared, **chunks)
    padded = extend((c + 4, 9), (0, 2 * c + 2), padding=2, trailing=3)
    yield case_of("dual-chunk-extend-padding", page, padded, **chunks)
    mixed = extend((0, 2 * c + 1), (3 * c - 1, 1), (17, c), (5, 1), mode=ForwardMode.MIXED)
    yield case_of("dual-chunk-mixed", page, mixed, **chunks)
    then = extend((0, c - 1), (2 * c, 11)), decode(c, 2 * c + 12), decode(c + 1, 2 * c + 13)
    yield case_of("dual-chunk-extend-then-decode", page, *then, **chunks)
    unsaved = extend((0, 2 * c + 7), (0, 5), (0, 0), (0, c + 1))
    yield case_of("dual-chunk-extend-unsaved", page, unsaved, save_kv_cache=False, **chunks)

    features: dict[str, dict[str, Any]] = {
        "lse": {"lse": True},
        "scale": {"scaling": 0.3},
        "kv-in-pool": {"kv_in_pool": True},
        "float16": {"dtype": "float16"},
        "dim-64": {"head_dim": 64, "v_head_dim": 64},
        "14x2-heads": {"num_q_heads": 14},
        "uneven-chunks": {"dual_chunk_len": page + 1 if page > 1 else 7},
    }
    for name, settings in features.items():
        of_case = {**chunks, **settings}
        yield case_of(f"dual-chunk-decode-{name}", page, each, **of_case)
        yield case_of(f"dual-chunk-extend-{name}", page, across, **of_case)
    yield case_of("dual-chunk-decode-lse-of-nothing", page, decode(0, c), lse=True, **chunks)
    yield case_of("dual-chunk-idle", page, each, extend(mode=ForwardMode.IDLE), **chunks)
