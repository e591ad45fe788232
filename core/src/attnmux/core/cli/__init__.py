"""The command `attnmux`. A verb's module is imported when the verb is called."""

from __future__ import annotations

import gc
import importlib
import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    # Imports allocate much and free nothing, and everything goes with the process at its end.
    # Without collections during both, a short answer takes a sixth less time. The collector is on
    # while the verb runs.
    gc.disable()
    try:
        importlib.import_module("attnmux.core.cli.verbs").verbs()
    except KeyboardInterrupt:  # before the verbs can handle it
        print("attnmux: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        gc.freeze()
