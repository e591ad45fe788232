"""One thread at a time in an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmux.core import InvalidInput

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable


class Turn:
    """A call of the engine, by one thread at a time. A call that raises leaves the accounts
    settled.

    Not a generator: one that an interrupt leaves suspended would settle much later.
    """

    def __init__(self, lock: threading.RLock, settle: Callable[[], None]) -> None:
        self._lock, self._settle = lock, settle

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidInput(
                "engine", got="a call while another thread uses it", expected="one thread at a time"
            )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._settle()
        finally:
            self._lock.release()
