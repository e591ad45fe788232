"""Runs Gluon kernels on the CPU, in torch: what they compute, not how fast or in what order.

Layouts are ignored. A program's groups of warps are threads of Python, which wait for each other at
the kernel's own barriers: one that is never completed is an error. Copies and products that a GPU
does in the background are done at once, so that a missing wait or fence goes unnoticed.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from attnmux.emulators.gluon.language import LANGUAGE
from attnmux.emulators.gluon.values import Pointer, Value
from attnmux.emulators.gluon.warps import HERE

FUNCTIONS = GluonJITFunction, JITFunction, ConstexprFunction


class Emulator:
    """Python functions and classes in place of a kernel's."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def translated(self, name: str, value: Any) -> Any:
        """What takes the place of a value that a kernel's module knows by `name`."""
        if name in ("gl", "tl"):
            return types.SimpleNamespace(**LANGUAGE)
        if name in LANGUAGE:
            return LANGUAGE[name]
        if isinstance(value, FUNCTIONS):
            return self.function(value.fn)
        if getattr(value, "__triton_aggregate__", False):
            return self.aggregate(value)
        return value.value if isinstance(value, gl.constexpr) else value

    def function(self, function: types.FunctionType) -> Any:
        key = id(function)
        if key not in self._known:
            names: dict[str, Any] = {"__builtins__": __builtins__}
            code, defaults = function.__code__, function.__defaults__
            made = types.FunctionType(code, names, function.__name__, defaults)
            made.__kwdefaults__ = function.__kwdefaults__
            # Known before its names are: it may be one of them.
            self._known[key] = made
            for name, value in function.__globals__.items():
                if name in code.co_names:
                    names[name] = self.translated(name, value)
        return self._known[key]

    def aggregate(self, kind: Any) -> Any:
        key = id(kind)
        if key not in self._known:
            members = {"__init__": self.function(kind.hash_attrs[0].fn)}
            for name, member in vars(kind).items():
                if isinstance(member, FUNCTIONS):
                    members[name] = self.function(member.fn)
            self._known[key] = type(kind.__name__, (), members)
        return self._known[key]


def run(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    """Run a kernel's programs one after the other.

    given, named: its arguments: tensors on the CPU, which change in place, numbers and None. Other
    names are the compiler's options. Raises TimeoutError where its groups of warps wait for each
    other.
    """
    values = dict(zip(kernel.arg_names, given, strict=False)) | named
    arguments = {
        each.name: values[each.name] if each.is_constexpr else _argument(values[each.name])
        for each in kernel.params
    }
    function = Emulator().function(kernel.fn)
    for x, y, z in itertools.product(*map(range, (*grid, 1, 1)[:3])):
        HERE.program, HERE.num_warps = (x, y, z), 4
        function(**arguments)


def _argument(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return Pointer.to(given)
    return None if given is None else Value(torch.tensor(given))


@contextmanager
def emulated() -> Iterator[list[str]]:
    """Launches of Gluon kernels run here. Yields the names of those that were launched."""
    launched: list[str] = []

    def on_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            launched.append(kernel.__name__)
            run(kernel, grid, *given, **named)

        return launch

    with patch.object(GluonJITFunction, "__getitem__", on_grid):
        yield launched
