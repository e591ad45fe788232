"""Random cases that cover a card's claims by pairs of values. Imports no torch.

A `Point` is one value for each axis. The axes' values come from the card's clauses: every listed
value, both ends of a range, and random values between them; for an axis without a limit, the sizes
of `UNLIMITED`. Each case covers as many new pairs of values as a few random drafts allow, as AETG
does (Cohen et al., IEEE TSE 23(7), 1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random
from typing import Any

from attnmux.core import ANY, Clause, ForwardMode
from attnmux.core.choosing.ask.values import DTYPES
from attnmux.core.choosing.judge.axes import AXES, Question
from attnmux.core.choosing.offer.conditions import Condition, Value
from attnmux.testing.candidate import MACHINE_AXES, Candidate
from attnmux.testing.cases import Case, Step, decode, extend, verify
from attnmux.testing.linear_cases import AnyCase
from attnmux.testing.linear_sampling import linear_samples

Point = dict[str, Any]
Pair = tuple[str, Value | None, str, Value | None]
Range = tuple[int, int]

UNLIMITED: Mapping[str, tuple[int | Range, ...]] = {
    "page_size": (1, (2, 15), 16, (17, 63), 64, (65, 255), 256),
    "num_q_heads": (8, 16, (17, 64), 128),
    "num_kv_heads": (1, 2, (3, 7), 8),
    "group_size": (1, 2, (3, 8), (9, 16), (17, 32)),
    "head_dim": (16, 64, 80, 128, 256),
    "v_head_dim": (64, 128),
    "kv_lora_rank": (128, 512),
    "qk_rope_head_dim": (64,),
    "spec_topk": (1, 2, 4),
    "spec_draft_tokens": (1, (2, 8), (9, 32)),
    "sliding_window": (1, (2, 63), (64, 511), (512, 4095)),
    "attention_chunk": (1, (2, 63), (64, 511), (512, 4095)),
}
"""Values for axes on which a clause sets no limit; a random one of each range."""

OWN: Mapping[str, tuple[Value | Range | None, ...]] = {
    "rows": (1, (2, 8), (9, 64), (65, 96), (97, 128)),
    "length": (1, (2, 63), (64, 511), (512, 2047), (2048, 32767), 32768),
    "new": (1, (2, 15), (16, 127), (128, 512)),
    "scale": (None, 2.0),
    "kv_scales": (None, 0.5),
    "padding": (0, 3),
    "host_lens": (False, True),
    "store": ("call", "pool"),
    "shared": (False, True),
    "graph": (False, True),
}
"""Values for properties that every card supports implicitly, and for those that the engine decides.
`scale` is in units of the usual one."""

FLAGS = (
    *("sinks", "alibi", "relative_bias", "lse", "deterministic", "cross_attention"),
    *("multi_item", "strided_kv"),
)
MODES = {
    "extend": ("extend", "mixed"),
    "decode": ("decode",),
    "verify": ("verify",),
    "draft": ("draft",),
    "encoder": ("encoder",),
}
"""Modes by phase of a card."""

FAR = 131_072
FAR_MODES = {4: "decode", 40: "extend"}
"""Positions among the extremes at which a slow case of length `FAR` runs, with its mode."""
MOST_IN_GRAPHS, MOST_ALONE = 96, 8
"""The most rows of a step in a graph, and of one whose requests also run alone."""
SLOWER_IN_GRAPHS = 16
"""An estimate of how much slower a step is while its graph is recorded without a device."""
MOST_READ, MOST_MULTIPLIED = 1 << 24, 1 << 28
"""The most elements of K that a kernel reads for one layer, and the most products of Q and K: about
one second of one CPU core."""
SHARP, SHARP_FROM = 2.5, 512
"""The scale of requests longer than `SHARP_FROM`, in units of the usual one."""
DRAFTS, PIN_TRIES = 6, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How many pairs of values the cases had so far, of all pairs that a case can have."""

    covered: int
    total: int

    def __str__(self) -> str:
        if not self.total:
            return "no pairs of values are counted"
        percent = 100 * self.covered // max(self.total, 1)
        return f"{percent} % of {self.total} pairs of values"


@dataclass(kw_only=True, eq=False)
class Sampler:
    """Cases of one candidate. The same seed gives the same cases."""

    candidate: Candidate
    seed: int
    page_sizes: frozenset[int] = frozenset()
    """Use only these page sizes. Empty: all that the card admits."""
    most_cost: float = 1.0
    """Scales `MOST_READ` and `MOST_MULTIPLIED`. Below 1, cases of length `FAR` are left out."""
    _random: Random = field(init=False)
    _levels: list[dict[str, tuple[Any, ...]]] = field(init=False)
    _open: dict[Pair, None] = field(init=False)
    """Pairs that no case has had yet, in a fixed order."""
    _covered: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._levels = [
            levels
            for clause in self.candidate.card.clauses
            if _fits_machine(clause, self.candidate)
            for levels in self._of_clause(clause)
        ]
        self._open = dict.fromkeys(
            pair for levels in self._levels for pair in _pairs_of_levels(levels)
        )

    @property
    def coverage(self) -> Coverage:
        return Coverage(covered=self._covered, total=self._covered + len(self._open))

    def cases(self) -> Iterator[AnyCase]:
        """Yield extremes of all axes in each mode, then all pairs of values, then random points.

        Cases of linear layers are random from the first.
        """
        if not self._levels:
            yield from linear_samples(self.candidate, self.seed, most_cost=self.most_cost)
        number = 0
        for pins in self._goals():
            found = self._case(pins, number)
            if found is not None:
                yield found
                number += 1

    def _goals(self) -> Iterator[Point]:
        """Yield the values that the next case should have."""
        if not self._levels:
            return
        ends = {
            ("mode", mode, name, level)
            for levels in self._levels
            for mode in levels["mode"]
            for name, values in levels.items()
            for level in (values[0], values[-1])
            if name != "mode"
        }
        extremes = [pair for pair in self._open if _in_order(pair) in ends]
        self._random.shuffle(extremes)
        for number, pair in enumerate(extremes):
            if number in FAR_MODES and self.most_cost >= 1:
                yield {"mode": FAR_MODES[number], "length": FAR, "rows": 1, "graph": False}
            if pair in self._open:
                yield {pair[0]: pair[1], pair[2]: pair[3]}
        while self._open:
            pair = self._random.choice(list(self._open))
            yield {pair[0]: pair[1], pair[2]: pair[3]}
        while True:
            yield {}

    def _case(self, pins: Point, number: int) -> Case | None:
        """The admitted draft that has the pinned values and covers the most new pairs.

        None without such a draft: no case can have the pinned pair, and it is no longer counted.
        """
        best: tuple[int, Point, Case] | None = None
        drafts = 0
        for _ in range(PIN_TRIES if pins else 1):
            point = self._draft(pins)
            if point is None:
                continue
            new = sum(pair in self._open for pair in _pairs(point))
            if best is not None and new <= best[0]:
                continue
            case = _case_of(point, Random(f"{self.seed} {number}"), number)
            if self.candidate.admits(case):
                best = new, point, case
                drafts += 1
            if drafts == DRAFTS:
                break
        if best is None:
            if len(pins) == 2:
                self._open = {p: None for p in self._open if dict([p[:2], p[2:]]) != pins}
            return None
        for pair in _pairs(best[1]):
            if pair in self._open:
                del self._open[pair]
                self._covered += 1
        return best[2]

    def _draft(self, pins: Point) -> Point | None:
        """A random affordable point of one clause with the pinned values; None if there is none."""
        able = [
            levels
            for levels in self._levels
            if all(
                name in levels and (value in levels[name] or value == FAR)
                for name, value in pins.items()
            )
        ]
        if not able:
            return None
        levels = self._random.choice(able)
        point = {name: self._random.choice(values) for name, values in levels.items()} | pins
        _settle(point)
        _afford(point, pins, levels, self._random, self.most_cost)
        kept = all(point[name] == value for name, value in pins.items())
        return point if kept and _cost(point) <= self.most_cost else None

    def _of_clause(self, clause: Clause) -> Iterator[dict[str, tuple[Any, ...]]]:
        """The values of each axis, for each kind that the clause serves."""
        modes = tuple(m for phase, ms in MODES.items() if clause.phase.admits(phase) for m in ms)
        levels: dict[str, tuple[Any, ...]] = {
            "dtype": tuple(d for d in DTYPES[:3] if clause.dtype.admits(d)),
            "kv_dtype": tuple(d for d in DTYPES if clause.kv_dtype.admits(d)),
            "page_size": self._numbers("page_size", clause.page_size),
            "spec_topk": (None, *self._numbers("spec_topk", clause.spec_topk)),
            "spec_draft_tokens": self._numbers("spec_draft_tokens", clause.spec_draft_tokens),
            **{name: tuple(map(self._pick, values)) for name, values in OWN.items()},
            **{name: self._flag(name, clause) for name in ("lse", "deterministic")},
        }
        if self.page_sizes:
            sizes = [size for size in sorted(self.page_sizes) if clause.page_size.admits(size)]
            levels["page_size"] = tuple(sizes)
        if not clause.graph.admits(True):
            levels["graph"] = (False,)
        for kind in ("mha", "mla", "nsa", "dual_chunk"):
            if kind != "mha":
                modes = tuple(mode for mode in modes if mode != "encoder")
            shaped = {"mode": modes, "kind": (kind,), **levels, **self._of_kind(clause, kind)}
            if clause.kind.admits(kind) and all(shaped.values()):
                yield shaped

    def _of_kind(self, clause: Clause, kind: str) -> dict[str, tuple[Any, ...]]:
        """The values of axes that only some kinds have."""
        names: tuple[str, ...] = ("head_dim", "num_kv_heads", "group_size")
        if kind in ("mla", "nsa"):
            names = ("kv_lora_rank", "qk_rope_head_dim", "num_q_heads")
        levels: dict[str, tuple[Any, ...]] = {
            name: self._numbers(name, getattr(clause, name)) for name in names
        }
        if kind in ("mla", "nsa"):
            return levels
        levels["v_head_dim"] = (0, *self._numbers("v_head_dim", clause.v_head_dim))
        if kind == "mha":
            for name in ("sliding_window", "attention_chunk"):
                levels[name] = (None, *self._numbers(name, getattr(clause, name)))
            levels["logit_cap"] = (None, 2.0) if clause.logit_cap.admits(2.0) else (None,)
            levels |= {name: self._flag(name, clause) for name in FLAGS}
        return levels

    def _flag(self, name: str, clause: Clause) -> tuple[bool, ...]:
        return (False, True) if getattr(clause, name).admits(True) else (False,)

    def _pick(self, level: Value | Range | None) -> Value | None:
        return self._random.randint(*level) if isinstance(level, tuple) else level

    def _numbers(self, name: str, condition: Condition) -> tuple[int, ...]:
        """Values that the condition admits: its ends, its listed values and some in between."""
        usual = [
            self._random.randint(*level) if isinstance(level, tuple) else level
            for level in UNLIMITED[name]
        ]
        named = [value for value in condition.examples() if isinstance(value, int)]
        if condition is not ANY:
            ends = (condition.nearest(1), condition.nearest(usual[-1]))
            named += [end for end in ends if isinstance(end, int)]
            near = [condition.nearest(size) for size in usual]
            named += [size for size in near if isinstance(size, int)]
        return tuple(sorted(size for size in {*named, *usual} if condition.admits(size) and size))


