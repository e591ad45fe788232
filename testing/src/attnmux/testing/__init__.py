"""The conformance suite that every backend passes, this project's and others'.

`AttentionBackendTests` is the suite for pytest; `attnmux verify NAME` runs the same cases. Both are
made of plain data and functions that need no pytest:

- `Case` is one model's attention over some `Step`s, which `decode`, `extend` and `verify` make;
  `standard_cases` lists the suite's, and `in_graphs` those that device graphs can serve.
- `find_candidate` makes a `Candidate`, a backend with its card and machine; `run_case` runs a case
  on it and compares all that it did with `reference`, dense attention in float64.
- `outside_points` lists requests just beyond a card's limits and those that no case can ask for,
  and `try_point` checks that the selector refuses one.
- `make_setup` and `prepare_step` make the pools, batch and tensors of a case, for tests that call
  a backend themselves.
- `RecordingGraphs` captures and replays steps without a device that has graphs.
- `Sampler` makes random cases of a card, and `run_in_children` runs cases in child processes.
- `FirstUse` runs a handful of cases in a model's shapes before a backend serves it.
- `CanaryBackend` checks a share of a backend's steps while it serves; `FailureKeeper` keeps a
  failed step, which `load_failure` reads and `run_again` repeats on any backend.
- `FakeBackend` and `GraphFakeBackend` are correct and slow, with cards for `fake_platform`.

Importing this module imports neither torch nor pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.testing import reference as reference
    from attnmux.testing.canary import CanaryBackend as CanaryBackend
    from attnmux.testing.canary import CanarySample as CanarySample
    from attnmux.testing.canary_checks import CanaryFinding as CanaryFinding
    from attnmux.testing.candidate import Candidate as Candidate
    from attnmux.testing.candidate import Outcome as Outcome
    from attnmux.testing.candidate import find_candidate as find_candidate
    from attnmux.testing.card_limits import OutsidePoint as OutsidePoint
    from attnmux.testing.card_limits import outside_points as outside_points
    from attnmux.testing.card_limits import try_point as try_point
    from attnmux.testing.case_setup import CaseSetup as CaseSetup
    from attnmux.testing.case_setup import make_setup as make_setup
    from attnmux.testing.cases import Case as Case
    from attnmux.testing.cases import Step as Step
    from attnmux.testing.cases import decode as decode
    from attnmux.testing.cases import extend as extend
    from attnmux.testing.cases import verify as verify
    from attnmux.testing.children import run_in_children as run_in_children
    from attnmux.testing.comparison import Disagreement as Disagreement
    from attnmux.testing.comparison import Errors as Errors
    from attnmux.testing.comparison import distance as distance
    from attnmux.testing.comparison import errors_between as errors_between
    from attnmux.testing.failures import FailureKeeper as FailureKeeper
    from attnmux.testing.failures import KeptFailure as KeptFailure
    from attnmux.testing.failures import load_failure as load_failure
    from attnmux.testing.fakes import FakeBackend as FakeBackend
    from attnmux.testing.fakes import fake_card as fake_card
    from attnmux.testing.fakes import fake_platform as fake_platform
    from attnmux.testing.first_use import FirstUse as FirstUse
    from attnmux.testing.graph_fakes import GraphFakeBackend as GraphFakeBackend
    from attnmux.testing.graph_fakes import graph_card as graph_card
    from attnmux.testing.greedy_trees import verify_tree_greedy as verify_tree_greedy
    from attnmux.testing.prepared import LayerInput as LayerInput
    from attnmux.testing.prepared import PreparedStep as PreparedStep
    from attnmux.testing.prepared import prepare_step as prepare_step
    from attnmux.testing.recording import RecordingGraphs as RecordingGraphs
    from attnmux.testing.replay import Replayed as Replayed
    from attnmux.testing.replay import run_again as run_again
    from attnmux.testing.runner import run_case as run_case
    from attnmux.testing.sampling import Sampler as Sampler
    from attnmux.testing.shaped import cases_in_shape as cases_in_shape
    from attnmux.testing.standard import in_graphs as in_graphs
    from attnmux.testing.standard import standard_cases as standard_cases
    from attnmux.testing.suite import AttentionBackendTests as AttentionBackendTests

_MODULES = {
    "AttentionBackendTests": "suite",
    "CanaryBackend": "canary",
    "CanaryFinding": "canary_checks",
    "CanarySample": "canary",
    "Candidate": "candidate",
    "Case": "cases",
    "CaseSetup": "case_setup",
    "Disagreement": "comparison",
    "Errors": "comparison",
    "FailureKeeper": "failures",
    "FakeBackend": "fakes",
    "FirstUse": "first_use",
    "GraphFakeBackend": "graph_fakes",
    "KeptFailure": "failures",
    "LayerInput": "prepared",
    "Outcome": "candidate",
    "OutsidePoint": "card_limits",
    "PreparedStep": "prepared",
    "RecordingGraphs": "recording",
    "Replayed": "replay",
    "Sampler": "sampling",
    "Step": "cases",
    "cases_in_shape": "shaped",
    "decode": "cases",
    "distance": "comparison",
    "errors_between": "comparison",
    "extend": "cases",
    "fake_card": "fakes",
    "fake_platform": "fakes",
    "find_candidate": "candidate",
    "graph_card": "graph_fakes",
    "in_graphs": "standard",
    "load_failure": "failures",
    "make_setup": "case_setup",
    "outside_points": "card_limits",
    "prepare_step": "prepared",
    "reference": "reference",
    "run_again": "replay",
    "run_case": "runner",
    "run_in_children": "children",
    "standard_cases": "standard",
    "try_point": "card_limits",
    "verify": "cases",
    "verify_tree_greedy": "greedy_trees",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import the module of a public name when it is first asked for."""
    if name in _MODULES:
        module = importlib.import_module(f"attnmux.testing.{_MODULES[name]}")
        return module if name == "reference" else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
