"""Runs architectures in child processes, so that a crash or a hang is an outcome like any other."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attnmux.core import InvalidInput, Offer, Platform, Plugins
from tools.models.outcome import Outcome
from tools.models.recipe import Recipe

STACK_AT = 0.95
"""The share of a child's time after which it tells where it is."""
STACK_CALLS = 8


@dataclass(frozen=True, slots=True)
class Stage:
    """What a child does from now on."""

    text: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls that a child is in."""

    text: str


def _ignore(name: str, stage: str) -> None: ...


SERVER = "forkserver"
"""It runs one architecture, and children begin as forks of it with all that this imported."""


def context_of_children(device: str) -> Any:  # noqa: ANN401  # a context of multiprocessing
    if device != "cpu":
        # A GPU that the server has touched cannot be used after a fork
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context(SERVER)
    context.set_forkserver_preload(["tools.models.warm"])
    return context


def all_names(context: Any) -> list[str]:  # noqa: ANN401  # as above
    """The names of all architectures that the installed transformers has."""
    with context.Pool(1) as pool:
        return list(pool.apply(_names))


def _names() -> list[str]:
    # Loaded in the server already; the parent needs neither torch nor transformers
    from tools.models.architectures import architecture_names  # noqa: PLC0415

    return architecture_names()


def machine_of(device: str, backend: str | None) -> tuple[Platform, Sequence[Offer]]:
    """The platform, and the backends on it; backend: the name of the only one.

    Raises InvalidInput for a platform or a backend that nobody has.
    """
    plugins = Plugins.load()
    platform, offers = plugins.detect().pick(device), tuple(plugins.offers())
    found = tuple(offer for offer in offers if backend in (None, offer.card.name))
    if not found:
        names = ", ".join(sorted({offer.card.name for offer in offers}))
        raise InvalidInput("backend", got=repr(backend), expected=f"one of {names}")
    return platform, found


def run_all(
    context: Any,  # noqa: ANN401  # as above
    names: Sequence[str],
    recipe: Recipe,
    *,
    jobs: int,
    timeout: float,
    platform: Platform,
    offers: Sequence[Offer],
    say: Callable[[str, str], None] = _ignore,
) -> Iterator[Outcome]:
    """The outcomes of architectures, as they end.

    timeout: seconds for each of them. say: called with an architecture's name and each stage of
    its run as that begins, from any thread.
    """

    def run(name: str) -> Outcome:
        ours, theirs = context.Pipe(duplex=False)
        given = (theirs, name, recipe, platform, offers, timeout)
        child = context.Process(target=_run, args=given)
        child.start()
        theirs.close()
        return _ended(name, child, ours, Stages(timeout, partial(say, name)))

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run, name) for name in names]
        for done in as_completed(running):
            yield done.result()


class Stages:
    """What a child has done so far, and for how long."""

    def __init__(self, timeout: float, say: Callable[[str], None]) -> None:
        self._timeout, self._say = timeout, say
        self._begun = [("starting", time.monotonic())]
        self._stack = ""

    def left(self) -> float:
        """Seconds until the child has run too long; 0.0 after that."""
        return max(0.0, self._begun[0][1] + self._timeout - time.monotonic())

    def read(self, message: Stage | Stack) -> None:
        if isinstance(message, Stack):
            self._stack = f", in {message.text}"
            return
        self._begun.append((message.text, time.monotonic()))
        self._say(message.text)

    def too_long(self) -> str:
        """Why the child was stopped."""
        ends = [begin for _, begin in self._begun[1:]] + [time.monotonic()]
        spent = ", ".join(
            f"{text} {end - begin:.0f} s"
            for (text, begin), end in zip(self._begun, ends, strict=True)
        )
        return f"not done in {self._timeout:g} s: {spent}{self._stack}"


def _ended(name: str, child: Any, ours: Connection, stages: Stages) -> Outcome:  # noqa: ANN401  # a process of any context
    try:
        while ours.poll(stages.left()):
            message = ours.recv()
            if isinstance(message, Outcome):
                return message
            stages.read(message)
        return Outcome(config=name, status="failed", reason=stages.too_long())
    except EOFError:
        child.join()
        reason = f"the process ended with exit code {child.exitcode}"
        return Outcome(config=name, status="failed", reason=reason)
    finally:
        child.kill()
        child.join()


def _run(
    answer: Connection,
    name: str,
    recipe: Recipe,
    platform: Platform,
    offers: Sequence[Offer],
    timeout: float,
) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    turn = threading.Lock()

    def send(message: Stage | Stack | Outcome) -> None:
        with turn:
            answer.send(message)

    main = threading.get_ident()
    watch = threading.Timer(STACK_AT * timeout, lambda: send(Stack(_innermost(main))))
    watch.daemon = True
    watch.start()
    from tools.models.trial import try_alone  # noqa: PLC0415  # as above

    def say(text: str) -> None:
        send(Stage(text))

    send(try_alone(name, recipe, platform, offers, say))


def _innermost(thread: int) -> str:
    """The last calls of a thread of this process."""
    frames = traceback.extract_stack(sys._current_frames()[thread])[-STACK_CALLS:]
    return " > ".join(
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames
    )
