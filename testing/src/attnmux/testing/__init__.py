"""The conformance suite that every backend passes, for this project's plugins and for others.

`AttentionBackendTests` is the suite for pytest; `attnmux verify NAME` runs the same cases. What
both are made of is plain data and functions, and needs no pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.testing.builders import PreparedStep, prepare_step
    from attnmux.testing.candidate import Candidate, find_candidate
    from attnmux.testing.cases import Case, Step
    from attnmux.testing.fakes import FakeBackend, fake_card, fake_platform
    from attnmux.testing.graph_fakes import GraphFakeBackend, graph_card
    from attnmux.testing.limits import OutsidePoint, outside_points, try_point
    from attnmux.testing.outcome import Outcome
    from attnmux.testing.runner import run_case
    from attnmux.testing.standard import standard_cases
    from attnmux.testing.suite import AttentionBackendTests
    from attnmux.testing.world import World, make_world

_MODULES = {
    "AttentionBackendTests": "suite",
    "Candidate": "candidate",
    "Case": "cases",
    "FakeBackend": "fakes",
    "Outcome": "outcome",
    "GraphFakeBackend": "graph_fakes",
    "OutsidePoint": "limits",
    "PreparedStep": "builders",
    "Step": "cases",
    "World": "world",
    "fake_card": "fakes",
    "fake_platform": "fakes",
    "find_candidate": "candidate",
    "graph_card": "graph_fakes",
    "make_world": "world",
    "outside_points": "limits",
    "prepare_step": "builders",
    "run_case": "runner",
    "standard_cases": "standard",
    "try_point": "limits",
}

__all__ = [
    "AttentionBackendTests",
    "Candidate",
    "Case",
    "FakeBackend",
    "GraphFakeBackend",
    "Outcome",
    "OutsidePoint",
    "PreparedStep",
    "Step",
    "World",
    "fake_card",
    "fake_platform",
    "find_candidate",
    "graph_card",
    "make_world",
    "outside_points",
    "prepare_step",
    "run_case",
    "standard_cases",
    "try_point",
]


def __getattr__(name: str) -> object:
    """Import the module of a public name when it is first asked for."""
    if name in _MODULES:
        module = importlib.import_module(f"attnmux.testing.{_MODULES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