def _fits_machine(clause: Clause, candidate: Candidate) -> bool:
    question = Question(
        request=Case(name="", steps=()).request, platform=candidate.platform, phase="decode"
    )
    for axis in AXES:
        if axis.name in MACHINE_AXES:
            value = axis.wanted(question)
            if value is not None and not axis.condition(clause).admits(value):
                return False
    return True


def _clear(*names: str) -> Point:
    return {name: NEUTRAL.get(name) for name in names}


NEUTRAL: Mapping[str, Any] = {
    "store": "call",
    **dict.fromkeys((*FLAGS, "graph", "shared", "host_lens"), False),
    **dict.fromkeys(("padding", "new", "spec_draft_tokens", "v_head_dim"), 0),
}
"""Values that request nothing. For axes that are not listed, it is None."""

ENCODER: Point = {
    **_clear("sliding_window", "attention_chunk", "logit_cap", "kv_scales", "store"),
    **_clear("sinks", "deterministic", "lse", "cross_attention", "multi_item", "v_head_dim"),
    **_clear("strided_kv", "alibi"),
    **{"num_kv_heads": 2, "group_size": 4, "page_size": 1},
}
"""An encoder's request mentions neither the cache nor heads."""

RULES: tuple[tuple[Callable[[Point], object], Point], ...] = (
    (lambda p: p["mode"] == "encoder", ENCODER),
    (lambda p: p["mode"] not in ("verify", "draft"), _clear("spec_topk")),
    (lambda p: p["mode"] == "draft" or (p["mode"], p["spec_topk"]) == ("verify", None),
     {"spec_topk": 1}),
    (lambda p: p["mode"] != "verify", _clear("spec_draft_tokens")),
    (lambda p: p["mode"] not in ("decode", "verify"), _clear("graph", "padding")),
    (lambda p: p["rows"] > MOST_IN_GRAPHS, _clear("graph")),
    (lambda p: p["mode"] in ("decode", "verify"), _clear("new")),
    (lambda p: p["mode"] in ("decode", "verify", "encoder"), _clear("shared")),
    (lambda p: p["mode"] not in ("extend", "decode"), _clear("cross_attention", "deterministic")),
    (lambda p: p["mode"] != "extend" or p.get("cross_attention"), _clear("multi_item")),
    (lambda p: p.get("cross_attention") or p.get("multi_item"),
     _clear("sliding_window", "attention_chunk", "shared", "deterministic", "graph", "padding",
            "store")),
    (lambda p: p.get("alibi"), _clear("logit_cap", "cross_attention", "multi_item")),
    (lambda p: p.get("alibi") or (p["spec_topk"] or 1) > 1, _clear("relative_bias")),
    (lambda p: p.get("relative_bias"), _clear("logit_cap", "multi_item")),
    (lambda p: (p["spec_topk"] or 1) > 1, _clear("alibi")),
    (lambda p: p["rows"] > MOST_ALONE, _clear("deterministic")),
    (lambda p: p["deterministic"], {**_clear("graph", "padding"), "store": "pool"}),
    (lambda p: p.get("sliding_window"), _clear("attention_chunk")),
    (lambda p: not p["kv_dtype"].startswith("fp8") or p["kind"] != "mha", _clear("kv_scales")),
)  # fmt: skip
"""Replacements for values that have no meaning at a point or that the suite cannot combine. Each
rule is a condition with the values that replace the point's. The rules for modes come first."""


