"""Backends made of backends: results of a decision, never candidates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.call import AttentionCall
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.latent import UpProjection
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.steps import StepBackend, prepared
from attnmux.core.facts.errors import InvalidInput

MemberSteps = Iterable[tuple[StepBackend, ForwardBatch]]
"""The members that a step prepares, each with the step as it gets it."""

Route = tuple[AttentionBackend, AttentionCall, ForwardBatch]
"""The member that attends in a layer, with the call and the prepared step as it gets them."""


class CompositeBackend(AttentionBackend):
    """Prepares each step for some of its members, and sends each layer to one of them.

    All share one KV pool.
    """

    def __init__(self, context: BackendContext, members: Sequence[AttentionBackend]) -> None:
        """members: the first one says how a graph runner pads."""
        super().__init__(context)
        self.members = tuple(members)
        self._steps: tuple[tuple[StepBackend, ForwardBatch], ...] = ()

    @abstractmethod
    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        """The batches that a step prepares. Unless eager, tensors are where captured graphs read
        them."""

    @abstractmethod
    def route(self, call: AttentionCall, batch: ForwardBatch) -> Route:
        """The backend that attends in a layer of a prepared step."""

    def step_of(self, member: AttentionBackend) -> ForwardBatch:
        """The prepared step as the member gets it."""
        return prepared(next((step for each, step in self._steps if each is member), None))

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._steps = tuple(self.parts(batch, eager=True))
        for backend, step in self._steps:
            backend.init_forward_metadata(step)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self._steps = tuple(self.parts(batch, eager=False))
        for backend, step in self._steps:
            backend.init_forward_metadata_out_graph(step, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        for backend, step in self._steps:
            backend.init_forward_metadata_in_graph(step)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for member in self.members:
            member.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.members[0].get_cuda_graph_seq_len_fill_value()

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        for member in self.members:
            member.check_lse(layer, batch)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        backend, call, step = self.route(call, batch)
        return backend.forward_decode(call, step)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        backend, call, step = self.route(call, batch)
        return backend.forward_extend(call, step)

    @staticmethod
    def check_context(argument: str, first: AttentionBackend, *others: AttentionBackend) -> None:
        """Raise InvalidInput for backends of another context than the first's."""
        if any(other.context is not first.context for other in others):
            expected = "backends of one context, whose KV pool they share"
            raise InvalidInput(argument, got="a backend of another context", expected=expected)

    @staticmethod
    def check_padding(argument: str, first: AttentionBackend, *others: AttentionBackend) -> None:
        """Raise InvalidInput for other padding rows than the first's: one runner pads for all."""
        fill = first.get_cuda_graph_seq_len_fill_value()
        for other in others:
            padding = other.get_cuda_graph_seq_len_fill_value()
            if padding != fill:
                expected = f"{fill} as `seq_lens` of a padding row, as the first backend has"
                raise InvalidInput(argument, got=padding, expected=expected)


class DispatchingBackend(CompositeBackend):
    """Sends each step to the backend that `serving` returns."""

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        """The backend of a step: the first member, unless overridden."""
        return self.members[0]

    def as_served(self, batch: ForwardBatch) -> ForwardBatch:
        """A prepared step as that backend gets it."""
        return batch

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        return ((self.serving(batch), batch),)

    def route(self, call: AttentionCall, batch: ForwardBatch) -> Route:
        return self.serving(batch), call, self.as_served(batch)

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        self.serving(batch).check_lse(layer, batch)

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        self.serving(batch).save_kv(k, v, layer, batch, k_rope=k_rope)

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        projection: UpProjection,
    ) -> torch.Tensor:
        serving, served = self.serving(batch), self.as_served(batch)
        return serving.forward_latent(q, latent, k_rope, layer, served, projection)


class HybridAttnBackend(DispatchingBackend):
    """Sends each step to the backend of its phase.

    Decode steps go to `decode`; EXTEND and MIXED to `prefill`; TARGET_VERIFY and DRAFT_EXTEND to
    the one that the request's `speculative_attention_mode` names.
    """

    def __init__(self, *, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        """Raises InvalidInput for backends of different contexts."""
        self.check_context("prefill", decode, prefill)
        super().__init__(decode.context, (decode, prefill))
        self.prefill = prefill
        self.decode = decode
        mode = self.context.request.speculative_attention_mode
        self._speculative = decode if mode == "decode" else prefill

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The child for steps of that mode."""
        if mode.is_decode_or_idle():
            return self.decode
        if mode.is_target_verify() or mode.is_draft_extend():
            return self._speculative
        return self.prefill

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        return self.select(batch.forward_mode)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """For the decode backend, and for the prefill backend if it verifies drafts.

        A `GraphRunner` calls only the child that `select` returns.
        """
        self.decode.init_cuda_graph_state(max_bs, max_num_tokens)
        if self.context.request.spec_topk and self._speculative is self.prefill:
            self.prefill.init_cuda_graph_state(max_bs, max_num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sizes:
    """A range of batch sizes, and the backend that decodes them."""

    least: int
    most: int | None
    """None: no limit."""
    backend: AttentionBackend

    def hold(self, batch_size: int) -> bool:
        return self.least <= batch_size and (self.most is None or batch_size <= self.most)


class BatchSizeAttnBackend(DispatchingBackend):
    """Sends a decode step to the backend of its batch size, and every other step to `usual`.

    In a graph the padded batch size decides, at capture and at replay, so that each graph has one
    backend.
    """

    def __init__(self, *, usual: AttentionBackend, sizes: Sequence[Sizes]) -> None:
        """Raises InvalidInput for backends of different contexts, for overlapping ranges, and for
        backends whose padding rows differ in length, since one graph runner pads for all."""
        others = [size.backend for size in sizes]
        self.check_context("sizes", usual, *others)
        self.check_padding("sizes", usual, *others)
        super().__init__(usual.context, (usual, *others))
        self.usual = usual
        self.sizes = tuple(sorted(sizes, key=lambda each: each.least))
        end: int | None = 0
        for each in self.sizes:
            if end is None or each.least <= end or (each.most or each.least) < each.least:
                got = f"{each.least} to {each.most} after {end}"
                raise InvalidInput("sizes", got=got, expected="ranges that do not overlap")
            end = each.most

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        if not batch.forward_mode.is_decode():
            return self.usual
        held = (size.backend for size in self.sizes if size.hold(batch.batch_size))
        return next(held, self.usual)

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """Itself for decode steps, whose size decides; otherwise a child of `usual`."""
        return self if mode.is_decode_or_idle() else self.usual.select(mode)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Gives each backend room for the sizes that it serves, and `usual` for all sizes."""
        self.usual.init_cuda_graph_state(max_bs, max_num_tokens)
        for size in self.sizes:
            if size.least <= max_bs:
                largest = max_bs if size.most is None else min(size.most, max_bs)
                tokens = max_num_tokens * largest // max_bs
                size.backend.init_cuda_graph_state(largest, tokens)
