"""Operations of Triton's language, recorded once for each combination of types and then repeated.

For each operation the interpreter checks, converts and broadcasts types anew, in dozens of Python
calls, which take most of the time of a kernel on tiles as small as tests have. Which functions of
the interpreter's builder run follows from the types and constants of the arguments: Triton decides
it before it knows any value. An operation that reads a value is not repeated. After a few repeats a
function of its own does what the calls do; see `triton_compiled.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from attnmux.emulators.triton_compiled import (
    Call,
    Compiler,
    ConstantForm,
    Form,
    SequenceForm,
    TensorForm,
    built,
)

CONSTANTS = frozenset({int, bool, str, type(None)})
SEQUENCES = frozenset({tuple, list, core.tuple})
FOLDED = frozenset({"create_splat", "create_make_range"})
"""Functions of the builder, besides those that get a type or a number, whose results for constants
are constants."""
ADDRESS = np.dtype(np.uint64)
WRITTEN_AT = 3
"""Repeats after which an operation gets a function of its own, which takes as long to write as some
repeats take."""
known_np_dtype = cache(interpreter._get_np_dtype)
AnyHandle = interpreter.TensorHandle
Tensor, Constexpr = core.tensor, core.constexpr
UNKNOWN: Any = object()


class NotRepeatableError(Exception):
    """An operation depends on more than the types and constants of its arguments."""


class Handle(interpreter.TensorHandle):  # type: ignore[misc]  # Triton has no types
    """A value without the check of its width, which its recording passed."""

    def __init__(self, data: Any, dtype: Any, attr: Any = None) -> None:  # noqa: ANN401  # the interpreter's
        self.data, self.dtype, self.attr = data, dtype, attr or {}


class Recording:
    """What an operation called. A register holds an argument's handle, a constant or a result."""

    def __init__(
        self, *, registers: list[Any], calls: list[Call], form: Form, num_handles: int
    ) -> None:
        self.registers = registers
        """With the constants. The arguments' handles come first."""
        self.calls = calls
        self.form = form
        """The operation's result."""
        self.num_handles = num_handles
        self.repeats = 0
        self.repeat: Callable[[list[Any]], Any] = self._repeat
        """From the arguments' handles to the operation's result."""

    def _repeat(self, handles: list[Any]) -> Any:  # noqa: ANN401  # the operation's
        registers = self.registers.copy()
        registers[: len(handles)] = handles
        for call in self.calls:
            registers[call.target] = call.function(*[registers[place] for place in call.places])
        self.repeats += 1
        if self.repeats == WRITTEN_AT:
            written = Compiler(self.calls, registers, self.num_handles).function(self.form, Handle)
            self.repeat = written or self._repeat
        return built(self.form, registers)


class Tape:
    """In place of the interpreter's builder during one operation: calls it and takes notes."""

    def __init__(self, builder: Any, handles: Sequence[Any]) -> None:  # noqa: ANN401  # the interpreter's
        self.builder = builder
        self.is_repeatable = True
        self.registers: list[Any] = []
        self.places: dict[int, int] = {}
        """The registers of handles, by their ids."""
        self.values: set[int] = set()
        """The registers that hold no constants."""
        self.calls: list[Call] = []
        for handle in handles:
            self.values.add(self.keep(handle))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # the interpreter's
        member = getattr(self.builder, name)
        if not callable(member):
            return member

        def noted(*args: Any, **options: Any) -> Any:  # noqa: ANN401  # as above
            result = member(*args, **options)
            try:
                self.note(name, member, args, options, result)
            except NotRepeatableError:
                self.is_repeatable = False
            return result

        return noted

    def note(
        self,
        name: str,
        member: Callable[..., Any],
        args: Sequence[Any],
        options: dict[str, Any],
        result: Any,  # noqa: ANN401  # as above
    ) -> None:
        places = tuple(map(self.place, args))
        if name.startswith("get_") or (name in FOLDED and self.values.isdisjoint(places)):
            self.keep(result)
            return
        results = result if isinstance(result, tuple) else (result,)
        if options or not all(each is None or isinstance(each, AnyHandle) for each in results):
            raise NotRepeatableError
        whole = self.called(name, member, places, result)
        if isinstance(result, tuple):
            for index, each in enumerate(result):
                self.called("", itemgetter(index), (whole,), each)

    def called(
        self,
        name: str,
        function: Callable[..., Any],
        places: tuple[int, ...],
        result: Any,  # noqa: ANN401  # as above
    ) -> int:
        target = self.keep(result)
        self.values.add(target)
        self.calls.append(Call(name, function, places, target))
        return target

    def keep(self, value: Any) -> int:  # noqa: ANN401  # as above
        """Its register."""
        self.registers.append(value)
        place = len(self.registers) - 1
        if isinstance(value, AnyHandle):
            self.places[id(value)] = place
        return place

    def place(self, value: Any) -> int:  # noqa: ANN401  # as above
        """The register of an argument of the builder's."""
        if isinstance(value, AnyHandle):
            if id(value) not in self.places:
                raise NotRepeatableError
            return self.places[id(value)]
        if isinstance(value, list | tuple) and not all(isinstance(each, int) for each in value):
            raise NotRepeatableError
        return self.keep(value)

    def form(self, value: Any) -> Form:  # noqa: ANN401  # the operation's
        """How the like of an operation's result is made from registers."""
        kind = type(value)
        if kind in SEQUENCES:
            return SequenceForm(kind, tuple([self.form(each) for each in value]))
        if kind is not core.tensor:
            describe(value, [])
            return ConstantForm(value)
        return TensorForm(self.place(value.handle), {**vars(value), "handle": None})


