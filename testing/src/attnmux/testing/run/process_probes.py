"""Parts of the process's state that a backend must leave as they were, one row each."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch


class Probe(NamedTuple):
    """One part of the state."""

    name: str
    remedy: str
    read: Callable[[torch.device], Any]
    """The value; None for a part that the process does not have."""
    restore: Callable[[Any, torch.device], object] | None = None
    """Sets a value that was read; None if nothing can."""
    view: Callable[[Any], object] = lambda value: value
    """The part of a value that must stay."""


SHARED_VARIABLES = re.compile(
    r"_VISIBLE_DEVICES$|_LAUNCH_BLOCKING$|^(OMP|MKL|OPENBLAS|NCCL|LD|PYTHON)_?|^PYTORCH_\w*ALLOC"
)
"""Environment variables that torch, its libraries and child processes read."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE")
SMALLEST = [5e-324]
"""A denormal number, in a list so that no compiler multiplies it."""

OWN_GENERATOR = "draw from a generator of your own, made with a seed"
OF_ENGINE = "it belongs to the engine: leave it, or set it back before you return"


def _numpy_state(_: torch.device) -> tuple[object, ...] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return (name, keys.tobytes(), *rest)


def _set_numpy_state(state: tuple[Any, ...], _: torch.device) -> None:
    numpy = sys.modules["numpy"]
    name, keys, *rest = state
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _affinity(_: torch.device) -> set[int] | None:
    return os.sched_getaffinity(0) if sys.platform == "linux" else None


def _set_environment(values: Mapping[str, str], _: torch.device) -> None:
    now = os.environ.copy()
    for name in now.keys() - values.keys():
        if SHARED_VARIABLES.search(name):
            del os.environ[name]
    os.environ.update({name: text for name, text in values.items() if now.get(name) != text})


def _wide_filters(values: list[Any]) -> list[tuple[str, str]]:
    """The action and category of the filters that an engine's warnings pass.

    Filters for one message, one module or a library's category do not count: imports add them.
    """
    return [
        (action, category.__name__)
        for action, message, category, module, _ in values
        if message is None and module is None and category.__module__ == "builtins"
    ]


def _set_filters(values: list[Any], _: torch.device) -> None:
    warnings.filters[:] = values  # type: ignore[index]  # a list, though typed as a sequence
    warnings._filters_mutated()  # type: ignore[attr-defined]  # as `catch_warnings` does


def _handlers(_: torch.device) -> dict[str, object]:
    return {
        name: signal.getsignal(getattr(signal, name)) for name in SIGNALS if name in dir(signal)
    }


def _set_handlers(values: Mapping[str, Any], _: torch.device) -> None:
    for name, handler in values.items():
        if handler is not None:  # as of one that C installed
            signal.signal(getattr(signal, name), handler)


def _set_log_levels(values: tuple[int, int], _: torch.device) -> None:
    logging.root.setLevel(values[0])
    logging.disable(values[1])


def _set_collector(value: tuple[bool, tuple[int, int, int]], _: torch.device) -> None:
    (gc.enable if value[0] else gc.disable)()
    gc.set_threshold(*value[1])


def _folder(_: torch.device) -> str | None:
    with suppress(OSError):  # it was deleted
        return os.getcwd()
    return None


PROCESS_PROBES = (
    Probe(
        "Python's random state",
        OWN_GENERATOR,
        lambda _: random.getstate(),
        lambda value, _: random.setstate(value),
    ),
    Probe("numpy's random state", OWN_GENERATOR, _numpy_state, _set_numpy_state),
    Probe(
        "the CPUs of the thread",
        OF_ENGINE,
        _affinity,
        lambda value, _: os.sched_setaffinity(0, value),
    ),
    Probe(
        "whether denormal numbers are kept",
        OF_ENGINE,
        lambda _: SMALLEST[0] * 1.0 > 0,
        lambda value, _: torch.set_flush_denormal(not value),
    ),
    Probe(
        "environment variables",
        "pass the setting to the library, or set the variable back before you return",
        lambda _: os.environ.copy(),
        _set_environment,
    ),
    Probe(
        "filters of warnings for every module",
        "use `with warnings.catch_warnings()`",
        lambda _: list(warnings.filters),
        _set_filters,
        _wide_filters,
    ),
    Probe("signal handlers", OF_ENGINE, _handlers, _set_handlers),
    Probe(
        "logging (the root's level, the level that is disabled)",
        "set the level of your library's own logger",
        lambda _: (logging.root.level, logging.root.manager.disable),
        _set_log_levels,
    ),
    Probe(
        "the garbage collector (on, thresholds)",
        OF_ENGINE,
        lambda _: (gc.isenabled(), gc.get_threshold()),
        _set_collector,
    ),
    Probe("the working directory", "use absolute paths", _folder, lambda value, _: os.chdir(value)),
)
