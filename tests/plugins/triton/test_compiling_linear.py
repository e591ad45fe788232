"""The kernels of linear layers compile for GPUs that are not here, as in `test_compiling`.

As a script it compiles for one target and prints a line for each kernel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from attnmux.testing import decode, extend, verify
from attnmux.testing.cases.linear import SHAPES, LinearCase
from attnmux.testing.setup.linear import make_linear_setup, prepare_linear

pytest.importorskip("triton")

STEPS = {
    "decode": decode(45, 3),
    "verify": verify(4, 20, 3),
    "extend": extend((0, 100), (7, 70)),
    "spans": extend((0, 1100)),
}
"""The last is a long prompt, whose few heads go in spans."""
ALONE = {
    "spans": {"num_k_heads": 1, "num_v_heads": 1},
    "mamba1": {"num_v_heads": 8192},
}


def cases() -> dict[str, LinearCase]:
    """By kind, step, and dims other than 128."""
    found = {}
    for kind, shape in SHAPES.items():
        in_chunks = kind not in ("mamba1", "conv")
        dims = {"head_k_dim": 128, "head_v_dim": 128} if in_chunks else {}
        for name, step in STEPS.items():
            if name == "spans" and not in_chunks:
                continue
            own = {**shape, **dims, **ALONE.get(kind, {}), **ALONE.get(name, {})}
            case = LinearCase(name=f"{kind}, {name}", kind=kind, steps=(step,), **own)  # type: ignore[arg-type]  # a key of SHAPES
            found[case.name] = case
            if in_chunks:
                found[f"{case.name}, 64"] = replace(case, head_k_dim=64, head_v_dim=64)
    found["gdn, spans, float32"] = replace(found["gdn, spans"], dtype="float32")
    return found


EVERY = cases()
SCANS = ("mamba1, extend", "mamba1, decode", "mamba1, verify")
SPREAD = {
    "sm80": (*SCANS, "gdn, spans, 64", "gdn, verify", "kda, extend"),
    "sm90": (
        *SCANS,
        *("gdn, spans", "gdn, verify, 64", "kda, extend, 64", "lightning, spans"),
        "mamba2, decode",
    ),
    "gfx942": (
        *SCANS,
        *("gdn, spans, float32", "gdn, decode, 64", "kda, spans", "lightning, decode"),
        "mamba2, spans, 64",
    ),
    "gfx950": (*SCANS, "gdn, spans", "gdn, spans, 64", "kda, spans", "mamba2, verify"),
    "gfx1201": (
        *SCANS,
        "gdn, spans",
        "kda, spans",
        "kda, decode",
        "mamba2, extend",
        "conv, verify",
    ),
}
"""Every kernel for every GPU, and each kind's code for one or two."""
KERNELS = {
    *("linear.tokens.recur", "linear.channel_scan.scan_channels"),
    *(f"linear.convolutions.{name}" for name in ("convolve", "convolve_drafts", "convolve_one")),
    "linear.convolutions.keep_inputs",
    *(f"linear.chunks.{name}" for name in ("solve_chunks", "chunk_outputs")),
    *(f"linear.channel_chunks.{name}" for name in ("solve_channel_chunks", "channel_outputs")),
    "linear.channel_chunks.weigh_channel_chunks",
    *(f"linear.chunk_states.{name}" for name in ("weigh_spans", "join_spans", "pass_states")),
}
SCRATCH = {"gfx942": 0, "gfx950": 0, "gfx1201": 128}
"""The most bytes of registers that a thread may spill, in 16 bits on gfx1201."""
SCAN_SCRATCH = {**SCRATCH, "gfx1201": 64}
"""The same in a scan."""
SPILLS = {
    "sm80": {"solve_chunks": 256, "solve_channel_chunks": 128, "weigh_channel_chunks": 1088},
    "sm90": {"solve_chunks": 128, "solve_channel_chunks": 64, "weigh_channel_chunks": 384},
}
"""The most instructions that spill registers, in 16 bits; 32 in kernels without a line, and none in
a scan. Three
programs of those that solve share a multiprocessor, which takes less time on an H200."""


