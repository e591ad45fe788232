"""DeepSeek's models: prompts, too, run on the latent if attnmux serves them."""

from __future__ import annotations

from typing import Any

from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS


def serve_latent(name: str, runner: Any) -> None:  # noqa: ANN401  # SGLang's ModelRunner
    """Have SGLang's MLA models call the backend of that name absorbed in every mode.

    They pass Q and K in two parts, which saves a copy of each, unless the model scales Q by
    position: SGLang then scales a whole Q alone.
    """
    handlers.AttentionBackendRegistry.register(name, _absorbed)
    scales = getattr(runner.model_config.hf_config, "llama_4_scaling", None) is not None
    if not scales and name not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)


def _absorbed(attn: Any, forward_batch: Any) -> AttnForwardMethod:  # noqa: ANN401  # SGLang's
    return AttnForwardMethod.MLA