def _settle(point: Point) -> None:
    """Apply the rules. A point that loses a pinned value is drawn again."""
    for holds, values in RULES:
        if holds(point):
            point.update((name, value) for name, value in values.items() if name in point)
    if point["mode"] == "encoder":
        point["kv_dtype"] = point["dtype"]


def _query_dim(point: Point) -> int:
    if point["kind"] in ("mla", "nsa"):
        return int(point["kv_lora_rank"] + point["qk_rope_head_dim"])
    return int(point["head_dim"])


def _cost(point: Point) -> float:
    """The larger of the elements read and the products, each in units of its limit."""
    latent = point["kind"] in ("mla", "nsa")
    dim = point["kv_lora_rank"] if latent else point["head_dim"]
    heads = point["num_q_heads"] if latent else point["num_kv_heads"] * point["group_size"]
    keys = point["rows"] * point["length"]
    read = keys * dim * (1 if latent else point["num_kv_heads"])
    new = max(point["new"], point["spec_draft_tokens"], 1)
    if point["mode"] in ("extend", "mixed", "draft", "encoder"):
        new = min(new, point["length"])
    slower = SLOWER_IN_GRAPHS if point["graph"] else 1
    return float(slower * max(read / MOST_READ, keys * new * heads * dim / MOST_MULTIPLIED))


def _afford(
    point: Point, pins: Point, levels: Mapping[str, tuple[Any, ...]], rng: Random, most: float
) -> None:
    """Choose smaller values for axes that are not pinned, until the point is affordable."""
    names = ["rows", "length", "new", "group_size", "num_kv_heads", "num_q_heads", "head_dim"]
    rng.shuffle(names)
    for name in names:
        if _cost(point) <= most:
            return
        if name in pins or name not in levels or not point[name]:
            continue
        smaller = sorted(
            (v for v in levels[name] if v is not None and v < point[name]), reverse=True
        )
        for value in smaller:
            point[name] = value
            if _cost(point) <= most:
                return


def _pairs(point: Point) -> list[Pair]:
    return [(a, point[a], b, point[b]) for a, b in combinations(sorted(point), 2)]


def _pairs_of_levels(levels: Mapping[str, tuple[Any, ...]]) -> Iterator[Pair]:
    for a, b in combinations(sorted(levels), 2):
        for one in levels[a]:
            for other in levels[b]:
                yield a, one, b, other


def _in_order(pair: Pair) -> Pair:
    """The pair with its mode first, if it has one."""
    return (*pair[2:], *pair[:2]) if pair[2] == "mode" else pair


