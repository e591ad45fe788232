"""Types and tuples of Triton's interpreter that are made once, and not at every operation.

For each result the interpreter makes the type of its block anew, with a text that names it, and
several tuples of constants with texts of theirs. That is most of the time of a kernel on tiles as
small as tests have.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.language import core
from triton.runtime import interpreter

PLAIN = frozenset({int, bool, float, str, type(None), core.dtype, core.block_type})
PLAIN |= {core.pointer_type, core.tensor}
"""Types of values that are no constants and hold none."""


@contextmanager
def made_once() -> Iterator[None]:
    """Replace what makes types and tuples by equals that remember them."""
    unwrap, make_block = core._unwrap_if_constexpr, core.block_type.__init__
    np_dtype, find = interpreter._get_np_dtype, core.tuple.__getattr__
    blocks: dict[tuple[str, type, builtins.tuple[int, ...]], dict[str, Any]] = {}
    np_dtypes: dict[tuple[str, type], np.dtype[Any]] = {}

    def unwrapped(value: Any) -> Any:  # noqa: ANN401  # Triton's
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in PLAIN else unwrap(value)

    def block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:  # noqa: ANN401  # as above
        key = element_ty.name, type(element_ty), builtins.tuple(map(unwrapped, shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    @cache
    def constants(shape: builtins.tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(int(np.prod(shape))), core.tuple(map(core.constexpr, shape))

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: ANN401  # as above
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = builtins.tuple(type.shape.values) if type.is_block() else ()
        self.numel, self.shape = constants(shape)

    def values(self: Any, args: Sequence[Any], type: Any = None) -> None:  # noqa: ANN401  # as above
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def typed(self: Any, name: str) -> Any:  # noqa: ANN401  # as above
        if name != "type":
            return find(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    def stored_as(tt_dtype: Any) -> np.dtype[Any]:  # noqa: ANN401  # as above
        scalar = tt_dtype.scalar
        key = scalar.name, type(scalar)
        if key not in np_dtypes:
            np_dtypes[key] = np_dtype(tt_dtype)
        return np_dtypes[key]

    with ExitStack() as stack:
        for owner, name, replacement in (
            (core, "_unwrap_if_constexpr", unwrapped),
            (core.block_type, "__init__", block),
            (core.tensor, "__init__", tensor),
            (core.tuple, "__init__", values),
            (core.tuple, "__getattr__", typed),
            (interpreter, "_get_np_dtype", stored_as),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield
