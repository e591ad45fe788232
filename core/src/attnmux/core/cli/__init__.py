"""The command `attnmux`: one module a verb, loaded when the verb is called."""

from __future__ import annotations

from attnmux.core.cli.verbs import main

__all__ = ["main"]