def describe(value: Any, handles: list[Any]) -> Any:  # noqa: ANN401  # Triton's
    """A key of the value's types and constants. Appends the handles of its tensors."""
    kind = type(value)
    if kind is Tensor:
        handles.append(value.handle)
        return value.type.name
    if kind is Constexpr:
        return kind, describe(value.value, handles)
    if kind in CONSTANTS:
        return kind, value
    if kind in SEQUENCES:
        return kind, *[describe(each, handles) for each in value]
    if kind is float:
        return kind, value.hex()  # unlike values, it tells 0.0 from -0.0, and NaN is itself
    if kind is slice:
        return kind, value.start, value.stop, value.step
    if isinstance(value, core.dtype):
        return core.dtype, value.name
    raise NotRepeatableError


def key_of(args: Sequence[Any], options: dict[str, Any], handles: list[Any]) -> Any:  # noqa: ANN401  # Triton's
    """What an operation's calls follow from. Appends the handles of its tensors."""
    parts: list[Any] = []
    for each in args:
        kind = type(each)
        if kind is Tensor:  # most are
            handles.append(each.handle)
            parts.append(each.type.name)
        elif kind in CONSTANTS:
            parts.append((kind, each))
        else:
            parts.append(describe(each, handles))
    for name, each in options.items():
        parts.append((name, describe(each, handles)))
    # One value twice
    if len(handles) == 2:
        if handles[0] is handles[1]:
            parts.append((0, 0))
    elif len(handles) > 2:
        ids = list(map(id, handles))
        if len(set(ids)) < len(ids):
            parts.append(tuple(map(ids.index, ids)))
    return tuple(parts)


class Recorder:
    """Runs the operations of kernels."""

    def __init__(self, builder: Any) -> None:  # noqa: ANN401  # the interpreter's
        self.builder, self.plain = builder, TritonSemantic(builder)
        self.tape: Tape | None = None
        self.semantic: Any = None
        """That of the tape."""

    def repeating(self, member: Callable[..., Any]) -> Callable[..., Any]:
        """An operation that remembers what it did."""
        known: dict[Any, Recording | None] = {}

        def operation(*args: Any, **options: Any) -> Any:  # noqa: ANN401  # as above
            options.pop("_semantic", None)
            if self.tape is not None:  # a part of another operation
                return member(*args, **options, _semantic=self.semantic)
            handles: list[Any] = []
            try:
                key = key_of(args, options, handles)
            except NotRepeatableError:
                return member(*args, **options, _semantic=self.plain)
            recording = known.get(key, UNKNOWN)
            if recording is UNKNOWN:
                result, known[key] = self._record(member, args, options, handles)
                return result
            if recording is None:
                return member(*args, **options, _semantic=self.plain)
            return recording.repeat(handles)

        return operation

    def _record(
        self,
        member: Callable[..., Any],
        args: Sequence[Any],
        options: dict[str, Any],
        handles: Sequence[Any],
    ) -> tuple[Any, Recording | None]:
        self.tape = tape = Tape(self.builder, handles)
        self.semantic = TritonSemantic(tape)
        try:
            result = member(*args, **options, _semantic=self.semantic)
        finally:
            self.tape = None
        try:
            form = tape.form(result)
        except NotRepeatableError:
            return result, None
        if not tape.is_repeatable:
            return result, None
        registers = [
            None if place in tape.values else kept for place, kept in enumerate(tape.registers)
        ]
        return result, Recording(
            registers=registers, calls=tape.calls, form=form, num_handles=len(handles)
        )

    def reading(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A method that reads a tensor's value, on which the operation then depends."""

        def read(tensor: Any) -> Any:  # noqa: ANN401  # Triton's
            # Triton asks `if mask`, which is true of all but numbers
            if self.tape is not None and tensor.handle.data.size == 1:
                self.tape.is_repeatable = False
            return method(tensor)

        return read


def _np_dtype(dtype: Any) -> np.dtype[Any]:  # noqa: ANN401  # Triton's
    scalar = dtype.scalar
    return ADDRESS if scalar.is_ptr() else known_np_dtype(scalar)


@contextmanager
def recorded() -> Iterator[None]:
    """Within the block Triton's language is the interpreter's, with a memory."""
    recorder = Recorder(interpreter.interpreter_builder)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:  # noqa: ANN401  # the interpreter's
        scope.set_attr(obj, name, recorder.repeating(member))

    with patch.object(interpreter, "_patch_attr", patch_attr):
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    for name in ("__bool__", "__index__"):
        scope.set_attr(core.tensor, name, recorder.reading(getattr(core.tensor, name)))
    nothing = interpreter._LangPatchScope()
    try:
        with (
            patch.object(interpreter, "_patch_lang", lambda function: nothing),
            patch.object(interpreter, "_get_np_dtype", _np_dtype),
            patch.object(interpreter, "TensorHandle", Handle),
        ):
            yield
    finally:
        scope.restore()
