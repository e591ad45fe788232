"""Recorded operations of Triton's language as Python functions over numpy arrays.

A recording repeats the calls of the interpreter's builder, each of which wraps its array in a
handle, looks types up and copies a value that is the same along an axis. Types and shapes follow
from a recording's key, so that a function can name the numpy operations at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from triton.language import core
from triton.runtime.interpreter import InterpreterBuilder

CASTS = frozenset(
    f"create_{name}"
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "int_cast")
)
SPREAD = frozenset({"create_broadcast", "create_splat"})
RESHAPED = frozenset({"create_expand_dims", "create_reshape"})
CHANGES_ITS_ARGUMENT = frozenset({"create_ashr"})


class Call(NamedTuple):
    """A function of the builder, the registers of its arguments, and that of its result."""

    name: str
    function: Callable[..., Any]
    places: tuple[int, ...]
    target: int


class TensorForm(NamedTuple):
    """A tensor of an operation's result: the register of its handle, and its other fields."""

    place: int
    facts: dict[str, Any]


class SequenceForm(NamedTuple):
    kind: type
    parts: tuple[Any, ...]


class ConstantForm(NamedTuple):
    value: Any


Form = TensorForm | SequenceForm | ConstantForm


def built(form: Form, registers: Sequence[Any]) -> Any:  # noqa: ANN401  # the operation's
    """The like of an operation's result from registers."""
    if isinstance(form, TensorForm):
        tensor = core.tensor.__new__(core.tensor)
        tensor.__dict__ = {**form.facts, "handle": registers[form.place]}
        return tensor
    if isinstance(form, SequenceForm):
        return form.kind([built(part, registers) for part in form.parts])
    return form.value


@cache
def _numpy_function(name: str) -> tuple[Callable[..., Any], int] | None:
    """What a function of the builder does with the arrays of its arguments, and how many these are;
    None for one that does more."""
    member = getattr(InterpreterBuilder, name, None)
    probe = SimpleNamespace(
        binary_op=lambda lhs, rhs, op: (op, 2),
        unary_op=lambda arg, op: (op, 1),
        ternary_op=lambda lhs, rhs, other, op: (op, 3),
    )
    for count in (1, 2, 3):
        try:
            found = member(probe, *[None] * count)  # type: ignore[misc]  # None is no function either
        except (TypeError, AttributeError, AssertionError):
            continue
        if isinstance(found, tuple) and len(found) == 2 and found[1] == count:
            return found
    return None


