"""What is timed: steps whose requests are all alike. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.errors import InvalidInput

FIELDS = {"decode": ("bs", "ctx"), "extend": ("bs", "new", "prefix")}
"""What says a workload of each phase, in this order."""

GRAMMAR = "decode:bs=64,ctx=4096 or extend:bs=4,new=512,prefix=8192"

MOST_TOKENS = 1 << 24
"""Of a step's requests together: an error in a number must not ask for all memory there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of `batch_size` requests.

    Raises InvalidInput for a phase that is not timed and for sizes that cannot be.
    """

    phase: str
    """"decode" or "extend"."""
    batch_size: int
    prefix: int
    """Tokens of each request that are in the cache before the step."""
    new: int = 1
    """New tokens of each request; 1 in decode."""

    def __post_init__(self) -> None:
        if self.phase not in FIELDS:
            raise _refusal(self.phase, f"decode or extend, as in {GRAMMAR}")
        if self.batch_size < 1 or self.new < 1 or self.prefix < 0:
            raise _refusal(str(self), "at least one request, and one new token of each")
        if self.phase == "decode" and self.new != 1:
            raise _refusal(f"decode of {self.new} tokens", "1 new token of each request")
        if self.batch_size * self.keys > MOST_TOKENS:
            raise _refusal(str(self), f"at most {MOST_TOKENS} tokens in all")

    @property
    def keys(self) -> int:
        """Of each request, the new tokens included."""
        return self.prefix + self.new

    def __str__(self) -> str:
        """As `parse` reads it, and as a measurement names it."""
        if self.phase == "decode":
            return f"decode:bs={self.batch_size},ctx={self.keys}"
        return f"{self.phase}:bs={self.batch_size},new={self.new},prefix={self.prefix}"

    @classmethod
    def parse(cls, text: str) -> Workload:
        """From "decode:bs=64,ctx=4096", where `ctx` counts the new token, or
        "extend:bs=4,new=512,prefix=8192". `bs` is 1 and `prefix` 0 where they are left out.

        Raises InvalidInput for anything else.
        """
        phase, _, rest = text.partition(":")
        if phase not in FIELDS:
            raise _refusal(text, GRAMMAR)
        given = {"bs": 1, "prefix": 0}
        for pair in filter(None, rest.split(",")):
            name, _, number = pair.partition("=")
            if name not in FIELDS[phase] or not number.isdecimal():
                raise _refusal(text, f"{phase} with {', '.join(FIELDS[phase])}, as in {GRAMMAR}")
            given[name] = int(number)
        needed = "ctx" if phase == "decode" else "new"
        if given.get(needed, 0) < 1:
            raise _refusal(text, f"{needed}=NUMBER, 1 at least")
        new = 1 if phase == "decode" else given["new"]
        prefix = given["ctx"] - 1 if phase == "decode" else given["prefix"]
        return cls(phase=phase, batch_size=given["bs"], prefix=prefix, new=new)

    def kv_bytes(self, request: Request, itemsize: int) -> int:
        """Of one layer: what the step has to read of the cache.

        itemsize: bytes of a stored value.
        """
        width = sum(_widths(request)[:2])
        seen = self.batch_size * _seen(request, self.keys - 1)
        return seen * width * (request.num_kv_heads or 1) * itemsize

    def stored_bytes(self, request: Request, itemsize: int) -> int:
        """Of one layer: what the requests hold, seen or not."""
        width = sum(_widths(request)[:2])
        return self.batch_size * self.keys * width * (request.num_kv_heads or 1) * itemsize

    def flops(self, request: Request) -> int:
        """Of one layer's two products, over the keys that each new token sees."""
        seen = sum(_seen(request, place) for place in range(self.prefix, self.keys))
        width = sum(_widths(request)[2:])
        return 2 * self.batch_size * seen * (request.num_q_heads or 1) * width


