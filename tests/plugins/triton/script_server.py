"""Runs scripts in forks of this process, which has imported what they import.

It reads a JSON line for each: `argv`, and in `files` where its output and its errors go. Once it
has ended, its exit status is a line: 0, or another where it failed or took 10 minutes.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from importlib import import_module
from pathlib import Path

import triton

SECONDS = 600
PRELOADED = (
    "torch",
    "torch._dynamo",  # which the registration of operators imports
    "triton.experimental.gluon.language",
    "attnmux.testing",
    "attnmux.triton.attention.factory",
    "compile_kernel",
    "pytest",
)


def next_power_of_2(number: int) -> int:
    """SGLang puts such a function in the place of Triton's. No kernel can call it."""
    return 1 << (number - 1).bit_length()


def run(argv: list[str], files: list[str]) -> None:
    """In the fork."""
    for number, name in enumerate(files, start=1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    signal.alarm(SECONDS)
    sys.argv[:] = argv
    runpy.run_path(argv[0], run_name="__main__")
    sys.stdout.flush()


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    triton.next_power_of_2 = next_power_of_2
    for name in PRELOADED:
        import_module(name)
    for line in sys.stdin:
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        status = 1
        try:
            run(**json.loads(line))
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(status)


if __name__ == "__main__":
    main()
