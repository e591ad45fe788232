"""Records the operations of a step and refuses those that a replay would not repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux.core import RadixAttention
from attnmux.testing.graphs import collectives as collectives
from attnmux.testing.graphs.tape import (
    GraphViolation,
    Operation,
    Place,
    Tape,
    identity,
    replaced,
    tensors,
)

aten = torch.ops.aten

UNINITIALISED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
BY_INDEX = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})
MASK_DTYPES = (torch.bool, torch.uint8)
SCRIBBLED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Runs and records the operations that are called while it is active.

    method: names the part of the step in errors. host_tensors: tensors on the host that change
    between replays, which a device graph does not see; results computed from them alone stay
    constant.
    """

    def __init__(self, tape: Tape, method: str, host_tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._tape = tape
        self._method = method
        self._on_host = {identity(tensor): tensor for tensor in host_tensors}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be wrapped by torch, which takes a tenth of a recording: while one is made,
        compiled functions run eagerly."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the operation returns
        """Raises GraphViolation for an operation that a graph cannot hold."""
        kwargs = dict(kwargs or {})
        facts = _facts_of(func)
        if facts.has_parts:
            with self:
                return _from_parts(func, args, kwargs)
        given = tensors((args, kwargs))
        known = set(map(identity, given))
        if given and not facts.is_collective and known <= self._on_host.keys():
            results = func(*args, **kwargs)
            self._on_host.update((identity(tensor), tensor) for tensor in tensors(results))
            return results
        self._refuse(func, facts, args, kwargs, given)
        # Before the call, which may change an argument's shape
        frozen = replaced(args, torch.Tensor, self._freeze)
        frozen_kwargs = replaced(kwargs, torch.Tensor, self._freeze) if kwargs else kwargs
        has_places = any(key not in self._tape.made and key not in self._on_host for key in known)
        results = collectives.queue(func, args) if facts.is_collective else func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            self._tape.keep(args[0], facts.name)
            return results
        kept = tuple(self._keep(facts, result, known) for result in tensors(results))
        if func in UNINITIALISED:
            self._scribble(results)
        elif facts.writes or any(result is not None for result in kept):
            replayed = collectives.replayed(func) if facts.is_collective else func
            self._note(facts.name, replayed, frozen, frozen_kwargs, kept, has_places=has_places)
        return results

    def _note(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kept: tuple[torch.Tensor | None, ...],
        *,
        has_places: bool,
    ) -> None:
        operation = Operation(
            method=self._method,
            name=name,
            func=func,
            args=args,
            kwargs=kwargs,
            results=kept,
            has_places=has_places,
        )
        self._tape.operations.append(operation)

    def _freeze(self, tensor: torch.Tensor) -> torch.Tensor | Place:
        """Numbers on the host are part of a kernel's launch and stay constant."""
        return tensor.clone() if identity(tensor) in self._on_host else self._tape.freeze(tensor)

    def _keep(self, facts: _Facts, result: torch.Tensor, known: set[int]) -> torch.Tensor | None:
        """The result if its memory is new; None for a view or an argument."""
        return None if identity(result) in known else self._tape.keep(result, facts.name)

    def _scribble(self, result: torch.Tensor) -> None:
        """Uninitialised memory of a graph's pool may hold anything."""
        if result.dtype in SCRIBBLED:
            result.fill_(torch.nan)
            fill, args = aten.fill_.Scalar, (self._tape.freeze(result), torch.nan)
            self._note(str(fill), fill, args, {}, (None,), has_places=False)

    def _refuse(
        self,
        func: OpOverload[..., Any],
        facts: _Facts,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
    ) -> None:
        reason, hint = facts.refusal
        if reason:
            raise GraphViolation(self._method, facts.name, reason, hint=hint)
        if facts.depends_on_values or (
            facts.may_depend_on_values and _depends_on_values(func, args, kwargs)
        ):
            reason, hint = "has a shape that depends on values", "keep shapes static and mask"
        elif func is aten.lift_fresh.default and given[0].dim():
            reason, hint = "copies from the host", "make constants in init_cuda_graph_state"
        elif self._on_host and any(
            tensor.dim() and identity(tensor) in self._on_host for tensor in given
        ):
            reason = "reads a tensor of the host, which a graph cannot follow"
            hint = "copy it to a device buffer in init_forward_metadata_out_graph"
        elif len(given) > 1 and len({tensor.device for tensor in given if tensor.dim()}) > 1:
            reason, hint = "copies between devices", "do it in init_forward_metadata_out_graph"
        if reason:
            raise GraphViolation(self._method, facts.name, reason, hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """Facts about an operation before it is called."""

    name: str
    has_parts: bool
    is_collective: bool
    refusal: tuple[str, str]
    """Why no graph holds it, and a hint; both are empty where a graph may."""
    depends_on_values: bool
    """Whether the result's shape depends on values of tensors on the device."""
    may_depend_on_values: bool
    """The same for some arguments."""
    writes: bool
    """Whether a replay repeats it though it makes no tensor."""


@cache
def _facts_of(func: OpOverload[..., Any]) -> _Facts:
    refusal, is_collective = collectives.refusal(func), collectives.is_collective(func)
    if not refusal[0] and torch.Tag.data_dependent_output in func.tags:
        hint = "read values on the host in init_forward_metadata_out_graph"
        refusal = "synchronises with the device", hint
    may_depend = func in BY_INDEX or func is aten.repeat_interleave.Tensor
    return _Facts(
        name=str(func),
        has_parts=_has_parts(func),
        is_collective=is_collective,
        refusal=refusal,
        depends_on_values=not may_depend and torch.Tag.dynamic_output_shape in func.tags,
        may_depend_on_values=may_depend,
        writes=is_collective or _changes_values(func),
    )


def _has_parts(func: OpOverload[..., Any]) -> bool:
    """Whether an operation is made of others.

    In inference mode composite operations are dispatched whole. The op of attention runs Python, of
    which a device graph holds only the kernels.
    """
    return func is RadixAttention.op.default or func._can_decompose()


def _from_parts(
    func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:  # noqa: ANN401  # whatever the operation returns
    if func is RadixAttention.op.default:
        return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    return func.decompose(*args, **kwargs)


def _changes_values(func: OpOverload[..., Any]) -> bool:
    writes = any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    )
    return writes and torch.Tag.inplace_view not in func.tags


def _depends_on_values(
    func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether an operation that takes masks, or a length of its output, depends on values."""
    if func in BY_INDEX:
        return any(index.dtype in MASK_DTYPES for index in args[1] if index is not None)
    return kwargs.get("output_size") is None
