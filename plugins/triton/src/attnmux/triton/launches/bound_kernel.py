"""Launches whose fixed arguments are bound once.

Triton's own launch binds every argument, looks up the compiler's assumptions about each and asks
the driver about every pointer: tens of microseconds for kernels like these. The first call of a
kind goes that way. Its compiled kernel is kept, and later calls hand it the same list of values
with the changed ones replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.compiler import make_backend
from triton.errors import TritonError
from triton.runtime import driver

from attnmux.core import AttnmuxError, BackendFailed

if TYPE_CHECKING:
    from attnmux.core import Platform

ALIGNMENT = 16
"""Bytes. The compiler distinguishes addresses that are a multiple of this from others."""
MOST_VARIANTS = 64
"""Variants that a bound kernel keeps: strides that never come back must not fill the memory."""

Grid = tuple[int, int, int]
Tensors = Sequence[torch.Tensor | None]
Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompiledVariant:
    """A kernel that Triton compiled for some arguments, loaded on a device."""

    run: Callable[..., None]
    """The function of a `triton.compiler.CompiledKernel`."""
    launched: tuple[object, ...]
    """The first arguments of `run`: the kernel's own, and no hooks."""
    values: list[object]
    """All arguments in the kernel's order, tensors as their addresses."""
    device: int
    assumed: Callable[..., str] | None
    """A Triton backend's assumption about a tensor beyond its alignment; None for a backend that
    makes none."""
    of_tensors: tuple[str, ...]
    """The assumption about each tensor that calls pass."""
    misaligned: tuple[int, ...]
    """For each of these tensors, the bits that its address must not have."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RehearsedLaunch:
    """A launch that did not take place."""

    bound: BoundKernel
    key: Key
    values: list[object]
    tensors: Tensors


class Launcher:
    """Shared by the launches of a backend: whether they take place or are only noted, and whether
    they may begin while the previous one ends."""

    def __init__(self, *, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.notes: dict[tuple[BoundKernel, Key], RehearsedLaunch] | None = None

    def rehearse(self, steps: Callable[[], object]) -> list[RehearsedLaunch]:
        """The launches that `steps` would do, each kind once."""
        notes: dict[tuple[BoundKernel, Key], RehearsedLaunch] = {}
        self.notes = notes
        try:
            steps()
        finally:
            self.notes = None
        return list(notes.values())


class BoundKernel:
    """A kernel and the arguments that no call changes."""

    def __init__(
        self,
        launcher: Launcher,
        kernel: Any,  # noqa: ANN401  # a JITFunction or what interprets one, which Triton does not type
        fixed: Mapping[str, object],
        *,
        tensors: Sequence[str],
        numbers: Sequence[str] = (),
        counts: Sequence[str] = (),
        options: Mapping[str, int],
    ) -> None:
        """fixed: values by name. tensors, numbers, counts: the names of the arguments that calls
        pass. options: the compiler's, such as num_warps.

        The compiler specialises on numbers, such as strides. Counts are declared as
        `do_not_specialize`. Names that the kernel has no argument for are ignored: a kernel that
        serves less takes less, and calls pass None for the tensors that it lacks.
        """
        # Triton 3.9 warns that 3.10 will no longer fuse products with sums unless it is told to
        self.kernel, self.options = kernel, {"enable_fp_fusion": True, **options}
        self._launcher = launcher
        places = {name: place for place, name in enumerate(kernel.arg_names)}
        self._fixed = [fixed.get(name) for name in places]
        self._tensors = [places.get(name) for name in tensors]
        self._numbers = [places.get(name) for name in numbers]
        self._counts = [places.get(name) for name in counts]
        self._variants: dict[Key, CompiledVariant] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: Tensors,
        numbers: tuple[float, ...] = (),
        counts: tuple[int, ...] = (),
        dtypes: Hashable = None,
    ) -> None:
        """Launch on the current stream of the tensors' device.

        dtypes: of the tensors whose dtype may change. Whether a tensor is None must not change.
        Raises BackendFailed if the kernel does not compile on its first launch.
        """
        variant = self._variants.get((dtypes, *numbers))
        values = None if variant is None else self._values(variant, tensors, counts)
        if variant is None or values is None:
            self._launch_unbound(grid, tensors, numbers, counts, dtypes)
            return
        index, active = variant.device, driver.active
        stream = active.get_current_stream(index)
        if active.get_current_device() == index:
            variant.run(*grid, stream, *variant.launched, *values)
            return
        with torch.get_device_module().device(index):
            variant.run(*grid, stream, *variant.launched, *values)

    def keep(self, key: Key, compiled: Any, values: list[object], tensors: Tensors) -> None:  # noqa: ANN401  # as Triton
        """Use `compiled` for calls of this key from now on.

        Does nothing if a tensor is less aligned than an allocator's are: other calls of the same
        key may pass aligned ones.
        """
        misaligned = tuple(
            0
            if place is None or self.kernel.params[place].do_not_specialize_on_alignment
            else ALIGNMENT - 1
            for place in self._tensors
        )
        given = [(t, bits) for t, bits in zip(tensors, misaligned, strict=True) if t is not None]
        devices = {tensor.get_device() for tensor, _ in given}
        if len(devices) > 1 or any(tensor.data_ptr() & bits for tensor, bits in given):
            return
        triton_backend = make_backend(compiled.metadata.target)
        assumed = triton_backend.get_tensor_specialization
        if assumed is BaseBackend.get_tensor_specialization:
            assumed = None
        if len(self._variants) >= MOST_VARIANTS:
            self._variants.clear()
        self._variants[key] = CompiledVariant(
            run=compiled.run,  # loads it
            launched=(compiled.function, compiled.packed_metadata, None, None, None),
            values=[v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values],
            device=devices.pop(),
            assumed=assumed,
            of_tensors=tuple(_assumption(assumed, tensor) for tensor in tensors),
            misaligned=misaligned,
        )

    def _values(
        self, variant: CompiledVariant, tensors: Tensors, counts: tuple[int, ...]
    ) -> list[object] | None:
        """The arguments of a call; None if the variant does not fit it."""
        values, index = variant.values.copy(), variant.device
        for place, tensor, bits in zip(self._tensors, tensors, variant.misaligned, strict=True):
            if tensor is not None and place is not None:
                address = tensor.data_ptr()
                if address & bits or tensor.get_device() != index:
                    return None
                values[place] = address
        for place, count in zip(self._counts, counts, strict=True):
            if place is not None:
                values[place] = count
        if variant.assumed is not None:
            now = (_assumption(variant.assumed, tensor) for tensor in tensors)
            if tuple(now) != variant.of_tensors:
                return None
        hooks = knobs.runtime
        # Profilers hook into Triton's own launch.
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return None
        return None if self._launcher.notes is not None else values

    def _launch_unbound(
        self,
        grid: Grid,
        tensors: Tensors,
        numbers: tuple[float, ...],
        counts: tuple[int, ...],
        dtypes: Hashable,
    ) -> None:
        """Launch through Triton, which compiles a new kind."""
        values = self._fixed.copy()
        for places, given in (
            (self._tensors, tensors),
            (self._numbers, numbers),
            (self._counts, counts),
        ):
            for place, value in zip(places, given, strict=True):
                if place is not None:
                    values[place] = value
        key = dtypes, *numbers
        notes = self._launcher.notes
        if notes is not None:
            launch = RehearsedLaunch(bound=self, key=key, values=values, tensors=tensors)
            notes.setdefault((self, key), launch)
            return
        device = next(tensor.device for tensor in tensors if tensor is not None)
        with current(device):
            try:
                compiled = self.kernel[grid](*values, **self.options)
            except TritonError as error:
                raise failure_of(self.kernel, error) from error
        # The interpreter compiles nothing.
        if compiled is not None:
            self.keep(key, compiled, values, tensors)


def overlaps_launches(platform: Platform) -> bool:
    """Whether kernels may begin while the previous one ends (programmatic dependent launch).

    CUDA has it from SM90 on; it was measured there.
    """
    return platform.arch == "sm90"


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the one where Triton loads and launches."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def failure_of(kernel: Any, error: BaseException) -> BackendFailed:  # noqa: ANN401  # as above
    """The error for a kernel that does not compile or load."""
    return BackendFailed(
        "triton", f"{kernel.__name__} does not compile: {AttnmuxError.in_brief(error)}"
    )


def _assumption(assumed: Callable[..., str] | None, tensor: torch.Tensor | None) -> str:
    return "" if assumed is None or tensor is None else assumed(tensor, align=True)
