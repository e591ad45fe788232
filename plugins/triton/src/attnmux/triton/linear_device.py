"""What the kernels of linear layers know of the device that Triton drives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from triton.runtime import driver

from attnmux.triton.factory import compute_units

if TYPE_CHECKING:
    from attnmux.core import BackendContext


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearDevice:
    """The device's limits, and what its compiler takes."""

    compute_units: int
    shared_memory: int = 0
    """Bytes of a program's shared memory that loads may take; products need the rest."""
    has_tf32: bool = False
    limits_registers: bool = False

    @classmethod
    def of(cls, context: BackendContext) -> LinearDevice:
        """Raises BackendFailed where Triton cannot drive the device."""
        units = compute_units(context)
        if triton.knobs.runtime.interpret:
            return cls(compute_units=units)
        facts = driver.active.utils.get_device_properties(context.device.index or 0)
        target = driver.active.get_current_target()
        options = triton.compiler.make_backend(target).parse_options({})
        return cls(
            compute_units=units,
            shared_memory=int(facts["max_shared_mem"]) * 7 // 10,
            has_tf32="tf32" in options.allowed_dot_input_precisions,
            limits_registers="maxnreg" in vars(options),
        )

    def precision(self, dtype: torch.dtype) -> str:
        """How float32 is multiplied in calls of this dtype.

        The inverse of a chunk is float32 until it is rounded to the dtype of the call.
        """
        return "tf32" if self.has_tf32 and dtype is not torch.float32 else "ieee"

    def registers(self, most: int) -> dict[str, int]:
        """The option that gives a thread this many registers, where the compiler has one."""
        return {"maxnreg": most} if self.limits_registers else {}
