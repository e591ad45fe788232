"""The base of the backends of DeepSeek's sparse attention, which turns an indexer's picks into
slots.

Each layer's indexer writes places in a request, -1 for no key. They become slots of the pool here,
or rows of the call's own keys if there is no prefix, on the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from attnmux.core import GraphUnsupported, InvalidInput
from attnmux.core.plugin import LibraryBackend, cu_seqlens, shared_kernel, token_rows

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch


class FindsSlots(Protocol):
    """Kernels with a function that looks slots up."""

    @property
    def topk_slots(self) -> Callable[..., torch.Tensor]:
        """Makes slots of an indexer's picks, as `attnmux.core.topk_slots`."""


K = TypeVar("K", bound=FindsSlots)
L = TypeVar("L")


@dataclass(kw_only=True, slots=True, eq=False)
class PickedStep:
    """A prepared step."""

    rows: torch.Tensor | None = None
    """[T] int64: each token's row of the request table. Set by `fill_step`."""


class PickedBackend(LibraryBackend[K, L, PickedStep, tuple[()]]):
    """Prefill and decoding of MLA over the keys that an indexer picks."""

    @abstractmethod
    def over_pool(self, call: AttentionCall, layer: L, slots: torch.Tensor) -> torch.Tensor:
        """Attention over slots of the layer's buffer, [T, topk] int32; -1 is no key.

        Returns like `attend`.
        """

    @abstractmethod
    def over_call(self, call: AttentionCall, layer: L, rows: torch.Tensor) -> torch.Tensor:
        """Attention over rows of the call's own k, [T, topk] int32; -1 is no key.

        Returns like `attend`.
        """

    def plan_step(self, batch: ForwardBatch, buffers: tuple[()] | None) -> PickedStep:
        if batch.tree_mask is not None:
            raise InvalidInput("custom_mask", got="a mask", expected="None: the indexer masks")
        if buffers is not None and not batch.forward_mode.is_decode():
            raise GraphUnsupported(
                f"{batch.forward_mode.name} runs without a graph: only decode steps are captured"
            )
        return PickedStep()

    def fill_step(self, step: PickedStep, batch: ForwardBatch) -> None:
        step.rows = batch.req_pool_indices
        if batch.extend_seq_lens is not None:
            step.rows = token_rows(step.rows, batch.extend_seq_lens, batch.num_tokens)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> tuple[()]:
        """A decode step reads only the batch's own tensors."""
        return ()

    def attend(
        self, call: AttentionCall, layer: L, step: PickedStep, batch: ForwardBatch
    ) -> torch.Tensor:
        if call.has_own_kv and not batch.forward_mode.is_decode():
            return self.over_call(call, layer, _rows_of_call(batch))
        table, pool = self.context.req_to_token_pool.req_to_token, self.context.token_to_kv_pool
        slots = self.kernels.topk_slots(table, LibraryBackend.filled(step.rows), _picks(batch))
        translated = pool.translate(slots, call.layer.layer_id)
        if translated is not slots:
            slots = torch.where(slots < 0, -1, translated)
        return self.over_pool(call, layer, slots)


def lookup_arguments(context: BackendContext) -> dict[str, Any]:
    """The field `topk_slots` of a backend's kernels, if a plugin offers a launch for it; else
    nothing."""
    fused = shared_kernel("topk_slots", context)
    return {} if fused is None else {"topk_slots": fused}


def _picks(batch: ForwardBatch) -> torch.Tensor:
    if batch.topk_indices is None:
        raise InvalidInput(
            "topk_indices",
            got=None,
            expected="the keys that the indexer picked: the model writes them before each layer",
        )
    return batch.topk_indices


def _rows_of_call(batch: ForwardBatch) -> torch.Tensor:
    """[T, topk] int32: rows of the call's own k, if there is no prefix."""
    picks, (new, _) = _picks(batch), batch.extend_lens()
    starts = token_rows(cu_seqlens(new)[:-1].long(), new, batch.num_tokens).int()
    return torch.where(picks < 0, -1, starts.unsqueeze(1) + picks)
