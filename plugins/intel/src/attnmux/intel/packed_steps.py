"""Steps of Intel's GPU backends, whose kernels take packed queries of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attnmux.core import GraphUnsupported, InvalidInput
from attnmux.core.plugin import DecodeStep, LibraryBackend, PagedBackend
from attnmux.intel.packed_requests import PackedRequests

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, ForwardBatch, LayerSpec


K = TypeVar("K")


@dataclass(kw_only=True, slots=True, eq=False)
class PackedStep(DecodeStep):
    """A step of any phase."""

    requests: PackedRequests | None = None
    """Set by `plan_step`."""


class PackedBackend(PagedBackend[K, Any, PackedStep, None], Generic[K]):
    """Prefill and decode by kernels that write no LSE and run in no graph."""

    def plan_packed(self, batch: ForwardBatch, *, key_tile: int = 1) -> PackedStep:
        """key_tile: rows of page tables have room for a multiple of so many keys."""
        step = PackedStep.of(batch, self.context, None, key_tile=key_tile)
        step.requests = PackedRequests.of(batch, step.tables.queries_each)
        return step

    def fill_step(self, step: PackedStep, batch: ForwardBatch) -> None:
        step.fill(batch, self.key_groups, self.context)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> None:
        raise GraphUnsupported("graphs of Intel's GPUs are not captured")

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: the kernels write none")

    def requests_of(self, call: AttentionCall, step: PackedStep) -> PackedRequests:
        """The step's requests. Raises InvalidInput for a Q of another dtype than the pool's."""
        pool = self.context.token_to_kv_pool
        if call.q.dtype != pool.dtype:
            raise InvalidInput("q", got=call.q.dtype, expected=f"{pool.dtype}, as the pool is")
        return LibraryBackend.filled(step.requests)
