"""One measurement of a backend on a device, and the file that keeps a machine's measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from attnmux.core.facts.axis import Demand
from attnmux.core.facts.fields import Check, Name, Positive
from attnmux.core.facts.questions import Question
from attnmux.core.facts.records import Record, is_figure

STATED_APART = frozenset({"vendor", "arch", "version", "features", "runtime", "phase"})
"""Axes that a measurement states by its device and its phase."""

DECIDED = ("page_size", "kv_dtype")
"""Values that the solver decides if the request leaves them open."""

Error = Annotated[
    float | None,
    Check("0 or more units, or none", lambda error: error in (None, 0) or is_figure(error)),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(Record):
    """The time that a backend took for one workload of one phase, and the error of its answer.

    `median_us` is the time of one step. Errors are in units of the output format's rounding, as
    `attnmux.testing.bench.Errors` defines them. Raises InvalidInput as `Record`.
    """

    noun = "measurement"
    listed = "measurements"
    keyed_by = ("phase", "shape", "workload")

    phase: Name
    shape: Name
    """`Measurement.shape_of` the question. Without a page size in it, the backend preferred its
    own."""
    workload: Name
    """The timed batch, as the benchmark calls it: "batch=32,kv=4096". Only equal workloads are
    compared."""
    conformant: bool
    """Whether the backend passed its conformance check in this phase, with these versions."""
    batch_size: Annotated[Positive | None, Check("requests, or none")] = None
    """Requests of a decode step that device graphs are captured for, so that the choice can depend
    on the batch size; None for other steps."""
    rms_error: Error = None
    """None: the error was not measured."""
    worst_error: Error = None

    @staticmethod
    def shape_of(question: Question) -> str:
        """The demands besides phase and platform, as text: "dtype=bfloat16,head_dim=128,…".

        An open page size or KV dtype is left out: the solver tries several.
        """
        named = {axis.name: value for axis, value in insisted(question)}
        return ",".join(
            f"{name}={value}" for name, value in sorted(named.items()) if name not in STATED_APART
        )


def insisted(question: Question) -> list[Demand]:
    """The demands without those that the solver only tries."""
    origins = question.request.origins
    tried = {name for name in DECIDED if origins.get(name, "default") == "default"}
    return [(axis, value) for axis, value in question.demands if axis.name not in tried]
