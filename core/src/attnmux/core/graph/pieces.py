"""Captures a model's steps over prompts in pieces, from one attention call to the next, and replays
them.

Attention over a prompt depends on lengths that the host knows, and its kernels are chosen by them.
All else in a decoder depends on the number of tokens alone. So the pieces are captured for some
numbers of tokens, and between them attention runs eagerly, over the tokens that the step has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.op import ForwardContext
from attnmux.core.facts.errors import GraphUnsupported, InvalidInput
from attnmux.core.graph.breaks import Breaks, CapturedPieces
from attnmux.core.graph.config import padded_size
from attnmux.core.graph.devices import DeviceGraphs, GraphStep
from attnmux.core.graph.outputs import FixedOutputs

INPUT = "input_ids"


class PieceRunner:
    """Runs EXTEND and MIXED steps from pieces of device graphs.

    It owns the tensors that the graphs read. `replay` copies the tokens there, pads them to a
    captured size, and launches the pieces. Attention runs between them on the backend, which the
    caller has prepared for the step's own batch. A padded token is token 0 at position 0, has no
    part in attention, and gets a result of 0 from it.
    """

    Forward: TypeAlias = Callable[[ForwardBatch, Mapping[str, torch.Tensor], torch.Tensor], Any]
    """A model's call, with the batch, its `input_ids` [T] int64, and the indices [n] int64 of
    tokens whose results it returns: a tensor, or a tuple, list or dict of tensors, each with n
    rows."""

    def __init__(
        self,
        backend: AttentionBackend,
        forward: Forward,
        *,
        sizes: Sequence[int],
        max_rows: int,
        devices: DeviceGraphs,
    ) -> None:
        """forward: called inside `ForwardContext.enter`. sizes: numbers of tokens, ascending.
        max_rows: the most tokens of a step whose results are needed.

        Raises InvalidInput for other sizes, and GraphUnsupported for a context in debug mode,
        whose checks synchronise.
        """
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise InvalidInput("sizes", got=sizes, expected="ascending numbers of tokens from 1 up")
        InvalidInput.check_at_least(1, "max_rows", max_rows)
        if backend.context.debug:
            raise GraphUnsupported("the context is in debug mode, whose checks synchronise")
        self.sizes = tuple(sizes)
        self._backend, self._forward, self._devices = backend, forward, devices
        self._max_rows = max_rows
        device = backend.context.device
        # A tensor made in inference mode could not be written outside of it later
        with torch.inference_mode(False):
            self._tokens = torch.zeros((3, sizes[-1]), dtype=torch.int64, device=device)
            """Ids, positions and slots."""
            self._keep = torch.zeros(self.rows(sizes[-1]), dtype=torch.int64, device=device)
        self._outputs = FixedOutputs()
        self._captured: dict[int, CapturedPieces] = {}

    @property
    def memory_bytes(self) -> Mapping[int, int]:
        """Bytes that the pieces of each captured size took. All share a pool, so that the largest,
        which is captured first, takes most of it."""
        return {size: self._captured[size].nbytes for size in sorted(self._captured)}

    def rows(self, size: int) -> int:
        """The most results of a step of so many tokens."""
        return min(size, self._max_rows)

    def size_for(self, batch: ForwardBatch, num_rows: int) -> int | None:
        """The size that serves a step, captured or not yet; None if none does."""
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return None
        others = (batch.spec_info, batch.encoder_lens, batch.multi_item, batch.topk_indices)
        if any(other is not None for other in others):
            return None
        size = padded_size(batch.num_tokens, self.sizes)
        return None if size is None or num_rows > self.rows(size) else size

    def capture(self, size: int | None = None) -> None:
        """Capture a size, or all; the largest one first. Does nothing for those that are captured.

        Raises GraphUnsupported for a model that cannot be captured in pieces, and InvalidInput for
        a size that is none of the runner's.
        """
        if size is not None and size not in self.sizes:
            raise InvalidInput("size", got=size, expected=f"one of {self.sizes}")
        wanted = self.sizes if size is None else (size, self.sizes[-1])
        missing = sorted(set(wanted).difference(self._captured), reverse=True)
        if not missing:
            return
        # Tensors made in inference mode could not be written outside of it later
        with torch.inference_mode(False), torch.no_grad(), self._devices.session():
            for one_size in missing:
                self._captured[one_size] = self._capture(one_size)

    def is_captured(self, size: int) -> bool:
        return size in self._captured

    def replay(self, batch: ForwardBatch, input_ids: torch.Tensor, keep: torch.Tensor) -> Any:  # noqa: ANN401  # as the model's call returns it
        """Run a step that the backend is prepared for. Returns the results after the tokens at
        `keep` [n] int64, which the next replay overwrites.

        input_ids: [T] int64. Raises InvalidInput unless `size_for` names a captured size.
        """
        num_tokens, num_rows = batch.num_tokens, keep.shape[0]
        size = self.size_for(batch, num_rows)
        captured = None if size is None else self._captured.get(size)
        if size is None or captured is None:
            got, expected = f"{num_tokens} tokens", f"a captured size: {[*self.memory_bytes]}"
            raise InvalidInput("batch", got=got, expected=expected)
        tokens = self._tokens[:, :num_tokens]
        sources = [input_ids, batch.positions, batch.out_cache_loc, keep]
        torch._foreach_copy_([*tokens.unbind(), self._keep[:num_rows]], sources)
        # Tokens of an earlier, longer step, and indices among them
        self._tokens[:, num_tokens:size].zero_()
        self._keep[num_rows:].zero_()
        for piece, call in zip(captured.pieces, captured.calls, strict=False):
            piece.replay()
            call.run(self._backend, batch)
        captured.pieces[-1].replay()
        return self._outputs.rows(num_rows)

    def _capture(self, size: int) -> CapturedPieces:
        device, (ids, positions, slots) = self._tokens.device, self._tokens[:, :size].unbind()
        keep, length = self._keep[: self.rows(size)], torch.tensor([size], dtype=torch.int32)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
            seq_lens=length.to(device),
            out_cache_loc=slots,
            positions=positions,
            extend_seq_lens=length.to(device),
            extend_prefix_lens=torch.zeros_like(length, device=device),
            extend_num_tokens=size,
        )
        self._tokens.zero_()
        self._keep.zero_()
        breaks = Breaks(self._backend, self._devices)

        def run_model() -> Any:  # noqa: ANN401  # as the model's call returns it
            with ForwardContext.enter(breaks, batch):
                return self._outputs.store(self._forward(batch, {INPUT: ids}, keep), len(keep))

        for _ in range(self._devices.NUM_WARM_UPS):
            self._devices.warm_up(GraphStep(prepare=lambda: None, forward=run_model))
        return breaks.capture(run_model)
