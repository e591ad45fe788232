"""Properties of Triton's device that the kernels of linear layers use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from triton.runtime import driver

from attnmux.triton.attention.factory import compute_units

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from attnmux.core import BackendContext


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearDevice:
    """The device's limits, and its compiler's options."""

    compute_units: int
    shared_memory: int = 0
    """Bytes of a program's shared memory that loads may take; products need the rest."""
    has_tf32: bool = False
    limits_registers: bool = False
    copies_ahead: bool = True
    """Whether loads ahead go to shared memory, and not to registers."""
    warp_threads: int = 32

    @classmethod
    def of(cls, context: BackendContext) -> LinearDevice:
        """Raises BackendFailed if Triton cannot drive the device."""
        units = compute_units(context)
        if triton.knobs.runtime.interpret:
            return cls(compute_units=units)
        facts = driver.active.utils.get_device_properties(context.device.index or 0)
        return cls.of_target(
            driver.active.get_current_target(),
            compute_units=units,
            most_shared=int(facts["max_shared_mem"]),
        )

    @classmethod
    def of_target(cls, target: GPUTarget, *, compute_units: int, most_shared: int) -> LinearDevice:
        """A device that need not be here. most_shared: bytes of shared memory that one program may
        take."""
        options = triton.compiler.make_backend(target).parse_options({})
        return cls(
            compute_units=compute_units,
            shared_memory=most_shared * 7 // 10,
            has_tf32="tf32" in options.allowed_dot_input_precisions,
            limits_registers="maxnreg" in vars(options),
            # A compiler that has such copies loads ahead by more than one stage unless told not to
            copies_ahead=options.num_stages > 2,
            warp_threads=target.warp_size,
        )

    def precision(self, dtype: torch.dtype) -> str:
        """How float32 is multiplied in calls of this dtype.

        The inverse of a chunk is float32 until it is rounded to the dtype of the call.
        """
        return "tf32" if self.has_tf32 and dtype is not torch.float32 else "ieee"

    @property
    def lacks_registers(self) -> bool:
        """Whether the products of float32 in a chunk overfill the registers of 4 warps.

        Without TF32 they are exact and run outside of tensor cores, and each thread holds rows of
        both sides. Warps of 64 threads have twice the registers, and matrix instructions for
        float32. Kernels with TF32 keep the measured launches.
        """
        return not self.has_tf32 and self.warp_threads < 64

    def registers(self, most: int) -> dict[str, int]:
        """The option that gives a thread this many registers, if the compiler has one."""
        return {"maxnreg": most} if self.limits_registers else {}
