"""Telling listeners the texts of their requests as they grow."""

from __future__ import annotations

from collections import deque

from attnmux.transformers.engine.request import LiveRequest


class Teller:
    """Texts that nobody was told yet, in the order of their tokens.

    Where a listener raises, what it was told counts as told, and the others' turn comes later.
    """

    def __init__(self) -> None:
        self._unsaid: deque[tuple[LiveRequest, str | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._unsaid)

    def add(self, request: LiveRequest, last: str | None = None) -> None:
        """Note that a request has a new token; last: the rest of its text, where it has ended."""
        if request.on_text is not None:
            self._unsaid.append((request, last))

    def tell(self) -> None:
        """Call the listeners. A request that was aborted has nothing more to say."""
        while self._unsaid:
            request, last = self._unsaid.popleft()
            if request.on_text is None:
                continue
            if last is not None:
                request.on_text(last, True)
            elif not request.ended and (piece := request.new_text()):
                request.on_text(piece, False)
