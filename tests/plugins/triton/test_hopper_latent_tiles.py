"""The Hopper kernel for latent tiles: compiled and emulated without a GPU, run where there is one.

As a script, `compile` prints a line for each variant, `run` one for each case on the GPU.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnmux.emulators.gluon import run as emulate

SHARED = 232448
"""Bytes of shared memory that one program may take on sm90, by NVIDIA's manual."""
LAUNCH = {"BLOCK_M": 64, "STAGES": 2, "REGISTERS": 216, "COPY_REGISTERS": 72}
PLAIN = {"GROUP": 16, "IN_CALL": False, "SPLIT_BLOCKS": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in call": {"IN_CALL": True},
    "splits": {"SPLIT_BLOCKS": 8, "GROUP": 128},
}
POINTERS = {
    **dict.fromkeys(("q", "q_tail", "k", "k_tail", "out"), "*bf16"),
    **dict.fromkeys(("slots", "cached_lens", "q_indptr", "tile_request", "tile_row"), "*i32"),
    **{"lse": "*fp32", "rows": "*i64", "scale": "fp32", "v_scale": "fp32"},
}
RUNS: dict[str, dict[str, Any]] = {
    "causal": {"new": [9, 1, 0, 5], "cached": [0, 70, 7, 130]},
    "one row a tile": {"new": [3, 2], "cached": [60, 0], "GROUP": 128},
    "odd group": {"new": [7, 30], "cached": [100, 0], "GROUP": 6},
    "in call": {"new": [7, 30], "cached": [0, 0], "GROUP": 8, "IN_CALL": True},
    "splits": {"new": [3, 5], "cached": [300, 0], "SPLIT_BLOCKS": 2},
}


def compiled() -> None:
    from compile_kernel import compile_kernel, facts  # noqa: PLC0415  # not the interpreter's

    from attnmux.triton.kernels.hopper.latent_tiles import (  # noqa: PLC0415  # as above
        attend_latent_tiles,
    )

    for name, changed in VARIANTS.items():
        variant = {**PLAIN, **changed, **LAUNCH}
        words = dict(POINTERS)
        if variant["IN_CALL"]:
            words |= dict.fromkeys(("slots", "rows", "cached_lens"), "constexpr")
        if variant["SPLIT_BLOCKS"]:
            words["out"] = "*fp32"
        made = compile_kernel(attend_latent_tiles, words, variant, options={"num_warps": 4})
        print(json.dumps({"variant": name, **facts(made)}))


def run_case(changed: dict[str, Any], device: str) -> float:
    """The largest error compared with float64. On a CPU, the kernel is emulated."""
    from attnmux.triton.attention.tile_plans import TileKey, TilePlan  # noqa: PLC0415  # not in both processes

    torch.manual_seed(0)
    variant = {**PLAIN, **changed}
    new, cached = variant.pop("new"), variant.pop("cached")
    group, in_call = variant["GROUP"], variant["IN_CALL"]
    tokens, batch_size = sum(new), len(new)
    lens = [both[0] + both[1] for both in zip(new, cached, strict=True)]
    table = torch.randperm(batch_size * max(lens)).view(batch_size, -1).to(device, torch.int32)
    q = torch.randn(tokens, group, 576, device=device, dtype=torch.bfloat16)
    k = torch.randn(tokens if in_call else table.numel(), 576, device=device, dtype=torch.bfloat16)
    num_splits = 3 if variant["SPLIT_BLOCKS"] else 1
    out = torch.full((num_splits, tokens, group, 512), math.nan, device=device)
    out = out if num_splits > 1 else out.bfloat16()
    lse = torch.full(out.shape[:3], math.nan, device=device)
    q_indptr = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32, device=device)
    plan = TilePlan(TileKey(group=group, block_m=64), torch.device(device))
    plan.fill_for(
        q_indptr, torch.tensor(cached, dtype=torch.int32, device=device), batch_size, tokens
    )
    own = k.clone()
    keys = (own, 576, None, 0) if variant["SPLIT_BLOCKS"] else (own, 576, own[:, 512:], 576)
    given = (
        *(q, *q.stride()[:2], q[..., 512:], *q.stride()[:2], *keys),
        *(out, out.stride(1), lse, lse.stride(1)),
        *((None, 0, None) if in_call else (table, table.shape[1], None)),
        None if in_call else torch.tensor(cached, dtype=torch.int32, device=device),
        *(q_indptr, plan.request, plan.row, batch_size, tokens, plan.num_tiles, num_splits),
        *(192**-0.5 * math.log2(math.e), 1.0),
    )
    launch_on(device, (1, plan.num_tiles, num_splits), given, {**variant, **LAUNCH})
    if num_splits > 1:
        shares = lse.softmax(0)[..., None]
        out, lse = (out * shares).sum(0)[None], lse.logsumexp(0)[None]
    errors: list[torch.Tensor] = []
    for request, length in enumerate(lens):
        here = slice(int(q_indptr[request]), int(q_indptr[request + 1]))
        places = torch.arange(length, device=device)
        keys_here = (k[here] if in_call else k[table[request, :length].long()]).double()
        logits = torch.einsum("qhd,kd->hqk", q[here].double(), keys_here) * 192**-0.5
        position = torch.arange(new[request], device=device)[:, None] + cached[request]
        logits = logits.masked_fill(places > position, -math.inf)
        expected = torch.einsum("hqk,kd->qhd", logits.softmax(-1), keys_here[:, :512])
        errors.append((out[0, here] - expected).abs().flatten())
        errors.append((lse[0, here] - logits.logsumexp(-1).T).abs().flatten())
    # Of tensors, which unlike Python's numbers are NaN where one value is.
    return float(torch.cat(errors).max())


def launch_on(
    device: str, grid: tuple[int, int, int], given: Sequence[Any], constants: dict[str, Any]
) -> None:
    from attnmux.triton.kernels.hopper.latent_tiles import (  # noqa: PLC0415  # not in both
        attend_latent_tiles,
    )

    if device == "cuda":
        attend_latent_tiles[grid](*given, **constants, num_warps=4)
    else:
        emulate(attend_latent_tiles, grid, *given, **constants)


@pytest.mark.turns(4, suite="compilers")
def test_every_variant_fits(script):
    lines = script("compile")
    assert [line["variant"] for line in lines] == list(VARIANTS)
    for line in lines:
        assert line["shared"] <= SHARED, line
        assert line["matrix"] >= 36 + 4 + 4, line
        assert line["narrow copies"] == line["local memory"] == 0, line


@pytest.mark.parametrize("case", RUNS)
def test_it_attends_as_float64_does_where_it_is_emulated(case):
    assert run_case(RUNS[case], "cpu") < 0.03


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_it_attends_as_float64_does(script):
    lines = script("run")
    assert [line["case"] for line in lines] == list(RUNS)
    assert [line for line in lines if not line["error"] < 0.03] == []


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compiled()
    else:
        for case, changed in RUNS.items():
            print(json.dumps({"case": case, "error": run_case(changed, "cuda")}))
