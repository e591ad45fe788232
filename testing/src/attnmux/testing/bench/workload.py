"""The steps that are timed. Importing this module imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from attnmux.core import InvalidInput, Request

FIELDS = {
    "decode": ("bs", "ctx"),
    "extend": ("bs", "new", "prefix", "decoding", "ctx"),
    "verify": ("bs", "new", "prefix"),
}
"""The fields of a workload's text, by phase and in this order."""

GRAMMAR = (
    "decode:bs=64,ctx=4096, extend:bs=4,new=512,prefix=8192, verify:bs=16,new=4,prefix=4096 or, "
    "beside decoding requests, extend:bs=1,new=512,prefix=8192,decoding=63,ctx=4096"
)

MAX_TOKENS = 1 << 24
"""Tokens that the requests of a step may hold together. A typo must not allocate all memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of `batch_size` requests, all of the same length unless `lens` is given.

    A step of verification checks a chain of drafts of each request. One of prompts is mixed where
    other requests decode in it. Raises InvalidInput for a phase that is not timed, and for
    impossible sizes.
    """

    phase: str
    """"decode", "extend" or "verify"."""
    batch_size: int
    prefix: int
    """Tokens of each request that are in the cache before the step; of the longest with `lens`."""
    new: int = 1
    """New tokens of each request; 1 in decode. Of verification: the drafts and the token before."""
    lens: tuple[int, ...] = ()
    """[batch_size] tokens of each request after the step. Empty: `prefix + new` for all."""
    decoding: int = 0
    """Requests with one new token beside the prompts of an extend step, after them."""
    ctx: int = 0
    """Tokens of each decoding request after the step; 0 without any."""

    def __post_init__(self) -> None:
        if self.phase not in FIELDS:
            raise _refusal(self.phase, f"{' or '.join(FIELDS)}, as in {GRAMMAR}")
        if self.batch_size < 1 or self.new < 1 or self.prefix < 0:
            raise _refusal(str(self), "at least one request, and one new token of each")
        if self.phase == "decode" and self.new != 1:
            raise _refusal(f"decode of {self.new} tokens", "1 new token of each request")
        if self.lens and (
            len(self.lens) != self.batch_size
            or min(self.lens) < self.new
            or max(self.lens) != self.prefix + self.new
        ):
            longest = self.prefix + self.new
            expected = f"a length for each of {self.batch_size} requests, {longest} at most"
            raise _refusal(f"lens={self.lens}", expected)
        if self.decoding < 0 or (self.decoding > 0) != (self.ctx > 0):
            got = f"decoding={self.decoding},ctx={self.ctx}"
            raise _refusal(got, "both or neither: requests that decode, and the tokens of each")
        if self.decoding and self.phase != "extend":
            raise _refusal(f"{self.phase} beside {self.decoding} decoding requests", "extend")
        if sum(self.lengths) > MAX_TOKENS:
            raise _refusal(str(self), f"at most {MAX_TOKENS} tokens in all")

    @classmethod
    def uneven(cls, lens: Iterable[int]) -> Workload:
        """A decode step of requests with these lengths, the new token included."""
        lens = tuple(lens)
        return cls(phase="decode", batch_size=len(lens), prefix=max(lens) - 1, lens=lens)

    @property
    def keys(self) -> int:
        """Tokens of the longest request after the step."""
        return max(self.prefix + self.new, self.ctx)

    @property
    def num_requests(self) -> int:
        """B: `batch_size`, and the decoding requests of a mixed step."""
        return self.batch_size + self.decoding

    @property
    def lengths(self) -> tuple[int, ...]:
        """[B] tokens of each request after the step."""
        lens = self.lens or (self.prefix + self.new,) * self.batch_size
        return lens + (self.ctx,) * self.decoding

    @property
    def new_lens(self) -> tuple[int, ...]:
        """[B] new tokens of each request."""
        return (self.new,) * self.batch_size + (1,) * self.decoding

    @property
    def starts(self) -> tuple[int, ...]:
        """[B + 1] places of each request's first new token among all, and T."""
        return (0, *accumulate(self.new_lens))

    @property
    def num_tokens(self) -> int:
        """T: new tokens of all requests."""
        return sum(self.new_lens)

    def __str__(self) -> str:
        """The text that `parse` reads, and that names the workload in a measurement.

        `parse` does not read a workload with `lens`: "decode:bs=16,ctx=16..4096".
        """
        if self.phase == "decode":
            shortest = f"{min(self.lens)}.." if self.lens else ""
            return f"decode:bs={self.batch_size},ctx={shortest}{self.keys}"
        beside = f",decoding={self.decoding},ctx={self.ctx}" if self.decoding else ""
        return f"{self.phase}:bs={self.batch_size},new={self.new},prefix={self.prefix}{beside}"

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read "decode:bs=64,ctx=4096", where `ctx` counts the new token,
        "extend:bs=4,new=512,prefix=8192" or "verify:bs=16,new=4,prefix=4096". `bs` defaults to 1
        and `prefix` to 0. An extend step may have `decoding` requests of `ctx` tokens beside it.

        Raises InvalidInput for anything else.
        """
        phase, _, rest = text.partition(":")
        if phase not in FIELDS:
            raise _refusal(text, GRAMMAR)
        given: dict[str, int] = {}
        for pair in filter(None, rest.split(",")):
            name, _, number = pair.partition("=")
            if name not in FIELDS[phase] or not number.isdecimal():
                raise _refusal(text, f"{phase} with {', '.join(FIELDS[phase])}, as in {GRAMMAR}")
            if name in given:
                raise _refusal(text, f"{name} once")
            given[name] = int(number)
        given = {"bs": 1, "prefix": 0, **given}
        needed = "ctx" if phase == "decode" else "new"
        if given.get(needed, 0) < 1:
            raise _refusal(text, f"{needed}=NUMBER, 1 at least")
        new = 1 if phase == "decode" else given["new"]
        prefix = given["ctx"] - 1 if phase == "decode" else given["prefix"]
        return cls(
            phase=phase,
            batch_size=given["bs"],
            prefix=prefix,
            new=new,
            decoding=given.get("decoding", 0),
            ctx=given.get("ctx", 0) if phase == "extend" else 0,
        )

    def kv_bytes(self, request: Request, itemsize: float) -> int:
        """Bytes of K and V in the pool that some query of the step sees, in one layer.

        itemsize: bytes of a stored value.
        """
        # The first new token sees the earliest key; the later ones add their own
        seen = sum(_seen(request, length - new) + new - 1 for length, new in self._sizes)
        return round(seen * kv_width(request) * itemsize)

    def stored_bytes(self, request: Request, itemsize: float) -> int:
        """Bytes of K and V that the requests hold in one layer, visible or not."""
        return round(sum(self.lengths) * kv_width(request) * itemsize)

    def flops(self, request: Request) -> int:
        """Floating-point operations of one layer's two products, over the visible keys."""
        seen = sum(
            count * sum(_seen(request, place) for place in range(length - new, length))
            for (length, new), count in Counter(self._sizes).items()
        )
        return 2 * seen * q_width(request)

    @property
    def _sizes(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.lengths, self.new_lens, strict=True))


def kv_width(request: Request) -> int:
    """Values of a token's K and V in one layer; of MLA, the latent, which is both."""
    if request.latent:
        return (request.kv_lora_rank or 0) + (request.qk_rope_head_dim or 0)
    return (request.num_kv_heads or 1) * sum(_head_dims(request))


def q_width(request: Request) -> int:
    """Values of a token's query and of its result in one layer, together."""
    if request.latent:
        dims = 2 * (request.kv_lora_rank or 0) + (request.qk_rope_head_dim or 0)
    else:
        dims = sum(_head_dims(request))
    return (request.num_q_heads or 1) * dims


def _head_dims(request: Request) -> tuple[int, int]:
    """Widths of a head's key and of its value."""
    dim = request.head_dim or 0
    return dim, request.v_head_dim or dim


def _seen(request: Request, place: int) -> int:
    """Keys that the token at `place` sees, itself included."""
    seen = place + 1
    if request.sliding_window is not None:
        seen = min(seen, request.sliding_window + 1)
    if request.attention_chunk:
        seen = min(seen, place % request.attention_chunk + 1)
    return seen


def _refusal(got: str, expected: str) -> InvalidInput:
    return InvalidInput("workload", got=repr(got), expected=expected)
