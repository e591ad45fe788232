"""What the card's clauses can launch compiles for chips that are not here, and fits their shared
memory: every cell of dims, dtypes, steps and features with `nox -s chips`, and in the suite one a
day for each of two chips.

As a script it prints a line for each kernel, and fails if one does not compile or fit: `python
test_chips.py [CHIP…] [--day 739949] [--cell "extend, bfloat16, 256/256"]`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from attnmux.core import ForwardMode, Platform, Request
from attnmux.core.verbs import Question
from attnmux.testing import Case, decode, extend, verify

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from attnmux.triton.plugin import TRITON

CHIPS: Sequence[str] = (
    *("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"),
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
)
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
    "draft": {"steps": (extend((16, 41), mode=ForwardMode.DRAFT_EXTEND),), "spec_topk": 1},
}
"""With 4 heads a group, 17 drafts have 68 rows: tiles are as tall as they get."""
BITS = ("bfloat16", "float16", "fp8_e5m2", "fp8_e4m3", "fp8_e4m3fnuz", "fp4_e2m1")


@cache
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
    return all(TRITON.serves(question) for question in questions)


def served(chip: str) -> list[str]:
    """The cells that the card serves on a chip."""
    from test_compiling import platform_of  # noqa: PLC0415  # the script's

    platform = platform_of(chip)
    return [name for name, case in cells().items() if is_offered(case.request, platform)]


def compiled(chip: str, cell: str) -> list[dict[str, Any]]:
    """A line for each kernel: the bytes that it leaves, or why it did not compile."""
    from compile_kernel import SHARED  # noqa: PLC0415  # the script's
    from test_compiling import (  # noqa: PLC0415  # as above
        compile_launch,
        launches_of,
        name_of,
        platform_of,
        target_of,
    )

    lines = []
    for launch in launches_of(cells()[cell], platform_of(chip)):
        line = {"chip": chip, "cell": cell, "kernel": name_of(launch.bound.kernel)}
        try:
            shared = compile_launch(launch, target_of(chip)).metadata.shared
            line |= {"shared": shared, "spare": SHARED[chip] - shared}
        except Exception as error:  # whatever a compiler raises
            line |= {"error": f"{type(error).__name__}: {error}"[:500], "spare": -1}
        lines.append(line)
    return lines


def asked(chips: list[str], day: str, cell: str) -> Iterator[tuple[str, str]]:
    """(chip, cell). A day decides on one cell for each chip."""
    for chip in chips:
        names = [cell] if cell else served(chip)
        if day:
            names = [random.Random(day + chip).choice(names)]
        yield from ((chip, name) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*", default=CHIPS)
    parser.add_argument("--day", default="")
    parser.add_argument("--cell", default="")
    args = parser.parse_args()
    chips, names = zip(*asked(args.chips, args.day, args.cell), strict=True)
    wrong = []
    with ExitStack() as stack:
        run = map
        if len(chips) > 1:
            run = stack.enter_context(ProcessPoolExecutor(os.cpu_count())).map
        for lines in run(compiled, chips, names):
            for line in map(json.dumps, lines):
                print(line, flush=True)
            wrong += [line for line in lines if line["spare"] < 0]
    if wrong:
        sys.exit("\n".join(map(json.dumps, wrong)))


@pytest.mark.parametrize("number", [70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 120, 121])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_e4m3_is_served_where_the_compiler_has_it(number, dtype):
    request = Request(
        num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype, kv_dtype="fp8_e4m3"
    )
    backend = make_backend(GPUTarget("cuda", number, 32))
    options = backend.parse_options({"enable_fp_fusion": True})
    is_known = "fp8e4nv" in options.supported_fp8_dtypes
    assert is_offered(request, Platform.parse(f"nvidia:sm{number}")) is is_known


def test_the_card_says_compiled_of_these_chips_and_steps():
    """Of those on which nothing ran. Another chip's word would claim what nobody compiles."""
    compiled = [run for run in TRITON.verified_on if run.compiled]
    ran = {run.platform for run in TRITON.verified_on if run.cases}
    chips = {f"{'amd' if chip.startswith('gfx') else 'nvidia'}:{chip}" for chip in CHIPS}
    assert {run.platform for run in compiled} == chips - ran
    phases = {phase for fields in STEPS.values() for phase in Case(name="", **fields).phases}
    assert all(set(run.phases) == phases for run in compiled)


@pytest.mark.parametrize("number", range(2))
def test_a_cell_of_the_day_compiles_and_fits(number, script, day):
    """On as many chips in turn. It fails with the chip and the cell, by which the script repeats
    it."""
    chip = CHIPS[(2 * day + number) % len(CHIPS)]
    assert script(chip, "--day", str(day))


if __name__ == "__main__":
    main()
