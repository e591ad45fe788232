"""The command `attnmux`: one module a verb, loaded when the verb is called."""

from __future__ import annotations

import gc
import importlib
import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    # Imports allocate much and free nothing, and at the end all of it goes with the process:
    # without the collections in between and the last one, a short answer takes a sixth less time.
    # The collector is on again before the verb runs.
    gc.disable()
    try:
        importlib.import_module("attnmux.core.cli.verbs").verbs()
    except KeyboardInterrupt:  # before the verbs could say so
        print("attnmux: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        gc.freeze()
