"""Every error that attnmux raises on purpose: AttnmuxError, and below it a class for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.core.facts.verdicts import Verdict


class AttnmuxError(Exception):
    """Base of every error raised on purpose."""

    @staticmethod
    def in_brief(error: BaseException, *, lines: int = 1) -> str:
        """The type of any error and the first lines of its message, since compilers print pages."""
        text_lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return ": ".join([type(error).__name__, *text_lines[:lines]])


class InvalidInput(AttnmuxError, ValueError):
    """An argument that cannot be used; also a ValueError.

    Raised before a kernel runs and before anything is changed, such as the KV pool.
    """

    def __init__(self, argument: str, *, got: object, expected: str) -> None:
        self.argument = argument
        self.got = got
        self.expected = expected
        super().__init__(f"{argument}: expected {expected}, got {got}")

    @classmethod
    def check_at_least(cls, least: int, argument: str, value: int) -> None:
        """Raise InvalidInput below `least`, and for values that are no whole numbers."""
        try:
            is_enough = index(value) >= least
        except TypeError:
            expected = f"a whole number, at least {least}"
            raise cls(argument, got=repr(value), expected=expected) from None
        if not is_enough:
            raise cls(argument, got=value, expected=f"at least {least}")


class PoolExhausted(AttnmuxError):
    """An allocation that does not fit the request table, a pool or the device. Nothing was
    allocated."""

    def __init__(self, what: str, *, wanted: int, available: int, hint: str = "") -> None:
        self.what = what
        self.wanted = wanted
        self.available = available
        super().__init__(_hinted(f"{what}: {wanted} wanted, {available} available", hint))


class NoBackend(AttnmuxError):
    """No backend serves the request on the platform; `candidates` has the reasons of each."""

    assumed = ""
    """The assumption under which `--assume` goes on, in words; empty where none helps."""

    def __init__(self, message: str, candidates: Sequence[Verdict] = ()) -> None:
        self.candidates = tuple(candidates)
        super().__init__(message)


class UnknownBackend(AttnmuxError):
    """A backend name that no installed plugin advertises."""

    def __init__(self, name: str, *, known: Sequence[str] = (), hint: str = "") -> None:
        self.name = name
        self.known = tuple(known)
        self.hint = hint
        super().__init__(_hinted(f"unknown attention backend {name!r}", hint))


class AmbiguousPlatform(AttnmuxError):
    """Several kinds of accelerator are present and no setting names one."""


class GraphUnsupported(AttnmuxError):
    """The backend cannot be captured in a device graph."""


class RankError(AttnmuxError):
    """A rank that does not run with the others; see attnmux-distributed's `RanksDiffer` and
    `RankFailed`."""

    is_on_every_rank = False
    """Whether every rank raises it."""


class BackendFailed(AttnmuxError):
    """A chosen backend that cannot run here: its library does not load or its kernel does not
    compile. An automatic choice goes on to the next candidate."""

    def __init__(self, address: str, reason: str, *, hint: str = "") -> None:
        self.address = address
        self.reason = reason
        self.hint = hint
        super().__init__(_hinted(f"{address} cannot run here: {reason}", hint))


class SettingsError(AttnmuxError):
    """A configuration file or an environment variable that cannot be used."""


def _hinted(message: str, hint: str) -> str:
    return f"{message}; {hint}" if hint else message
