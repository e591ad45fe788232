"""Dual chunk attention of Qwen2.5-1M (arXiv:2402.17463), which transformers does not have.

With c = chunk_size - local_size, a key of place j is rotated by j % c. A query of place i meets the
keys of its own chunk rotated by i % c, those of the chunk before by min(i % c + c, chunk_size), and
all earlier ones by min(2 * c - 1, chunk_size). So the model runs with positions i % c, and the
second and third query are the first one, rotated further.

If the config says for how many tokens the model was trained, queries after these grow by
0.1 * ln((i + 1) / trained) + 1, so that an answer does not depend on how its prompt was divided.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnmux.core import ForwardBatch, InvalidInput, LayerSpec
from attnmux.transformers.model.attention import QUERIES
from attnmux.transformers.model.layer_call import LayerCall
from attnmux.transformers.model.part import ModelPart
from attnmux.transformers.options import RunnerOptions

WITHOUT = (
    "transformers runs this model without its dual chunks: beyond the first chunk of {length} "
    "tokens, its own generate gives other answers"
)
"""Shown to the user of a model that has them."""

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class DualChunks(ModelPart):
    """The `dual_chunk_attention_config` of a model's config, for a context of several chunks."""

    unpieced = "dual chunks, whose queries depend on the running step"
    chunk_size: int
    local_size: int
    trained_len: int = 0
    """Tokens of a context that the model was trained for; 0 if queries do not grow."""
    model: PreTrainedModel | None = None

    @classmethod
    def find(cls, model: PreTrainedModel, options: RunnerOptions) -> DualChunks | None:
        chunks = cls.of(model.config, options.max_context_len)
        return None if chunks is None else replace(chunks, model=model)

    @classmethod
    def of(cls, config: PreTrainedConfig, max_context_len: int) -> DualChunks | None:
        """None for other models, and for a context of one chunk, in which nothing differs from
        plain attention.

        Raises InvalidInput for sizes that are no chunk.
        """
        stated = getattr(config, "dual_chunk_attention_config", None)
        if not stated:
            return None
        try:
            chunks = cls(
                chunk_size=int(stated["chunk_size"]),
                local_size=int(stated["local_size"]),
                trained_len=int(stated.get("original_max_position_embeddings") or 0),
            )
        except (KeyError, TypeError, ValueError) as error:
            expected = "numbers chunk_size and local_size"
            raise InvalidInput(
                "dual_chunk_attention_config", got=stated, expected=expected
            ) from error
        if not 0 <= chunks.local_size < chunks.chunk_size:
            expected = "0 <= local_size < chunk_size"
            raise InvalidInput("dual_chunk_attention_config", got=stated, expected=expected)
        limits = (chunks.length, *filter(None, [chunks.trained_len]))
        return None if max_context_len <= min(limits) else chunks

    @property
    def length(self) -> int:
        """c, the tokens of a chunk."""
        return self.chunk_size - self.local_size

    @property
    def note(self) -> str:  # type: ignore[override]  # it has the chunk's length
        return WITHOUT.format(length=self.length)

    def mark(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """Lets each layer make three queries of its one, from now on.

        Raises InvalidInput for a model whose rotary embedding is not found, or scales, and for
        layers with features, which nobody combines with dual chunks.
        """
        self._make_queries()
        for layer in layers:
            if layer.features:
                got = f"dual chunks with {', '.join(sorted(layer.features))}"
                raise InvalidInput(f"layer {layer.layer_id}", got=got, expected="no other feature")
        return tuple(
            replace(layer, kind="dual_chunk", dual_chunk_len=self.length) for layer in layers
        )

    def _make_queries(self) -> None:
        model = self.model
        assert model is not None
        rotary = [module for module in model.modules() if hasattr(module, "inv_freq")]
        if len(rotary) != 1 or getattr(rotary[0], "attention_scaling", 1.0) != 1.0:
            raise InvalidInput(
                type(model).__name__,
                got=f"{len(rotary)} rotary embeddings, or one that scales",
                expected="a single one that rotates alone, whose angles dual chunks continue",
            )
        for module in model.modules():
            if hasattr(module, "q_proj") and hasattr(module, "layer_idx"):
                beside = f"{type(module).__module__}:apply_rotary_pos_emb"
                rotate: Rotate = pkgutil.resolve_name(beside)
                setattr(module, QUERIES, partial(self.queries, rotary[0], rotate))

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions that keys and first queries are rotated by."""
        return positions % self.length

    def queries(
        self, rotary: torch.nn.Module, rotate: Rotate, call: LayerCall, batch: ForwardBatch
    ) -> torch.Tensor:
        """[T, Hq, 3 * D] of the call's q [T, Hq, D], which is rotated by `places`."""
        places = self.places(batch.positions)
        q = call.q.transpose(0, 1).unsqueeze(0)
        last = min(2 * self.length - 1, self.chunk_size)
        parts = [q]
        for place in (
            (places + self.length).clamp(max=self.chunk_size),
            torch.full_like(places, last),
        ):
            further = (place - places).unsqueeze(0)
            parts.append(rotate(q, q, *rotary(q, further))[0])
        joined = torch.cat(parts, dim=-1)[0].transpose(0, 1).contiguous()
        if not self.trained_len:
            return joined
        grown = (
            ((batch.positions + 1).float() / self.trained_len).log().mul(0.1).add(1).clamp(min=1)
        )
        return (joined * grown.view(-1, 1, 1)).to(joined.dtype)
