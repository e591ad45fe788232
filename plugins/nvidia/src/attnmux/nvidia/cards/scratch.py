"""The option for the scratch memory of kernels."""

from __future__ import annotations

from attnmux.core.plugin import Option

MOST_BYTES = 1 << 40
"""More than any device has: a larger number is an error in writing."""


def workspace_bytes(summary: str) -> Option:
    """0 is the backend's own number, which the summary gives."""
    return Option(
        name="workspace_bytes", type=int, default=0, least=0, most=MOST_BYTES, summary=summary
    )
