"""The line that starts SGLang with a decision: see `attnmux.core.cli.engines`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmux.core import InvalidInput

if TYPE_CHECKING:
    from attnmux.core import Decision


def launch(decision: Decision, model: str) -> list[str]:
    """The server with the decision's page size and, where it is not the model's, KV dtype.

    Raises InvalidInput for 4-bit K and V, and for layers that keep another KV dtype.
    """
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--attention-backend", "attnmux", "--page-size", str(decision.page_size)]
    stored = sorted({each.kv_dtype for each in decision.groups})
    if len(stored) > 1:
        expected = "one: pools of SGLang have one KV dtype"
        raise InvalidInput("kv_dtype_skip", got=f"KV in {' and '.join(stored)}", expected=expected)
    if decision.kv_dtype == "fp4_e2m1":
        expected = "8 bits or more: no 4-bit floats in the pools of SGLang"
        raise InvalidInput("kv_dtype", got=decision.kv_dtype, expected=expected)
    if decision.kv_dtype != decision.request.dtype:
        words += ["--kv-cache-dtype", decision.kv_dtype]
    return words
