"""The line that starts vLLM with a decision: see `attnmux.core.cli.engines`. Imports no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmux.core import InvalidInput

if TYPE_CHECKING:
    from attnmux.core import Decision


def launch(decision: Decision, model: str) -> list[str]:
    """`vllm serve` with the decision's page size and, where it is not the model's, KV dtype.

    A page size of 1 means that every page size will do: vLLM's own choice stays.
    Raises InvalidInput for 4-bit K and V, and for layers that keep another KV dtype.
    """
    words = ["vllm", "serve", model, "--attention-backend", "ATTNMUX"]
    if decision.page_size > 1:
        words += ["--block-size", str(decision.page_size)]
    stored = sorted({each.kv_dtype for each in decision.groups})
    if len(stored) > 1:
        expected = "one: the line names no layers, so add vLLM's --kv-cache-dtype-skip-layers to it"
        raise InvalidInput("kv_dtype_skip", got=f"KV in {' and '.join(stored)}", expected=expected)
    if decision.kv_dtype == "fp4_e2m1":
        expected = "8 bits or more: no 4-bit floats in the pools of vLLM"
        raise InvalidInput("kv_dtype", got=decision.kv_dtype, expected=expected)
    if decision.kv_dtype != decision.request.dtype:
        words += ["--kv-cache-dtype", decision.kv_dtype]
    return words
