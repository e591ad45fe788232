"""Telling what the steps brought: outputs to the caller, texts to their listeners."""

from __future__ import annotations

from collections import deque

from attnmux.transformers.engine.request import LiveRequest, TokenOutput


class Teller:
    """New tokens that nobody was told of yet, in their order.

    Where a tokenizer or a listener raises, what it was given counts as told. All else is told the
    next time, the outputs included that the caller has not got.
    """

    def __init__(self) -> None:
        self._untold: deque[tuple[LiveRequest, int, bool]] = deque()
        self._outputs: list[TokenOutput] = []

    def __bool__(self) -> bool:
        return bool(self._untold or self._outputs)

    def add(self, request: LiveRequest, token: int, is_last: bool) -> None:
        """Note a request's new token."""
        self._untold.append((request, token, is_last))

    def forget(self, request: LiveRequest) -> None:
        """Say nothing more about a request."""
        self._untold = deque(one for one in self._untold if one[0] is not request)
        self._outputs = [one for one in self._outputs if one.request_id != request.id]

    def tell(self) -> list[TokenOutput]:
        """Call the listeners. Returns the outputs."""
        while self._untold:
            request, token, is_last = self._untold.popleft()
            if is_last:
                self._tell_last(request, token)
                continue
            self._outputs.append(TokenOutput(request.id, token, None))
            # What comes before the end of one that has ended is said with the end.
            if request.on_text is None or request.ended:
                continue
            if piece := request.new_text():
                request.on_text(piece, False)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _tell_last(self, request: LiveRequest, token: int) -> None:
        try:
            piece = request.new_text()
        finally:
            self._outputs.append(TokenOutput(request.id, token, request.result()))
        if request.on_text is not None:
            request.on_text(piece, True)
