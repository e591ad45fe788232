"""Layers that see a window of keys and, in the same softmax, keys that modules of the model make.

Such a module hands its layer no keys here: they go to a pool, and attention to them is merged with
the window's.
"""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from attnmux.core import (
    BackendContext,
    Decision,
    ForwardBatch,
    ForwardContext,
    InvalidInput,
    LayerSpec,
    Request,
    torch_dtype,
)
from attnmux.transformers.model.attention import MORE_KEYS
from attnmux.transformers.model.layer_call import LayerCall
from attnmux.transformers.model.part import ModelPart, TokenBytes
from attnmux.transformers.model.sparse.compressed_keys import CompressedKeys
from attnmux.transformers.model.sparse.compressed_pool import CompressedPool, CompressedShape
from attnmux.transformers.model.sparse.compressor import OVERLAPPING, Compressor
from attnmux.transformers.options import RunnerOptions


@dataclass(kw_only=True, eq=False)
class Compressors(ModelPart):
    """The modules of a model."""

    unpieced = "keys of blocks, which read the running step"
    uncompiled = (
        "compressed keys",
        "a model whose layers make no keys of blocks, which read the running step",
    )

    each: tuple[Compressor, ...]
    sinks: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """Sinks of their layers, which a backend does not get."""
    keys: dict[int, CompressedKeys] = field(default_factory=dict)
    """By layer; none while a probe runs."""
    is_captured: bool = field(default=True, init=False)
    """Whether steps have static shapes: any that do not run `eager`."""

    @classmethod
    def find(cls, model: torch.nn.Module, options: RunnerOptions) -> Compressors | None:
        """Raises InvalidInput for a module that makes other keys than ours."""
        compressors = tuple(
            Compressor(module=child, owner=owner)
            for owner in model.modules()
            for child in owner.children()
            if type(child).__name__ in OVERLAPPING
        )
        for compressor in {type(each.module): each for each in compressors}.values():
            if not compressor.agrees():
                name = type(compressor.module).__name__
                expected = "those of transformers 5.23"
                raise InvalidInput(name, got="other keys of blocks of tokens", expected=expected)
        return cls(each=compressors) if compressors else None

    def bind(self) -> None:
        """Let the modules keep what they make, and their layers' attention read it."""
        for compressor in self.each:
            compressor.module.forward = self._bound(compressor)
            setattr(compressor.owner, MORE_KEYS, self._attending(compressor))

    def mark(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """The layers as a backend serves them: sinks come after all keys."""
        ids = {compressor.layer_id for compressor in self.each}
        self.sinks = {layer.layer_id: layer.sinks for layer in layers if layer.layer_id in ids}
        return tuple(
            replace(layer, sinks=None) if layer.layer_id in ids else layer for layer in layers
        )

    def ask(self, ways: Sequence[Request], options: RunnerOptions) -> list[Request]:
        check_blocks(options)
        kinds = Counter(str(compressor.owner.layer_type) for compressor in self.each)
        return [
            way.replace(origin="model", lse=True, compressed_layers=kinds)
            for way in ways
            if not way.latent
        ]

    def stored(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """The layers with windows of as many tokens as are kept for them, and for all of one pool:
        the rows for keys are in its slots."""
        least = max(compressor.shape.earlier_tokens for compressor in self.each)
        return tuple(
            replace(layer, sliding_window_size=max(layer.sliding_window_size, least))
            if layer.sliding_window_size >= 0
            else layer
            for layer in layers
        )

    def bytes_per_token(self, decision: Decision) -> TokenBytes:
        """Bytes of keys, and of the rows that they are made from."""
        parts = [
            CompressedPool.bytes_per_token(
                shape,
                page_size=decision.page_size,
                dtype=torch_dtype(decision.request.dtype or decision.kv_dtype),
                kv_dtype=torch_dtype(decision.kv_dtype),
                num_layers=len(alike),
            )
            for shape, alike in self._by_shape().items()
        ]
        full, windowed = (sum(numbers) for numbers in zip(*parts, strict=True))
        return TokenBytes(full=full, windowed=windowed)

    def attach(self, context: BackendContext, decision: Decision) -> None:
        """Write to a pool for each shape, and read it, from now on. Raises as `CompressedPool`
        does."""
        dtype = torch_dtype(decision.request.dtype or decision.kv_dtype)
        for shape, alike in self._by_shape().items():
            ids = [layer.layer_id for layer in alike]
            pool = CompressedPool(shape, pool=context.token_to_kv_pool, dtype=dtype, layer_ids=ids)
            layers = [context.layer(layer_id) for layer_id in ids]
            self.keys.update(dict.fromkeys(ids, CompressedKeys(pool, context, layers)))

    @contextmanager
    def eager(self, batch: ForwardBatch) -> Iterator[ForwardBatch]:
        """Let shapes follow the lengths on the host."""
        self.is_captured = False
        try:
            yield batch
        finally:
            self.is_captured = True

    def _by_shape(self) -> dict[CompressedShape, list[Compressor]]:
        shapes: dict[CompressedShape, list[Compressor]] = {}
        for compressor in self.each:
            shapes.setdefault(compressor.shape, []).append(compressor)
        return shapes

    def _bound(self, compressor: Compressor) -> Callable[..., tuple[torch.Tensor, None]]:
        def forward(
            hidden_states: torch.Tensor,
            q_residual: torch.Tensor,
            position_ids: torch.Tensor,
            past_key_values: None,
            layer_idx: int,
        ) -> tuple[torch.Tensor, None]:
            if self.keys:
                rows, batch = compressor.rows(hidden_states), ForwardContext.current().batch
                keys, captured = self.keys[compressor.layer_id], self.is_captured
                keys.write(compressor.layer_id, rows, batch, compressor.make, captured=captured)
                compressor.queries = compressor.asks(hidden_states, q_residual, position_ids)
            return hidden_states.new_empty((1, 1, 0, compressor.module.head_dim)), None

        return forward

    def _attending(self, compressor: Compressor) -> Callable[..., None]:
        def attend(
            call: LayerCall, batch: ForwardBatch, out: torch.Tensor, lse: torch.Tensor
        ) -> None:
            layer_id, queries = compressor.layer_id, compressor.queries
            compressor.queries = None
            self.keys[layer_id].attend(
                layer_id,
                call.q,
                batch,
                out,
                lse,
                queries=queries,
                sinks=self.sinks[layer_id],
                captured=self.is_captured,
            )

        return attend


def has_compressors(model_class: type[torch.nn.Module]) -> bool:
    """Whether the module of a model's class has modules that make keys."""
    return any(hasattr(pkgutil.resolve_name(model_class.__module__), name) for name in OVERLAPPING)


def check_blocks(options: RunnerOptions) -> None:
    """Raise InvalidInput for options that do not go together with keys of blocks."""
    if options.draft_topk > 1:
        expected = "1, chains of drafts: a key stands for a block of places"
        raise InvalidInput("draft_topk", got=options.draft_topk, expected=expected)
    if options.ranks.size > 1:
        expected = "1: the rows for keys are not split"
        raise InvalidInput("ranks", got=options.ranks.size, expected=expected)
