"""One start of `attnmux generate`, timed. `benchmarks.first_answer` runs it in a process.

    python one_start.py BEGAN FILE AHEAD [ARGUMENT]...

BEGAN: `time.time()` before the process was started. FILE gets the seconds until each phase ended,
and the kernels that Triton made for the first token. AHEAD: 0 begins nothing while weights load.
"""

from __future__ import annotations

import json
import pkgutil
import sys
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

PHASES = ("imported", "opened", "decided", "loaded", "made", "answered")


class Start:
    """The ends of a start's phases."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.ends: dict[str, float] = {}
        self.kernels: list[str] = []

    def end(self, phase: str) -> None:
        """At the first call for the phase."""
        self.ends.setdefault(phase, time.time() - self.began)

    def around(self, owner: object, name: str, *, before: str = "", after: str = "") -> None:
        """Let calls of a function or method end phases."""
        real: Callable[..., object] = getattr(owner, name)

        @wraps(real)
        def watched(*args: object, **kwargs: object) -> object:
            if before:
                self.end(before)
            result = real(*args, **kwargs)
            if after:
                self.end(after)
            return result

        setattr(owner, name, watched)

    def watch(self, *, ahead: bool) -> None:
        """Once modules are imported."""
        self.end("imported")
        run = import_module("attnmux.transformers.cli.run")
        self.around(run, "load_runner", before="opened", after="made")
        load = import_module("attnmux.transformers.load.load_decoder")
        self.around(load, "load_model", before="decided", after="loaded")
        engine = import_module("attnmux.transformers.engine.engine")
        self.around(engine.Engine, "step", after="answered")
        if not ahead:
            import_module("attnmux.transformers.load.ahead").Ahead.begin = lambda _: None
        if "triton" in sys.modules:
            sys.modules["triton"].knobs.runtime.jit_post_compile_hook = self.made

    def made(self, **facts: Any) -> None:  # noqa: ANN401  # what Triton tells its hooks
        if "made" in self.ends and "answered" not in self.ends:
            self.kernels.append(facts["fn"].name)


def main(began: str, file: str, ahead: str, *arguments: str) -> None:
    start, resolve = Start(float(began)), pkgutil.resolve_name

    def resolved(name: str) -> object:
        found = resolve(name)
        if name.endswith(":run_command"):
            start.watch(ahead=ahead != "0")
        return found

    setattr(pkgutil, resolve.__name__, resolved)
    sys.argv = ["attnmux", "generate", *arguments]
    try:
        import_module("attnmux.core.cli").main()
    finally:
        Path(file).write_text(json.dumps({"ends": start.ends, "kernels": start.kernels}))


if __name__ == "__main__":
    main(*sys.argv[1:])
