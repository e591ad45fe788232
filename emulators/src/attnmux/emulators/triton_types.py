"""Types and tuples of Triton's interpreter that are made once, and not at every operation.

For each result the interpreter makes the type of its block anew, with a text that names it, and
tuples of constants with texts of theirs. That takes most of the time of a kernel on tiles as small
as tests have.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

unwrap, find = core._unwrap_if_constexpr, core.tuple.__getattr__
broadcast = TritonSemantic.broadcast_impl_value
scalar_np_dtype = cache(interpreter._get_np_dtype)
ADDRESS = np.dtype(np.uint64)
PLAIN = frozenset(
    {int, bool, float, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}
)
"""Types of values that are no constants and hold none."""


def _unwrap(value: Any) -> Any:  # noqa: ANN401  # Triton's
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in PLAIN else unwrap(value)


@cache
def _sized(shape: builtins.tuple[int, ...]) -> tuple[Any, int]:
    """The shape of a block type, and its number of elements."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(shape), validate_block_shape(shape)


@cache
def _constant(shape: builtins.tuple[int, ...]) -> tuple[Any, Any]:
    """The shape of a tensor, and its number of elements."""
    return core.tuple(map(core.constexpr, shape)), core.constexpr(math.prod(shape))


def _make_block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:  # noqa: ANN401  # as above
    self.element_ty = element_ty
    self.shape, self.numel = _sized(builtins.tuple(map(_unwrap, shape)))
    self.name = f"<{self.shape.values}, {element_ty.name}>"


def _make_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: ANN401  # as above
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constant(builtins.tuple(type.shape) if type.is_block() else ())


def _make_tuple(self: Any, args: Sequence[Any], type: Any = None) -> None:  # noqa: ANN401  # as above
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def _find(self: Any, name: str) -> Any:  # noqa: ANN401  # as above
    """A tuple's attribute; its type is made when somebody asks."""
    if name != "type":
        return find(self, name)
    self.type = core._type_for_tuple_values(self.values)
    return self.type


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:  # noqa: ANN401  # as above
    one, other = lhs.type, rhs.type
    if one.is_block() and other.is_block() and one.shape is other.shape:
        return lhs, rhs
    lhs, rhs = broadcast(self, lhs, rhs)
    return lhs, rhs


def _np_dtype(tt_dtype: Any) -> np.dtype[Any]:  # noqa: ANN401  # as above
    scalar = tt_dtype.scalar
    return ADDRESS if scalar.is_ptr() else scalar_np_dtype(scalar)


@contextmanager
def made_once() -> Iterator[None]:
    """Within the block the interpreter remembers types and tuples."""
    with ExitStack() as stack:
        for owner, name, replacement in (
            (core, "_unwrap_if_constexpr", _unwrap),
            (core.block_type, "__init__", _make_block_type),
            (core.tensor, "__init__", _make_tensor),
            (core.tuple, "__init__", _make_tuple),
            (core.tuple, "__getattr__", _find),
            (TritonSemantic, "broadcast_impl_value", _broadcast),
            (interpreter, "_get_np_dtype", _np_dtype),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield
