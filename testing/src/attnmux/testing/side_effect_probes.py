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
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


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
BY_CALL = "ask for it by an argument of the operation, or set it back before you return"


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


def _precision(_: torch.device) -> tuple[str, str, str]:
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's older and newer settings contradict each other
        products = "mixed"
    backends = torch.backends
    return products, backends.cuda.matmul.fp32_precision, backends.cudnn.fp32_precision


def _set_precision(values: tuple[str, str, str], _: torch.device) -> None:
    products, matmul, convolutions = values
    if products != "mixed":  # first, since it sets the others too
        torch.set_float32_matmul_precision(products)
    torch.backends.cuda.matmul.fp32_precision = matmul
    torch.backends.cudnn.fp32_precision = convolutions


def _attributes(owner: object, *names: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def write(values: tuple[Any, ...], _: torch.device) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(owner, name, value)

    return lambda _: tuple(getattr(owner, name) for name in names), write


def _attention_kernels(_: torch.device) -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _set_attention_kernels(values: tuple[bool, ...], _: torch.device) -> None:
    cuda = torch.backends.cuda
    setters = cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp
    for setter, value in zip((*setters, cuda.enable_cudnn_sdp), values, strict=True):
        setter(value)


def _set_default_device(value: torch.device, _: torch.device) -> None:
    # "cpu" by name would be a mode that every later call passes through
    torch.set_default_device(None if value.type == "cpu" else value)


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


def _affinity(_: torch.device) -> set[int] | None:
    return os.sched_getaffinity(0) if sys.platform == "linux" else None


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


PROBES = (
    Probe(
        "torch's random state on the host",
        OWN_GENERATOR,
        lambda _: torch.get_rng_state(),
        lambda value, _: torch.set_rng_state(value),
    ),
    Probe(
        "Python's random state",
        OWN_GENERATOR,
        lambda _: random.getstate(),
        lambda value, _: random.setstate(value),
    ),
    Probe("numpy's random state", OWN_GENERATOR, _numpy_state, _set_numpy_state),
    Probe(
        "torch.get_num_threads()",
        OF_ENGINE,
        lambda _: torch.get_num_threads(),
        lambda value, _: torch.set_num_threads(value),
    ),
    Probe("torch.get_num_interop_threads()", OF_ENGINE, lambda _: torch.get_num_interop_threads()),
    Probe(
        "the CPUs of the thread",
        OF_ENGINE,
        _affinity,
        lambda value, _: os.sched_setaffinity(0, value),
    ),
    Probe(
        "grad mode",
        "use `with torch.no_grad()`",
        lambda _: torch.is_grad_enabled(),
        lambda value, _: torch.set_grad_enabled(value),
    ),
    Probe(
        "inference mode",
        "use `with torch.inference_mode()`",
        lambda _: torch.is_inference_mode_enabled(),
    ),
    Probe(
        "autocast",
        "use `with torch.autocast(...)`",
        lambda device: torch.is_autocast_enabled(device.type),
        lambda value, device: torch.set_autocast_enabled(device.type, value),
    ),
    Probe(
        "anomaly detection",
        OF_ENGINE,
        lambda _: torch.is_anomaly_enabled(),
        lambda value, _: torch.autograd.set_detect_anomaly(value),
    ),
    Probe(
        "torch's default dtype",
        "pass dtype= to each operation",
        lambda _: torch.get_default_dtype(),
        lambda value, _: torch.set_default_dtype(value),
    ),
    Probe(
        "torch's default device",
        "pass device= to each operation",
        lambda _: torch.get_default_device(),
        _set_default_device,
    ),
    Probe(
        "torch's active modes",
        "leave each mode that you enter",
        lambda _: (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()),
    ),
    Probe(
        "deterministic algorithms (used, warns only)",
        BY_CALL,
        lambda _: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value, _: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Probe(
        "precision of float32 (products, backends.cuda.matmul, backends.cudnn)",
        BY_CALL,
        _precision,
        _set_precision,
    ),
    Probe(
        "reduced precision of backends.cuda.matmul's reductions (float16, bfloat16)",
        BY_CALL,
        *_attributes(
            torch.backends.cuda.matmul,
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        ),
    ),
    Probe(
        "torch.backends.cudnn (enabled, benchmark, deterministic)",
        BY_CALL,
        *_attributes(torch.backends.cudnn, "enabled", "benchmark", "deterministic"),
    ),
    Probe(
        "kernels of scaled_dot_product_attention (flash, efficient, math, cudnn)",
        "use `with torch.nn.attention.sdpa_kernel(...)`",
        _attention_kernels,
        _set_attention_kernels,
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
"""On every device."""

DEVICE_PROBES = (
    Probe(
        "torch's random state on the device",
        OWN_GENERATOR,
        lambda device: torch.get_device_module(device).get_rng_state(device),
        lambda value, device: torch.get_device_module(device).set_rng_state(value, device),
    ),
    Probe(
        "the current device",
        "use `with torch.accelerator.device_index(...)`",
        lambda _: torch.accelerator.current_device_index(),
        lambda value, _: torch.accelerator.set_device_index(value),
    ),
    Probe(
        "the current stream",
        "use `with` the stream, and let the caller's stream wait for it",
        lambda device: torch.accelerator.current_stream(device),
        lambda value, _: torch.accelerator.set_stream(value),
    ),
)
"""On accelerators."""
