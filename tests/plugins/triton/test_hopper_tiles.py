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

from attnmux.triton.config_tables import HOPPER_TILES

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
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages": {"PAGE": 16},
    "narrow": {"D": 64},
    "window": {"WINDOW": 100, "HAS_SINKS": True},
    "chunk": {"CHUNK": 192, "HAS_CAP": True},
    "in call": {"IN_CALL": True, "IS_CAUSAL": False, "HAS_LSE": True},
    "cross": {"IS_CROSS": True, "IS_CAUSAL": False},
    "splits": {"SPLIT_BLOCKS": 2, "HAS_LSE": True},
}
SOME = ("plain", "pages", "chunk", "splits")
"""The variants that compile without `--full`: the most common one, and those with the most to keep
in registers."""
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
        }.items()
        if not is_given
    }


def changed_pointers(variant: dict[str, Any]) -> dict[str, str]:
    absentees = dict.fromkeys(absent(variant), "constexpr")
    return {**absentees, "out": "*fp32"} if variant.get("SPLIT_BLOCKS") else absentees


def compile_variants(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    import triton  # noqa: PLC0415  # not in the interpreter's process
    from compile_kernel import compile_kernel  # noqa: PLC0415  # as above

    from attnmux.triton.kernels.hopper_tiles import (  # noqa: PLC0415  # as above
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
                {**LAUNCH, **variant},
                options={"num_warps": 4},
            )
        yield {"variant": name, "shared": compiled.metadata.shared, "said": log.getvalue()}


RUNS: dict[str, dict[str, Any]] = {
    "causal": {"new": [300, 1, 0, 129], "cached": [0, 0, 7, 0]},
    "prefix": {"new": [65, 1, 200], "cached": [333, 128, 1000], "PAGE": 16, "HAS_LSE": True},
    "window": {"new": [300, 129], "cached": [500, 0], "WINDOW": 100},
    "narrow": {"new": [300, 129], "cached": [500, 0], "D": 64, "GROUP": 5},
    "in call": {"new": [300, 129], "cached": [0, 0], "IN_CALL": True, "IS_CAUSAL": False},
}


def run_case(changed: dict[str, Any]) -> float:
    """The largest error compared with float64."""
    from attnmux.triton.kernels.hopper_tiles import (  # noqa: PLC0415  # not the interpreter's
        attend_hopper_tiles,
    )
    from attnmux.triton.tiles import TileKey, TilePlan  # noqa: PLC0415  # as above

    variant = {**PLAIN, **changed}
    new, cached = variant.pop("new"), variant.pop("cached")
    width, group, heads, page = variant["D"], variant["GROUP"], 2, variant["PAGE"]
    cuda = torch.device("cuda")
    tokens, batch_size = sum(new), len(new)
    lens = [both[0] + both[1] for both in zip(new, cached, strict=True)]
    pages = -(-max(lens) // page)
    table = torch.randperm(batch_size * pages).view(batch_size, pages).to(cuda, torch.int32)
    kept = batch_size * pages * page
    rows = tokens if variant["IN_CALL"] else kept
    q, k, v = (
        torch.randn(count, of, width, device=cuda, dtype=torch.bfloat16)
        for count, of in ((tokens, heads * group), (rows, heads), (rows, heads))
    )
    out = torch.full_like(q, float("nan"))
    lse = torch.empty(q.shape[:2], device=cuda) if variant["HAS_LSE"] else None
    q_indptr = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32, device=cuda)
    plan = TilePlan(TileKey(group=group, block_m=128), cuda)
    plan.fill_for(q_indptr, batch_size, tokens)
    in_call = variant["IN_CALL"]
    attend_hopper_tiles[heads, plan.num_tiles](
        *(q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], out, out.stride(0)),
        *(lse, 0 if lse is None else lse.stride(0), None),
        *((None, 0, None) if in_call else (table, pages, torch.arange(batch_size, device=cuda))),
        torch.tensor(cached, dtype=torch.int32, device=cuda),
        *(None, None, q_indptr, plan.request, plan.row),
        *(batch_size, tokens, plan.num_tiles, 1, width**-0.5 * math.log2(math.e), 0.0, 1.0),
        **variant,
        **LAUNCH,
        num_warps=4,
    )
    worst = 0.0
    for request, length in enumerate(lens):
        here = slice(int(q_indptr[request]), int(q_indptr[request + 1]))
        places = torch.arange(length, device=cuda)
        slots = table[request].long()[places // page] * page + places % page
        keys, values = (
            (x[here] if in_call else x[slots]).double().repeat_interleave(group, 1) for x in (k, v)
        )
        logits = torch.einsum("qhd,khd->hqk", q[here].double(), keys) * width**-0.5
        position = torch.arange(new[request], device=cuda)[:, None] + cached[request]
        if variant["IS_CAUSAL"]:
            logits = logits.masked_fill(places > position, -math.inf)
        if variant["WINDOW"] >= 0:
            logits = logits.masked_fill(places < position - variant["WINDOW"], -math.inf)
        expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)
        differences = [(out[here] - expected).abs()]
        if lse is not None:
            differences.append((lse[here] - logits.logsumexp(-1).T).abs())
        worst = max(worst, *(float(each.max()) if each.numel() else 0.0 for each in differences))
    return worst


def test_every_variant_fits_and_overlaps(script, full):
    names = VARIANTS if full else SOME
    lines = script("compile", *names)
    assert [line["variant"] for line in lines] == list(names)
    for line in lines:
        assert line["shared"] <= SHARED, line
        # The assembler warns where products wait for each other, and of register counts it ignores.
        assert "(C75" not in line["said"], line
        spilled = re.search(r"(\d+) bytes spill stores", line["said"])
        # The warps that copy may spill a few numbers; those that multiply have no time to.
        assert spilled is not None, line
        assert int(spilled[1]) <= (MOST_SPILLED_OF_PAGES if line["variant"] == "pages" else 32), (
            line
        )


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_it_attends_as_float64_does(script):
    lines = script("run")
    assert [line["case"] for line in lines] == list(RUNS)
    assert [line for line in lines if not line["error"] < 0.02] == []


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        for facts in compile_variants(sys.argv[2:]):
            print(json.dumps(facts))
    else:
        for case, changed in RUNS.items():
            print(json.dumps({"case": case, "error": run_case(changed)}))
