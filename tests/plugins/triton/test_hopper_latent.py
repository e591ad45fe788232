"""The latent kernel for Hopper GPUs: compiled without one, run where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

SHARED = 232448
"""Bytes of shared memory that one program may take on sm90, by NVIDIA's manual."""
CASES: dict[str, dict[str, Any]] = {
    "decode": dict(GROUP=16, QUERIES=1, HAS_LSE=False, IS_FIXED=False),
    "verify": dict(GROUP=128, QUERIES=3, HAS_LSE=True, IS_FIXED=True),
}
POINTERS = {
    **dict.fromkeys(("q", "q_tail", "k", "out"), "*bf16"),
    **dict.fromkeys(("lse", "partial", "partial_lse"), "*fp32"),
    **dict.fromkeys(("slots", "lens", "stops", "unit_blocks", "starts", "share"), "*i32"),
    "rows": "*i64",
    **dict.fromkeys(("scale", "v_scale"), "fp32"),
}


def compiled() -> None:
    """In a process without the interpreter."""
    import triton  # noqa: PLC0415  # as said
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415  # as said
    from triton.experimental.gluon._runtime import GluonASTSource  # noqa: PLC0415  # as said

    from attnmux.triton.kernels.hopper_latent import attend_latent  # noqa: PLC0415  # as said

    for name, case in CASES.items():
        given = {**case, "LENS_SHIFT": 0, "PART_ROWS": 16, "REGISTERS": 216, "COPY_REGISTERS": 72}
        given["STAGES"] = 2
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(attend_latent.params):
            word = POINTERS.get(parameter.name, "i32")
            if parameter.is_constexpr:
                word, constants[parameter.name] = "constexpr", given[parameter.name]
            elif parameter.name.endswith("stride") or word.startswith("*"):
                attributes[place,] = [["tt.divisibility", 16]]
            signature[parameter.name] = word
        made = triton.compile(
            GluonASTSource(attend_latent, signature, constants, attributes),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4},
        )
        facts = {
            "case": name,
            "shared": made.metadata.shared,
            "matrix": made.asm["ptx"].count("wgmma.mma_async"),
            "wide copies": made.asm["ptx"].count("cp.async.cg"),
            "narrow copies": made.asm["ptx"].count("cp.async.ca"),
            "local memory": made.asm["sass"].count("LDL") + made.asm["sass"].count("STL"),
        }
        print(json.dumps(facts))


def test_it_compiles_within_registers_and_shared_memory(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == list(CASES)
    for line in lines:
        assert line["shared"] <= SHARED
        assert line["matrix"] >= 36 + 4 + 4
        assert line["wide copies"] >= 36
        assert line["narrow copies"] == line["local memory"] == 0


if __name__ == "__main__":
    compiled()
