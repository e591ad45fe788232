"""A decision in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnmux.core.choosing.choice import Choice


def summary(decision: Any) -> str:  # noqa: ANN401  # a Decision, whose module imports this one
    """One line: the backend of each phase, the machine, and why each backend won."""
    said = _said(decision)
    for group, other in zip(decision.request.other_layers, decision.others, strict=True):
        said += [f"for {group}: {'; '.join(_said(other))}"]
    where = decision.platform.name or str(decision.platform)
    stored = f"page size {decision.page_size}, KV in {decision.kv_dtype}"
    notes = [*decision.notes, *(note for other in decision.others for note in other.notes)]
    noted = "".join(f"; note: {note}" for note in notes)
    return f"{'; '.join(said)}; on {where}, {stored}{noted}"


def _said(decision: Any) -> list[str]:  # noqa: ANN401  # as above
    """The backends of one group of layers, and of the linear ones."""
    served: dict[str, list[str]] = {}
    for phase, choice in decision.phases.items():
        if decision.trees is None or phase != "verify":
            served.setdefault(choice.address, []).append(phase)
    said = []
    for phases in served.values():
        won = decision.phases["decode" if "decode" in phases else phases[0]]
        said.append(f"{_named(won)} serves {_listed(phases)}, {_standing(decision, won, phases)}")
    said += [
        f"{_named(each.choice)} serves decode of {each} requests, "
        f"saving at least {each.gain:.0%} of the time (measured)"
        for each in decision.decode_sizes
    ]
    if decision.expanded is not None:
        said.append(
            f"{_named(decision.expanded)} serves prompts with expanded heads, where that takes "
            "fewer operations"
        )
    if decision.request.sparse is not None:
        said.append(
            f"an approximation: decode reads {decision.request.sparse_budget} tokens of a request, "
            f"in the pages that {decision.request.sparse} chooses for each KV head; prompts "
            "are read whole"
        )
    if decision.request.index_block_size is not None:
        said.append(
            "attnmux-core, or a kernel that a plugin offers, serves the layers with an "
            f"indexer: each token sees {decision.request.index_topk} blocks of "
            f"{decision.request.index_block_size} keys"
        )
    if decision.request.compressed_layers:
        layers = [f"{count} {kind}" for kind, count in decision.request.compressed_layers]
        said.append(
            "the engine, such as attnmux-transformers, serves the keys of blocks in "
            f"{_listed(layers)} layers, merged with their windows by LSE"
        )
    if decision.trees is not None:
        said.append(
            "draft trees are verified in two parts, merged by LSE: "
            f"{_named(decision.trees)} reads the prefixes, and attnmux-core the drafts"
        )
    said += [
        f"{_linear_backends(decision.linear[kind])} serves {count} {kind} layers"
        if kind in decision.linear
        else f"no backend serves {count} {kind} layers"
        for kind, count in decision.request.linear_layers
    ]
    return said


def _standing(decision: Any, choice: Choice, phases: list[str]) -> str:  # noqa: ANN401  # as above
    """How a winner stood among the candidates of the phase that decided: decode if served."""
    phase = "decode" if "decode" in phases else phases[0]
    fitting = [v for v in decision.candidates if v.phase == phase and v.eligible]
    own = next((v for v in fitting if v.address == choice.address), None)
    if own is None:
        return "as decided elsewhere"
    named = f"named by {choice.origin}, " if choice.origin else ""
    rank = f"{named}rank {own.rank}{f' ({own.source})' if own.measured else ''}"
    if len(fitting) == 1:
        return f"{rank}, the only one that fits"
    better = sum((v.rank or 0) < (own.rank or 0) for v in fitting)
    place = f"behind {better}" if better else "the best"
    return f"{rank}, {place} of {len(fitting)} that fit"


def _linear_backends(served: Mapping[str, Choice]) -> str:
    """One name, or that of each phase."""
    names = {choice.backend: phase for phase, choice in served.items()}
    if len(names) == 1:
        (choice, *_) = served.values()
        return _named(choice)
    return " and ".join(f"{name} ({phase})" for name, phase in names.items())


def _named(choice: Choice) -> str:
    return f"{choice.backend} ({choice.plugin})"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
