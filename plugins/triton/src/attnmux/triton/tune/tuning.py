"""The tuner: tries launch configurations for a request's shapes, one by one, on the device.

It starts from today's configuration, tries the kernel's other whole ones, then varies one field of
the fastest after the other and keeps the fastest value of each: the fields hardly depend on each
other, and all combinations would take hours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton

from attnmux.core import AttnmuxError, BackendFailed, TunedLaunch
from attnmux.core.plugin import Job, Trial
from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.attention.factory import ADDRESS, compute_units
from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.attention.rounding import rounding
from attnmux.triton.attention.warmup import compile_ahead
from attnmux.triton.attention.wide_tiles import wide_layer
from attnmux.triton.launches.config_tables import ConfigTables
from attnmux.triton.launches.configs import ConfigEntry
from attnmux.triton.launches.dispatch import Dispatch
from attnmux.triton.launches.tuned_configs import VARIANTS, Config, Variants, subject_of, values_of
from attnmux.triton.tune.loads import Load, Setup, make_setup

TOLERANCE = 1e-2
"""The most that a result may differ from today's, as a share of the norm of today's."""

DECODE = (Load(batch_size=1, keys=8192), Load(batch_size=64, keys=4096))
VERIFY = (
    Load(batch_size=1, keys=8200, new=8, verifies=True),
    Load(batch_size=32, keys=4104, new=8, verifies=True),
)
EXTEND = (Load(batch_size=1, keys=4096, new=4096), Load(batch_size=4, keys=4608, new=512))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timed:
    """The time of a configuration over the loads, and its results."""

    median_us: float
    outs: tuple[torch.Tensor, ...]


def tune(job: Job) -> Iterator[Trial]:
    """The configurations of decode, of chains of drafts, and of prompts. Raises InvalidInput for a
    request without dims or heads."""
    for loads in (DECODE, VERIFY, EXTEND):
        yield from tried(job, loads)


def tried(
    job: Job, loads: Sequence[Load], variants: Mapping[Any, Variants] = VARIANTS
) -> Iterator[Trial]:
    """Today's configuration of the kernel that serves `loads`, then others, on the same inputs."""
    setups = [make_setup(job, load) for load in loads]
    kind, dispatch, today = _served(job, loads[0], setups[0])
    traits = dispatch.traits
    subject = subject_of(
        kind,
        traits.shape,
        page_size=dispatch.page_size,
        key_bits=traits.key_bits,
        queries=loads[0].new,
    )
    trial = partial(Trial, subject=subject)
    reference = _together(job, partial(_timed, job, setups, dispatch.tables))
    yield trial(values=values_of(today), median_us=reference.median_us, is_current=True)
    best, least = today, reference.median_us
    of_kernel = variants[today.kernel, type(today)]
    for axis in (None, *of_kernel.axes):
        for config in _others(of_kernel, best, axis):
            tables = _alone(kind, config, dispatch)
            try:
                found = _together(job, partial(_checked, job, setups, tables, reference))
            except BackendFailed as failure:
                yield trial(values=values_of(config), median_us=None, error=failure.reason)
                continue
            yield trial(values=values_of(config), median_us=found.median_us)
            if found.median_us < least:
                best, least = config, found.median_us


def _served(job: Job, load: Load, setup: Setup) -> tuple[str, Dispatch, Config]:
    """The configuration of a load's step: its kind, the layer's dispatch, and its own one."""
    (spec,) = setup.context.layers
    arch = job.platform.arch
    tables = ConfigTables.of(TunedLaunch.current(job.launches, ADDRESS, job.platform), arch)
    layer = TritonLayer.of(spec, setup.context, tables=tables)
    if load.new > 1 and not load.verifies:
        # Prompts over keys of 8 bits run where these are widened
        rounds = rounding(job.options, setup.context.request)
        dispatch = (wide_layer(layer, rounds) or layer).dispatch
        return "tiles", dispatch, dispatch.tiles(hides=False)
    chains = layer.dispatch.chains(load.new) if load.verifies else None
    if chains is not None:
        return "chains", layer.dispatch, chains
    return "shares", layer.dispatch, layer.dispatch.whole_shares(load.new)


def _others(variants: Variants, start: Config, axis: str | None) -> list[Config]:
    """The other whole configurations; with an axis, those that differ from `start` in this field
    alone."""
    if axis is None:
        return [base for base in variants.bases if base != start]
    changes: list[dict[str, Any]] = [{axis: number} for number in variants.axes[axis]]
    return [
        replace(start, **change) for change in changes if change != {axis: getattr(start, axis)}
    ]


def _together(job: Job, measure: Callable[[], Timed]) -> Timed:
    """The results of this rank, with the time of the slowest."""

    def measured() -> tuple[Timed, tuple[float]]:
        found = measure()
        return found, (found.median_us,)

    found: Timed
    found, (slowest,) = job.together(measured)
    return replace(found, median_us=slowest)


def _alone(kind: str, config: Config, dispatch: Dispatch) -> ConfigTables:
    """Tables in which this configuration wins."""
    fields: dict[str, Any] = {"arch": dispatch.arch, "dims": dispatch.traits.shape.dims}
    own: dict[str, Any] = {f"own_{kind}": (ConfigEntry(**fields, config=config),)}  # type: ignore[type-var]
    return ConfigTables(**own)


def _timed(job: Job, setups: Sequence[Setup], tables: ConfigTables) -> Timed:
    """Raises BackendFailed for a configuration that does not compile or run."""
    medians, outs = [], []
    for setup in setups:
        backend = TritonBackend(
            setup.context,
            job.options,
            compute_units=compute_units(setup.context),
            tables=tables,
        )
        step = partial(_step, backend, setup)
        if not triton.knobs.runtime.interpret:
            compile_ahead(backend.launcher.rehearse(step), setup.context.device)
        try:
            outs.append(step().clone())
            medians.append(_median_us(partial(_attend, backend, setup), setup.context.device))
        except (RuntimeError, triton.errors.TritonError) as error:
            raise BackendFailed("triton", AttnmuxError.in_brief(error)) from error
    logs = math.fsum(map(math.log, medians))
    return Timed(median_us=math.exp(logs / len(medians)), outs=tuple(outs))


def _checked(job: Job, setups: Sequence[Setup], tables: ConfigTables, reference: Timed) -> Timed:
    """Raises BackendFailed for a configuration that does not run, or has another result."""
    found = _timed(job, setups, tables)
    if not _agrees(found, reference):
        raise BackendFailed("triton", "another result")
    return found


def _step(backend: TritonBackend, setup: Setup) -> torch.Tensor:
    backend.init_forward_metadata(setup.batch)
    return _attend(backend, setup)


def _attend(backend: TritonBackend, setup: Setup) -> torch.Tensor:
    (layer,) = setup.context.layers
    return backend.forward(setup.q, None, None, layer, setup.batch, q_rope=setup.q_rope)


def _median_us(call: Callable[[], object], device: torch.device) -> float:
    """On a device, with a cold cache; on a CPU, of one call."""
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    median: float = triton.testing.do_bench(call, return_mode="median")
    return median * 1e3


def _agrees(found: Timed, reference: Timed) -> bool:
    return all(
        float((mine - right).float().norm()) <= TOLERANCE * float(right.float().norm())
        for mine, right in zip(found.outs, reference.outs, strict=True)
    )
