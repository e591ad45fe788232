"""The Hopper kernel for tiles: compiled without a GPU, and run where there is one.

As a script, `compile` prints a line for each variant, `run` one for each case on the GPU.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnmux.emulators.gluon import run as emulate
from attnmux.triton.launches.hopper_configs import (
    HOPPER_HIGH_HELD_TILES,
    HOPPER_HIGH_TILES,
    HOPPER_TILES,
)

SHARED = 232448
"""Bytes of shared memory that one program may take, by NVIDIA's manual."""

MOST_SPILLED_OF_PAGES = 160
"""Bytes. A table of pages, which only pools of window layers have, needs more registers than the
warps that copy have; with 56 registers they would spill no more than without pages."""

LAUNCH = {
    "BLOCK_M": HOPPER_TILES.block_m,
    "BLOCK_N": HOPPER_TILES.block_n,
    "STAGES": HOPPER_TILES.num_stages,
    **HOPPER_TILES.constants,
}
PLAIN: dict[str, Any] = {
    "GROUP": 4,
    "D": 128,
    "REAL_TAIL": 0,
    "REAL_DV": 128,
    "PAGE": 1,
    "IS_CAUSAL": True,
    "IS_CROSS": False,
    "IN_CALL": False,
    "HAS_ENCODER": False,
    "WINDOW": -1,
    "CHUNK": 0,
    "HAS_CAP": False,
    "HAS_SINKS": False,
    "HAS_LSE": False,
    "SPLIT_BLOCKS": 0,
}
THREE = {
    "BLOCK_M": HOPPER_HIGH_TILES.block_m,
    "BLOCK_N": HOPPER_HIGH_TILES.block_n,
    **HOPPER_HIGH_TILES.constants,
}
"""Three warpgroups that multiply."""
HELD = dict(HOPPER_HIGH_HELD_TILES.constants)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages": {"PAGE": 16},
    "narrow": {"D": 64, "REAL_DV": 64, **THREE},
    "high": {"PAGE": 16, **THREE},
    "held": {**{"D": 64, "REAL_TAIL": 48, "REAL_DV": 112, "PAGE": 16}, **THREE, **HELD},
    "half": {"PAGE": 16, "BLOCK_M": 64, "maxnreg": 168},
    "window": {"WINDOW": 100, "HAS_SINKS": True},
    "chunk": {"CHUNK": 192, "HAS_CAP": True},
    "in call": {"IN_CALL": True, "IS_CAUSAL": False, "HAS_LSE": True},
    "cross": {"IS_CROSS": True, "IS_CAUSAL": False},
    "splits": {"SPLIT_BLOCKS": 2, "HAS_LSE": True},
    **{
        f"rounded {what}, {name}": {"PAGE": 16, "rounds": what, **changed}
        for what in ("queries", "all")
        for name, changed in {
            "high": THREE,
            "narrow": {"D": 64, "REAL_DV": 64, "HAS_CAP": True, **THREE},
            "short": {},
            "wide": {"D": 256, "REAL_DV": 256, "BLOCK_N": 64},
        }.items()
    },
}
SOME = ("pages", "narrow", "held", "chunk", "splits", "rounded queries, high", "rounded all, high")
"""The variants that compile without `--full`: those with the most to keep in registers."""
POINTERS = {
    "q": "*bf16",
    "k": "*bf16",
    "v": "*bf16",
    "out": "*bf16",
    "lse": "*fp32",
    "sinks": "*fp32",
    "rows": "*i64",
    "scale": "fp32",
    "cap": "fp32",
    "v_scale": "fp32",
} | dict.fromkeys(
    (
        "slots",
        "v_starts",
        "cached_lens",
        "encoder_lens",
        "encoder_indptr",
        "q_indptr",
        "tile_request",
        "tile_row",
    ),
    "*i32",
)


def absent(variant: dict[str, Any]) -> set[str]:
    """Arguments that are None."""
    return {
        name
        for name, is_given in {
            "lse": variant["HAS_LSE"],
            "sinks": variant["HAS_SINKS"],
            "encoder_lens": variant["IS_CROSS"],
            "encoder_indptr": variant["IS_CROSS"] and variant["IN_CALL"],
            "slots": not variant["IN_CALL"],
            "rows": not variant["IN_CALL"],
            "v_starts": "rounds" in variant,
        }.items()
        if not is_given
    }


