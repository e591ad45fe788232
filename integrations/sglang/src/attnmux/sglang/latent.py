"""DeepSeek's models: prompts, too, run on the latent if attnmux serves them."""

from __future__ import annotations

from typing import Any

from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)


def serve_latent(name: str) -> None:
    """Have SGLang's MLA models call the backend of that name absorbed in every mode."""
    handlers.AttentionBackendRegistry.register(name, _absorbed)


def _absorbed(attn: Any, forward_batch: Any) -> AttnForwardMethod:  # noqa: ANN401  # SGLang's
    return AttnForwardMethod.MLA
