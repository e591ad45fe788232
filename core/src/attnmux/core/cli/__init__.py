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
            code = _quick(sys.argv[1:])
            if code is None:
                from attnmux.core.cli.verbs import verbs  # noqa: PLC0415  # imports click

                verbs()
            sys.exit(code)
    except KeyboardInterrupt:  # before the verbs can handle it
        print("attnmux: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader has seen enough, as in `attnmux matrix | head`
        sys.exit(1)
    except OSError as error:
        print(f"attnmux: the answer cannot be written: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        gc.freeze()


def _quick(args: list[str]) -> int | None:
    """The exit code of a plain `select --json`; None for what click must read."""
    # On Windows click expands patterns in the arguments
    if args[:1] != ["select"] or "--json" not in args or os.name == "nt":
        return None
    from attnmux.core.cli.quick import answer  # noqa: PLC0415  # imports choosing

    return answer(args[1:])


@contextmanager
def answers_apart() -> Iterator[None]:
    """Write `sys.stdout` to a copy of descriptor 1, and let descriptor 1 write to stderr.

    Kernel libraries, drivers and their processes print to descriptor 1 at any time. Where a
    descriptor is closed, nothing changes. Raises OSError where the answer cannot be written.
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
