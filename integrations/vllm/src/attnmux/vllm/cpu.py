"""vLLM's CPU platform, which asks a named backend of attnmux as vLLM's other platforms do.

vLLM takes the class through its own entry point for platforms. vLLM is unchanged. Without a backend
of attnmux the class behaves like vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from attnmux.vllm.plugin import BACKEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm." + __name__)  # vLLM shows the loggers below its own


class AttnmuxCpuPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """vLLM's class, or attnmux's if it was named. Raises ValueError with the solver's
        reasons, in the words of vLLM's CUDA platform."""
        if selected_backend is None or not _is_ours(selected_backend):
            own: str = super().get_attn_backend_cls(
                selected_backend, attn_selector_config, num_heads
            )
            return own
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"Selected backend {selected_backend} is not valid for this configuration. "
                f"Reason: {reasons}"
            )
        logger.info_once("Using %s backend.", selected_backend)
        return BACKEND

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """vLLM's check. The options that it switches off for its own MLA kernel (chunked prompts,
        prefix caching, other pages than 16) keep the user's values. A drafter gets attnmux too:
        vLLM would choose its own backend, which reads another layout of the shared cache."""
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        asked = (
            cache.block_size if cache.user_specified_block_size else None,
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        )
        super().check_and_update_config(vllm_config)
        model, backend = vllm_config.model_config, vllm_config.attention_config.backend
        if model is None or not _is_ours(backend):
            return
        drafts = vllm_config.speculative_config
        if drafts is not None and drafts.attention_backend is None:
            drafts.attention_backend = backend
        if not model.use_mla:
            return
        page_size, cache.enable_prefix_caching, scheduler.enable_chunked_prefill = asked[:3]
        scheduler.max_num_batched_tokens = asked[3]
        if page_size is not None:
            cache.block_size = page_size


def _is_ours(selected: AttentionBackendEnum | None) -> bool:
    # A CUSTOM that nobody registered has no path
    if selected is None or not (selected.value or selected.is_overridden()):
        return False
    return bool(selected.get_path() == BACKEND)
