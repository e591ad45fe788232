"""One call a layer over pages, for libraries whose kernels take packed queries of requests.

A library's own part is which layers it serves (`check`), its constant arguments (`arguments`) and
the call (`launch`). No kernel here writes an LSE or applies a cap.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from attnmux.core.plugin import KeyGroup, Keys, LibraryBackend, PagedLayer, Rows
from attnmux.intel.packed_steps import PackedBackend, PackedStep

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, ForwardBatch, LayerSpec
    from attnmux.intel.packed_requests import PackedRequests

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operands:
    """The tensors of one call, as both libraries take them."""

    q: torch.Tensor
    """[T, Hq, D]."""
    out: torch.Tensor
    """[T, Hq, D]."""
    k: torch.Tensor
    """[pages, page, Hkv, D], as V."""
    v: torch.Tensor
    keys: Keys
    """Keys of the requests with new tokens."""
    bounds: torch.Tensor
    """[B + 1] int32: where the queries of each begin."""


class PackedPagesBackend(PackedBackend[K]):
    """MHA and GQA, prefill and decode."""

    @abstractmethod
    def check(self, layer: LayerSpec) -> None:
        """Raises InvalidInput for a layer or a pool that no kernel serves."""

    @abstractmethod
    def arguments(self, layer: LayerSpec) -> dict[str, Any]:
        """Arguments of the library's function that no step changes."""

    @abstractmethod
    def launch(self, operands: Operands, layer: PagedLayer, step: PackedStep) -> None:
        """Call the library, which writes to `operands.out`."""

    def prepare_layer(self, layer: LayerSpec) -> PagedLayer:
        self.check(layer)
        self.context.check_sixteen_bits()
        arguments = self.arguments(layer)
        if layer.layer_id not in self.context.token_to_kv_pool.layer_ids:
            return PagedLayer(arguments=arguments)
        group = KeyGroup.of(layer, self.context)
        kv = self.context.kv_pages(layer, group.page_size)
        return PagedLayer(arguments=arguments, group=group, kv=kv)

    def plan_step(self, batch: ForwardBatch, buffers: None) -> PackedStep:
        return self.plan_packed(batch)

    def attend(
        self, call: AttentionCall, layer: PagedLayer, step: PackedStep, batch: ForwardBatch
    ) -> torch.Tensor:
        requests = self.requests_of(call, step)
        count = requests.num_queries
        if not count:
            return call.empty_result()
        keys, (k, v) = self._keys(call, layer, step, requests)
        out = call.out
        if out is None or not Rows.is_writable(out):
            out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
        operands = Operands(
            q=Rows.aligned(call.q[:count].contiguous()),
            out=out[:count],
            k=k,
            v=v,
            keys=keys,
            bounds=requests.bounds(step.tables.query_bounds(out.device)),
        )
        self.launch(operands, layer, step)
        if batch.forward_mode.is_decode():
            step.replace_empty(out)
        out[count:] = 0
        return out

    def _keys(
        self, call: AttentionCall, layer: PagedLayer, step: PackedStep, requests: PackedRequests
    ) -> tuple[Keys, tuple[torch.Tensor, ...]]:
        if call.has_own_kv:
            page_size = self.context.token_to_kv_pool.page_size
            return requests.own_pages(page_size, page_size, *call.own_keys(call.v))
        if layer.group is None or layer.kv is None:
            raise call.layer.not_in_pool()
        return requests.keys(LibraryBackend.filled(step.keys)[layer.group]), layer.kv
