"""Clauses of attention chunks for kernels without them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from attnmux.core.plugin import NONE, Clause, multiple_of, one_of

PHASES = ("extend", "decode")
"""Phases that virtual requests serve. Drafts may lie in two chunks, and a verify step has as many
for each request."""
SOURCE = (
    "virtual requests, as SGLang 0.5.23's local attention: a chunk is whole pages, and drafts are "
    "not cut"
)
"""Source of the axis `attention_chunk`."""


def with_chunks(clauses: Iterable[Clause], pages: Iterable[int] = ()) -> Iterator[Clause]:
    """The clauses, and for a card with `virtual_requests` a clause for layers with attention chunks
    for each. pages: page sizes of clauses that name none."""
    for clause in clauses:
        yield clause
        phases = [phase for phase in PHASES if clause.phase.admits(phase)]
        sizes = [size for size in clause.page_size.examples() if isinstance(size, int)]
        for size in (sizes or pages) if phases else ():
            yield replace(
                clause,
                phase=one_of(*phases),
                page_size=one_of(size),
                attention_chunk=multiple_of(size),
                spec_topk=NONE,
                custom_mask=NONE,
                multi_item=NONE,
                cross_attention=NONE,
            )
