"""The two sides of `adapters.py`: a backend, and the library that it calls, called by hand."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.adapter_setups import Setup
from benchmarks.adapter_workloads import Workload
from benchmarks.timing import Call

from attnmux.core.backend import AttentionBackend
from attnmux.core.context import BackendContext

SAME = "same calls"
"""Those that the adapter makes of the library, and what prepares the library's arguments from what
the contract gives: a copy of K and V, or both parts of Q in one row."""
ALONE = "kernel alone"
"""The kernel's call, whose arguments were prepared before."""
ONE = "one call"
"""Over all keys in the pool, where the adapter makes several calls."""

Ways = Mapping[str, list[Call]]
"""The library's calls of each layer, by how they are made; in extend each stores the new K and V
first."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """A backend and its library."""

    distributions: tuple[str, ...]
    """That the library may come in."""
    workloads: tuple[Workload, ...]
    tiny: tuple[Workload, ...]
    """For a dry run."""
    installed: Callable[[BackendContext], Any]
    """The library's functions. Raises ImportError and BackendFailed."""
    emulated: Callable[[], Any]
    """What stands in for them on a CPU."""
    backend: Callable[[BackendContext, Any], AttentionBackend]
    """On these functions."""
    ways: Callable[[Any, Setup], Ways]
    """The same functions, called by hand."""


def kernels_of(name: str) -> Callable[[BackendContext], Any]:
    """The functions that the adapter's factory has imported."""

    def installed(context: BackendContext) -> Any:  # noqa: ANN401  # the Kernels of any library
        return pkgutil.resolve_name(f"attnmux.nvidia.{name}.factory:KERNELS")

    return installed


def after_writes(setup: Setup, calls: Sequence[Call]) -> list[Call]:
    """The calls of an extend step, each behind the write of its layer's new K and V; those of a
    decode step as they are."""
    if setup.workload.is_decode:
        return list(calls)

    def both(layer_id: int, kv: tuple[torch.Tensor, torch.Tensor], call: Call) -> object:
        setup.write(layer_id, *kv)
        return call()

    layer_ids = setup.context.token_to_kv_pool.layer_ids
    return [partial(both, *each) for each in zip(layer_ids, setup.new_kv(), calls, strict=True)]
