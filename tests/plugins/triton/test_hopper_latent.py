"""The latent kernel for Hopper GPUs: compiled without one, run where there is one."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

from attnmux.emulators.gluon import run as emulate

if TYPE_CHECKING:
    import torch

SHARED = 232448
"""Bytes of shared memory that one program may take on sm90, by NVIDIA's manual."""
CASES: dict[str, dict[str, Any]] = {
    "decode": {"GROUP": 16, "QUERIES": 1, "IS_FIXED": False},
    "verify": {"GROUP": 128, "QUERIES": 3, "IS_FIXED": True},
}
POINTERS = {
    **dict.fromkeys(("q", "q_tail", "k", "out"), "*bf16"),
    **dict.fromkeys(("lse", "partial", "partial_lse"), "*fp32"),
    **dict.fromkeys(("slots", "lens", "stops", "unit_blocks", "starts", "share"), "*i32"),
    "rows": "*i64",
    **dict.fromkeys(("scale", "v_scale"), "fp32"),
}


def compiled() -> None:
    """Prints a line for each case."""
    from compile_kernel import compile_kernel, facts  # noqa: PLC0415  # not the interpreter's

    from attnmux.triton.kernels.hopper.latent import attend_latent  # noqa: PLC0415  # as above

    for name, case in CASES.items():
        given = {**case, "LENS_SHIFT": 0, "PART_ROWS": 16, "REGISTERS": 216, "COPY_REGISTERS": 72}
        given["STAGES"] = 2
        made = compile_kernel(attend_latent, POINTERS, given, options={"num_warps": 4})
        print(json.dumps({"case": name, **facts(made)}))


@pytest.mark.turns(4, suite="compilers")
def test_it_compiles_within_registers_and_shared_memory(script):
    lines = script("compile")
    assert [line["case"] for line in lines] == list(CASES)
    for line in lines:
        assert line["shared"] <= SHARED
        assert line["matrix"] >= 36 + 4 + 4
        assert line["wide copies"] >= 36
        assert line["narrow copies"] == 0
        # Two values that the warps that copy need once an item
        assert line["local memory"] <= 4


