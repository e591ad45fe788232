"""What the card's clauses can launch compiles for chips that are not here, and fits their shared
memory.

As a script, `python test_chips.py CHIP… [PART/PARTS]`, it prints a line for each kernel of a chip,
or of every PARTS-th cell from cell PART on. `nox -s chips` does so for all of them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from attnmux.core import Platform, Request
from attnmux.core.choosing.judge.axes import Question
from attnmux.core.choosing.judge.shortcomings import is_served
from attnmux.testing import Case, decode, extend, verify

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from attnmux.triton.plugin import TRITON

DIMS = (
    *((dim, dim) for dim in (64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)),
    *((192, 128), (224, 128), (448, 256), (448, 512)),
)
"""Columns of K and V: those of models, and the widest tiles of each launch configuration."""
STEPS = {
    "decode": {"steps": (decode(45, 3),)},
    "verify": {"steps": (verify(17, 40),), "spec_topk": 1},
    "tree": {"steps": (verify(17, 40),), "spec_topk": 4},
    "extend": {"steps": (extend((16, 41), (0, 7)),)},
}
"""With 4 heads a group, 17 drafts have 68 rows: tiles are as tall as they get."""
BITS = ("bfloat16", "float16", "fp8_e5m2", "fp8_e4m3", "fp8_e4m3fnuz", "fp4_e2m1")


def cells() -> dict[str, Case]:
    """By name."""
    from test_compiling import EVERY, LATENT  # noqa: PLC0415  # the script's

    found: dict[str, Case] = {}
    for step, fields in STEPS.items():
        for bits in BITS:
            dtype = "float16" if bits == "float16" else "bfloat16"
            common: dict[str, Any] = {"windows": (None,), "dtype": dtype, "kv_dtype": bits}
            for dims in DIMS:
                name = f"{step}, {bits}, {dims[0]}/{dims[1]}"
                found[name] = Case(
                    name=name, head_dim=dims[0], v_head_dim=dims[1], **common, **fields
                )
            for kind in ("mla", "nsa"):
                name = f"{step}, {bits}, {kind}"
                latent: dict[str, Any] = {**common, **LATENT, "kind": kind}
                latent["index_topk"] = 1024 if kind == "nsa" else 0
                found[name] = Case(name=name, **latent, **fields)
    return found | {f"{name}, features": case for name, case in EVERY.items()}


def is_offered(request: Request, platform: Platform) -> bool:
    """Whether the card serves every phase of a request."""
    questions = (
        Question(request=request, platform=platform, phase=phase) for phase in request.phases
    )
    return all(is_served(TRITON, question) for question in questions)


def main(chip: str, part: int = 0, parts: int = 1, only: str = "") -> None:
    from compile_kernel import SHARED  # noqa: PLC0415  # the script's
    from test_compiling import (  # noqa: PLC0415  # as above
        compile_launch,
        launches_of,
        name_of,
        platform_of,
        target_of,
    )

    target, platform = target_of(chip), platform_of(chip)
    served = [(name, case) for name, case in cells().items() if is_offered(case.request, platform)]
    for name, case in served[part::parts]:
        if only not in name:
            continue
        for launch in launches_of(case, platform):
            facts = {"chip": chip, "cell": name, "kernel": name_of(launch.bound.kernel)}
            try:
                shared = compile_launch(launch, target).metadata.shared
                facts |= {"shared": shared, "spare": SHARED[chip] - shared}
            except Exception as error:
                facts["failed"] = repr(error)
            print(json.dumps(facts), flush=True)


@pytest.mark.parametrize("number", [70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 120, 121])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_e4m3_is_served_where_the_compiler_has_it(number, dtype):
    request = Request(
        num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype, kv_dtype="fp8_e4m3"
    )
    options = make_backend(GPUTarget("cuda", number, 32)).parse_options({})
    is_known = "fp8e4nv" in options.supported_fp8_dtypes
    assert is_offered(request, Platform.parse(f"nvidia:sm{number}")) is is_known


if __name__ == "__main__":
    main(sys.argv[1], only=sys.argv[2])
