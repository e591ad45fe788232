"""Cases whose first step is repeated, for what a backend leaves behind at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attnmux.testing.cases.case import Case, Step, case_of, decode, extend, verify
from attnmux.testing.cases.variants import LATENT

REPEATS = 10
"""Repetitions of a step. At most this many lengths below 16, 48, 64 and 80 need as many pages of 16
tokens or more."""


def steady_cases(page: int) -> Iterator[Case]:
    """Cases of each kind and phase with the same shapes at every step."""
    again: dict[str, Any] = {"repeats": REPEATS}
    tokens = decode(48, 16, 80, 64)
    prompts = extend((40, 8), (60, 4), (68, 12))
    drafts = verify(4, 44, 12, 76)
    sparse: dict[str, Any] = {**LATENT, "kind": "nsa", "index_topk": 64}
    chunks: dict[str, Any] = {"kind": "dual_chunk", "dual_chunk_len": -(-24 // page) * page}
    yield case_of("steady-decode", page, tokens, **again)
    yield case_of("steady-extend", page, prompts, **again)
    yield case_of("steady-verify", page, drafts, spec_topk=1, **again)
    yield case_of("steady-mla-decode", page, tokens, **LATENT, **again)
    yield case_of("steady-mla-extend", page, prompts, **LATENT, **again)
    yield case_of("steady-nsa-decode", page, tokens, **sparse, **again)
    yield case_of("steady-dual-chunk-decode", page, tokens, **chunks, **again)


def repetition(step: Step, number: int) -> Step:
    """A step of the same shapes, each of whose requests has `number` cached tokens fewer."""
    return replace(step, lens=tuple(length - number for length in step.lens))
