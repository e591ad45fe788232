"""Runs of the cards' backends, for their `verified_on`."""

from __future__ import annotations

from attnmux.core.plugin import Verified

TORCH = "torch 2.14.1+cu130"
"""The torch of SGLang 0.5.23."""


def on_h200(*libraries: str, date: str, cases: int, torch: str = "torch 2.11.0+cu130") -> Verified:
    """libraries: with their versions, in addition to torch. date, cases: as in
    benchmarks/results/conformance.md."""
    return Verified(
        on="NVIDIA H200",
        platform="nvidia:sm90",
        libraries=(torch, *libraries),
        date=date,
        cases=cases,
    )
