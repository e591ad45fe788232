"""The kernel of shares for Hopper GPUs, compiled without one; the conformance suite runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton")

SHARED = 233472
"""Bytes of shared memory of an SM of sm90, which keeps 1 KiB of each program's."""
PLAIN: dict[str, Any] = {
    "KV_HEADS": 8,
    "GROUP": 4,
    "QUERIES": 1,
    "LENS_SHIFT": -1,
    "REAL_D": 128,
    "REAL_TAIL": 0,
    "REAL_DV": 128,
    "PAGE": 1,
    "IS_CAUSAL": True,
    "IS_CROSS": False,
    "HAS_ENCODER": False,
    "WINDOW": -1,
    "CHUNK": 0,
    "HAS_CAP": False,
    "HAS_MASK": False,
    "IS_TREE": False,
    "IS_FIXED": False,
    "BLOCK_M": 8,
    "BLOCK_N": 64,
    "PART_ROWS": 4,
    "PARTS": 8,
    "MOST_PARTS": 64,
    "STAGES": 4,
    "COPY_REGISTERS": 72,
}
EIGHT_BITS = {"BLOCK_N": 128, "STAGES": 6}
CASES: dict[str, dict[str, Any]] = {
    "decode": {},
    "narrow": {"REAL_D": 64, "REAL_DV": 64},
    "wide": {
        **{"REAL_D": 256, "REAL_DV": 256, "BLOCK_M": 32, "PARTS": 4, "COPY_REGISTERS": 120},
        **{"maxnreg": 184, "programs": 1},
    },
    "padded": {"REAL_D": 64, "REAL_TAIL": 16, "REAL_DV": 80},
    "e4m3": {"keys": "*fp8e4nv", **EIGHT_BITS},
    "e5m2, narrow": {"keys": "*fp8e5", "REAL_D": 64, "REAL_DV": 64, **EIGHT_BITS},
    "window in pages": {
        "WINDOW": 100,
        "PAGE": 16,
        "IS_FIXED": True,
        "HAS_CAP": True,
        "MOST_PARTS": 0,
    },
    "cross": {"IS_CROSS": True, "IS_CAUSAL": False, "encoder_lens": "*i32"},
    "verify": {
        **{"QUERIES": 4, "BLOCK_M": 16, "PART_ROWS": 16, "PARTS": 2, "LENS_SHIFT": 0},
        **{"HAS_MASK": True, "IS_CAUSAL": False, "mask": "*u8", "mask_indptr": "*i64"},
        **{"lse": "*fp32", "sinks": "*fp32"},
    },
    "trees": {
        **{"QUERIES": 8, "BLOCK_M": 32, "PART_ROWS": 32, "PARTS": 1, "LENS_SHIFT": 0},
        **{"HAS_MASK": True, "IS_TREE": True, "IS_CAUSAL": False, "WINDOW": 100},
        **{"mask": "*u8", "first_keys": "*i32"},
    },
}
SOME = ("decode", "e4m3", "wide", "window in pages", "trees")
"""The cases that compile without `--full`: each size of tiles, pages, and the mask of trees."""
OWN = ("maxnreg", "programs")
"""What cases say of a launch and not of a kernel: registers of a thread, and programs of an SM."""
POINTERS = {
    **dict.fromkeys(("q", "out"), "*bf16"),
    **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
    **dict.fromkeys(("slots", "lens", "stops", "unit_blocks", "starts", "share"), "*i32"),
    **dict.fromkeys(("arrivals", "span_arrivals"), "*i32"),
    "rows": "*i64",
    **dict.fromkeys(("scale", "cap", "v_scale"), "fp32"),
}
OPTIONAL = ("lse", "sinks", "encoder_lens", "mask", "mask_indptr", "first_keys")


def main(names: Sequence[str]) -> None:
    from compile_kernel import compile_kernel, facts  # noqa: PLC0415  # not the interpreter's

    from attnmux.triton.kernels.hopper.shares import attend_shares  # noqa: PLC0415  # as above

    for name in names:
        case = CASES[name]
        given = {**PLAIN, **case}
        keys = given.get("keys", "*bf16")
        optional = {name: given.get(name, "constexpr") for name in OPTIONAL}
        compiled = compile_kernel(
            attend_shares,
            {**POINTERS, "k": keys, "v": keys, **optional},
            {name: value for name, value in given.items() if name not in (*OPTIONAL, *OWN)},
            options={"num_warps": 4, "maxnreg": given.get("maxnreg", 128)},
        )
        print(json.dumps({"case": name, **facts(compiled)}))


def of_dims(case: dict[str, Any]) -> tuple[int, int]:
    """Columns of K and of V."""
    return case["REAL_D"] + case["REAL_TAIL"], case["REAL_DV"]


@pytest.mark.turns(4, suite="compilers")
def test_programs_share_an_sm(script, full):
    names = CASES if full else SOME
    lines = script(*names)
    assert [line["case"] for line in lines] == list(names)
    for line in lines:
        case = {**PLAIN, **CASES[line["case"]]}
        assert line["shared"] <= SHARED // case.get("programs", 2) - 1024
        # Keys times queries 16 columns at a time, values times weights 16 keys at a time.
        turns = case["BLOCK_N"] // 64
        d, dv = (1 << (real - 1).bit_length() for real in of_dims(case))
        products = turns * d // 16 + case["BLOCK_N"] // 16 * dv // 64
        assert line["matrix"] == products
        assert line["narrow copies"] == 0 < line["wide copies"]
        assert line["local memory"] == 0


if __name__ == "__main__":
    main(sys.argv[1:])
