"""Features of a model beyond attention over all keys, in one vocabulary.

Indexers, keys of blocks, dual chunks, recurrences, images and hidden states are parts. `KINDS` of
`load_decoder.py` lists the kinds; memory and the runner go through a model's parts and know none of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    BackendContext,
    Decision,
    ForwardBatch,
    GraphConfig,
    LayerSpec,
    LinearLayerSpec,
    ModelInput,
    Request,
)
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.requests.sequence import Step

P = TypeVar("P")


class TokenBytes(NamedTuple):
    """Bytes of a token in all layers, besides K and V."""

    beside: int = 0
    """In each slot of the pool, for which the KV pool leaves a share of its memory."""
    full: int = 0
    """Kept as long as K and V of layers without windows."""
    windowed: int = 0
    """Kept as long as K and V of layers with windows."""


class ModelPart:
    """One part of a model. In the order of the methods: it is found and bound, the layers are
    recorded and marked, the backend is asked for and built, and steps run."""

    one_pool: bool = False
    """Whether layers with windows share the pool of all tokens."""
    uncompiled: tuple[str, str] | None = None
    """`got` and `expected` of the refusal to compile a model with it; None if a compiler may."""
    unpieced: str | None = "parts that read the running step"
    """The reason why its model's prompts cannot run in pieces; None if they can."""
    note: str = ""
    """A sentence for the user of a model with it."""

    @classmethod
    def find(cls, model: PreTrainedModel, options: RunnerOptions) -> ModelPart | None:
        """That of a loaded model, for contexts of the options; None without one.

        Raises InvalidInput for one that cannot be served.
        """
        raise NotImplementedError

    def bind(self) -> None:
        """Let the model's modules call ours, before its layers are recorded."""

    def mark(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """The recorded layers as a backend serves them. Raises InvalidInput for those that it does
        not go with."""
        return tuple(layers)

    @property
    def linear(self) -> tuple[LinearLayerSpec, ...]:
        """Layers without softmax attention, known once the model's layers are recorded."""
        return ()

    def ask(self, ways: Sequence[Request], options: RunnerOptions) -> list[Request]:
        """Its requests to backends, one for each way that the model may run, the preferred one
        first.

        Raises InvalidInput for options that it does not go with.
        """
        return list(ways)

    def stored(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """The marked layers as the KV pool stores them."""
        return tuple(layers)

    def bytes_per_token(self, decision: Decision) -> TokenBytes:
        """Bytes that it stores for each token. They are subtracted from the memory of the KV
        pool."""
        return TokenBytes()

    def attach(self, context: BackendContext, decision: Decision) -> None:
        """Make its own pools, and run on the backend of the context from now on.

        Raises PoolExhausted for too little memory, and BackendFailed.
        """

    def captured(self, config: GraphConfig) -> GraphConfig:
        """A configuration of graphs, with the room that it needs in them. Raises GraphUnsupported
        if no graph holds what it does."""
        return config

    def graph_inputs(self) -> Mapping[str, ModelInput]:
        """The tensors among `inputs` that graphs hold."""
        return {}

    def inputs(self, step: Step) -> Mapping[str, torch.Tensor]:
        """The model's arguments in a step, in addition to token ids and their positions."""
        return {}

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions that the model is called with, of those that tokens have."""
        return positions

    @contextmanager
    def eager(self, batch: ForwardBatch) -> Iterator[ForwardBatch]:
        """A block that runs a step eagerly, over the batch that it gets."""
        yield batch


def part_of(parts: Sequence[ModelPart], kind: type[P]) -> P | None:
    """The part of a kind; None without one."""
    return next((part for part in parts if isinstance(part, kind)), None)
