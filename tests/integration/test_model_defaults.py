"""What a silent config.json means, against the config classes of transformers."""

from __future__ import annotations

import pytest

from attnmux.core.choosing.model_config import DEFAULTS

transformers = pytest.importorskip("transformers")

CLASSES = {
    "llama": "LlamaConfig",
    "llama4_text": "Llama4TextConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "gpt_oss": "GptOssConfig",
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
}


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_the_table_says_what_the_class_does(model_type) -> None:
    config = getattr(transformers, CLASSES[model_type])()
    for name, value in DEFAULTS[model_type].items():
        said = getattr(config, name)
        if name == "sliding_window" and DEFAULTS[model_type].get("use_sliding_window") is False:
            assert said is None  # the class forgets a window that is switched off
        else:
            assert said == value, name
