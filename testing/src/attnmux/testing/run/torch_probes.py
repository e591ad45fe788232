"""Parts of torch's state that a backend must leave as they were, one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attnmux.testing.run.process_probes import OF_ENGINE, OWN_GENERATOR, Probe

BY_CALL = "ask for it by an argument of the operation, or set it back before you return"


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
    cuda: Any = torch.backends.cuda  # whose functions have no types
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


def _modes(_: torch.device) -> tuple[object, ...]:
    of_functions: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's own
    return (*of_functions, *_get_current_dispatch_mode_stack())


TORCH_PROBES = (
    Probe(
        "torch's random state on the host",
        OWN_GENERATOR,
        lambda _: torch.get_rng_state(),
        lambda value, _: torch.set_rng_state(value),
    ),
    Probe(
        "torch.get_num_threads()",
        OF_ENGINE,
        lambda _: torch.get_num_threads(),
        lambda value, _: torch.set_num_threads(value),
    ),
    Probe("torch.get_num_interop_threads()", OF_ENGINE, lambda _: torch.get_num_interop_threads()),
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
        _modes,
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
