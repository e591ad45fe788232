"""The forward mode of a step."""

from __future__ import annotations

from enum import Enum, auto


class ForwardMode(Enum):
    """The kind of a step. Every mode but DECODE and IDLE may have many new tokens a request."""

    EXTEND = auto()
    """New tokens on top of a cached prefix, which may be empty."""
    DECODE = auto()
    """One new token a request."""
    MIXED = auto()
    """Extending and decoding requests in one step; a decoding one extends by a single token. Where
    the decoding ones are first or last, backends can serve them as in a decode step."""
    IDLE = auto()
    """No requests on this rank, which only takes part in collectives."""
    TARGET_VERIFY = auto()
    """The target model scores the draft tokens of each request."""
    DRAFT_EXTEND = auto()
    """The draft model processes the tokens that were accepted."""

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_decode_or_idle(self) -> bool:
        return self is ForwardMode.DECODE or self is ForwardMode.IDLE

    def is_extend(self) -> bool:
        """Whether steps of the mode go to `forward_extend`: all but DECODE and IDLE."""
        return not self.is_decode_or_idle()

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND
