"""The kernels compile for GPUs that are not here: the interpreter accepts what a compiler refuses.

As a script it compiles for one target and prints a line for each kernel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import Platform
from attnmux.testing import Case, decode, extend, make_setup, prepare_step, verify

pytest.importorskip("triton")

TARGETS = {"sm80": 166912, "sm90": 232448, "gfx942": 65536}
"""Bytes of shared memory that one program may take, by NVIDIA's and AMD's manuals."""

TREE: dict[str, Any] = {"spec_topk": 4}
LATENT: dict[str, Any] = {
    "kind": "mla",
    "num_q_heads": 128,
    "num_kv_heads": 1,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
CASES = {
    "decode": Case(name="decode", steps=(decode(45, 3),), lse=True),
    "decode, 8-bit": Case(name="8-bit", steps=(decode(45, 3),), kv_dtype="fp8_e5m2"),
    "decode, sinks": Case(
        name="sinks", steps=(decode(45),), sinks=True, windows=(8, None), logit_cap=30.0
    ),
    "decode, 256": Case(name="256", steps=(decode(45),), head_dim=256, v_head_dim=256),
    "verify": Case(name="verify", steps=(verify(5, 40, 4),), **TREE),
    "extend": Case(name="extend", steps=(extend((16, 41), (0, 7)),), lse=True),
    "extend, 8-bit": Case(name="8-bit", steps=(extend((16, 41)),), kv_dtype="fp8_e5m2"),
    "extend, window": Case(
        name="window",
        steps=(extend((16, 41)),),
        windows=(8, None),
    ),
    "decode, latent": Case(name="latent", steps=(decode(45, 3),), **LATENT),
    "extend, latent": Case(
        name="latent",
        steps=(extend((16, 41)),),
        **LATENT,
    ),
}

NARROW = {
    f"{name}, 64": replace(CASES[name], head_dim=64, v_head_dim=64)
    for name in ("decode", "decode, 8-bit", "decode, sinks", "verify", "extend", "extend, window")
}

WORDS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def cases_of(arch: str) -> dict[str, Case]:
    """Narrow heads where they have launches of their own."""
    return {**CASES, **(NARROW if arch == "sm90" else {})}


def rehearsed(arch: str) -> Iterator[tuple[str, Any]]:
    """The launches of every case, with its name."""
    from attnmux.triton.backend import TritonBackend  # noqa: PLC0415  # not the interpreter's

    vendor = "amd" if arch.startswith("gfx") else "nvidia"
    for name, case in cases_of(arch).items():
        setup = make_setup(case, Platform.parse(f"{vendor}:{arch}"), "cpu")
        backend = TritonBackend(setup.context, {}, compute_units=108)
        made = prepare_step(setup, case.steps[0])

        def step(backend: Any = backend, made: Any = made, has_lse: bool = case.lse) -> None:
            backend.init_forward_metadata(made.batch)
            for given in made.inputs:
                backend.forward(
                    given.q,
                    given.k,
                    given.v,
                    given.layer,
                    made.batch,
                    q_rope=given.q_rope,
                    k_rope=given.k_rope,
                    lse=torch.empty(given.q.shape[:2]) if has_lse else None,
                )

        yield from ((name, launch) for launch in backend.launcher.rehearse(step))


def main(arch: str) -> None:
    from compile_kernel import GPUTarget, compile_kernel  # noqa: PLC0415  # not the interpreter's

    target = (
        GPUTarget("hip", arch, 64)
        if arch.startswith("gfx")
        else GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
    )
    for name, launch in rehearsed(arch):
        kernel = launch.bound.kernel
        values = dict(zip(kernel.arg_names, launch.values, strict=True))
        compiled = compile_kernel(
            kernel,
            {name: word(value) for name, value in values.items()},
            values,
            target=target,
            options=launch.bound.options,
            odd_strides=frozenset(
                name for name, value in values.items() if isinstance(value, int) and value % 16
            ),
        )
        facts = {
            "case": name,
            "kernel": f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}",
            "shared": compiled.metadata.shared,
        }
        print(json.dumps(facts))


def word(value: Any) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return WORDS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


PORTABLE = {
    "shares.attend_shares",
    "tiles.attend_tiles",
    "shares.plan_shares",
    "tiles.plan_tiles",
    "indices.sum_lens",
    "write.write_kv",
}
HOPPER = {
    "hopper_latent.attend_latent",
    "hopper_shares.attend_shares",
    "hopper_tiles.attend_hopper_tiles",
    "latent_merge.merge_latent",
}


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_compiles_and_fits(arch, script):
    lines = script(arch)
    assert {line["case"] for line in lines} == set(cases_of(arch))
    assert {line["kernel"] for line in lines} == PORTABLE | (HOPPER if arch == "sm90" else set())
    assert [line for line in lines if line["shared"] > TARGETS[arch]] == []


if __name__ == "__main__":
    main(sys.argv[1])
