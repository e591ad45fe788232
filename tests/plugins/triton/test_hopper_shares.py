"""The kernel of shares for Hopper GPUs, compiled without one; the conformance suite runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton")

HALF_OF_SHARED = 233472 // 2 - 1024
"""Bytes that a program may take if two are to share an SM: sm90 has 228 KiB, and keeps 1 each."""
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
    "STAGES": 4,
    "COPY_REGISTERS": 72,
}
EIGHT_BITS = {"BLOCK_N": 128, "STAGES": 6}
CASES: dict[str, dict[str, Any]] = {
    "decode": {},
    "narrow": {"REAL_D": 64, "REAL_DV": 64},
    "padded": {"REAL_D": 64, "REAL_TAIL": 16, "REAL_DV": 80},
    "e4m3": {"keys": "*fp8e4nv", **EIGHT_BITS},
    "e5m2, narrow": {"keys": "*fp8e5", "REAL_D": 64, "REAL_DV": 64, **EIGHT_BITS},
    "window in pages": {"WINDOW": 100, "PAGE": 16, "IS_FIXED": True, "HAS_CAP": True},
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
SOME = ("decode", "e4m3", "window in pages", "trees")
"""The cases that compile without `--full`: each size of tiles, pages, and the mask of trees."""
POINTERS = {
    **dict.fromkeys(("q", "out"), "*bf16"),
    **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
    **dict.fromkeys(("slots", "lens", "stops", "unit_blocks", "starts", "share"), "*i32"),
    "arrivals": "*i32",
    "rows": "*i64",
    **dict.fromkeys(("scale", "cap", "v_scale"), "fp32"),
}
OPTIONAL = ("lse", "sinks", "encoder_lens", "mask", "mask_indptr", "first_keys")


def main(names: Sequence[str]) -> None:
    from compile_kernel import compile_kernel, facts  # noqa: PLC0415  # not the interpreter's

    from attnmux.triton.kernels.hopper_shares import attend_shares  # noqa: PLC0415  # as above

    for name in names:
        case = CASES[name]
        given = {**PLAIN, **case}
        keys = given.get("keys", "*bf16")
        optional = {name: given.get(name, "constexpr") for name in OPTIONAL}
        compiled = compile_kernel(
            attend_shares,
            {**POINTERS, "k": keys, "v": keys, **optional},
            {name: value for name, value in given.items() if name not in OPTIONAL},
            options={"num_warps": 4, "maxnreg": 128},
        )
        print(json.dumps({"case": name, **facts(compiled)}))


def test_two_programs_share_an_sm(script, full):
    names = CASES if full else SOME
    lines = script(*names)
    assert [line["case"] for line in lines] == list(names)
    for line in lines:
        case = {**PLAIN, **CASES[line["case"]]}
        assert line["shared"] <= HALF_OF_SHARED
        # Keys times queries 16 columns at a time, values times weights 16 keys at a time.
        turns = case["BLOCK_N"] // 64
        products = turns * case["D"] // 16 + case["BLOCK_N"] // 16 * case["D"] // 64
        assert line["matrix"] == products
        assert line["narrow copies"] == 0 < line["wide copies"]
        assert line["local memory"] == 0


if __name__ == "__main__":
    main(sys.argv[1:])