def changed_pointers(variant: dict[str, Any]) -> dict[str, str]:
    changed = dict.fromkeys(absent(variant), "constexpr")
    if variant.get("rounds"):
        changed["k"] = "*fp8e4nv"
    if variant.get("rounds") == "all":
        changed["v"] = "*fp8e4nv"
    if variant.get("SPLIT_BLOCKS"):
        changed["out"] = "*fp32"
    return changed


def compile_variants(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    import triton  # noqa: PLC0415  # not in the interpreter's process
    from compile_kernel import compile_kernel  # noqa: PLC0415  # as above

    from attnmux.triton.kernels.hopper.tiles import (  # noqa: PLC0415  # as above
        attend_hopper_tiles,
    )

    triton.knobs.nvidia.dump_ptxas_log = True
    for name in names:
        changed = VARIANTS[name]
        variant, log = {**PLAIN, **changed}, io.StringIO()
        with redirect_stdout(log):
            compiled = compile_kernel(
                attend_hopper_tiles,
                {**POINTERS, **changed_pointers(variant)},
                {**LAUNCH, **{n: value for n, value in variant.items() if n.isupper()}},
                options={
                    "num_warps": 4,
                    **({"maxnreg": variant["maxnreg"]} if "maxnreg" in variant else {}),
                },
            )
        yield {
            "variant": name,
            "shared": compiled.metadata.shared,
            "said": log.getvalue(),
            "multiplies 8 bits": ".f32.e4m3.e4m3" in compiled.asm["ptx"],
        }


def of_dims(d: int, tail: int = 0, value: int | None = None) -> dict[str, Any]:
    """Constants for rows of d + tail columns, and values of as many unless given."""
    return {"D": d, "REAL_TAIL": tail, "REAL_DV": d + tail if value is None else value}


ROUNDED = {"rounds": "queries", "HAS_LSE": True}
"""Queries are rounded to the 8 bits of K, and V lies side by side."""
ALL_ROUNDED = {"rounds": "all", "HAS_LSE": True}
"""So are weights to the 8 bits of V, which is turned."""
RUNS: dict[str, dict[str, Any]] = {
    "causal": {"new": [300, 1, 0, 129], "cached": [0, 0, 7, 0]},
    "prefix": {"new": [65, 1, 200], "cached": [333, 128, 1000], "PAGE": 16, "HAS_LSE": True},
    "window": {"new": [300, 129], "cached": [500, 0], "WINDOW": 100},
    "narrow": {"new": [300, 129], "cached": [500, 0], **of_dims(64), "GROUP": 5},
    "wide": {"new": [70, 129], "cached": [190, 0], **of_dims(256), "BLOCK_N": 64, "GROUP": 2},
    "80": {"new": [70, 129], "cached": [190, 0], **of_dims(64, 16), "HAS_LSE": True},
    "96": {"new": [70, 129], "cached": [190, 0], **of_dims(64, 32), "PAGE": 16, "GROUP": 3},
    "112": {"new": [70, 129], "cached": [190, 0], **of_dims(64, 48), "WINDOW": 60},
    "192/128": {"new": [70, 129], "cached": [0, 0], **of_dims(128, 64, 128), "IN_CALL": True},
    "sinks": {"new": [70, 129], "cached": [190, 0], "HAS_SINKS": True, "HAS_CAP": True},
    "splits": {"new": [7, 12], "cached": [900, 0], "SPLIT_BLOCKS": 2, "HAS_LSE": True},
    "112 in splits": {
        "new": [7, 12],
        "cached": [900, 0],
        **of_dims(64, 48),
        "SPLIT_BLOCKS": 2,
        "HAS_LSE": True,
    },
    "in call": {"new": [300, 129], "cached": [0, 0], "IN_CALL": True, "IS_CAUSAL": False},
    "three": {"new": [300, 129], "cached": [500, 0], **of_dims(64), **THREE, "HAS_LSE": True},
    "half": {"new": [40, 17], "cached": [190, 70], "PAGE": 16, "BLOCK_M": 64, "BLOCK_N": 64},
    "held": {"new": [40, 129], "cached": [190, 0], **of_dims(64), **THREE, "HOLDS_QUERIES": 1},
    "112 held": {"new": [70, 129], "cached": [190, 0], **of_dims(64, 48), "PAGE": 16, **HELD},
    "96 held": {
        "new": [70, 129],
        "cached": [190, 0],
        **of_dims(64, 32),
        **THREE,
        "HOLDS_QUERIES": 1,
    },
    "rounded": {"new": [65, 1, 200], "cached": [333, 128, 300], **ROUNDED, "PAGE": 16, **THREE},
    "rounded, 64": {"new": [70, 0, 129], "cached": [190, 9, 0], **ROUNDED, **of_dims(64)},
    "rounded, 256": {"new": [70], "cached": [190], **ROUNDED, **of_dims(256), "BLOCK_N": 64},
    "rounded, window": {"new": [100], "cached": [400], **ROUNDED, "WINDOW": 100, "HAS_SINKS": True},
    "rounded, cap": {"new": [9, 70], "cached": [190, 0], **ROUNDED, "HAS_CAP": True, "GROUP": 8},
    "rounded, splits": {"new": [7, 12], "cached": [900, 0], **ROUNDED, "SPLIT_BLOCKS": 2},
    "rounded, rising": {"new": [70], "cached": [500], **ROUNDED, "rise": 0.03, "GROUP": 1},
    "all": {"new": [65, 1, 200], "cached": [333, 128, 300], **ALL_ROUNDED, "PAGE": 16, **THREE},
    "all, 64": {"new": [70, 0, 129], "cached": [190, 9, 0], **ALL_ROUNDED, **of_dims(64)},
    "all, 256": {"new": [70], "cached": [190], **ALL_ROUNDED, **of_dims(256), "BLOCK_N": 64},
    "all, window": {"new": [100], "cached": [400], **ALL_ROUNDED, "WINDOW": 100, "HAS_SINKS": True},
    "all, cap": {"new": [9, 70], "cached": [190, 0], **ALL_ROUNDED, "HAS_CAP": True, "GROUP": 8},
    "all, splits": {"new": [7, 12], "cached": [900, 0], **ALL_ROUNDED, "SPLIT_BLOCKS": 2},
    "all, rising": {"new": [70], "cached": [500], **ALL_ROUNDED, "rise": 0.03, "GROUP": 1},
    # From block to block by less than rows are rescaled for, and by more
    "rising": {"new": [70, 129], "cached": [500, 0], "PAGE": 16, "HAS_LSE": True, "rise": 0.03},
    "rising fast": {"new": [70], "cached": [500], "rise": 0.1, **of_dims(64, 32), **THREE},
}


def run_case(changed: dict[str, Any], device: str) -> float:
    """The largest error compared with float64. On a CPU, the kernel is emulated."""
    from attnmux.triton.attention.tile_plans import TileKey, TilePlan  # noqa: PLC0415  # not in both processes

    torch.manual_seed(0)
    variant = {**PLAIN, **changed}
    new, cached = variant.pop("new"), variant.pop("cached")
    rise, rounds = variant.pop("rise", 0.0), variant.pop("rounds", "")
    launch = {**LAUNCH, **{name: variant.pop(name) for name in LAUNCH if name in variant}}
    group, heads, page = variant["GROUP"], 2, variant["PAGE"]
    width, value_width = variant["D"] + variant["REAL_TAIL"], variant["REAL_DV"]
    tokens, batch_size = sum(new), len(new)
    lens = [both[0] + both[1] for both in zip(new, cached, strict=True)]
    pages = -(-max(lens) // page)
    table = torch.randperm(batch_size * pages).view(batch_size, pages).to(device, torch.int32)
    in_call = variant["IN_CALL"]
    rows = tokens if in_call else batch_size * pages * page
    q, k, v = (
        torch.randn(count, of, each, device=device, dtype=torch.bfloat16)
        for count, of, each in (
            (tokens, heads * group, width),
            (rows, heads, width),
            (rows, heads, value_width),
        )
    )
    slots_of_requests = [slots_of(*both, page) for both in zip(table, lens, strict=True)]
    if rise:
        raise_logits(q, k, slots_of_requests, rise)
    v_read, v_starts = v, None
    if rounds:
        # Rows of different sizes
        q *= torch.randn(tokens, heads * group, 1, device=device).exp()
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        v_read, v_starts = side_by_side(v, slots_of_requests, turns=rounds == "all")
    num_splits = 3 if variant["SPLIT_BLOCKS"] else 1
    out = torch.full((num_splits, tokens, heads * group, value_width), math.nan, device=device)
    out = out if num_splits > 1 else out.bfloat16()
    lse = torch.empty(out.shape[:3], device=device) if variant["HAS_LSE"] else None
    sinks = torch.randn(heads * group, device=device) if variant["HAS_SINKS"] else None
    q_indptr = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32, device=device)
    plan = TilePlan(TileKey(group=group, block_m=launch["BLOCK_M"]), torch.device(device))
    plan.fill_for(
        q_indptr, torch.tensor(cached, dtype=torch.int32, device=device), batch_size, tokens
    )
    scale, cap = width**-0.5, 3.0 if variant["HAS_CAP"] else 0.0
    given = (
        *(q, *q.stride()[:2], k, *k.stride()[:2], v_read, *v_read.stride()[:2], out, out.stride(1)),
        *(lse, 0 if lse is None else lse.stride(1), sinks),
        *((None, 0, None) if in_call else (table, pages, torch.arange(batch_size, device=device))),
        v_starts,
        torch.tensor(cached, dtype=torch.int32, device=device),
        *(None, None, q_indptr, plan.request, plan.row),
        *(batch_size, tokens, plan.num_tiles, num_splits),
        *(scale if cap else scale * math.log2(math.e), cap, 1.0),
    )
    launch_on(device, (heads, plan.num_tiles, num_splits), given, {**variant, **launch})
    if num_splits > 1:
        shares = lse.softmax(0)[..., None]
        out, lse = (out * shares).sum(0)[None], lse.logsumexp(0)[None]
    errors: list[torch.Tensor] = []
    for request, length in enumerate(lens):
        here = slice(int(q_indptr[request]), int(q_indptr[request + 1]))
        places, slots = torch.arange(length, device=device), slots_of_requests[request]
        keys, values = (
            (x[here] if in_call else x[slots]).double().repeat_interleave(group, 1) for x in (k, v)
        )
        queries = rounded(q[here]) if rounds else q[here].double()
        logits = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        position = torch.arange(new[request], device=device)[:, None] + cached[request]
        expected, total = attended(logits, values, position - places, variant, cap, sinks)
        differences = [(out[0, here] - expected).abs()]
        if lse is not None:
            differences.append((lse[0, here] - total.T).abs())
        errors += [each.flatten() for each in differences]
    # Of tensors, which unlike Python's numbers are NaN where one value is.
    return float(torch.cat(errors).max())


def slots_of(row: torch.Tensor, length: int, page: int) -> torch.Tensor:
    """The slots of the first `length` tokens of a row of a table of pages."""
    places = torch.arange(length, device=row.device)
    return row.long()[places // page] * page + places % page


def raise_logits(
    q: torch.Tensor, k: torch.Tensor, slots_of_requests: Sequence[torch.Tensor], rise: float
) -> None:
    """Let logits grow by so much from key to key, the last one first, as the kernel reads them."""
    q += 1
    for slots in slots_of_requests:
        places = torch.arange(len(slots), 0, -1, device=k.device)
        k[slots] += (rise * places * k.shape[2] ** -0.5)[:, None, None].bfloat16()


def rounded(q: torch.Tensor) -> torch.Tensor:
    """Queries [T, H, D] as the kernel rounds them: each row has a power of 2 for its own."""
    power = q.double().abs().amax(-1, keepdim=True).log2().floor().exp2() / 128
    return (q.double() / power).to(torch.float8_e4m3fn).double() * power


def side_by_side(
    v: torch.Tensor, slots_of_requests: Sequence[torch.Tensor], *, turns: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of requests as the kernel reads them, and each request's first row."""
    held = [turned(v[slots]) if turns else v[slots].bfloat16() for slots in slots_of_requests]
    first = torch.tensor([0, *(len(each) for each in held[:-1])]).cumsum(0)
    return torch.cat(held), first.to(v.device, torch.int32)


def turned(v: torch.Tensor) -> torch.Tensor:
    """Values [n, H, D] of a request in pieces [pieces, H, D * 64] of 64 keys, an even number."""
    count, heads, width = v.shape
    whole = torch.zeros(-(-count // 128) * 128, heads, width, dtype=v.dtype, device=v.device)
    whole[:count] = v
    # Keys 0, 1, 8, 9, 2, 3, 10, 11 and so on of every 16
    order = [8 * b + 2 * t + c for t in range(4) for b in range(2) for c in range(2)]
    pieces = whole.view(-1, 4, 16, heads, width)[:, :, order]
    return pieces.permute(0, 3, 4, 1, 2).reshape(len(pieces), heads, width * 64)


def attended(
    logits: torch.Tensor,
    values: torch.Tensor,
    distance: torch.Tensor,
    variant: dict[str, Any],
    cap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [T, Hq, Dv] and the LSE [Hq, T] of logits [Hq, T, keys]. distance [T, keys]: of
    each key before each token."""
    if cap:
        logits = cap * torch.tanh(logits / cap)
    if variant["IS_CAUSAL"]:
        logits = logits.masked_fill(distance < 0, -math.inf)
    if variant["WINDOW"] >= 0:
        logits = logits.masked_fill(distance > variant["WINDOW"], -math.inf)
    total = logits.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.double()[:, None])
    return torch.einsum("hqk,khd->qhd", (logits - total[..., None]).exp(), values), total


def launch_on(
    device: str, grid: tuple[int, int, int], given: Sequence[Any], constants: dict[str, Any]
) -> None:
    from attnmux.triton.kernels.hopper.tiles import (  # noqa: PLC0415  # not in both processes
        attend_hopper_tiles,
    )

    if device == "cuda":
        attend_hopper_tiles[grid](*given, **constants, num_warps=4)
    else:
        emulate(attend_hopper_tiles, grid, *given, **constants)


@pytest.mark.turns(4, suite="compilers")
def test_every_variant_fits_and_overlaps(script, full):
    names = VARIANTS if full else SOME
    lines = script("compile", *names)
    assert [line["variant"] for line in lines] == list(names)
    for line in lines:
        assert line["shared"] <= SHARED, line
        # The assembler warns where products wait for each other, and of register counts it ignores.
        assert "(C75" not in line["said"], line
        assert line["multiplies 8 bits"] == line["variant"].startswith("rounded"), line
        spilled = re.search(r"(\d+) bytes spill stores", line["said"])
        # The warps that copy may spill a few numbers; those that multiply have no time to.
        assert spilled is not None, line
        assert int(spilled[1]) <= (
            MOST_SPILLED_OF_PAGES if line["variant"] in ("pages", "half") else 32
        ), line


def most_error(case: str) -> float:
    """Rounded weights are off by 2^-4 each, of values up to 4, of which few dominate some rows."""
    return 0.12 if RUNS[case].get("rounds") == "all" else 0.02


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.turns(4)
def test_it_attends_as_float64_does_where_it_is_emulated(case):
    assert run_case(RUNS[case], "cpu") < most_error(case)


def parts_of_prompt(lens: Sequence[int], variant: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """out and lse of a prompt that is emulated in parts of as many tokens."""
    from attnmux.triton.attention.tile_plans import TileKey, TilePlan  # noqa: PLC0415  # not in both processes

    generator, total, group, width = torch.Generator().manual_seed(0), sum(lens), 4, variant["D"]
    q, k, v = (
        torch.randn(total, heads, width, generator=generator).bfloat16() for heads in (group, 1, 1)
    )
    results, cached = [], 0
    for new in lens:
        out, lse = torch.empty(new, group, width).bfloat16(), torch.empty(new, group)
        q_indptr, lens_before = (torch.tensor(x, dtype=torch.int32) for x in ([0, new], [cached]))
        plan = TilePlan(TileKey(group=group, block_m=variant["BLOCK_M"]), torch.device("cpu"))
        plan.fill_for(q_indptr, lens_before, 1, new)
        given = (
            *(q[cached:], group * width, width, k, width, width, v, width, width),
            *(out, group * width, lse, group, None),
            *(torch.arange(total, dtype=torch.int32)[None], total, torch.zeros(1).long(), None),
            *(lens_before, None, None, q_indptr, plan.request, plan.row),
            *(1, new, plan.num_tiles, 1, width**-0.5 * math.log2(math.e), 0.0, 1.0),
        )
        launch_on("cpu", (1, plan.num_tiles, 1), given, variant)
        results.append((out, lse))
        cached += new
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


@pytest.mark.parametrize("changed", [{}, {"WINDOW": 127}, {"WINDOW": 127, "HOLDS_QUERIES": 1}])
def test_a_row_has_the_same_bits_whatever_rows_share_its_tile(changed):
    # Rows of a tile begin to see keys at different ones: some read blocks that they do not see.
    variant = {**PLAIN, **LAUNCH, **of_dims(64), **THREE, "HAS_LSE": True, **changed}
    whole = parts_of_prompt([320], variant)
    for lens in ([128, 192], [64, 192, 64]):
        for part, expected in zip(parts_of_prompt(lens, variant), whole, strict=True):
            assert part.equal(expected)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_it_attends_as_float64_does(script):
    lines = script("run")
    assert [line["case"] for line in lines] == list(RUNS)
    assert [line for line in lines if not line["error"] < most_error(line["case"])] == []


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        for facts in compile_variants(sys.argv[2:]):
            print(json.dumps(facts))
    else:
        for case, changed in RUNS.items():
            print(json.dumps({"case": case, "error": run_case(changed, "cuda")}))
