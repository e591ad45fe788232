"""Asking what may hang: every question in bounded time, none able to take another down."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Answer = tuple[Sequence[T], "BaseException | None"]
"""What was found, or nothing and why."""


def ask_each(questions: Sequence[Callable[[], Sequence[T]]], seconds: float) -> list[Answer[T]]:
    """The answer to each question: what it returned, or nothing and what it raised.

    One that gives no answer in `seconds` is abandoned with a TimeoutError; the others go on.
    """
    answers: list[Answer[T]] = []
    while len(answers) < len(questions):
        answers += _ask_until_one_hangs(questions[len(answers) :], seconds)
    return answers


def _ask_until_one_hangs(
    questions: Sequence[Callable[[], Sequence[T]]], seconds: float
) -> list[Answer[T]]:
    """At least one answer. One thread serves all, as starting one costs more than most probes."""
    told: queue.SimpleQueue[Answer[T]] = queue.SimpleQueue()
    abandoned = threading.Event()
    # A daemon can be abandoned: nothing stops a thread that hangs in a driver
    worker = threading.Thread(target=_work, args=(questions, told, abandoned), daemon=True)
    worker.start()
    answers: list[Answer[T]] = []
    for _ in questions:
        try:
            answers.append(told.get(timeout=seconds))
        except queue.Empty:
            abandoned.set()
            return [*answers, ((), TimeoutError(f"no answer in {seconds:g} s"))]
    return answers


def _work(
    questions: Sequence[Callable[[], Sequence[T]]],
    told: queue.SimpleQueue[Answer[T]],
    abandoned: threading.Event,
) -> None:
    for question in questions:
        if abandoned.is_set():
            return
        try:
            told.put((question(), None))
        except BaseException as error:
            told.put(((), error))
