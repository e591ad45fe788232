"""Steps of many new tokens: the model is compiled in pieces, with attention between them.

Attention of an extend step depends on every request's lengths, so that a graph of the whole step
could not be reused. The rest of the model depends only on the number of tokens. It is compiled, and
Inductor's graph partition splits it at `attnmux::attention_with_output`, whose tag keeps it out of
CUDA graphs. Each piece between two calls is captured once for each padded number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from attnmux.core.arguments import described
from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.errors import InvalidInput
from attnmux.core.graph.config import (
    NO_INPUTS,
    NO_MODEL_INPUTS,
    NUM_WARM_UPS,
    Forward,
    ModelInput,
    Progress,
    check_names,
    padded_size,
    show_progress,
)
from attnmux.core.op import forward_context

Compiler: TypeAlias = Callable[[Forward], Forward]

CAPTURED_MODES = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND})


def compile_in_pieces(forward: Forward) -> Forward:
    """Compile with Inductor, with CUDA graphs between the calls of attention.

    One compilation serves all numbers of tokens; each number has its own graphs. Without CUDA the
    model is neither split nor captured.
    """
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "graph_partition": True,
        "triton.cudagraphs": torch.cuda.is_available(),
    }
    return torch.compile(forward, dynamic=True, options=options)


class PiecewiseRunner:
    """Runs extend steps through a compiled model, padded to one of a few numbers of tokens.

    The model sees a padded number of tokens. Attention sees the step's own, and returns zeros for
    the padding.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        forward: Forward,
        token_counts: Sequence[int],
        *,
        inputs: Mapping[str, ModelInput] = NO_MODEL_INPUTS,
        compiler: Compiler = compile_in_pieces,
        progress: Progress = show_progress,
        rank: int = 0,
    ) -> None:
        """forward: called inside `forward_context` with a batch, of which it may read `positions`,
        and `inputs`; it returns tensors of T rows. token_counts: the padded sizes, from 2 up.
        """
        if not token_counts or min(token_counts) < 2:
            raise InvalidInput("token_counts", got=list(token_counts), expected="sizes from 2 up")
        self.token_counts = tuple(sorted(set(token_counts)))
        self._backend = backend
        self._forward = compiler(forward)
        self._progress = progress
        self._rank = rank
        with torch.inference_mode(False):
            self._inputs = dict(inputs)
            self._inputs["positions"] = ModelInput(dtype=torch.int64)
            self._views = _make_views(self._inputs, self.token_counts, backend.context.device)

    def capture(self) -> None:
        """Compile and capture every size, from large to small.

        All tokens are padding, so that attention does nothing and the KV pool is not written.
        """
        device = self._backend.context.device
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.IDLE,
            batch_size=0,
            req_pool_indices=empty,
            seq_lens=empty.int(),
            out_cache_loc=empty,
            positions=empty,
        )
        sizes = self.token_counts[::-1]
        shown: Iterable[int] = self._progress(sizes) if self._rank == 0 else sizes
        for size in shown:
            # The first run compiles, the next records CUDA graphs, and the last replays them
            for _ in range(NUM_WARM_UPS + 1):
                with _mode():
                    self._run(batch, size)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether a size holds the batch's tokens."""
        return self._size(batch) is not None

    def run(self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor] = NO_INPUTS) -> Any:  # noqa: ANN401  # as the model's call returns it
        """Run a step. Returns the model's result for the batch's own T tokens, which the next step
        overwrites.

        Raises InvalidInput for a batch that `can_run` refuses, and for tensors that do not fit.
        """
        size, num_tokens = self._size(batch), batch.num_tokens
        if size is None:
            raise InvalidInput(
                "batch",
                got=f"{batch.forward_mode.name} of {num_tokens} tokens",
                expected=f"an extend step of 1 to {self.token_counts[-1]} tokens, no topk_indices",
            )
        with _mode():
            self._load(batch, inputs, size)
            self._backend.init_forward_metadata(batch)
            outputs = self._run(batch, size)
        return pytree.tree_map_only(torch.Tensor, lambda rows: rows[:num_tokens], outputs)

    def _size(self, batch: ForwardBatch) -> int | None:
        if batch.forward_mode not in CAPTURED_MODES or not batch.num_tokens:
            return None
        if batch.topk_indices is not None:  # its rows are not padded as the model's are
            return None
        return padded_size(batch.num_tokens, self.token_counts)

    def _load(self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], size: int) -> None:
        """Copy to the fixed buffers; the rows after the batch's are zeros."""
        num_tokens = batch.num_tokens
        sources = {**inputs, "positions": batch.positions}
        views = self._views[size]
        check_names(sources, views)
        for name, view in views.items():
            dim = len(self._inputs[name].leading)
            source, target = sources.get(name), view.narrow(dim, 0, num_tokens)
            if source is None or source.shape != target.shape or source.dtype != target.dtype:
                got = None if source is None else described(source)
                raise InvalidInput(name, got=got, expected=described(target))
        for name, view in views.items():
            dim = len(self._inputs[name].leading)
            view.narrow(dim, 0, num_tokens).copy_(sources[name])
            view.narrow(dim, num_tokens, size - num_tokens).zero_()

    def _run(self, batch: ForwardBatch, size: int) -> Any:  # noqa: ANN401  # as the model's call returns it
        inputs = dict(self._views[size])
        padded = replace(batch, positions=inputs.pop("positions"))
        with forward_context(self._backend, batch):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch's own
            return self._forward(padded, inputs)


@contextmanager
def _mode() -> Iterator[None]:
    """The mode that a model is compiled for, whatever the caller's is."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _make_views(
    inputs: Mapping[str, ModelInput], sizes: Sequence[int], device: torch.device
) -> dict[int, dict[str, torch.Tensor]]:
    """Every input in every size; the tensors of one input share one address.

    They are contiguous and not views of one tensor: a model is compiled for the shape of a view's
    base, and one compilation must serve all sizes.
    """
    views: dict[int, dict[str, torch.Tensor]] = {size: {} for size in sizes}
    for name, given in inputs.items():
        shape = (*given.leading, max(sizes), *given.trailing)
        memory = torch.zeros(shape, dtype=given.dtype, device=device).untyped_storage()
        for size in sizes:
            shape = (*given.leading, size, *given.trailing)
            stride = torch.empty(shape, device="meta").stride()
            empty = torch.empty(0, dtype=given.dtype, device=device)
            views[size][name] = empty.set_(memory, 0, shape, stride)
    return views