def _widths(request: Request) -> tuple[int, int, int, int]:
    """What a token stores a KV head as K and as V; the dims of a query and of its result."""
    if request.latent:
        rank, rope = request.kv_lora_rank or 0, request.qk_rope_head_dim or 0
        return rank + rope, 0, rank + rope, rank
    dim = request.head_dim or 0
    v_dim = request.v_head_dim or dim
    return dim, v_dim, dim, v_dim


def _seen(request: Request, place: int) -> int:
    """Keys that the token at `place` sees, itself included."""
    seen = place + 1
    if request.sliding_window is not None:
        seen = min(seen, request.sliding_window + 1)
    if request.attention_chunk:
        seen = min(seen, place % request.attention_chunk + 1)
    return seen


def _refusal(came: str, expected: str) -> InvalidInput:
    return InvalidInput("workload", came=repr(came), expected=expected)


ON_CPU = (
    *((1, 256), (1, 2048), (4, 512), (16, 256)),
    *((1, 128, 0), (2, 32, 256)),
)
ON_ACCELERATOR = (
    *((1, 1024), (1, 4096), (1, 32768), (8, 4096), (32, 1024), (32, 4096), (32, 16384)),
    *((128, 1024), (128, 4096), (256, 1024)),
    *((1, 2048, 0), (1, 8192, 0), (8, 1024, 0), (4, 512, 8192)),
)
"""(batch size, context) of decode, (batch size, new, prefix) of extend."""

MEMORY_SHARE = 0.25
"""Of the device's memory, which a workload of the default grid may take: two layers of KV. The
rest is for an engine beside it, and for what backends allocate."""


def default_grid(request: Request, platform: Platform, itemsize: int) -> tuple[Workload, ...]:
    """Decode and extend steps of sizes that such a device serves, as far as its memory goes.

    itemsize: bytes of a stored value.
    """
    sizes: Iterable[tuple[int, ...]] = ON_CPU if platform.device_type == "cpu" else ON_ACCELERATOR
    room = platform.memory_bytes * MEMORY_SHARE or float("inf")
    grid = (
        Workload(phase="decode", batch_size=size[0], prefix=size[1] - 1)
        if len(size) == 2
        else Workload(phase="extend", batch_size=size[0], new=size[1], prefix=size[2])
        for size in sizes
    )
    return tuple(each for each in grid if 2 * each.stored_bytes(request, itemsize) <= room)


USUAL = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
USUAL_LATENT = {
    **{"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"},
}
"""Shapes that are timed where nobody asked for others: a dense model's of 8 billion parameters, and
those of DeepSeek-V3 on one of eight ranks."""

UNTIMED = ("cross_attention", "custom_mask", "multi_item")
"""Features that no workload has."""


def completed(request: Request) -> Request:
    """The request with the usual shapes where it has none, for the phases that are timed.

    Raises InvalidInput for a request whose steps cannot be timed.
    """
    if request.kind not in ("mha", "mla"):
        raise InvalidInput("request", came=f"kind={request.kind}", expected="kind=mha or kind=mla")
    for name in UNTIMED:
        if getattr(request, name):
            expected = "none of " + ", ".join(UNTIMED) + ": no workload has them"
            raise InvalidInput("request", came=f"{name}=yes", expected=expected)
    usual = USUAL_LATENT if request.latent else USUAL
    unset = {name: value for name, value in usual.items() if getattr(request, name) is None}
    return request.replace(origin="default", **unset) if unset else request


def check_stated(request: Request) -> None:
    """Raise InvalidInput, naming them, for shapes that the request leaves open.

    What was measured for the usual ones says nothing of what others will ask.
    """
    usual = USUAL_LATENT if request.latent else USUAL
    missing = [name for name in usual if getattr(request, name) is None]
    if missing:
        came, expected = f"no {', '.join(missing)}", "--model, or all of them in --request"
        raise InvalidInput("request", came=came, expected=expected)
