"""Several texts that grow at once, printed one after the other."""

from __future__ import annotations

from types import TracebackType

import click


class Printer:
    """Prints the pieces of the first unfinished text as they come, and keeps the others' back.

    Called as `OnText`. With several texts each has a heading. Leaving the context ends a line
    that was begun.
    """

    def __init__(self, num_texts: int, *, stream: bool) -> None:
        self._waiting: list[list[str]] = [[] for _ in range(num_texts)]
        self._finished = [False] * num_texts
        self._stream = stream
        self._current = 0
        self._open = False
        """Whether something of the current text may be on its line."""

    def __enter__(self) -> Printer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._open:
            click.echo()

    def __call__(self, index: int, piece: str, finished: bool) -> None:
        self._waiting[index].append(piece)
        self._finished[index] = finished
        while self._current < len(self._waiting):
            done = self._finished[self._current]
            if self._stream or done:
                self._print("".join(self._waiting[self._current]))
                self._waiting[self._current] = []
            if not done:
                return
            click.echo()
            self._open = False
            self._current += 1

    def _print(self, text: str) -> None:
        if not self._open and len(self._waiting) > 1:
            click.echo(f"==> prompt {self._current + 1} <==")
        # Before the text: an interrupt in between must not leave a line open.
        self._open = True
        click.echo(text, nl=False)
