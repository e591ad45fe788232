"""The tuner: launches of a request's shapes, tried one by one on the device.

One field after the other is varied, from today's launch on, and the fastest value kept: the tables'
fields hardly depend on each other, and all combinations would take hours.
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

from attnmux.core.choosing.launches import Value
from attnmux.core.choosing.trials import Job, Trial
from attnmux.core.errors import BackendFailed, in_brief
from attnmux.triton.backend import TritonBackend
from attnmux.triton.call import LayerCall
from attnmux.triton.compiling import compile_ahead
from attnmux.triton.factory import compute_units
from attnmux.triton.launch import Launches
from attnmux.triton.launch_types import (
    PORTABLE,
    Entry,
    ShareLaunch,
    TileLaunch,
    dims_of,
    tuned_fields,
)
from attnmux.triton.own_launches import own_launches
from attnmux.triton.shapes import Shape
from attnmux.triton.tuning_batches import Load, Setup, make_setup

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
"""Of a result's distance from that of today's launch, as a share of its norm."""

DECODE = (Load(batch_size=1, keys=8192), Load(batch_size=64, keys=4096))
EXTEND = (Load(batch_size=1, keys=4096, new=4096), Load(batch_size=4, keys=4608, new=512))

Launch = TileLaunch | ShareLaunch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timed:
    """How a launch did over the loads, and what it computed."""

    median_us: float
    outs: tuple[torch.Tensor, ...]


def tune(job: Job) -> Iterator[Trial]:
    """Decode's launch and extend's. Raises InvalidInput for a request without dims and heads."""
    yield from tried(job, DECODE, SHARE_AXES)
    yield from tried(job, EXTEND, TILE_AXES)


def tried(job: Job, loads: Sequence[Load], axes: Mapping[str, Sequence[int]]) -> Iterator[Trial]:
    """Of the kernel that serves `loads`: today's launch, then others, on the same inputs.

    Of kernels for one architecture today's alone: not every launch of theirs comes to an end.
    """
    setups = [make_setup(job, load) for load in loads]
    context = setups[0].context
    layer, arch = context.layers[0], job.platform.arch
    shape, page = Shape.of(layer), context.token_to_kv_pool.page_size
    own = own_launches(job.platform)
    call = LayerCall.of(layer, context, launches=own)
    today: Launch = call.share_launch(1) if loads[0].new == 1 else call.tiles
    k_dim, v_dim = dims_of(shape)
    kind = "tiles" if isinstance(today, TileLaunch) else "shares"
    subject: dict[str, Value] = {
        "kind": kind,
        "k_dim": k_dim,
        "v_dim": v_dim,
        "rows": shape.group,
        "page": page,
    }
    trial = partial(Trial, subject=subject)
    reference = _timed(job, setups, own)
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
            launch = replace(start, **changed)
            values = _values(launch)
            try:
                found = _timed(job, setups, _alone(launch, shape, arch))
            except BackendFailed as failure:
                yield trial(values=values, median_us=None, error=failure.reason)
                continue
            if not _agrees(found, reference):
                yield trial(values=values, median_us=None, error="another result")
                continue
            yield trial(values=values, median_us=found.median_us)
            if found.median_us < least:
                best, least = launch, found.median_us


def _values(launch: Launch) -> dict[str, Value]:
    sizes = {name: getattr(launch, name) for name in sorted(tuned_fields(type(launch)))}
    return {"kernel": launch.kernel, **sizes}


def _alone(launch: Launch, shape: Shape, arch: str) -> Launches:
    """Tables in which nothing else counts."""
    entry: dict[str, Any] = {"arch": arch, "dims": dims_of(shape), "launch": launch}
    if isinstance(launch, TileLaunch):
        return Launches(own_tiles=(Entry(**entry),))
    return Launches(own_shares=(Entry(**entry),))


def _timed(job: Job, setups: Sequence[Setup], launches: Launches) -> Timed:
    """Raises BackendFailed for a launch that does not compile or run."""
    medians, outs = [], []
    for setup in setups:
        backend = TritonBackend(
            setup.context,
            job.options,
            compute_units=compute_units(setup.context),
            launches=launches,
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


def _step(backend: TritonBackend, setup: Setup) -> torch.Tensor:
    backend.init_forward_metadata(setup.batch)
    return _attend(backend, setup)


def _attend(backend: TritonBackend, setup: Setup) -> torch.Tensor:
    (layer,) = setup.context.layers
    return backend.forward(setup.q, None, None, layer, setup.batch, q_rope=setup.q_rope)


def _median_us(call: Callable[[], object], device: torch.device) -> float:
    """On a device with a cold cache."""
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
