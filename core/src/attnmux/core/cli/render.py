"""The answers of verbs as tables. Verbs import this module only to print, as `tables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from attnmux.core.cards.proof import Proven
from attnmux.core.choosing.choice import Choice
from attnmux.core.choosing.decision import Decision
from attnmux.core.cli.asking import Asked
from attnmux.core.cli.here import ELSEWHERE, LACKING, Backend
from attnmux.core.cli.outcomes import Outcome, joined_by_first_reason
from attnmux.core.cli.select_explained import Explanation, Figured, Stated
from attnmux.core.cli.tables import (
    CHOSEN,
    REFUSED,
    plain_console,
    plain_table,
    print_elsewhere,
    print_rows,
    proof_cell,
)
from attnmux.core.facts.axes import AXES
from attnmux.core.facts.errors import NoBackend
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.verdicts import Reason

MACHINE = tuple(axis.name for axis in AXES if axis.of_machine)


def render_platforms(platforms: Sequence[Platform], picked: str | None) -> None:
    columns = ("", "platform", "name", "count", "memory", "cores", "runtime", "features")
    rows = [
        (
            "*" if str(platform) == picked else "",
            f"{platform.vendor}:{platform.arch}",
            platform.name,
            str(platform.count),
            f"{platform.memory_bytes / 1e9:.0f} GB" if platform.memory_bytes else "",
            str(platform.core_count or ""),
            platform.runtime,
            " ".join(sorted(platform.features)),
        )
        for platform in platforms
    ]
    print_rows(plain_console(), columns, rows)


def render_backends(backends: Sequence[Backend], *, every: bool = False) -> None:
    """A row for each backend that this machine's devices could run, or, with `every`, for each,
    with the commands that install missing libraries if nothing else is missing."""
    shown = [backend for backend in backends if every or backend.here != ELSEWHERE]
    rows = [
        (backend.offer.address, proof_cell(backend.proof), backend.here, _with_hints(backend))
        for backend in shown
    ]
    console = plain_console()
    print_rows(console, ("backend", "proof", "here", "summary"), rows)
    others = [backend.offer.address for backend in backends if backend not in shown]
    print_elsewhere(console, others, "--all")


def _with_hints(backend: Backend) -> str:
    hints = [reason.hint for reason in backend.reasons] if backend.here == LACKING else []
    return "; ".join((*hints, backend.offer.card.summary))


def render_codes(meanings: Mapping[str, str]) -> None:
    print_rows(plain_console(), ("code", "meaning"), list(meanings.items()))


def render_machines(asked: Sequence[Asked]) -> None:
    """A row for each machine: the backend of each phase with its proof unless that is hardware, or
    why there is none."""
    phases = asked[0].request.phases
    cards = {offer.address: offer.card for offer in asked[0].offers}
    rows: list[tuple[str, ...]] = []
    for device, answer in ((query.device, query.answer) for query in asked):
        if isinstance(answer, NoBackend):
            note = str(answer).partition("\n")[0]
            rows.append((str(device), *[""] * len(phases), "", "", note))
            continue
        chosen = [answer.phases[phase].backend for phase in phases]
        served: dict[Choice, list[str]] = {}
        for phase, choice in answer.phases.items():
            served.setdefault(choice, []).append(phase)
        proofs = {
            choice.backend: Proven.on(
                cards[choice.address].verified_on, device, served_phases, answer.request.kind
            ).word
            for choice, served_phases in served.items()
            if choice.address in cards
        }
        notes = [f"{change.field} became {change.new}" for change in answer.coercions]
        notes += [
            f"{layers}: {' and '.join(dict.fromkeys(one.backend for _, one in other.choices))}"
            for layers, other in zip(answer.request.other_layers, answer.others, strict=True)
        ]
        notes += [f"{name}: {word}" for name, word in proofs.items() if word != "hardware"]
        page, dtype = str(answer.page_size), answer.kv_dtype
        rows.append((str(device), *chosen, page, dtype, "; ".join((*notes, *answer.notes))))
    print_rows(plain_console(), ("machine", *phases, "page", "KV", "note"), rows)


def render_answer(
    asked: Asked, explanation: Explanation, lines: Sequence[str], *, explain: bool, every: bool
) -> None:
    """The answer of `attnmux select`, and the engine's command lines if there are any. A refusal's
    message is on stderr: without `explain`, nothing else is printed."""
    if not isinstance(asked.answer, NoBackend):
        render_decision(asked.answer, explanation, explain=explain, every=every)
    elif explain:
        console = plain_console()
        _print_losers(console, explanation.outcomes, len(asked.request.phases), every=every)
        _print_values(console, explanation.values)
    if lines:
        print("", *lines, sep="\n")


def render_decision(
    decision: Decision, explanation: Explanation, *, explain: bool, every: bool
) -> None:
    """The summary and the changes, then the backends of each group of layers that are alike.

    These are the backends that fit and the number of others. With `explain`, they are the chosen
    ones and the others with their reasons (with `every`, all reasons of each instead of the first),
    and who set each value comes last.
    """
    console = plain_console()
    console.print(Text(decision.summary()))
    for change in decision.coercions:
        line = (
            f"{change.field}: {change.old} ({change.origin}) became {change.new}: {change.because}"
        )
        console.print(Text(line, style="yellow"))
    console.print()
    for layers, outcomes in (("", explanation.outcomes), *explanation.others):
        if layers:
            console.print()
            console.print(Text(f"{layers}:", style="bold"))
        if explain:
            _print_chosen(console, outcomes, len(decision.phases))
            for doubt in () if layers else explanation.doubts:
                console.print(Text(doubt, style="dim"))
            _print_losers(console, outcomes, len(decision.phases), every=every)
        else:
            _print_fitting(console, outcomes, len(decision.phases))
    if explain:
        for figured in explanation.figures:
            _print_figures(console, figured)
        _print_values(console, explanation.values)
    console.print()
    console.print(Text(f"decision {decision.hash[:16]}", style="dim"))


def _print_fitting(console: Console, told: Sequence[Outcome], phases: int) -> None:
    """The backends that fit, and the number of others."""
    fitting = [outcome for outcome in told if outcome.standing in ("chosen", "fits")]
    rows = [(*_candidate(outcome, phases), _standing(outcome)) for outcome in fitting]
    styles = [CHOSEN if outcome.standing == "chosen" else "" for outcome in fitting]
    print_rows(console, ("for", "backend", "plugin", "rank", "proof", ""), rows, styles)
    fully = {(outcome.plugin, outcome.backend) for outcome in fitting}
    others = {(outcome.plugin, outcome.backend) for outcome in told} - fully
    if others:
        verb = "does" if len(others) == 1 else "do"
        console.print()
        console.print(Text(f"{len(others)} more {verb} not fit: --explain says why"))


def _print_chosen(console: Console, told: Sequence[Outcome], phases: int) -> None:
    chosen = [outcome for outcome in told if outcome.standing == "chosen"]
    rows = [(*_candidate(outcome, phases), _sourced(outcome)) for outcome in chosen]
    if rows:
        columns = ("for", "chosen", "plugin", "rank", "proof", "because")
        print_rows(console, columns, rows, [CHOSEN] * len(rows))


def _print_losers(console: Console, told: Sequence[Outcome], phases: int, *, every: bool) -> None:
    lost = [_machine_first(outcome) for outcome in told if outcome.standing != "chosen"]
    near = [
        outcome for outcome in lost if not outcome.reasons or outcome.reasons[0].axis != "vendor"
    ]
    shown = lost if every else joined_by_first_reason(near)
    rows = [(*_candidate(outcome, phases), _against(outcome, every=every)) for outcome in shown]
    if rows:
        console.print()
        styles = ["" if outcome.standing == "fits" else REFUSED for outcome in shown]
        columns = ("for", "not chosen", "plugin", "rank", "proof", "because")
        print_rows(console, columns, rows, styles)
    elsewhere = sorted({outcome.backend for outcome in lost} - {each.backend for each in shown})
    print_elsewhere(console, elsewhere, "--all")


def _machine_first(outcome: Outcome) -> Outcome:
    """With the reasons first that another machine would remove, that of the vendor before all."""

    def place(reason: Reason) -> int:
        return MACHINE.index(reason.axis) if reason.axis in MACHINE else len(MACHINE)

    return replace(outcome, reasons=tuple(sorted(outcome.reasons, key=place)))


def _print_figures(console: Console, figured: Figured) -> None:
    """The times that a phase's ranks follow, a column for each backend."""
    names = sorted({name for times in figured.times.values() for name in times})
    table = plain_table(f"us, {figured.phase}", *(name.partition("/")[2] for name in names))
    for workload, times in figured.times.items():
        shown = (f"{times[name]:.1f}" if name in times else "" for name in names)
        table.add_row(workload, *shown)
    console.print()
    console.print(Text(f"{figured.source}:"))
    console.print(table)


