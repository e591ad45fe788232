"""Runs architectures in child processes, so that a crash or a hang is an outcome like any other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

from attnmux.core import InvalidInput, Offer, Platform, detect, load_plugins, pick_platform
from tools.models.outcome import Outcome

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
    plugins = load_plugins()
    platform, offers = pick_platform(detect(plugins), device), tuple(plugins.offers())
    found = tuple(offer for offer in offers if backend in (None, offer.card.name))
    if not found:
        names = ", ".join(sorted({offer.card.name for offer in offers}))
        raise InvalidInput("backend", got=repr(backend), expected=f"one of {names}")
    return platform, found


def run_all(
    context: Any,  # noqa: ANN401  # as above
    names: Sequence[str],
    *,
    seed: int,
    jobs: int,
    timeout: float,
    platform: Platform,
    offers: Sequence[Offer],
) -> Iterator[Outcome]:
    """The outcomes of architectures, as they end. timeout: seconds for each of them."""

    def run(name: str) -> Outcome:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_run, args=(theirs, name, seed, platform, offers))
        child.start()
        theirs.close()
        return _ended(name, child, ours, timeout)

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run, name) for name in names]
        for done in as_completed(running):
            yield done.result()


def _ended(name: str, child: Any, ours: Connection, timeout: float) -> Outcome:  # noqa: ANN401  # a process of any context
    try:
        if not ours.poll(timeout):
            return Outcome(config=name, status="failed", reason=f"not done in {timeout:g} s")
        outcome = ours.recv()
    except EOFError:
        child.join()
        reason = f"the process ended with exit code {child.exitcode}"
        return Outcome(config=name, status="failed", reason=reason)
    finally:
        child.kill()
        child.join()
    assert isinstance(outcome, Outcome)
    return outcome


def _run(
    answer: Connection, name: str, seed: int, platform: Platform, offers: Sequence[Offer]
) -> None:
    from tools.models.trial import try_alone  # noqa: PLC0415  # as above

    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    answer.send(try_alone(name, seed, platform, offers))
