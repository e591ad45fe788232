"""New tokens on their way to the engine's caller and to the listeners of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attnmux.transformers.engine.request import FinishReason, LiveRequest, TokenOutput
from attnmux.transformers.requests.sampling import NOT_A_NUMBER


class _Entry(NamedTuple):
    request: LiveRequest
    token: int
    is_last: bool


class OutputQueue:
    """New tokens that the engine's caller has not received, in order.

    If a tokenizer or a listener raises, the token that it was given counts as reported. The next
    call reports all others, including outputs that the caller has not received.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()
        """Tokens that no listener has heard of."""
        self._told: list[TokenOutput] = []
        """Outputs for the caller, which come before those that wait."""

    def __bool__(self) -> bool:
        return bool(self._waiting or self._told)

    @property
    def request_ids(self) -> set[int]:
        """The requests with tokens here."""
        return {waiting.request.id for waiting in self._waiting} | {
            output.request_id for output in self._told
        }

    def add(self, request: LiveRequest, token: int, reason: FinishReason | None) -> None:
        """Give a request its new token, and note it; NOT_A_NUMBER is only noted.

        reason: why the request ends with it, or None.
        """
        entry = _Entry(request, token, reason is not None)
        ids, new = request.state.token_ids, [] if token == NOT_A_NUMBER else [token]
        # One line, so that an interrupt leaves the token with the request and here, or nowhere
        request.finish_reason = self._waiting.append(entry) or ids.extend(new) or reason  # type: ignore[func-returns-value,redundant-expr]

    def add_all(
        self,
        takers: Sequence[tuple[LiveRequest, list[int]]],
        tokens: Iterable[list[int]],
        *,
        listens: bool,
    ) -> None:
        """Give requests their new tokens, with which none of them ends.

        takers: each request with its tokens so far. tokens: of each taker; more are not read.
        listens: whether any has a listener. An interrupt may leave tokens with a request alone.
        """
        pairs = list(zip(takers, tokens, strict=False))
        for (_, ids), new in pairs:
            ids += new
        if listens or self._waiting:
            self._waiting += [
                _Entry(request, token, False) for (request, _), new in pairs for token in new
            ]
        else:
            outputs = [
                TokenOutput(request.id, token, None) for (request, _), new in pairs for token in new
            ]
            self._told += outputs

    def add_aborted(self, request: LiveRequest) -> None:
        """Report an aborted request with its tokens so far. Its listener hears nothing."""
        self._told.append(TokenOutput(request.id, NOT_A_NUMBER, request.result()))

    def ends(self, request: LiveRequest) -> bool:
        """Whether the request's last token is here."""
        return any(
            waiting.is_last and waiting.request is request for waiting in self._waiting
        ) or any(
            output.result is not None and output.request_id == request.id for output in self._told
        )

    def forget(self, request: LiveRequest) -> None:
        """Report nothing more about a request."""
        waiting = deque(entry for entry in self._waiting if entry.request is not request)
        outputs = [output for output in self._told if output.request_id != request.id]
        self._waiting, self._told = waiting, outputs

    def tell(self) -> None:
        """Call the listeners."""
        while self._waiting:
            request, token, is_last = self._waiting[0]
            if request.finish_reason == "abort":
                self._waiting.popleft()
                continue
            # The text of a request that has ended is reported once, with its last token.
            speaks = is_last or not (request.on_text is None or request.ended)
            piece = ""
            try:
                if speaks:
                    piece = request.new_text()
            finally:
                output = TokenOutput(request.id, token, request.result() if is_last else None)
                # One line, as above
                self._told.append(self._waiting.popleft() and output)  # type: ignore[redundant-expr]
            if request.on_text is not None and speaks and (piece or is_last):
                request.on_text(piece, is_last)

    def hand_over(self) -> list[TokenOutput]:
        """The outputs, which leave the queue."""
        outputs = self._told[:]
        # One line, so that an interrupt loses none of them
        return self._told.clear() or outputs  # type: ignore[func-returns-value,redundant-expr]
