"""How far a model's logits may move: the bounds that attnmux's differences are held to.

In float32 one share of the logits' spread does for most. Random weights may magnify rounding beyond
it, as those of FSMT and LongT5 do: eager attention in float32 is 0.0007 and 0.002 from itself in
float64. The bound of such a token is FACTOR times its difference in copies of the model whose
modules move each value at random, by as much as rounding may.

In 16 bits all bounds come from the model itself: from eager attention in that dtype, and from eager
attention in float32 whose modules move each value at random, by as much as rounding may. A model
that picks experts or keys may pick others after rounding. Then its logits move as far as after a
fault, but only after some prompts, and in some of the copies. So the bound of a token is FACTOR
times its difference in the copy that moves it furthest. The mean over all tokens has a bound too,
for a fault moves most of them.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = 1e-3
"""The largest difference of logits in float32, as a share of their spread: rounding stays far
below, and one key more or less far above."""
FACTOR = 1.5
"""By so much the logits of one token may differ more than in the copy that moves them furthest."""
COPIES = 64
"""Copies of the model in float32, each rounded at random to 16 bits."""
FEW_COPIES = 8
"""Each rounded at random in float32, where experts and keys that are picked seldom change."""
ROUNDINGS = 2.0
"""Roundings of each module's output: sums and products between modules round too."""
MOST_VALUES = 1 << 17
"""Most values of a module's output that is rounded: an encoder's tables of distances are larger,
and slow."""
SHARE = 0.9
"""Share of the copies whose mean is within the bound of ours. A copy rounds twice what a kernel
does: the means of kernels came to half this bound, those after a wrong position to 1.3 times at
least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the model itself says after one prompt."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor
    """[new tokens, vocabulary]: those that each token was chosen by."""
    encoder: Mapping[str, torch.Tensor] | None
    """What the encoder reads; None without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The largest differences of logits, as shares of their spread."""

    each: torch.Tensor
    """[prompts, new tokens] float32: of one token's logits."""
    mean: float
    """Bound of the geometric mean over all tokens."""


@torch.inference_mode()
def float32_bounds(exact: Any, wanted: Sequence[Wanted], seed: int) -> Bounds:  # noqa: ANN401  # a model of transformers
    """TOLERANCE, and more for tokens whose logits rounding moves further."""
    said = _logits(exact, wanted)
    with _rounding(exact, seed, torch.float32):
        moved = [difference(_logits(exact, wanted), said) for _ in range(FEW_COPIES)]
    each = (FACTOR * torch.stack(moved).amax(0)).clamp_min(TOLERANCE)
    return Bounds(each=each, mean=TOLERANCE)


@torch.inference_mode()
def rounding_bounds(exact: Any, rounded: Any, wanted: Sequence[Wanted], seed: int) -> Bounds:  # noqa: ANN401  # models of transformers
    """The bounds of a model in 16 bits.

    exact, rounded: the model in float32 and in 16 bits, with the same weights.
    """
    said = _logits(exact, wanted)
    moved = [difference(_logits(rounded, wanted), said)]
    with _rounding(exact, seed, rounded.dtype):
        moved += [difference(_logits(exact, wanted), said) for _ in range(COPIES)]
    each = torch.stack(moved)
    furthest = each.amax(0)
    return Bounds(
        each=FACTOR * furthest.clamp_min(float(furthest.median())),
        mean=float(torch.tensor([geometric_mean(one) for one in each]).quantile(SHARE)),
    )


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """[...]: the largest difference of logits [..., vocabulary], as a share of their spread."""
    return (ours - theirs).abs().amax(-1) / theirs.std(-1)


def geometric_mean(values: torch.Tensor) -> float:
    """Geometric mean of differences. The few that are large, after another pick, weigh little in
    it."""
    return float(values.clamp_min(torch.finfo(values.dtype).tiny).log().mean().exp())


def _logits(model: Any, wanted: Sequence[Wanted]) -> torch.Tensor:  # noqa: ANN401  # as above
    """[prompts, new tokens, vocabulary] float32: of the wanted tokens, one forward a prompt."""
    every = []
    for one in wanted:
        ids = torch.tensor([one.prompt + one.tokens[:-1]])
        own = "input_ids" if one.encoder is None else "decoder_input_ids"
        encoder = {
            name: value.to(model.dtype) if value.is_floating_point() else value
            for name, value in (one.encoder or {}).items()
        }
        logits = model(**{own: ids}, **encoder, use_cache=False).logits[0]
        every.append(logits[-len(one.tokens) :].float())
    return torch.stack(every)


@contextmanager
def _rounding(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> Iterator[None]:
    """Meanwhile, modules without parts move each value by up to ROUNDINGS of the dtype,
    differently each time."""
    random = torch.Generator().manual_seed(seed)
    unit = ROUNDINGS * torch.finfo(dtype).eps / 2

    def move(module: torch.nn.Module, args: object, output: object) -> object:
        if not (isinstance(output, torch.Tensor) and output.is_floating_point()):
            return None
        if output.numel() > MOST_VALUES:
            return None
        shares = torch.rand(output.shape, generator=random)
        return output * (1 + unit * (2 * shares - 1))

    hooks = [
        module.register_forward_hook(move)
        for module in model.modules()
        if not any(True for _ in module.children())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
