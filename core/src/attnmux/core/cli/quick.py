"""Plain answers of `attnmux select --json` without click, which takes longer than the answer."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from attnmux.core.cli.invocation import INTERRUPTED, Run, escape_unknown
from attnmux.core.cli.select import select
from attnmux.core.cli.select_options import read
from attnmux.core.errors import PluginError


def answer(args: Sequence[str]) -> int | None:
    """Answer and return the exit code; None where click must read the arguments of `select`.

    Raises an OSError of an answer that cannot be written.
    """
    given = read(args)
    if given is None:
        return None
    gc.freeze()  # Imported modules stay: the first collection can skip them
    gc.enable()
    run = Run()
    escape_unknown()
    run.answer = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            select(run, **given)
    except KeyboardInterrupt:
        print("\nattnmux: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as error:
        return run.report(PluginError(f"ended early by a library: SystemExit: {error.code}"))
    except Exception as error:
        return run.report(error)
    return 0
