"""The runs that cards name are those of benchmarks/results/conformance.md, and the latest ones;
kernels that compile are those of benchmarks/results/chips.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attnmux.core import Plugins
from attnmux.core.plugin import Verified

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks/results/conformance.md"
CHIPS = ROOT / "benchmarks/results/chips.md"
ALL_OF = re.compile(r"(\d+) of \1")
"""All cases agreed. Where the time was over before the end, the cell says more or less."""


def recorded(text: str) -> Iterator[tuple[str, str, int]]:
    """(backend, day, cases) of each whole run. A table without days is of the day above it."""
    day, header = "", []
    for line in text.splitlines():
        if found := re.search(r"On (\d{4}-\d\d-\d\d)", line):
            day = found[1]
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
        row = dict(zip(header, cells, strict=True))
        counts = [row.get(name, "-") for name in ("agreed eagerly", "from graphs")]
        whole = [ALL_OF.fullmatch(count) for count in counts if count != "-"]
        if whole and all(whole):
            cases = sum(int(found[1]) for found in whole if found)
            for name in re.findall(r"`(\w+)`", row["backend"]):
                yield name, row.get("date", day), cases


def named() -> Iterator[tuple[str, Verified]]:
    """The runs on devices of this repository's cards that were counted."""
    ours = tuple(path.name for path in (ROOT / "plugins").iterdir() if path.is_dir())
    for offer in Plugins.load(ours, ()).offers():
        for run in offer.card.verified_on:
            if run.platform and run.cases:
                yield offer.card.name, run


def test_a_counted_run_is_recorded() -> None:
    runs = {(name, run.date, run.cases) for name, run in named()}
    assert len(runs) > 10
    assert runs - set(recorded(RECORDS.read_text())) == set()


def test_the_latest_whole_run_is_on_the_card() -> None:
    latest: dict[str, str] = {}
    for name, day, _ in recorded(RECORDS.read_text()):
        latest[name] = max(latest.get(name, ""), day)
    on_cards: dict[str, str] = {}
    for name, run in named():
        on_cards[name] = max(on_cards.get(name, ""), run.date)
    assert on_cards == latest


def compiled(text: str) -> Iterator[tuple[str, str]]:
    """(chip, day) of each row whose cells compiled, all of those that were tried."""
    day = ""
    for line in text.splitlines():
        if found := re.match(r"\| date \| (\d{4}-\d\d-\d\d) \|", line):
            day = found[1]
        if row := re.match(r"\| (\w+) \| ([1-9]\d*) of \d+ \|.*\| 0 \|", line):
            yield row[1], day


def test_a_card_says_compiled_of_chips_that_are_recorded() -> None:
    ours = tuple(path.name for path in (ROOT / "plugins").iterdir() if path.is_dir())
    runs = [run for each in Plugins.load(ours, ()).offers() for run in each.card.verified_on]
    claims = {(run.platform.partition(":")[2], run.date) for run in runs if run.compiled}
    assert claims
    assert claims - set(compiled(CHIPS.read_text())) == set()


def test_chips_are_read_as_people_read_them() -> None:
    text = """| date | 2026-11-29 |
| chip | cells compiled | kernels | failed | largest |
|---|--:|--:|--:|---|
| sm86 | 3 of 349 | 12 | 0 | 1 of 2 |
| sm75 | 2 of 329 | 4 | 1 | 1 of 2 |
| sm80 | 0 of 349 | 0 | 0 | - |
"""
    assert list(compiled(text)) == [("sm86", "2026-11-29")]


def test_runs_are_read_as_people_read_them() -> None:
    text = """On 2026-11-23, after a change:

| backend | agreed eagerly | from graphs |
|---|---|---|
| `a` | 3 of 3 | 2 of 2 |
| `b` | 3 of 4 | 2 of 2 |
| `c` | 3 of 3 that ran | - |
| `d` | 5 of 5 | - |

| date | backend | agreed eagerly |
|---|---|---|
| 2026-11-20 | `e` | 7 of 7 |
"""
    expected = [("a", "2026-11-23", 5), ("d", "2026-11-23", 5), ("e", "2026-11-20", 7)]
    assert list(recorded(text)) == expected


def test_no_reason_cites_a_file_of_this_repository() -> None:
    """No wheel has it."""
    ours = tuple(path.name for path in (ROOT / "plugins").iterdir() if path.is_dir())
    cards = [offer.card for offer in Plugins.load(ours, ()).offers()]
    reasons = [prior.source for card in cards for prior in card.priors]
    reasons += [source for card in cards for source in card.sources.values()]
    reasons += [caveat.text for card in cards for caveat in card.caveats]
    assert len(reasons) > 100
    assert not [reason for reason in reasons if re.search(r"\b(benchmarks|docs|tests)/", reason)]