def _print_values(console: Console, values: Sequence[Stated]) -> None:
    rows = [
        (
            value.name,
            value.origin,
            f"{value.value} ({value.source})" if value.source else value.value,
        )
        for value in values
    ]
    console.print()
    print_rows(console, ("field", "set by", "value"), rows)


def _candidate(outcome: Outcome, phases: int) -> tuple[str, str, str, str, Text]:
    """Every column but the last; `phases` is the number that the request asks for."""
    alike = len(outcome.phases)
    served = "all" if alike == phases > 2 else ", ".join(outcome.phases)
    rank = "" if outcome.rank is None else str(outcome.rank)
    return served, outcome.backend, outcome.plugin, rank, proof_cell(outcome.proof)


def _standing(outcome: Outcome) -> str:
    """The last column of the plain table."""
    return f"chosen: {outcome.why}" if outcome.standing == "chosen" else outcome.why


def _sourced(outcome: Outcome) -> str:
    """Why a backend was chosen, and where its rank comes from."""
    return f"{outcome.why} ({outcome.source})" if outcome.source else outcome.why


def _against(outcome: Outcome, *, every: bool) -> str:
    """Why a backend lost, with all reasons on lines of their own or with the first one."""
    reasons = [str(reason) for reason in outcome.reasons]
    if outcome.source:
        return _sourced(outcome)
    if every and len(reasons) > 1:
        return "\n".join(filter(None, (outcome.why, *reasons)))
    more = f" (and {len(reasons) - 1} more: --all)" if len(reasons) > 1 else ""
    return ": ".join(filter(None, (outcome.why, *reasons[:1]))) + more
