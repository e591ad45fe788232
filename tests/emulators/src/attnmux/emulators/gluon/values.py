"""Tensors, pointers and shared memory of a Gluon kernel, as torch tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DType:
    """A dtype of values or, by `element_ty`, of what a pointer points to."""

    torch: torch.dtype

    @property
    def element_ty(self) -> DType:
        return self

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch.itemsize


class Type:
    layout = None


class Value:
    """A tensor of the kernel; a scalar is one without dims."""

    type = Type

    def __init__(self, data: torch.Tensor, factors: tuple[Any, Any] | None = None) -> None:
        """factors: those that data is the rounded product of."""
        self.data, self.factors = data, factors

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> DType:
        return DType(self.data.dtype)

    def to(self, dtype: DType, bitcast: bool = False) -> Value:
        return Value(self.data.view(dtype.torch) if bitcast else self.data.to(dtype.torch))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, dims: Sequence[int]) -> Value:
        return Value(self.data.permute(*dims))

    def split(self) -> tuple[Value, Value]:
        return Value(self.data[..., 0]), Value(self.data[..., 1])

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)


def raw(value: Any) -> Any:
    return value.data if isinstance(value, Value) else value


def binary(function: Callable[[Any, Any], Any], is_reversed: bool) -> Any:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        pair = (raw(other), self.data) if is_reversed else (self.data, raw(other))
        result = torch.as_tensor(function(*pair))
        if result.dtype is not torch.float32:
            return Value(result)
        if function is operator.mul:
            return Value(result, pair)
        if function in (operator.add, operator.sub):
            left, right = map(exact, (other, self) if is_reversed else (self, other))
            if left is not None:
                return Value(function(left, pair[1]).float())
            if right is not None:
                return Value(function(pair[0], right).float())
        return Value(result)

    return method


def exact(value: Any) -> torch.Tensor | None:
    """The product that a value is the rounding of; None for other values. The GPU's compiler fuses
    products into sums, which are rounded once."""
    factors = value.factors if isinstance(value, Value) else None
    if factors is None:
        return None
    first, second = (torch.as_tensor(each, dtype=torch.float64) for each in factors)
    return first * second


def truncating(function: Callable[..., torch.Tensor], mode: str | None) -> Any:
    def divide(a: Any, b: Any) -> torch.Tensor:
        more = {"rounding_mode": mode} if mode else {}
        return function(torch.as_tensor(a), b, **more)

    return divide


OPERATORS = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv")},
    "floordiv": truncating(torch.div, "trunc"),
    "mod": truncating(torch.fmod, None),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
for _name, _function in OPERATORS.items():
    setattr(Value, f"__{_name}__", binary(_function, is_reversed=False))
    setattr(Value, f"__r{_name}__", binary(_function, is_reversed=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", binary(getattr(operator, _name), is_reversed=False))


class Pointer:
    """Addresses: a tensor's memory, and elements in it."""

    def __init__(self, memory: torch.Tensor, at: torch.Tensor) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        memory = tensor.detach().as_strided((count,), (1,), 0)
        return cls(memory, torch.tensor(tensor.storage_offset()))

    @property
    def dtype(self) -> DType:
        return DType(self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + raw(offset))

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.at[key])


class Room:
    """Shared memory."""

    type = Type

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> DType:
        return DType(self.data.dtype)

    def index(self, at: Any) -> Room:
        return Room(self.data[int(raw(at))])

    def permute(self, dims: Sequence[int]) -> Room:
        return Room(self.data.permute(*dims))

    def load(self, layout: object = None) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        self.data.copy_(value.data)


def load(places: Pointer, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Value:
    """Without `other`, masked values are NaN or 0: on a GPU they are anything."""
    # What a single number picks is no copy.
    if mask is None:
        return Value(places.memory[places.at].clone())
    is_there = torch.broadcast_to(torch.as_tensor(raw(mask)), places.at.shape)
    found = places.memory[torch.where(is_there, places.at, 0)].clone()
    if other is None:
        other = float("nan") if found.is_floating_point() else 0
    fill = torch.as_tensor(raw(other)).to(found.dtype)
    # torch fills no 8-bit floats
    word = torch.uint8 if found.itemsize == 1 else found.dtype
    found.view(word)[~is_there] = fill.view(word)
    return Value(found)


def add_atomically(places: Pointer, value: Any, sem: str = "", scope: str = "") -> Value:
    """Programs run one after the other."""
    before = load(places)
    store(places, before + value)
    return before


def store(places: Pointer, value: Any, mask: Any = None) -> None:
    at = places.at
    values = torch.broadcast_to(torch.as_tensor(raw(value)), at.shape).to(places.memory.dtype)
    is_there = torch.ones_like(at, dtype=torch.bool)
    if mask is not None:
        is_there = torch.broadcast_to(torch.as_tensor(raw(mask)), at.shape)
    places.memory[at[is_there]] = values[is_there]


def multiple_of(places: Any, numbers: Sequence[int]) -> Any:
    """Checks the claim for the first column of addresses."""
    if isinstance(places, Pointer):
        first = places.at[..., 0] * places.memory.itemsize
        assert not (first % numbers[-1]).any(), "rows that do not begin where they claim to"
    return places