def _case_of(point: Point, rng: Random, number: int) -> Case:
    """The case of a point. `rng` draws the other requests' lengths."""
    latent, kind = point["kind"] in ("mla", "nsa"), point["kind"]
    step = _step(point, rng)
    page, most = point["page_size"], max((*step.totals, 1)) + 2
    # Means over many values are so small that the tolerance would hide faults of them
    scale = SHARP if point["length"] > SHARP_FROM else point["scale"]
    large = point["length"] > 2048 or point["rows"] > 64
    windows: tuple[int | None, ...] = (None,) if large else (None, None)
    if point.get("sliding_window"):
        windows = (point["sliding_window"], *windows[1:])
    if point.get("cross_attention"):
        windows = (None, None)
    steps: tuple[Step, ...] = (step,)
    if not large:
        steps = (step, step.varied(most))
    shape: Point = {
        "num_kv_heads": point.get("num_kv_heads"),
        "num_q_heads": point.get("num_kv_heads", 1) * point.get("group_size", 1),
        "head_dim": point.get("head_dim"),
        "v_head_dim": point.get("v_head_dim") or point.get("head_dim"),
    }
    if latent:
        rope = {name: point[name] for name in ("kv_lora_rank", "qk_rope_head_dim")}
        shape = {"num_q_heads": point["num_q_heads"], "num_kv_heads": 1, "head_dim": 192, **rope}
    case = Case(
        name="",
        steps=steps,
        kind=kind,
        **shape,
        index_topk=64 if kind == "nsa" else 0,
        dual_chunk_len=rng.choice((7, 24, 100)) if kind == "dual_chunk" else 0,
        dtype=point["dtype"],
        kv_dtype=point["kv_dtype"],
        page_size=page,
        max_context_len=most,
        scaling=scale and scale * _query_dim(point) ** -0.5,
        windows=windows,
        attention_chunk=point.get("attention_chunk"),
        logit_cap=point.get("logit_cap"),
        kv_scales=(point["kv_scales"], 3.0) if point["kv_scales"] else None,
        sinks=point.get("sinks", False),
        alibi=point.get("alibi", False),
        relative_reach=rng.choice((0, 5, 128)) if point.get("relative_bias") else None,
        spec_topk=point["spec_topk"],
        lse=point["lse"],
        strided_kv=point.get("strided_kv", False),
        kv_in_pool=point["store"] == "pool",
        save_kv_cache=point["mode"] != "encoder",
        host_lens=point["host_lens"],
        deterministic=point["deterministic"],
        is_encoder=point["mode"] == "encoder",
        graph=point["graph"],
    )
    return replace(case, name=f"sampled-{number}-{_words(point)}")


def _step(point: Point, rng: Random) -> Step:
    """A step whose longest request has the point's length, at a random place in the batch."""
    mode, rows, length = point["mode"], point["rows"], point["length"]
    others = [rng.randint(1, min(length, 96)) for _ in range(rows - 1)]
    lens = [*others, length]
    rng.shuffle(lens)
    if mode == "decode":
        encoder = tuple(rng.randint(0, 40) for _ in lens) if point.get("cross_attention") else ()
        return decode(*lens, encoder=encoder, padding=point["padding"])
    if mode == "verify":
        drafts = point["spec_draft_tokens"]
        prefixes = (max(size - drafts, 0) for size in lens)
        return verify(drafts, *prefixes, padding=point["padding"])
    if mode == "encoder":
        return extend(*((0, min(size, max(point["new"], 1))) for size in lens))
    requests = [_request(size, point, rng) for size in lens]
    more: Point = {}
    if point.get("cross_attention"):
        more["encoder"] = tuple(rng.randint(0, 40) for _ in lens)
    if point.get("multi_item"):
        more["items"] = tuple(
            (max(new - new // 2, 1), *([new // 2] * (new > 1))) for _, new in requests
        )
    if point["shared"]:
        shared = rng.randint(1, 3) * point["page_size"]
        requests = [(max(cached, shared), new) for cached, new in requests]
        more["shared_prefix"] = shared
    modes = {"mixed": ForwardMode.MIXED, "draft": ForwardMode.DRAFT_EXTEND}
    return extend(*requests, mode=modes.get(mode, ForwardMode.EXTEND), **more)


def _request(size: int, point: Point, rng: Random) -> tuple[int, int]:
    """(cached, new) tokens. A mixed step's requests decode or extend."""
    new = 1 if point["mode"] == "mixed" and rng.random() < 0.5 else min(point["new"], size)
    return size - new, new


def _words(point: Point) -> str:
    """The values that distinguish the case, for its name."""
    parts = [str(point["mode"]), *([point["kind"]] if point["kind"] != "mha" else [])]
    parts += [f"{point['dtype']}", f"kv={point['kv_dtype']}", f"page={point['page_size']}"]
    for name in sorted(set(point) - {"mode", "kind", "dtype", "kv_dtype", "page_size"}):
        if point[name] not in (None, False, 0, "call"):
            parts.append(name if point[name] is True else f"{name}={point[name]}")
    return ",".join(parts)
