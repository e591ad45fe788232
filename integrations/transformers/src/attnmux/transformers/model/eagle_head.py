"""EAGLE heads: one decoder layer that drafts from a target model's hidden states.

A head (EAGLE, arXiv:2401.15077) joins the embedding of each token with the target's hidden state of
the token before it. Its own output takes that state's place in later drafts.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from attnmux.core import InvalidInput


class EagleHead(LlamaForCausalLM):
    """A head as a model of the engine. It has no norm before its output, which is its own state.

    This one is of EAGLE 1 and 2: it reads the target's last hidden states, and its embeddings and
    output embeddings are the target's.
    """

    token_ids: torch.Tensor | None
    """[n] int64: the target's ids of the tokens that logits count; None for its vocabulary."""

    def __init__(self, config: LlamaConfig, *, bias: bool) -> None:
        """bias: of `fc`."""
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        # The target's states are normed already, and so are those that the head imitates
        self.model.layers[0].input_layernorm = nn.Identity()
        self.model.norm = nn.Identity()
        self.register_buffer("token_ids", None, persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **given: Any,  # noqa: ANN401  # as transformers calls its models
    ) -> CausalLMOutputWithPast:
        """features: [T, width], from `from_target` or the head's own states. Without, zeros take
        their place: how the layers of the head are recorded."""
        output: CausalLMOutputWithPast = super().forward(
            inputs_embeds=self.join(input_ids, None if features is None else features.unsqueeze(0)),
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            **given,
        )
        return output

    def from_target(self, states: torch.Tensor) -> torch.Tensor:
        """[n, width]: the features of the target's states [n, its width].

        Raises InvalidInput for states of another width.
        """
        check_width(states, self.config.hidden_size)
        return states

    def join(self, input_ids: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        """[B, T, …]: the layer's inputs for tokens [B, T] and the features before them."""
        joined: torch.Tensor = self.fc(self._beside(input_ids, features))
        return joined

    def _beside(self, input_ids: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        """[B, T, 2 * width]: embeddings, and features."""
        embeds = self.model.embed_tokens(input_ids)
        before = torch.zeros_like(embeds) if features is None else features.to(embeds.dtype)
        return torch.cat([embeds, before], dim=-1)


def check_width(states: torch.Tensor, width: int) -> None:
    """Raise InvalidInput for hidden states of a target that keeps others than a head reads."""
    if states.shape[-1] != width:
        expected = f"{width}: RunnerOptions.hidden_layers as the head reads them"
        raise InvalidInput("target", got=f"states of width {states.shape[-1]}", expected=expected)


class _Layer(LlamaDecoderLayer):
    """Reads [B, T, 2 * width], embeddings next to features; returns [B, T, width]."""

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