def names_of(arch: str, *, full: bool) -> list[str]:
    """With `--full` all, but float32 only where matrix instructions multiply it: elsewhere ten
    kernels take a minute."""
    some = SPREAD[arch]
    return [
        name
        for name in EVERY
        if name in some or (full and ("float32" not in name or arch in ("gfx942", "gfx950")))
    ]


def launches(case: LinearCase, arch: str, target: Any, most_shared: int) -> list[Any]:
    """(kernel, values by argument, options) of each launch of a step."""
    from test_compiling import platform_of  # noqa: PLC0415  # not the interpreter's
    from triton import JITFunction  # noqa: PLC0415  # as above

    from attnmux.triton.linear.backend import TritonLinearBackend  # noqa: PLC0415  # as above
    from attnmux.triton.linear.device import LinearDevice  # noqa: PLC0415  # as above

    noted: list[Any] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False))
        options = {name: kwargs.pop(name) for name in set(kwargs) - set(kernel.arg_names)}
        noted.append((kernel, {**values, **kwargs}, options))

    setup = make_linear_setup(case, platform_of(arch), "cpu", num_layers=1)
    device = LinearDevice.of_target(target, compute_units=108, most_shared=most_shared)
    backend = TritonLinearBackend(setup.context, device=device)
    backend.least_span = 1
    made = prepare_linear(setup, case.steps[0], host_lens=True)
    with patch.object(JITFunction, "run", note):
        backend.init_forward_metadata(made.batch)
        for given in made.inputs:
            for index, (x, weight, bias) in enumerate(given.convs):
                how = {"bias": bias, "silu": given.silu, "index": index}
                backend.convolve(x, weight, given.layer, made.batch, **how)
            if case.kind != "conv":
                qkv, gates = (given.q, given.k, given.v), {"g": given.g, "beta": given.beta}
                backend.forward(*qkv, given.layer, made.batch, **gates)
    return noted


def main(arch: str, *, full: bool) -> None:
    from compile_kernel import SHARED, compile_kernel, local_memory  # noqa: PLC0415  # not the interpreter's
    from test_compiling import scratch_bytes, target_of, word  # noqa: PLC0415  # as above

    target = target_of(arch)
    for case in names_of(arch, full=full):
        for kernel, values, options in launches(EVERY[case], arch, target, SHARED[arch]):
            compiled = compile_kernel(
                kernel,
                {name: word(value) for name, value in values.items()},
                values,
                target=target,
                options=options,
                odd_strides=frozenset(
                    name for name, value in values.items() if isinstance(value, int) and value % 16
                ),
            )
            module = kernel.__module__.removeprefix("attnmux.triton.kernels.")
            facts = {
                "case": case,
                "kernel": f"{module}.{kernel.__name__}",
                "options": options,
                "spare": SHARED[arch] - compiled.metadata.shared,
            }
            if arch.startswith("gfx"):
                facts["scratch"] = scratch_bytes(compiled.asm["amdgcn"])
            else:
                facts["spills"] = local_memory(compiled)
            print(json.dumps(facts))


@pytest.mark.turns(over="arch")
@pytest.mark.parametrize("arch", SPREAD)
def test_kernels_of_linear_layers_compile_and_fit(arch, script, full):
    lines = script(arch, *(["full"] if full else []))
    assert {line["case"] for line in lines} == set(names_of(arch, full=full))
    assert {line["kernel"] for line in lines} == KERNELS
    assert [line for line in lines if line["spare"] < 0] == []
    for line in lines:
        name = line["kernel"].rpartition(".")[2]
        is_scan = name == "scan_channels"
        if arch in SCRATCH:
            assert line["scratch"] <= (SCAN_SCRATCH if is_scan else SCRATCH)[arch], line
        else:
            assert line["spills"] <= SPILLS[arch].get(name, 0 if is_scan else 32), line


if __name__ == "__main__":
    main(sys.argv[1], full="full" in sys.argv)
