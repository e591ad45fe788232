"""Writes benchmarks/STATUS.md: every goal that a page of benchmarks/results says is kept or missed.

    python -m tools.status

A goal is a row of a table one of whose cells says kept, met or missed, or a sentence about a goal
or a bar that says so. Machine, versions, commit and day are those of the page's first table, unless
the section names others. A page without a commit gets that of git, which added it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATUS = ROOT / "benchmarks/STATUS.md"
RESULTS = ROOT / "benchmarks/results"

MISSED = re.compile(
    r"(?<!would be )\bmissed\b|\bnot (?:kept|met|meet)\b|\bis not(?=[:;,.])|\bneither\b",
    re.IGNORECASE,
)
KEPT = re.compile(r"\b(kept|met)\b", re.IGNORECASE)
GOAL = re.compile(r"\b(goals?|bars?)\b", re.IGNORECASE)
ASIDE = re.compile(r"\([^)]*\)")
SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z*`\d])")
DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")
LINKED = re.compile(r"\[([^\]]+)\]\([^)]+\)")
PLAIN = ("kept", "missed")
FACTS = ("machine", "versions", "commit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The text under one heading of a page."""

    heading: str
    lines: Sequence[str]

    def goals(self) -> Iterator[tuple[str, str]]:
        """What each goal's row or sentence says, and "kept", "missed" or "both"."""
        for header, cells in self._rows():
            verdict = _verdict(ASIDE.sub("", " ".join(cells[1:])))
            if verdict and any(header):
                yield _labelled(header, cells), verdict
        prose = " ".join(line for line in self.lines if not line.startswith("|"))
        for sentence in SENTENCE.split(prose):
            if GOAL.search(sentence) and (verdict := _verdict(sentence)):
                yield sentence.strip(), verdict

    def _rows(self) -> Iterator[tuple[list[str], list[str]]]:
        """The cells of each row, and of its table's header."""
        header: list[str] = []
        for line in self.lines:
            if not line.startswith("|"):
                header = []
            elif not header:
                header = _cells(line)
            elif not set(line) <= set("|-: "):
                yield header, _cells(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """One page of benchmarks/results."""

    name: str
    title: str
    facts: Mapping[str, str]
    """Its first table."""
    sections: Sequence[Section]

    @classmethod
    def read(cls, path: Path) -> Results:
        text = LINKED.sub(r"\1", path.read_text(encoding="utf-8"))  # links are those of its folder
        lines = text.splitlines()
        starts = [place for place, line in enumerate(lines) if line.startswith("#")]
        sections = [
            Section(heading=lines[start].strip("# "), lines=lines[start + 1 : end])
            for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
        ]
        facts = dict(
            (cells[0].removesuffix(" A"), cells[1])
            for line in sections[0].lines
            if line.startswith("|") and len(cells := _cells(line)) == 2 and cells[0]
        )
        return cls(name=path.name, title=sections[0].heading, facts=facts, sections=sections)


def page() -> str:
    """The text of STATUS.md."""
    found = [(each, list(_goals_of(each))) for each in map(Results.read, _paths())]
    found = [(results, goals) for results, goals in found if goals]
    rows, parts = [], []
    for results, goals in found:
        said = [verdict for *_, verdict in goals]
        counts = [str(sum(one in (kind, "both") for one in said)) for kind in ("kept", "missed")]
        link = f"[{results.title}](results/{results.name})"
        rows.append([link, *counts, *(results.facts.get(fact, "") for fact in FACTS)])
        parts += [f"## {results.title}", _table(["goal", "day", ""], goals)]
    return (
        "\n\n".join(
            [
                "# Goals, kept and missed",
                "`python -m tools.status` makes this page from [results](README.md), which say "
                "more. A page is in the order of its measurements: a later line may replace an "
                "earlier one. A line that keeps one goal and misses another counts as both.",
                _table(["results", "kept", "missed", *FACTS], rows),
                *parts,
            ]
        )
        + "\n"
    )


def _goals_of(results: Results) -> Iterator[tuple[str, str, str]]:
    """Each goal with its section, its day and its verdict."""
    day = (DAY.findall(results.facts.get("date", "")) or [""])[-1]
    for section in results.sections:
        day = (DAY.findall(" ".join(section.lines)) or [day])[-1]
        first = section is results.sections[0]
        for goal, verdict in section.goals():
            yield goal if first else f"{section.heading}: {goal}", day, verdict


def add_commits() -> None:
    """Add to pages with a table of facts the commit that added them, if they name none."""
    for path in _paths():
        text = path.read_text(encoding="utf-8")
        if "versions" not in (facts := Results.read(path).facts) or "commit" in facts:
            continue
        command = ["git", "log", "--diff-filter=A", "--format=%h", "--abbrev=8", "--", str(path)]
        added = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        if added:
            line = next(one for one in text.splitlines() if one.startswith("| versions |"))
            commit = f"{line}\n| commit | added by {added.split()[-1]} |"
            path.write_text(text.replace(line, commit, 1), encoding="utf-8")


def _paths() -> list[Path]:
    return sorted(RESULTS.glob("*.md"))


def _verdict(text: str) -> str:
    missed = MISSED.search(text)
    kept = KEPT.search(MISSED.sub("", text))
    return {(True, True): "both", (True, False): "missed", (False, True): "kept"}.get(
        (bool(missed), bool(kept)), ""
    )


def _labelled(header: Sequence[str], cells: Sequence[str]) -> str:
    """A row as text: its first cell, then each other one after its column's name."""
    pairs = zip(header[1:], cells[1:], strict=False)
    told = [(name, cell) for name, cell in pairs if cell and cell.strip("*").lower() not in PLAIN]
    return ", ".join([cells[0], *(f"{name} {cell}".strip() for name, cell in told)])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    add_commits()
    STATUS.write_text(page(), encoding="utf-8")
