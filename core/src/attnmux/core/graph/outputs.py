"""The outputs of the model's call, in tensors that the graphs of all batch sizes share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from attnmux.core.contract.arguments import described
from attnmux.core.facts.errors import InvalidInput


class FixedOutputs:
    """Outputs of the largest batch; a smaller batch has the first rows.

    Each graph ends with a copy to them, so that the next graph can reuse the memory of its own
    outputs. Otherwise the logits of every batch size would be kept.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = []
        self._structure: pytree.TreeSpec | None = None

    def store(self, outputs: object, num_tokens: int) -> Any:  # noqa: ANN401  # as the model's call returns it
        """Copy the call's outputs for `num_tokens` tokens. Returns them as views of the buffers.

        The first call is that of the largest batch. Raises InvalidInput for outputs that are not
        tensors of one row a token, and for shapes and dtypes that differ from the first call's.
        """
        leaves, structure = pytree.tree_flatten(outputs)
        for leaf in leaves:
            if leaf is not None and not _has_rows(leaf, num_tokens):
                got, expected = f"{_said(leaf)} as output", f"tensors of {num_tokens} rows"
                raise InvalidInput("forward", got=got, expected=expected)
        if self._structure is None:
            self._buffers = [
                None
                if leaf is None
                else torch.empty_like(leaf, memory_format=torch.contiguous_format)
                for leaf in leaves
            ]
            self._structure = structure
        kinds, first_kinds = [list(map(_kind, tensors)) for tensors in (leaves, self._buffers)]
        if structure != self._structure or kinds != first_kinds:
            raise InvalidInput(
                "forward",
                got=f"{', '.join(map(_said, leaves))} for {num_tokens} tokens",
                expected=f"rows of {', '.join(map(_said, self._buffers))}, as for the largest "
                "batch",
            )
        for leaf, buffer in zip(leaves, self._buffers, strict=True):
            if buffer is not None:
                buffer[:num_tokens].copy_(leaf)
        return self.rows(num_tokens)

    def rows(self, num_tokens: int) -> Any:  # noqa: ANN401  # as the model's call returns it
        """The first rows of what was stored last, as views."""
        assert self._structure is not None  # something was stored
        views = [None if buffer is None else buffer[:num_tokens] for buffer in self._buffers]
        return pytree.tree_unflatten(views, self._structure)


def _has_rows(leaf: object, num_tokens: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (num_tokens,)


def _kind(leaf: torch.Tensor | None) -> object:
    """The part of an output that all sizes share."""
    return None if leaf is None else (leaf.shape[1:], leaf.dtype, leaf.device)


def _said(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return described(leaf)
    return "None" if leaf is None else type(leaf).__name__
