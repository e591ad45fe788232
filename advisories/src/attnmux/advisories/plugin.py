"""The offers of attnmux-advisories: findings alone, neither cards nor a probe."""

from __future__ import annotations

from pathlib import Path

from attnmux.core.plugin import Advisory, hookimpl

FINDINGS = Path(__file__).parent / "findings"


@hookimpl
def attnmux_advisories() -> list[Advisory]:
    return Advisory.in_folder(FINDINGS)
