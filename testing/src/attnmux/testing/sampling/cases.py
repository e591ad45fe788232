"""The case of a sampled point."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from attnmux.core import ForwardMode
from attnmux.testing.cases.case import Case, Step, decode, extend, verify
from attnmux.testing.sampling.points import MOST_SHARED, OPTION, Point, first_page

SHARP, SHARP_FROM = 2.5, 512
"""The scale of requests longer than `SHARP_FROM`, in units of the usual one."""
OTHER_IDS = 0, 1, 7, 8, 31, 32, 60
"""Ids of the second layer."""
MOST_FEW, SHORT = 4, 64
"""Requests, and the longest of them, in the small steps of a case with many steps."""


def case_of(point: Point, rng: Random, number: int) -> Case:
    """The case of a point. `rng` draws the other requests' lengths."""
    latent, kind = point["kind"] in ("mla", "nsa"), point["kind"]
    steps = _steps(point, rng)
    page, most = point["page_size"], max(total for step in steps for total in (*step.totals, 1)) + 2
    # Means over many values are so small that the tolerance would hide faults of them
    scale = SHARP if point["length"] > SHARP_FROM else point["scale"]
    windows: tuple[int | None, ...] = (None, None)
    if _is_large(point) or point["place"]:
        windows = (None,)
    if point.get("sliding_window"):
        windows = (point["sliding_window"], *windows[1:])
    if point.get("cross_attention"):
        windows = (None, None)
    other_ids = [layer_id for layer_id in OTHER_IDS if layer_id != point["layer_id"]]
    layer_ids = point["layer_id"], rng.choice(other_ids)
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
        steps=steps if len(steps) > 1 or _is_large(point) else (*steps, steps[0].varied(most)),
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
        layer_ids=layer_ids[: len(windows)],
        first_row=point["first_row"],
        spare_columns=point["spare_columns"],
        first_page=first_page(point),
        options=tuple(
            (name.removeprefix(OPTION), value)
            for name, value in point.items()
            if name.startswith(OPTION)
        ),
    )
    return replace(case, name=f"sampled-{number}-{_words(point)}")


def _query_dim(point: Point) -> int:
    if point["kind"] in ("mla", "nsa"):
        return int(point["kv_lora_rank"] + point["qk_rope_head_dim"])
    return int(point["head_dim"])


def _is_large(point: Point) -> bool:
    """Whether the case has one layer, and no variation of its step."""
    return bool(point["length"] > 2048 or point["rows"] > 64)


def _steps(point: Point, rng: Random) -> tuple[Step, ...]:
    """The point's step. If other modes follow, these are five in turns, of which the others are
    small: some have as many requests, and all other numbers of drafts."""
    steps = [_step(point, rng)]
    few = min(point["rows"], MOST_FEW)
    for mode in (point["then"], point["mode"]) * 2 if point["then"] else ():
        small = {
            "mode": mode,
            "rows": rng.choice((few, rng.randint(1, MOST_FEW))),
            "length": rng.randint(1, SHORT),
            "new": rng.randint(1, 16),
            "spec_draft_tokens": rng.randint(1, max(point["spec_draft_tokens"], 1)),
        }
        steps.append(_step({**point, **small}, rng))
    if rng.random() < 0.5:
        steps.reverse()
    if point["empty"]:
        steps.insert(1, _empty_step(steps[0]))
    return tuple(steps)


def _empty_step(step: Step) -> Step:
    """A step of as many requests, all without keys but the drafts."""
    drafts = step.new[0] if step.mode is ForwardMode.TARGET_VERIFY else 0
    new = (1 if step.mode is ForwardMode.DECODE else drafts,) * len(step.lens)
    return replace(step, lens=(drafts,) * len(new), new=new, shared_prefix=0)


def _step(point: Point, rng: Random) -> Step:
    """A step whose longest request has the point's length, at a random place in the batch."""
    mode, rows, length = point["mode"], point["rows"], point["length"]
    lens = [*(rng.randint(1, min(length, 96)) for _ in range(rows - 1)), length]
    rng.shuffle(lens)
    more: Point = {}
    if point.get("cross_attention"):
        more["encoder"] = tuple(rng.randint(0, 40) for _ in lens)
    if point["shared"] and rows > 1:
        more["shared_prefix"] = rng.randint(1, MOST_SHARED) * point["page_size"]
        more["sharing"] = rng.choice((None, rng.randint(2, rows)))
    if mode == "encoder":
        return extend(*((0, min(size, max(point["new"], 1))) for size in lens))
    requests = [_request(size, point, rng) for size in lens]
    if more.get("shared_prefix"):
        shared = requests[: more["sharing"]]
        shared = [(max(cached, more["shared_prefix"]), new) for cached, new in shared]
        requests = shared + requests[len(shared) :]
    if mode == "decode":
        lens = [cached + 1 for cached, _ in requests]
        return decode(*lens, padding=point["padding"], **more)
    if mode == "verify":
        prefixes = [cached for cached, _ in requests]
        return verify(point["spec_draft_tokens"], *prefixes, padding=point["padding"], **more)
    if point.get("multi_item"):
        more["items"] = tuple(
            (max(new - new // 2, 1), *([new // 2] * (new > 1))) for _, new in requests
        )
    modes = {"mixed": ForwardMode.MIXED, "draft": ForwardMode.DRAFT_EXTEND}
    return extend(*requests, mode=modes.get(mode, ForwardMode.EXTEND), **more)


def _request(size: int, point: Point, rng: Random) -> tuple[int, int]:
    """(cached, new) tokens. A mixed step's requests decode or extend."""
    mode = point["mode"]
    if mode == "decode" or (mode == "mixed" and rng.random() < 0.5):
        return size - 1, 1
    if mode == "verify":
        return max(size - point["spec_draft_tokens"], 0), point["spec_draft_tokens"]
    return max(size - point["new"], 0), min(point["new"], size)


def _words(point: Point) -> str:
    """The values that distinguish the case, for its name."""
    parts = [str(point["mode"]), *([point["kind"]] if point["kind"] != "mha" else [])]
    parts += [f"{point['dtype']}", f"kv={point['kv_dtype']}", f"page={point['page_size']}"]
    for name in sorted(set(point) - {"mode", "kind", "dtype", "kv_dtype", "page_size"}):
        if point[name] not in (None, False, 0, "call") and not name.startswith(OPTION):
            parts.append(name if point[name] is True else f"{name}={point[name]}")
    return ",".join(parts)
