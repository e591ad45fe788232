"""The subjects of timing: attention over a pool of K and V, or linear layers over a pool of
states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from attnmux.core import (
    AttentionBackend,
    Decision,
    ForwardBatch,
    Request,
    TunedLaunch,
    build,
    make_linear,
)
from attnmux.core.plugin import LinearAttentionBackend
from attnmux.testing import Errors
from attnmux.testing.bench.answers import errors_of, max_error
from attnmux.testing.bench.linear_steps import (
    LinearStep,
    linear_errors,
    linear_limit,
    make_linear_step,
)
from attnmux.testing.bench.steps import Step, make_step
from attnmux.testing.bench.timing import Run
from attnmux.testing.bench.workload import Workload


class TimedStep(Protocol):
    """A workload's inputs for all backends that read the same pool."""

    @property
    def workload(self) -> Workload: ...

    @property
    def batch(self) -> ForwardBatch: ...

    @property
    def layers(self) -> Sequence[object]: ...

    def calls(self, backend: Any, /) -> list[Run]:  # noqa: ANN401  # of the subject
        """Each layer's call as a model makes it."""

    def reset(self) -> None:
        """Undo what a run left, so that the next one's answer can be checked."""


S = TypeVar("S", bound=TimedStep)
AnyBackend = AttentionBackend | LinearAttentionBackend


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject(Generic[S]):
    """How steps of some kinds are made and checked."""

    make_step: Callable[[Workload, Decision, torch.device], S]
    """Raises PoolExhausted where memory does not suffice."""
    build: Callable[[Decision, S, tuple[TunedLaunch, ...]], AnyBackend]
    """The decided backend, for the step's context."""
    errors: Callable[[S], Errors]
    """Errors of the last run, against float64."""
    limit: Callable[[S, bool], float]
    """The largest relative error of a right answer, and of one with `has_fp8_products`."""


def subject_of(request: Request) -> Subject[Any]:
    return LINEAR if request.is_linear else ATTENTION


def _build_attention(
    decision: Decision, step: Step, launches: tuple[TunedLaunch, ...]
) -> AttentionBackend:
    return build(decision, step.context(decision.platform, decision.request, launches))


def _build_linear(
    decision: Decision, step: LinearStep, launches: tuple[TunedLaunch, ...]
) -> LinearAttentionBackend:
    context = replace(step.setup.context, request=decision.request, launches=launches)
    return make_linear(decision.phases[step.workload.phase], context)


ATTENTION: Subject[Step] = Subject(
    make_step=lambda workload, decision, device: make_step(workload, decision.request, device),
    build=_build_attention,
    errors=errors_of,
    limit=lambda step, fp8_products: max_error(step, fp8_products=fp8_products),
)
LINEAR: Subject[LinearStep] = Subject(
    make_step=make_linear_step,
    build=_build_linear,
    errors=linear_errors,
    limit=lambda step, fp8_products: linear_limit(step),
)
