"""EAGLE 3 heads (arXiv:2503.01840), which read the outputs of several layers of the target.

`fc` makes features of these, of the head's width; the head's own states are such features already.
The layer's attention reads the normed embedding and the normed feature of a token side by side. The
output embeddings count a part of the target's vocabulary.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from attnmux.transformers.draft.eagle_head import EagleHead, check_width


class _Layer(LlamaDecoderLayer):
    """Reads [B, T, 2 * width], embeddings beside features; returns [B, T, width]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, bias = getattr(self.self_attn, name).out_features, config.attention_bias
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, rows, bias=bias))

    def forward(  # type: ignore[override]  # all else is attention's
        self,
        hidden_states: torch.Tensor,
        **given: Any,  # noqa: ANN401  # as transformers calls its layers
    ) -> torch.Tensor:
        embeds, features = hidden_states.chunk(2, dim=-1)
        beside = torch.cat([self.input_layernorm(embeds), self.hidden_norm(features)], dim=-1)
        attended, _ = self.self_attn(hidden_states=beside, **given)
        states: torch.Tensor = features + attended
        states = states + self.mlp(self.post_attention_layernorm(states))
        return states


class Eagle3Head(EagleHead):
    """A head of EAGLE 3 as a model of the engine."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        bias: bool,
        target_width: int,
        token_ids: torch.Tensor | None,
    ) -> None:
        """bias: of `fc`. target_width: of the target's states, of all layers together. token_ids:
        as `EagleHead.token_ids`, on the CPU."""
        super().__init__(config, bias=bias)
        self.fc = nn.Linear(target_width, config.hidden_size, bias=bias)
        self.model.layers[0] = _Layer(config)
        rows = config.vocab_size if token_ids is None else len(token_ids)
        self.lm_head = nn.Sequential(
            LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            nn.Linear(config.hidden_size, rows, bias=False),
        )
        self.token_ids = token_ids

    def from_target(self, states: torch.Tensor) -> torch.Tensor:
        check_width(states, self.fc.in_features)
        features: torch.Tensor = self.fc(states)
        return features

    def join(self, input_ids: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        return self._beside(input_ids, features)
