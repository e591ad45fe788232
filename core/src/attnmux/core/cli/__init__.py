"""The command `attnmux`. A verb's module is imported when the verb is called."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    """Run the command line and end the process with its exit code."""
    # Imports allocate much and free nothing, and everything goes with the process at its end.
    # Without collections during both, a short answer takes a sixth less time. The collector is on
    # while the verb runs.
    gc.disable()
    try:
        with answers_apart():
            from attnmux.core.cli.verbs import verbs  # noqa: PLC0415  # an interrupt is caught here

            verbs()
    except KeyboardInterrupt:  # before the verbs can handle it
        print("attnmux: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader has seen enough, as in `attnmux backends | head`
        sys.exit(1)
    except OSError as error:
        print(f"attnmux: the answer cannot be written: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        gc.freeze()


@contextmanager
def answers_apart() -> Iterator[None]:
    """Write `sys.stdout` to a copy of descriptor 1, and let descriptor 1 write to stderr.

    Kernel libraries, drivers and their processes print to descriptor 1 at any time. If a
    descriptor is closed, nothing changes. Raises OSError if the answer cannot be written.
    """
    stdout = sys.stdout
    try:
        if stdout is None or stdout.fileno() != 1:
            raise OSError
        stdout.flush()
        descriptor = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):  # nothing to keep apart
        yield
        return
    line = 1 if os.isatty(descriptor) else -1
    encoding, errors = stdout.encoding, stdout.errors
    try:
        with open(descriptor, "w", line, encoding, errors) as sys.stdout:
            yield
    finally:
        sys.stdout = stdout
