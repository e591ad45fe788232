"""Recorded operations, which can be run again on the same tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from attnmux.core import GraphUnsupported

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """The memory of an operation's argument. Like a device graph, it keeps the address and does not
    keep memory from before the capture alive."""

    storage: StorageWeakRef
    address: int
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        storage = tensor.untyped_storage()
        return cls(
            storage=StorageWeakRef(storage),  # type: ignore[no-untyped-call]  # torch's own
            address=storage.data_ptr(),
            dtype=tensor.dtype,
            device=tensor.device,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def tensor(self) -> torch.Tensor | None:
        """The tensor; None if its memory was freed or moved."""
        new: Callable[[int], torch.UntypedStorage | None] = torch.UntypedStorage._new_with_weak_ptr
        storage = new(self.storage.cdata)
        if storage is None or storage.data_ptr() != self.address:
            return None
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    """One call of an operation."""

    method: str
    """The part of the step that called it."""
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    """Tensors, nested ones too, as `Tape.freeze` gives them."""
    kwargs: dict[str, Any]
    """Likewise."""
    results: tuple[torch.Tensor | None, ...]
    """The tensors of new results; None for results that are views or arguments."""
    has_places: bool
    """Whether a `Place` is among the arguments."""

    def run(self) -> None:
        args, kwargs = self.args, self.kwargs
        if self.has_places:
            args, kwargs = replaced((args, kwargs), Place, self._now)
        results = self.func(*args, **kwargs)
        for kept, new in zip(self.results, tensors(results), strict=True):
            if kept is not None:
                if kept.shape != new.shape:
                    raise GraphViolation(
                        self.method,
                        self.name,
                        f"gave shape {tuple(kept.shape)} when captured, now {tuple(new.shape)}",
                    )
                kept.copy_(new)

    def _now(self, place: Place) -> torch.Tensor:
        tensor = place.tensor()
        if tensor is None:
            raise GraphViolation(
                self.method,
                self.name,
                f"read a tensor of {place.dtype} and shape {place.size} when captured, whose "
                "memory has been freed or moved since",
                hint="graphs must read buffers that init_cuda_graph_state made",
            )
        return tensor


@dataclass(kw_only=True, slots=True, eq=False)
class Tape:
    """The operations of a step, and the memory that they allocated."""

    operations: list[Operation] = field(default_factory=list)
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors by storage, kept alive as in a graph's private pool."""
    makers: dict[int, str] = field(default_factory=dict)
    """The operation that allocated each."""
    seen: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages from before. A weak reference reserves their identity."""

    def keep(self, tensor: torch.Tensor, maker: str) -> torch.Tensor:
        """Keep memory that the step allocated. Returns the tensor that keeps it."""
        # A tensor of our own, so that other users of the memory can be counted
        holder, key = tensor.detach(), identity(tensor)
        self.made[key] = holder
        self.makers[key] = maker
        return holder

    def held_elsewhere(self) -> list[tuple[str, torch.Tensor]]:
        """Memory that the step allocated and that is used outside of the tape, with its maker."""
        with_one_user = torch.empty(1)
        uncounted = torch._C._storage_Use_Count(identity(with_one_user)) - 1
        arguments = [(operation.args, operation.kwargs) for operation in self.operations]
        # Arguments that are views, and torch's copy of the result of a factory function, are
        # tensors of their own
        own = {id(tensor): tensor for tensor in (*self.made.values(), *tensors(arguments))}
        users = Counter(identity(tensor) for tensor in own.values())
        return [
            (self.makers[key], tensor)
            for key, tensor in self.made.items()
            if torch._C._storage_Use_Count(key) > uncounted + users[key]
        ]

    def freeze(self, tensor: torch.Tensor) -> torch.Tensor | Place:
        """An operation's argument for replays: its place, or a tensor of our own over memory that
        the tape keeps anyway."""
        key = identity(tensor)
        if key in self.made:
            return tensor.detach()
        place = Place.of(tensor)
        self.seen[key] = place.storage
        return place

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether an operation allocated or used the tensor's memory."""
        return identity(tensor) in self.made or identity(tensor) in self.seen

    def run(self) -> None:
        for operation in self.operations:
            operation.run()

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.made.values())


def identity(tensor: torch.Tensor) -> int:
    """The identity of the tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


# Python's own containers alone, as an operation takes and returns them: pytree's, which it looks up
# for each value, would take a third of a recording.


def tensors(values: object) -> list[torch.Tensor]:
    """The tensors among arguments or results, in order."""
    found: list[torch.Tensor] = []
    _gather(values, found)
    return found


def _gather(values: object, found: list[torch.Tensor]) -> None:
    if isinstance(values, torch.Tensor):
        found.append(values)
    elif isinstance(values, (tuple, list)):
        for value in values:
            _gather(value, found)
    elif isinstance(values, dict):
        for value in values.values():
            _gather(value, found)


def replaced(values: Any, kind: type[T], change: Callable[[T], object]) -> Any:  # noqa: ANN401  # alike
    """Arguments, with the result of `change` for each value of a kind."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, (tuple, list)):
        return type(values)([replaced(value, kind, change) for value in values])
    if isinstance(values, dict):
        return {name: replaced(value, kind, change) for name, value in values.items()}
    return values


class GraphViolation(GraphUnsupported):
    """A captured step did what a replay would not repeat; names the method and the operation."""

    def __init__(self, method: str, operation: str, reason: str, *, hint: str = "") -> None:
        self.method = method
        self.operation = operation
        self.reason = reason
        self.hint = hint
        super().__init__(f"{method}: {operation} {reason}" + (f"; {hint}" if hint else ""))
