"""The line that starts vLLM with a decision: see `attnmux.core.cli.engines`. Imports no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.core import Decision


def launch(decision: Decision, model: str) -> list[str]:
    """`vllm serve` with the decision's page size and, where it is not the model's, KV dtype.

    A page size of 1 means that every page size will do: vLLM's own choice stays.
    """
    words = ["vllm", "serve", model, "--attention-backend", "ATTNMUX"]
    if decision.page_size > 1:
        words += ["--block-size", str(decision.page_size)]
    if decision.kv_dtype != decision.request.dtype:
        words += ["--kv-cache-dtype", decision.kv_dtype]
    return words
