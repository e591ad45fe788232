"""Steps of many new tokens: the model compiled in pieces, attention between them.

Attention of an extend step depends on every request's lengths, so a graph of the whole step would
serve no other. The rest of the model depends on the number of tokens alone: it is compiled, and
Inductor's graph partition splits it at `attnmux::attention_with_output`, whose tag keeps it out of
CUDA graphs. What lies between two calls is captured once for each padded number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.errors import InvalidInput
from attnmux.core.graph.config import Forward, ModelInput, check_names
from attnmux.core.graph.progress import show_progress
from attnmux.core.graph.runner import NO_INPUTS, NO_MODEL_INPUTS, NUM_WARM_UPS, Progress
from attnmux.core.graph.sizes import padded_size
from attnmux.core.op import forward_context

Compiler: TypeAlias = Callable[[Forward], Forward]

CAPTURED_MODES = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND})


def compile_in_pieces(forward: Forward) -> Forward:
    """Compile with Inductor, with CUDA graphs between the calls of attention.

    One compilation serves all numbers of tokens; each gets graphs of its own. Without CUDA
    nothing is split and nothing captured.
    """
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "graph_partition": True,
        "triton.cudagraphs": torch.cuda.is_available(),
    }
    return torch.compile(forward, dynamic=True, options=options)


class PiecewiseRunner:
    """Runs extend steps through a compiled model, padded to one of a few numbers of tokens.

    The model sees `size` tokens, the last of them padding; attention sees the step's own, and
    gives zeros for the others.
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
        """forward: called inside `forward_context` with `inputs` and a batch of which it may read
        `positions`; it returns tensors of T rows. token_counts: the sizes, from 2 up.
        """
        if not token_counts or min(token_counts) < 2:
            raise InvalidInput("token_counts", came=list(token_counts), expected="sizes from 2 up")
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
        """Run every size, from large to small, until it is compiled and captured.

        No token is a request's: nothing is attended to and nothing written to the KV pool.
        """
        device = self._backend.context.device
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        no_lens = nothing.int()
        batch = ForwardBatch(
            forward_mode=ForwardMode.IDLE,
            batch_size=0,
            req_pool_indices=nothing,
            seq_lens=no_lens,
            out_cache_loc=nothing,
            positions=nothing,
        )
        sizes = self.token_counts[::-1]
        shown: Iterable[int] = self._progress(sizes) if self._rank == 0 else sizes
        for size in shown:
            # CUDA graphs are recorded in the run after the one that compiles, then replayed.
            for _ in range(NUM_WARM_UPS + 1):
                with _mode():
                    self._run(batch, size)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether a size holds the batch's tokens."""
        return self._size(batch) is not None

    def run(self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor] = NO_INPUTS) -> Any:  # noqa: ANN401  # as the model's call returns it
        """Run a step. Returns what the model's call did for the batch's own T tokens; the next
        step overwrites it.

        Raises InvalidInput for a batch that `can_run` refuses, and for tensors that do not fit.
        """
        size, num_tokens = self._size(batch), batch.num_tokens
        if size is None:
            raise InvalidInput(
                "batch",
                came=f"{batch.forward_mode.name} of {num_tokens} tokens",
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
        if batch.topk_indices is not None:  # of the step's own rows, and the model's are padded
            return None
        return padded_size(batch.num_tokens, self.token_counts)

    def _load(self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], size: int) -> None:
        """Copy to the fixed buffers; rows behind are zeros."""
        num_tokens = batch.num_tokens
        sources = {**inputs, "positions": batch.positions}
        views = self._views[size]
        check_names(sources, views)
        for name, view in views.items():
            dim = len(self._inputs[name].leading)
            source, target = sources.get(name), view.narrow(dim, 0, num_tokens)
            if source is None or source.shape != target.shape or source.dtype != target.dtype:
                came = None if source is None else f"{source.dtype} of {tuple(source.shape)}"
                raise InvalidInput(
                    name, came=came, expected=f"{target.dtype} of {tuple(target.shape)}"
                )
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
    """The one mode that a model is compiled for, whatever its caller's is."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _make_views(
    inputs: Mapping[str, ModelInput], sizes: Sequence[int], device: torch.device
) -> dict[int, dict[str, torch.Tensor]]:
    """Every input in every size. Those of one input begin at one address.

    They are contiguous and no views of another tensor, whose shape would be part of what a model
    is compiled for: so one compilation serves all sizes.
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
