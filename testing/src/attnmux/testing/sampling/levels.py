"""The values that sampled cases have on each axis, from a clause of a card."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from random import Random
from typing import Any

from attnmux.core import Request
from attnmux.core.plugin import ANY, Clause, Condition, Option, OptionValue
from attnmux.core.verbs import AXES
from attnmux.testing.sampling.points import FLAGS, OPTION, Value

Range = tuple[int, int]
Levels = dict[str, tuple[Any, ...]]

UNLIMITED: Mapping[str, tuple[int | Range, ...]] = {axis.name: axis.samples for axis in AXES}
"""Values for axes on which a clause sets no limit; a random one of each range."""

OWN: Mapping[str, tuple[Value | Range | None, ...]] = {
    "rows": (1, (2, 8), (9, 64), (65, 96), (97, 256), (257, 320)),
    "length": (1, (2, 63), (64, 511), (512, 2047), (2048, 32767), 32768),
    "new": (1, (2, 15), (16, 127), (128, 1024), (1025, 1280)),
    "scale": (None, 2.0),
    "kv_scales": (None, 0.5),
    "padding": (0, 3),
    "host_lens": (False, True),
    "store": ("call", "pool"),
    "shared": (False, True),
    "graph": (False, True),
    "empty": (False, True),
    "layer_id": (0, 1, (2, 31), (32, 60), (61, 127)),
    "first_row": (1, (2, 511), (512, 1023), (1024, 2047)),
    "spare_columns": (0, 1, (2, 200)),
    "place": (None, "pages", "slots"),
}
"""Values for properties that every card supports implicitly, and for those that the engine decides.
`scale` is in units of the usual one. `empty`: a step without a key comes second. `place`: where in
the pool the requests lie, as in `points.FIRST_PAGES`."""

MOST_OPTION = 1 << 20
"""An option with a larger bound counts bytes, say, so that its largest values are not tried."""

MODES = {
    "extend": ("extend", "mixed"),
    "decode": ("decode",),
    "verify": ("verify",),
    "draft": ("draft",),
    "encoder": ("encoder",),
}
"""Modes by phase of a card."""


def levels_of(
    clause: Clause, rng: Random, page_sizes: Collection[int], options: Collection[Option]
) -> Iterator[Levels]:
    """The values of each axis, for each kind that the clause serves. options: the card's."""
    modes = tuple(m for phase, ms in MODES.items() if clause.phase.admits(phase) for m in ms)
    levels: Levels = {
        "dtype": tuple(d for d in Request.DTYPES[:3] if clause.dtype.admits(d)),
        "kv_dtype": tuple(d for d in Request.DTYPES if clause.kv_dtype.admits(d)),
        "page_size": _numbers("page_size", clause.page_size, rng),
        "spec_topk": (None, *_numbers("spec_topk", clause.spec_topk, rng)),
        "spec_draft_tokens": _numbers("spec_draft_tokens", clause.spec_draft_tokens, rng),
        **{name: tuple(_pick(value, rng) for value in values) for name, values in OWN.items()},
        **{name: _flag(name, clause) for name in ("lse", "deterministic")},
        "then": (None, *(mode for mode in modes if mode != "encoder")),
        **{f"{OPTION}{option.name}": _settings(option, rng) for option in options},
    }
    if page_sizes:
        sizes = [size for size in sorted(page_sizes) if clause.page_size.admits(size)]
        levels["page_size"] = tuple(sizes)
    if not clause.graph.admits(True):
        levels["graph"] = (False,)
    for kind in ("mha", "mla", "nsa", "dual_chunk"):
        if kind != "mha":
            modes = tuple(mode for mode in modes if mode != "encoder")
        shaped = {"mode": modes, "kind": (kind,), **levels, **_of_kind(clause, kind, rng)}
        if clause.kind.admits(kind) and all(shaped.values()):
            yield shaped


def _of_kind(clause: Clause, kind: str, rng: Random) -> Levels:
    """The values of axes that only some kinds have."""
    names: tuple[str, ...] = ("head_dim", "num_kv_heads", "group_size")
    if kind in ("mla", "nsa"):
        names = ("kv_lora_rank", "qk_rope_head_dim", "num_q_heads")
    levels: Levels = {name: _numbers(name, getattr(clause, name), rng) for name in names}
    if kind in ("mla", "nsa"):
        return levels
    levels["v_head_dim"] = (0, *_numbers("v_head_dim", clause.v_head_dim, rng))
    if kind == "mha":
        for name in ("sliding_window", "attention_chunk"):
            levels[name] = (None, *_numbers(name, getattr(clause, name), rng))
        levels["logit_cap"] = (None, 2.0) if clause.logit_cap.admits(2.0) else (None,)
        levels |= {name: _flag(name, clause) for name in FLAGS}
    return levels


def _settings(option: Option, rng: Random) -> tuple[OptionValue, ...]:
    """The default of an option and, as far as the card bounds them, other values."""
    least, most = option.least, option.most
    others: tuple[OptionValue, ...] = option.choices
    if option.type is bool:
        others = False, True
    elif not (others or least is None or most is None or max(-least, most) > MOST_OPTION):
        near = min(most, least + rng.randint(1, 16))
        others = tuple(map(option.type, (least, most, near, rng.uniform(least, most))))
    return (option.default, *(value for value in others if value != option.default))


def _flag(name: str, clause: Clause) -> tuple[bool, ...]:
    return (False, True) if getattr(clause, name).admits(True) else (False,)


def _pick(level: Value | Range | None, rng: Random) -> Value | None:
    return rng.randint(*level) if isinstance(level, tuple) else level


def _numbers(name: str, condition: Condition, rng: Random) -> tuple[int, ...]:
    """Values that the condition admits: its ends, its listed values and some in between."""
    usual = [
        rng.randint(*level) if isinstance(level, tuple) else level for level in UNLIMITED[name]
    ]
    named = [value for value in condition.examples() if isinstance(value, int)]
    if condition is not ANY:
        ends = (condition.nearest(1), condition.nearest(usual[-1]))
        named += [end for end in ends if isinstance(end, int)]
        near = [condition.nearest(size) for size in usual]
        named += [size for size in near if isinstance(size, int)]
    return tuple(sorted(size for size in {*named, *usual} if condition.admits(size) and size))
