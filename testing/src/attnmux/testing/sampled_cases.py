"""The case of a sampled point."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from attnmux.core import ForwardMode
from attnmux.testing.cases import Case, Step, decode, extend, verify
from attnmux.testing.sampled_points import Point

SHARP, SHARP_FROM = 2.5, 512
"""The scale of requests longer than `SHARP_FROM`, in units of the usual one."""


def case_of(point: Point, rng: Random, number: int) -> Case:
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


def _query_dim(point: Point) -> int:
    if point["kind"] in ("mla", "nsa"):
        return int(point["kv_lora_rank"] + point["qk_rope_head_dim"])
    return int(point["head_dim"])


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
