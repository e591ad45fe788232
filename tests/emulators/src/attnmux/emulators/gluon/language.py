"""The part of Gluon's language that our kernels use."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnmux.emulators.gluon.values import (
    DType,
    Room,
    Value,
    add_atomically,
    load,
    multiple_of,
    raw,
    store,
)
from attnmux.emulators.gluon.warps import (
    HERE,
    AsyncCopy,
    Barriers,
    MBarrier,
    copy_to_shared,
    warp_specialize,
)


def allocate(dtype: DType, shape: Sequence[int], layout: object) -> Any:
    if layout is Barriers:
        return Barriers(shape[0])
    room = torch.full(tuple(shape), float("nan")).to(dtype.torch)
    return Room(room)


def mma(a: Any, b: Any, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    product = a.data.float() @ b.data.float()
    return Value(acc.data + product if use_acc else product)


def mma_wait(pending: int, deps: Sequence[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    return lambda *values: Value(function(*(torch.as_tensor(raw(each)) for each in values)))


def nothing(*_args: object, **_kwargs: object) -> None:
    return None


DTYPES = {
    **{
        name: DType(getattr(torch, name))
        for name in ("bfloat16", "float16", "float32", "int8", "int16", "int32", "int64", "uint8")
    },
    # Of 64 bits, so that torch can compute with them.
    "uint32": DType(torch.int64),
    "uint64": DType(torch.int64),
}
LANGUAGE: dict[str, Any] = {
    **DTYPES,
    "constexpr": lambda value: value,
    "static_range": range,
    "static_assert": lambda condition: None,
    "arange": lambda start, stop, layout=None: Value(torch.arange(start, stop)),
    "zeros": lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype.torch)),
    "full": lambda shape, value, dtype, layout=None: Value(
        torch.full(shape, value, dtype=dtype.torch)
    ),
    "to_tensor": lambda value: Value(torch.as_tensor(raw(value))),
    "convert_layout": lambda value, layout: value,
    "abs": elementwise(torch.abs),
    "floor": elementwise(torch.floor),
    "where": elementwise(torch.where),
    "maximum": elementwise(torch.maximum),
    "minimum": elementwise(torch.minimum),
    "exp2": elementwise(torch.exp2),
    "log2": elementwise(torch.log2),
    "sqrt": elementwise(torch.sqrt),
    "cdiv": lambda a, b: (a + (b - 1)) // b,
    "max": lambda value, axis: Value(value.data.amax(axis)),
    "sum": lambda value, axis: Value(value.data.sum(axis)),
    "join": lambda a, b: Value(torch.stack((a.data, b.data), -1)),
    "program_id": lambda axis: Value(torch.tensor(HERE.program[axis])),
    "num_warps": lambda: HERE.num_warps,
    "load": load,
    "store": store,
    "atomic_add": add_atomically,
    "barrier": nothing,
    "copy_to_shared": copy_to_shared,
    "multiple_of": multiple_of,
    "max_contiguous": lambda places, numbers: places,
    "allocate_shared_memory": allocate,
    "warp_specialize": warp_specialize,
    "warpgroup_mma": mma,
    "warpgroup_mma_wait": mma_wait,
    "fence_async_shared": nothing,
    "gdc_launch_dependents": nothing,
    "gdc_wait": nothing,
    "mbarrier": MBarrier,
    "async_copy": AsyncCopy,
    "BlockedLayout": nothing,
    "DistributedLinearLayout": nothing,
    "SliceLayout": nothing,
    "DotOperandLayout": nothing,
    "NVMMADistributedLayout": nothing,
    "SwizzledSharedLayout": nothing,
    "NVMMASharedLayout": types.SimpleNamespace(get_default_for=nothing),
    # Instructions of the GPU.
    "tanh": elementwise(torch.tanh),
    "rescaled": lambda acc, share: acc * share[:, None],
    "pack": lambda weights, dtype: weights.to(dtype),
    "unpack": lambda pairs, dtype: pairs,
    "pack_quads": lambda weights: weights.to(DType(torch.float8_e4m3fn)),
    "unpack_quads": lambda quads: quads,
}