@pytest.mark.parametrize(
    ("lens", "items", "share"),
    [
        ([4096] * 64, 2, 64),
        ([8192] * 128, 1, 128),
        ([4096] * 64, 1, 32),
        ([4096] * 63 + [4160], 2, 64),
        ([64 * 10] * 20 + [64 * 30], 1, 2),
        ([64 * 50, 64 * 40, 64 * 30], 40, 50),
        ([8192], 1, 2),
        ([0], 1, 2),
    ],
)
def test_shares_of_equal_requests_end_where_items_do(lens, items, share):
    import torch  # noqa: PLC0415  # not for the process that only compiles

    from attnmux.triton.kernels.shares import STATE, plan_shares  # noqa: PLC0415  # as above

    programs, batch_size = 132, len(lens)
    taken, stops, unit_blocks, starts = (
        torch.zeros(shape, dtype=torch.int32)
        for shape in (1, batch_size + 1, batch_size, (programs, STATE.value))
    )
    plan_shares[(-(-programs // 16),)](
        torch.tensor(lens, dtype=torch.int32), None, None, stops, unit_blocks, starts, taken,
        batch_size, programs, 2, items, 1, 1,
        LENS_SHIFT=-1, QUERIES=1, IS_CROSS=False, WINDOW=-1, CHUNK=0, IS_FIXED=False, BLOCK_N=64,
        BLOCK_B=1 << (batch_size - 1).bit_length(), PROGRAMS=16, MEETS_ENDS=True,
    )  # fmt: skip
    assert taken.item() == share
    ends = starts[:, 7]
    assert ends.max() == stops[-1] * items
    assert torch.equal(ends[:-1], ((torch.arange(1, programs)) * share).clamp(max=ends.max()))


def attended(
    lens: list[int],
    heads: int,
    queries: int,
    splits: tuple[int, int] | None,
    device: str,
) -> tuple[float, float]:
    """The largest errors of the result and of the LSE, against float64. On a CPU, the kernel is
    emulated."""
    import torch  # noqa: PLC0415  # not for the process that only compiles

    from attnmux.triton.kernels.hopper.latent import (  # noqa: PLC0415  # not the interpreter's
        attend_latent,
    )
    from attnmux.triton.kernels.latent_merge import (  # noqa: PLC0415  # as above
        merge_latent,
        merge_slices,
    )
    from attnmux.triton.kernels.shares import STATE, plan_shares  # noqa: PLC0415  # as above

    scale, batch_size, total = 192**-0.5, len(lens), sum(lens)
    items = -(-queries * heads // 64)
    # Without splits the plan is of one item, and items lie side by side
    sides = items if splits is None else 1
    units = 6
    if device == "cuda":
        units = torch.cuda.get_device_properties(0).multi_processor_count
    in_line = units // sides
    programs = in_line * sides
    part_rows = min(64, 1 << (queries * heads - 1).bit_length())
    with torch.device(device):
        k = torch.randn(total + 7, 576, dtype=torch.bfloat16)
        q = torch.randn(batch_size * queries, heads, 512, dtype=torch.bfloat16)
        tail = torch.randn(batch_size * queries, heads, 64, dtype=torch.bfloat16)
        slots = torch.zeros(batch_size, max(lens), dtype=torch.int32)
        free = iter(torch.randperm(total + 7).int().split([*lens, 7]))
        for request, length in enumerate(lens):
            slots[request, :length] = next(free)
        cached = torch.tensor(lens, dtype=torch.int32) - queries
        rows = torch.arange(batch_size)
        stops, unit_blocks, share, starts = (
            torch.zeros(shape, dtype=torch.int32)
            for shape in (batch_size + 1, batch_size, 1, (in_line, STATE.value))
        )
        places = 2 * programs if splits is None else batch_size * items * splits[1]
        partial = torch.full((places, part_rows, 512), math.nan)
        partial_lse = torch.full((places, part_rows), math.nan)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    plan_shares[(-(-in_line // 16),)](
        cached, None, rows, stops, unit_blocks, starts, share, batch_size, in_line,
        2 if splits is None else 1, items // sides, *(splits or (1, 1)),
        LENS_SHIFT=0, QUERIES=queries, IS_CROSS=False, WINDOW=-1, CHUNK=0,
        IS_FIXED=splits is not None, BLOCK_N=64,
        BLOCK_B=1 << (batch_size - 1).bit_length(), PROGRAMS=16, MEETS_ENDS=True,
    )  # fmt: skip
    common = {
        "GROUP": heads, "QUERIES": queries, "IS_FIXED": splits is not None, "PART_ROWS": part_rows,
    }  # fmt: skip
    given = (
        q, *q.stride()[:2], tail, *tail.stride()[:2], k, k.stride(0), out, out.stride(0),
        lse, lse.stride(0), slots, slots.stride(0), rows, cached, stops, unit_blocks, starts,
        share, partial, partial_lse, scale * math.log2(math.e), 1.0,
    )  # fmt: skip
    launch = {**common, "LENS_SHIFT": 0, "STAGES": 2, "REGISTERS": 216, "COPY_REGISTERS": 72}
    slices, constants = merge_slices(batch_size * items, part_rows, programs)
    merged = (
        out, out.stride(0), lse, lse.stride(0), stops, share, partial, partial_lse, 1.0,
    )  # fmt: skip
    constants |= common
    if device == "cuda":
        attend_latent[(programs,)](*given, **launch, num_warps=4)
        merge_latent[(batch_size * items, slices)](
            *merged, **constants, num_warps=8, launch_pdl=True
        )
    else:
        emulate(attend_latent, (programs,), *given, **launch)
        # The interpreter runs one launch after the other.
        with patch.object(sys.modules[merge_latent.fn.__module__], "gdc_wait", lambda: None):
            merge_latent[(batch_size * items, slices)](*merged, **constants)
    return errors(k, torch.cat((q, tail), 2), slots, lens, out, lse, scale)


def errors(
    k: torch.Tensor,
    q: torch.Tensor,
    slots: torch.Tensor,
    lens: list[int],
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[float, float]:
    """Of out and lse."""
    import torch  # noqa: PLC0415  # not for the process that only compiles

    wrong: list[list[torch.Tensor]] = [[], []]
    queries = len(q) // len(lens)
    for request, length in enumerate(lens):
        keys = k[slots[request, :length].long()].double()
        own = slice(request * queries, (request + 1) * queries)
        logits = torch.einsum("qhd,kd->qhk", q[own].double(), keys) * scale
        last = torch.arange(length - queries, length, device=k.device)[:, None]
        hidden = torch.arange(length, device=k.device) > last
        logits = logits.masked_fill(hidden[:, None], -math.inf)
        want = logits.softmax(2) @ keys[:, :512]
        wrong[0].append((out[own] - want).abs().max())
        wrong[1].append((lse[own] - logits.logsumexp(2)).abs().max())
    # The largest of tensors is NaN where one is.
    return float(torch.stack(wrong[0]).max()), float(torch.stack(wrong[1]).max())


def ran() -> None:
    """On the GPU, in a process without the interpreter."""
    for heads, queries, splits in (
        (16, 1, None),
        (128, 1, None),
        (16, 3, None),
        (20, 2, (4, 16)),
        (128, 3, (4, 16)),
    ):
        for lens in ([8192], [1024] * 40, [777, 64, 65, 4096, 3, 128, 63, 9000]):
            value, lse = attended(lens, heads, queries, splits, "cuda")
            print(json.dumps({"heads": heads, "queries": queries, "value": value, "lse": lse}))


def is_hopper() -> bool:
    import torch  # noqa: PLC0415  # not for the process that only compiles

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize(
    ("lens", "heads", "queries", "splits"),
    [
        ([700], 16, 1, None),
        ([130] * 7, 128, 1, None),
        ([77, 64, 65, 400, 3, 128, 63], 16, 3, None),
        ([300, 5, 64], 20, 2, (1, 4)),
        ([300, 5, 64], 128, 2, (1, 4)),
    ],
)
def test_it_agrees_with_float64_where_it_is_emulated(lens, heads, queries, splits):
    value, lse = attended(lens, heads, queries, splits, "cpu")
    assert value < 0.03
    assert lse < 1e-4


@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
def test_it_agrees_with_float64(script):
    for line in script("run"):
        # Values to the rounding of bfloat16, of which those of three keys are the largest.
        assert line["value"] < 0.03, line
        assert line["lse"] < 1e-4, line


if __name__ == "__main__":
    compiled() if sys.argv[1] == "compile" else ran()
