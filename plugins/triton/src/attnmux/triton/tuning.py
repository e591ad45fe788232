"""The tuner: tries launch configurations for a request's shapes, one by one, on the device.

It starts from today's configuration, varies one field after the other and keeps the fastest value
of each: the fields hardly depend on each other, and all combinations would take hours.
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

from attnmux.core import BackendFailed, Job, Trial, Value, current_launches, in_brief
from attnmux.triton.backend import TritonBackend
from attnmux.triton.config_tables import ConfigTables
from attnmux.triton.configs import PORTABLE, ConfigEntry, ShareConfig, TileConfig, tuned_fields
from attnmux.triton.factory import ADDRESS, compute_units
from attnmux.triton.layer import TritonLayer
from attnmux.triton.shapes import Shape
from attnmux.triton.tuning_loads import Load, Setup, make_setup
from attnmux.triton.warmup import compile_ahead

SHARE_AXES: Mapping[str, Sequence[int]] = {
    "block_n": (16, 32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 5, 7),
    "programs_per_unit": (1, 2, 3, 4),
    "least_share": (1, 2, 4),
}
TILE_AXES: Mapping[str, Sequence[int]] = {
    "block_m": (32, 64, 128),
    "block_n": (16, 32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 5),
}
TOLERANCE = 1e-2
"""The most that a result may differ from today's, as a share of the norm of today's."""

DECODE = (Load(batch_size=1, keys=8192), Load(batch_size=64, keys=4096))
EXTEND = (Load(batch_size=1, keys=4096, new=4096), Load(batch_size=4, keys=4608, new=512))

Config = TileConfig | ShareConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timed:
    """The time of a configuration over the loads, and its results."""

    median_us: float
    outs: tuple[torch.Tensor, ...]


def tune(job: Job) -> Iterator[Trial]:
    """Decode's configurations, then extend's. Raises InvalidInput for a request without dims or
    heads."""
    yield from tried(job, DECODE, SHARE_AXES)
    yield from tried(job, EXTEND, TILE_AXES)


def tried(job: Job, loads: Sequence[Load], axes: Mapping[str, Sequence[int]]) -> Iterator[Trial]:
    """Today's configuration of the kernel that serves `loads`, then others, on the same inputs.

    Only the portable kernels have others: a kernel for one architecture may hang in some.
    """
    setups = [make_setup(job, load) for load in loads]
    context = setups[0].context
    layer, arch = context.layers[0], job.platform.arch
    shape, page = Shape.of(layer), context.token_to_kv_pool.page_size
    tables = ConfigTables.of(current_launches(job.launches, ADDRESS, job.platform), arch)
    served = TritonLayer.of(layer, context, tables=tables)
    today: Config = served.share_config(1) if loads[0].new == 1 else served.tiles
    k_dim, v_dim = shape.dims
    kind = "tiles" if isinstance(today, TileConfig) else "shares"
    subject: dict[str, Value] = {
        "kind": kind,
        "k_dim": k_dim,
        "v_dim": v_dim,
        "rows": shape.group,
        "page": page,
    }
    trial = partial(Trial, subject=subject)
    reference = _together(job, partial(_timed, job, setups, tables))
    yield trial(values=_values(today), median_us=reference.median_us, is_current=True)
    if today.kernel != PORTABLE:
        return
    best, least = today, reference.median_us
    for axis, numbers in axes.items():
        start = best
        for number in numbers:
            if number == getattr(start, axis):
                continue
            changed: dict[str, Any] = {axis: number}
            config = replace(start, **changed)
            values = _values(config)
            try:
                measure = partial(_checked, job, setups, config, shape, arch, reference)
                found = _together(job, measure)
            except BackendFailed as failure:
                yield trial(values=values, median_us=None, error=failure.reason)
                continue
            yield trial(values=values, median_us=found.median_us)
            if found.median_us < least:
                best, least = config, found.median_us


def _together(job: Job, measure: Callable[[], Timed]) -> Timed:
    """The results of this rank, with the time of the slowest."""

    def measured() -> tuple[Timed, tuple[float]]:
        found = measure()
        return found, (found.median_us,)

    found, (slowest,) = job.together(measured)
    return replace(found, median_us=slowest)


def _values(config: Config) -> dict[str, Value]:
    sizes = {name: getattr(config, name) for name in sorted(tuned_fields(type(config)))}
    return {"kernel": config.kernel, **sizes}


def _alone(config: Config, shape: Shape, arch: str) -> ConfigTables:
    """Tables in which this configuration wins."""
    entry: dict[str, Any] = {"arch": arch, "dims": shape.dims, "config": config}
    if isinstance(config, TileConfig):
        return ConfigTables(own_tiles=(ConfigEntry(**entry),))
    return ConfigTables(own_shares=(ConfigEntry(**entry),))


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
            raise BackendFailed("triton", in_brief(error)) from error
    logs = math.fsum(map(math.log, medians))
    return Timed(median_us=math.exp(logs / len(medians)), outs=tuple(outs))


def _checked(
    job: Job,
    setups: Sequence[Setup],
    config: Config,
    shape: Shape,
    arch: str,
    reference: Timed,
) -> Timed:
    """Raises BackendFailed for a configuration that does not run, or has another result."""
    found = _timed(job, setups, _alone(config, shape, arch))
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
