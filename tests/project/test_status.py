"""benchmarks/STATUS.md, and how goals are read from results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import status

PAGE = """# Steps

| | |
|---|---|
| date | 2026-11-01 |
| machine | a CPU |
| command | a script that is not kept |

| | found | bar | |
|---|---|---|---|
| decode | 1.01 | 1.02 | kept |
| extend | 1.30 | 1.20 | **missed** |
| tiles (two are kept) | 1.0 | | |

The goal of 5 ms is met. Its bar
is not met at 32 requests. The drafts were kept.

## Later

On another day, 2026-11-02, the step's goal is met and the [host](a.md)'s is not: 3 us.
"""


def test_the_page_is_that_of_the_results() -> None:
    assert status.STATUS.read_text(encoding="utf-8") == status.page(), "python -m tools.status"


def test_every_goal_of_a_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps.md").write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(status, "RESULTS", tmp_path)
    page = status.page()
    assert "| [Steps](results/steps.md) | 3 | 3 | a CPU |  |  |" in page
    goals = [
        line for line in page.splitlines() if line.endswith(("| kept |", "missed |", "both |"))
    ]
    assert goals == [
        "| decode, found 1.01, bar 1.02 | 2026-11-01 | kept |",
        "| extend, found 1.30, bar 1.20 | 2026-11-01 | missed |",
        "| The goal of 5 ms is met. | 2026-11-01 | kept |",
        "| Its bar is not met at 32 requests. | 2026-11-01 | missed |",
        "| Later: On another day, 2026-11-02, the step's goal is met and the host's is not: 3 us. "
        "| 2026-11-02 | both |",
    ]
