"""Settings for sampling in a checkpoint's generation_config.json."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel

from attnmux.transformers.model.packed_decoder import PackedDecoder

SERVED = ("temperature", "top_p")
SAMPLING = (
    *SERVED,
    *("top_k", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "no_repeat_ngram_size"),
)
"""Fields that change which token is drawn."""


def ignored_sampling(model: PreTrainedModel | PackedDecoder) -> str:
    """A sentence about settings that are followed only if the user requests them; empty if there
    are none. Tokens are the likeliest ones then, so that a text can be repeated."""
    config = model.generation_config
    if not isinstance(config, GenerationConfig):
        return ""
    stated = config.to_diff_dict()
    settings = {name: stated[name] for name in SAMPLING if stated.get(name) is not None}
    if not stated.get("do_sample"):
        # Temperature and its like say nothing about greedy decoding
        settings = {name: settings[name] for name in SAMPLING[-2:] if name in settings}
    if not settings:
        return ""
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    options = " ".join(f"--{n.replace('_', '-')} {settings[n]}" for n in SERVED if n in settings)
    follow = f"; {options} follows what can be" if options else ""
    return f"generation_config.json is ignored, tokens are the likeliest ones: {listed}{follow}"