class Compiler:
    """Writes the function of one recording, from its calls and registers with values of one run."""

    def __init__(self, calls: Sequence[Call], registers: Sequence[Any], num_handles: int) -> None:
        self.registers = registers
        self.producers = {call.target: call for call in calls}
        self.calls = calls
        self.num_handles = num_handles
        self.names: dict[str, Any] = {"empty": np.empty, "u4": np.uint32, "u8": np.uint64}
        self.lines: list[str] = []
        self.arrays: dict[int, str] = {}
        """Expressions of the registers' arrays that are known."""
        self.handles: dict[int, str] = {place: f"h{place}" for place in range(num_handles)}
        """Expressions of the registers' handles, and of what is no handle."""

    def function(self, form: Form, handle: type) -> Callable[[Sequence[Any]], Any] | None:
        """From the arguments' handles to the operation's result; None if none can be written."""
        if any(call.name in CHANGES_ITS_ARGUMENT for call in self.calls):
            return None
        self.names |= {"Handle": handle, "new": core.tensor.__new__, "tensor": core.tensor}
        if self.num_handles:
            self.lines.append(f"{''.join(f'h{n}, ' for n in range(self.num_handles))}= handles")
        for call in self.calls:
            if call.name not in SPREAD:
                self.write(call)
        self.lines.append(f"return {self.result(form)}")
        body = "\n    ".join(self.lines)
        exec(f"def operation(handles):\n    {body}\n", self.names)
        made: Callable[[Sequence[Any]], Any] = self.names["operation"]
        return made

    def named(self, prefix: str, value: Any) -> str:  # noqa: ANN401  # whatever a register holds
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def array(self, place: int) -> str:
        """An expression of the register's array."""
        if place not in self.arrays:
            call = self.producers.get(place)
            if call is not None and call.name in SPREAD:
                self.spread(call)
            elif call is not None or place < self.num_handles:
                self.assign(place, f"{self.handles[place]}.data")
            else:
                self.arrays[place] = self.named("k", self.registers[place].data)
        return self.arrays[place]

    def assign(self, place: int, expression: str) -> None:
        self.lines.append(f"a{place} = {expression}")
        self.arrays[place] = f"a{place}"

    def value(self, place: int) -> str:
        """An expression of what the register holds."""
        if place not in self.handles:
            held = self.registers[place]
            if place in self.producers:
                self.lines.append(
                    f"r{place} = Handle({self.array(place)}, {self.named('t', held.dtype)})"
                )
                self.handles[place] = f"r{place}"
            else:
                self.handles[place] = self.named("k", held)
        return self.handles[place]

    def spread(self, call: Call) -> None:
        """One value along each axis that it lacks."""
        given, made = self.array(source_of(call)), self.registers[call.target].data
        shape, dtype = self.named("s", made.shape), self.named("d", made.dtype)
        self.assign(call.target, f"empty({shape}, {dtype})")
        self.lines.append(f"a{call.target}[...] = {given}")

    def write(self, call: Call) -> None:
        target, made = call.target, self.registers[call.target]
        if call.name in RESHAPED:
            shape = self.named("s", made.data.shape)
            self.assign(target, f"{self.array(call.places[0])}.reshape({shape})")
        elif call.name in CASTS and self.cast(call):
            pass
        elif call.name == "create_addptr":
            width = max(1, self.registers[call.places[0]].get_element_ty().primitive_bitwidth // 8)
            pointers, offsets = self.operands(call.places, made.data.shape)
            self.assign(target, f"{pointers} + {width} * {offsets}.astype(u8)")
        elif (found := _numpy_function(call.name)) is not None and not self.is_narrow(call):
            self.elementwise(call, *found)
        else:
            given = ", ".join(map(self.value, call.places))
            self.lines.append(f"r{target} = {self.named('f', call.function)}({given})")
            self.handles[target] = f"r{target}"

    def is_narrow(self, call: Call) -> bool:
        """Whether it is of bfloat16, which numpy has as integers."""
        held = [self.registers[place] for place in call.places]
        return any(getattr(each, "dtype", None) == core.bfloat16 for each in held)

    def elementwise(self, call: Call, function: Callable[..., Any], count: int) -> None:
        made, places = self.registers[call.target].data, call.places[:count]
        given = ", ".join(self.operands(places, made.shape))
        was = function(*[self.registers[place].data for place in places]).dtype
        cast = "" if was == made.dtype else f".astype({self.named('d', made.dtype)})"
        self.assign(call.target, f"{self.named('f', function)}({given}){cast}")

    def operands(self, places: Sequence[int], shape: tuple[int, ...]) -> list[str]:
        """The arrays of an elementwise operation. numpy spreads a value itself where the others
        have the result's shape."""
        used = list(places)
        for index, place in enumerate(places):
            call = self.producers.get(place)
            if call is None or call.name not in SPREAD:
                continue
            shorter = [*used[:index], source_of(call), *used[index + 1 :]]
            arrays = [self.registers[each].data for each in shorter]
            same = arrays[index].dtype == self.registers[place].data.dtype
            if same and np.broadcast_shapes(*(array.shape for array in arrays)) == shape:
                used = shorter
        return [self.array(place) for place in used]

    def cast(self, call: Call) -> bool:
        """Whether it was written: bfloat16 is numpy's only as integers."""
        given, made = call.places[0], self.registers[call.target]
        types = self.registers[given].dtype.scalar.name, made.dtype.scalar.name
        if types == ("fp32", "bf16"):
            return False
        if types == ("bf16", "fp32"):
            expression = f"({self.array(given)}.astype(u4) << 16).view('f4')"
        else:
            expression = f"{self.array(given)}.astype({self.named('d', made.data.dtype)})"
        self.assign(call.target, expression)
        return True

    def result(self, form: Form) -> str:
        if isinstance(form, TensorForm):
            handle, name = self.value(form.place), f"o{len(self.lines)}"
            self.lines.append(f"{name} = new(tensor)")
            facts = self.named("m", form.facts)
            self.lines.append(f'{name}.__dict__ = {{**{facts}, "handle": {handle}}}')
            return name
        if isinstance(form, SequenceForm):
            parts = ", ".join(self.result(part) for part in form.parts)
            return f"{self.named('c', form.kind)}([{parts}])"
        return self.named("k", form.value)


def source_of(call: Call) -> int:
    """The register of the value that a call spreads."""
    return call.places[0] if call.name == "create_broadcast" else call.places[1]
