"""Steps of Intel's GPU backends, whose kernels take packed queries of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from attnmux.core import (
    DecodeStep,
    GraphUnsupported,
    InvalidInput,
    KeyGroup,
    LibraryBackend,
    filled,
)
from attnmux.intel.packed_requests import PackedRequests

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch


class StoredLayer(Protocol):
    """A layer's arguments that no step changes."""

    @property
    def group(self) -> KeyGroup | None:
        """None for a layer that the pool does not store."""


K = TypeVar("K")
L = TypeVar("L", bound=StoredLayer)


@dataclass(kw_only=True, slots=True, eq=False)
class PackedStep(DecodeStep):
    """A step of any phase."""

    requests: PackedRequests | None = None
    """Set by `plan_step`."""


class PackedBackend(LibraryBackend[K, L, PackedStep, None]):
    """Prefill and decode by kernels that write no LSE and run in no graph."""

    def __init__(self, context: BackendContext, options: Mapping[str, object], kernels: K) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options, kernels)
        groups = (layer.group for layer in self._layers.values() if layer.group is not None)
        self._groups = tuple(dict.fromkeys(groups))

    def plan_packed(self, batch: ForwardBatch, *, key_tile: int = 1) -> PackedStep:
        """key_tile: rows of page tables have room for a multiple of so many keys."""
        step = PackedStep.of(batch, self.context, None, key_tile=key_tile)
        step.requests = PackedRequests.of(batch, step.tables.queries_each)
        return step

    def fill_step(self, step: PackedStep, batch: ForwardBatch) -> None:
        step.fill(batch, self._groups, self.context)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> None:
        raise GraphUnsupported("graphs of Intel's GPUs are not captured")

    def requests_of(self, call: AttentionCall, step: PackedStep) -> PackedRequests:
        """The step's requests. Raises InvalidInput for a call that wants an LSE, or whose Q has
        another dtype than the pool."""
        if call.lse is not None:
            raise InvalidInput("lse", got="a tensor", expected="None: the kernels write none")
        pool = self.context.token_to_kv_pool
        if call.q.dtype != pool.dtype:
            raise InvalidInput("q", got=call.q.dtype, expected=f"{pool.dtype}, as the pool is")
        return filled(step.requests)
