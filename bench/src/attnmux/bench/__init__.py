"""Times attention backends on the same steps. Importing this module imports no torch.

workload.py     the steps that are timed
shapes.py       shapes that a request leaves open
grid.py         the steps that are timed by default
entrants.py     which backends take part, and why the others do not
steps.py        a workload in pools of its own
linear_steps.py a workload of linear layers
linear_work.py  what such a step needs
subjects.py     how steps of attention and of linear layers are made and checked
answers.py      whether an answer is right
timing.py       how long calls take, several sides by turns
roofline.py     what a step needs, and what the device reaches
measuring.py    all of these together: rows of results
conformance.py  the check that a measurement needs before it may change a choice
ranks.py        figures of the slowest of several ranks
trials.py       the launches that a tuner tried, and those that win
keeping.py      the files that keep measurements and launches
margins.py      which backend is fastest, by how much, and which one is chosen
report.py       tables of figures, and the facts that they belong to
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.bench.answers import error_of, errors_of, max_error
    from attnmux.bench.conformance import Check, check_conformance
    from attnmux.bench.entrants import Entrant, Field, Refused, find_entrants, make_field
    from attnmux.bench.grid import default_grid
    from attnmux.bench.measuring import Bench, Row, all_layers, all_layers_in_graph
    from attnmux.bench.report import Report, facts
    from attnmux.bench.roofline import Ceilings, Cost, ceilings, cost_of
    from attnmux.bench.shapes import completed
    from attnmux.bench.steps import Step, make_step
    from attnmux.bench.timing import (
        Times,
        device_meter,
        graphs_of,
        host_meter,
        in_graph,
        in_turn,
        interleave,
        median_us,
        wall_meter,
    )
    from attnmux.bench.workload import Workload

_MODULES = {
    "Bench": "measuring",
    "Ceilings": "roofline",
    "Check": "conformance",
    "Cost": "roofline",
    "Entrant": "entrants",
    "Field": "entrants",
    "Refused": "entrants",
    "Report": "report",
    "Row": "measuring",
    "Step": "steps",
    "Times": "timing",
    "Workload": "workload",
    "all_layers": "measuring",
    "all_layers_in_graph": "measuring",
    "ceilings": "roofline",
    "check_conformance": "conformance",
    "completed": "shapes",
    "cost_of": "roofline",
    "default_grid": "grid",
    "device_meter": "timing",
    "error_of": "answers",
    "errors_of": "answers",
    "facts": "report",
    "find_entrants": "entrants",
    "graphs_of": "timing",
    "host_meter": "timing",
    "in_graph": "timing",
    "in_turn": "timing",
    "interleave": "timing",
    "make_field": "entrants",
    "make_step": "steps",
    "max_error": "answers",
    "median_us": "timing",
    "wall_meter": "timing",
}

__all__ = [
    "Bench",
    "Ceilings",
    "Check",
    "Cost",
    "Entrant",
    "Field",
    "Refused",
    "Report",
    "Row",
    "Step",
    "Times",
    "Workload",
    "all_layers",
    "all_layers_in_graph",
    "ceilings",
    "check_conformance",
    "completed",
    "cost_of",
    "default_grid",
    "device_meter",
    "error_of",
    "errors_of",
    "facts",
    "find_entrants",
    "graphs_of",
    "host_meter",
    "in_graph",
    "in_turn",
    "interleave",
    "make_field",
    "make_step",
    "max_error",
    "median_us",
    "wall_meter",
]


def __getattr__(name: str) -> object:
    """Import the module of a public name when it is first used."""
    if name in _MODULES:
        module = importlib.import_module(f"attnmux.bench.{_MODULES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
