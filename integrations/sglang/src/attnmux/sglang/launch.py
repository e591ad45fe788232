"""The line that starts SGLang with a decision: see `attnmux.core.cli.engines`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.core import Decision


def launch(decision: Decision, model: str) -> list[str]:
    """The server with the decision's page size and, where it is not the model's, KV dtype."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--attention-backend", "attnmux", "--page-size", str(decision.page_size)]
    if decision.kv_dtype != decision.request.dtype:
        words += ["--kv-cache-dtype", decision.kv_dtype]
    return words
