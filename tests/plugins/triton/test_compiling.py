"""The kernels compile for GPUs that are not here: the interpreter accepts what a compiler refuses.
Those of linear layers are in `test_compiling_linear`.

As a script it compiles for one target and prints a line for each kernel.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch

from attnmux.core import AttentionCall, Platform
from attnmux.testing import Case, decode, extend, make_setup, prepare_step, verify

pytest.importorskip("triton")

TARGETS = ("sm80", "sm90", "gfx942", "gfx942, biases", "gfx950", "gfx1201")
"""Targets that compile every feature; one that has many takes two days. `test_chips` has dims and
dtypes, for more of them."""
SCRATCH = {"gfx942": 0, "gfx950": 0, "gfx1201": 64}
"""The most bytes of registers that a thread may spill."""
LATENT_SCRATCH = {**SCRATCH, "gfx1201": 640}
"""The same over latents: there a row of Q has 576 columns, and 16 rows take 144 of the 256
registers of each thread of a warp of 32."""

PICKED_SCRATCH = {"gfx942": 64, "gfx950": 64, "gfx1201": 2304}
"""The same where each token gathers rows of its own: a tile of keys is held beside that of Q."""

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
    "decode, 4-bit": Case(name="4-bit", steps=(decode(45, 3),), kv_dtype="fp4_e2m1"),
    "decode, sinks": Case(
        name="sinks", steps=(decode(45),), sinks=True, windows=(8, None), logit_cap=30.0
    ),
    "decode, ALiBi": Case(name="alibi", steps=(decode(45, 3),), alibi=True),
    "extend, ALiBi": Case(name="alibi", steps=(extend((16, 41)),), alibi=True),
    "decode, relative": Case(name="relative", steps=(decode(45, 3),), relative_reach=128),
    "extend, relative": Case(name="relative", steps=(extend((16, 41)),), relative_reach=128),
    "decode, 256": Case(name="256", steps=(decode(45),), head_dim=256, v_head_dim=256),
    "verify": Case(name="verify", steps=(verify(5, 40, 4),), **TREE),
    "extend": Case(name="extend", steps=(extend((16, 41), (0, 7)),), lse=True),
    "extend, 8-bit": Case(name="8-bit", steps=(extend((16, 41)),), kv_dtype="fp8_e5m2"),
    "extend, 4-bit": Case(name="4-bit", steps=(extend((16, 41)),), kv_dtype="fp4_e2m1"),
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
    "decode, picked latent": Case(
        name="picked",
        steps=(decode(45, 3),),
        lse=True,
        index_topk=1024,
        **{**LATENT, "kind": "nsa"},
    ),
}

NARROW = {
    f"{name}, 64": replace(CASES[name], head_dim=64, v_head_dim=64)
    for name in ("decode", "decode, 8-bit", "decode, sinks", "verify", "extend", "extend, window")
}

CDNA3 = {
    f"{name}, fnuz": replace(CASES[f"{name}, 8-bit"], kv_dtype="fp8_e4m3fnuz")
    for name in ("decode", "extend")
}
"""Its own 8-bit floats."""

WORDS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


WIDE = {
    "extend, 256": replace(CASES["extend"], head_dim=256, v_head_dim=256),
    "extend, widened": Case(
        name="widened",
        steps=(extend((0, 600)),),
        kv_dtype="fp8_e5m2",
        max_context_len=600,
        host_lens=True,
    ),
}
WIDE |= {
    f"extend, {rounds} rounded": replace(
        WIDE["extend, widened"],
        kv_dtype="fp8_e4m3",
        head_dim=128,
        v_head_dim=128,
        options=(("fp8_products", rounds),),
    )
    for rounds in ("queries", "all")
}
ON_HOPPER = {
    f"{name}, {dim}/{v_dim}": replace(CASES[name], head_dim=dim, v_head_dim=v_dim)
    for name in ("decode", "decode, 8-bit", "extend", "extend, window")
    for dim, v_dim in ((80, 80), (96, 96), (112, 112), (192, 128), (256, 256))
} | {
    f"chain of {drafts}, {dim}/{v_dim}": Case(
        name="chain",
        steps=(verify(drafts, 40),),
        spec_topk=1,
        num_q_heads=16,
        num_kv_heads=2,
        head_dim=dim,
        v_head_dim=v_dim,
    )
    for drafts in (3, 5, 9)
    for dim, v_dim in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
}
"""Widths and rows for which the kernels for Hopper have configurations of their own."""
EVERY = {**CASES, **NARROW, **WIDE, **CDNA3, **ON_HOPPER}
SPREAD = {
    "sm80": ("decode, sinks", "decode, 4-bit", "extend, 8-bit", "decode, latent", "decode, 256"),
    "sm90": (
        *("decode", "decode, 8-bit", "decode, 4-bit", "decode, relative", "decode, latent"),
        *("extend", "extend, 4-bit", "extend, latent", "extend, widened", "verify, 64"),
        *("extend, queries rounded", "extend, all rounded"),
    ),
    "gfx942": (
        *("decode, fnuz", "decode, 4-bit", "verify"),
        *("extend, fnuz", "extend, 256", "extend, latent"),
    ),
    "gfx942, biases": ("decode, ALiBi", "extend, ALiBi", "extend, relative"),
    "gfx950": ("decode, ALiBi", "extend, ALiBi", "extend, latent", "extend, relative"),
    "gfx1201": ("decode, 8-bit", "extend, window", "decode, latent"),
}
"""Every kernel for every GPU, and each of their features for one. `decode,
picked latent` compiles for all: its kernel has no other case."""


def cases_of(target: str, *, full: bool) -> dict[str, Case]:
    """With `--full` all, for GPUs that do not share the others' code."""
    some = {name: EVERY[name] for name in (*SPREAD[target], "decode, picked latent")}
    if not full or target in ("gfx942, biases", "gfx950", "gfx1201"):
        return some
    return {**CASES, **(NARROW | ON_HOPPER if target == "sm90" else {}), **some}


def arch_of(target: str) -> str:
    return target.partition(",")[0]


def platform_of(arch: str) -> Platform:
    return Platform.parse(f"{'amd' if arch.startswith('gfx') else 'nvidia'}:{arch}")


def target_of(arch: str) -> Any:
    """Triton's GPUTarget."""
    from compile_kernel import GPUTarget  # noqa: PLC0415  # not the interpreter's

    if arch.startswith("gfx"):
        # The warps of AMD's GPUs have 64 threads until gfx9, and 32 since
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(arch.removeprefix("sm")), 32)


def rehearsed(target: str, *, full: bool) -> Iterator[tuple[str, Any]]:
    """The launches of every case, with its name."""
    for name, case in cases_of(target, full=full).items():
        yield from ((name, launch) for launch in launches_of(case, platform_of(arch_of(target))))


def launches_of(case: Case, platform: Platform) -> list[Any]:
    """The launches of the case's first step."""
    from attnmux.triton.attention.backend import TritonBackend  # noqa: PLC0415  # not the interpreter's
    from attnmux.triton.attention.picked import PickedBackend  # noqa: PLC0415

    setup = make_setup(case, platform, "cpu")
    make = PickedBackend if case.kind == "nsa" else TritonBackend
    backend = make(setup.context, dict(case.options), compute_units=108)
    made = prepare_step(setup, case.steps[0], host_lens=case.host_lens)

    def step() -> None:
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
                lse=torch.empty(given.q.shape[:2]) if case.lse else None,
            )

    return list(backend.launcher.rehearse(step))


def compile_launch(launch: Any, target: Any) -> Any:
    """As `compile_kernel`."""
    from compile_kernel import compile_kernel  # noqa: PLC0415  # not the interpreter's

    kernel = launch.bound.kernel
    values = dict(zip(kernel.arg_names, launch.values, strict=True))
    return compile_kernel(
        kernel,
        {name: word(value) for name, value in values.items()},
        values,
        target=target,
        options=launch.bound.options,
        odd_strides=frozenset(
            name for name, value in values.items() if isinstance(value, int) and value % 16
        ),
    )


def name_of(kernel: Any) -> str:
    """module.function, without the packages."""
    return f"{kernel.__module__.removeprefix('attnmux.triton.kernels.')}.{kernel.__name__}"


def chosen_pages() -> list[Any]:
    """The launches of a decode step over pages that are chosen from 65,536 keys."""
    from attnmux.parts import RequestPages  # noqa: PLC0415  # not the interpreter's
    from attnmux.triton.functions.chosen_pages import ChosenPages  # noqa: PLC0415

    kernels = ChosenPages(num_kv_heads=8, head_dim=128, v_head_dim=128, page_size=16)
    keys = torch.zeros(64, 8, 128, dtype=torch.bfloat16)
    lower, q = keys[:4].clone(), keys.view(-1, 32, 128)[:1]
    requests = RequestPages(
        table=torch.zeros(2, 65_536, dtype=torch.int32),
        rows=torch.ones(1, dtype=torch.int64),
        lens=torch.ones(1, dtype=torch.int32),
        page_size=16,
        width=4096,
    )

    def step() -> None:
        kernels.widen(keys, lower, lower, requests.rows)
        places = kernels.choose(kernels.score(q, lower, lower, requests), requests, 64)
        kernels.copy((keys, keys), (keys, keys), places, requests)

    return kernels.launcher.rehearse(step)


def draft_attention() -> Iterator[Any]:
    """The launches of layers that verify 8 drafts with their prefixes' results."""
    from attnmux.triton.functions.draft_attention import TritonDraftAttention, try_layers  # noqa: PLC0415

    wide = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "sinks": True}
    for name, shape in (("drafts", wide), ("drafts, latent", LATENT)):
        case = Case(name=name, steps=(verify(8, 40),), **TREE, **shape)
        context = make_setup(case, Platform.parse("nvidia:sm90"), "cpu").context
        made = TritonDraftAttention()
        launches = made.launcher.rehearse(partial(try_layers, made, context))
        yield from ((name, launch) for launch in launches)


def main(name: str, *, full: bool) -> None:
    from compile_kernel import SHARED, compile_kernel  # noqa: PLC0415  # not the interpreter's

    arch = arch_of(name)
    target = target_of(arch)

    def tell(case: str, kernel: Any, compiled: Any) -> None:
        facts = {
            "case": case,
            "kernel": name_of(kernel),
            "spare": SHARED[arch] - compiled.metadata.shared,
        }
        if arch.startswith("gfx"):
            facts["scratch"] = scratch_bytes(compiled.asm["amdgcn"])
        print(json.dumps(facts))

    of_pages = (("chosen pages", launch) for launch in chosen_pages())
    of_blocks = (("blocks", launch) for launch in block_attention(arch))
    for case, launch in chain(rehearsed(name, full=full), of_pages, of_blocks, draft_attention()):
        compiled = compile_launch(launch, target)
        tell(case, launch.bound.kernel, compiled)
    for kernel, words, values in merges():
        compiled = compile_kernel(kernel, words, values, target=target, options={"num_warps": 4})
        tell("merge", kernel, compiled)
    for kernel, words, values, num_warps in index_kernels():
        compiled = compile_kernel(
            kernel,
            words,
            values,
            target=target,
            options={"num_warps": num_warps},
            odd_strides=frozenset({"scores_stride", "scales_stride"}),
        )
        tell("indexer", kernel, compiled)


def index_kernels() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """(kernel, Triton's types, constants, warps) of DeepSeek-V3.2's indexer."""
    from attnmux.triton.kernels import index_scores  # noqa: PLC0415  # not the interpreter's

    places = {"rows": "*i64", "positions": "*i64", "table": "*i32", "picks": "*i32"}
    words = {**places, "weights": "*fp32", "scores": "*fp32"}
    sizes = {"HEADS": 64, "DIM": 128, "BLOCK_H": 64, "BLOCK_D": 128, "BLOCK_N": 64}
    for keys, scales in (("*bf16", "constexpr"), ("*u8", "*fp32")):
        types = {**words, "q": "*bf16", "keys": keys, "scales": scales}
        yield index_scores.score_keys, types, {**sizes, "PRECISION": "ieee"}, 4


def block_attention(arch: str) -> list[Any]:
    """The launches of a decode step and a prompt over MiniMax-M3's blocks, with 8-bit K and V."""
    from attnmux.parts import PickedBlocks  # noqa: PLC0415  # not the interpreter's
    from attnmux.triton.functions.picked_blocks import BlockAttention  # noqa: PLC0415

    shape = {"num_q_heads": 64, "num_kv_heads": 4, "head_dim": 128, "v_head_dim": 128}
    launches = []
    for name, kv_dtype in (("blocks", None), ("blocks, 8-bit", "fp8_e5m2")):
        case = Case(name=name, steps=(decode(45, 3),), kv_dtype=kv_dtype, **shape)
        setup = make_setup(case, platform_of(arch), "cpu")
        made = prepare_step(setup, case.steps[0])
        attention = BlockAttention(setup.context, compute_units=108)
        given, batch = made.inputs[0], made.batch
        picked = PickedBlocks(
            picks=torch.zeros(2, 4, 16, dtype=torch.int32),
            size=128,
            table=setup.context.req_to_token_pool.req_to_token,
            rows=batch.req_pool_indices,
            positions=batch.positions,
        )
        lse = torch.empty(given.q.shape[:2])
        call = AttentionCall(given.q, None, None, given.layer, lse=lse)
        launches += attention.launcher.rehearse(partial(attention, call, picked))
    return launches


def merges() -> Iterator[tuple[Any, dict[str, str], dict[str, int | bool]]]:
    """(kernel, Triton's types, constants) of those that merge partial results of 128 columns."""
    from attnmux.triton.attention import splits  # noqa: PLC0415  # not the interpreter's

    sizes = {"HEADS": 8, "DV": 128, "BLOCK_D": 128}
    floats = {name: "*fp32" for name in ("lse", "parts", "part_lse", "sinks")}
    words = {**floats, "out": "*bf16"}
    flags = {"HAS_SINKS": True, "HAS_LSE": True, "BLOCK_R": splits.MERGED_ROWS}
    yield splits.merge_splits, words, {**sizes, **flags}


def scratch_bytes(assembly: str) -> int:
    """Bytes that each thread of a kernel keeps outside of its registers."""
    (found,) = re.findall(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    return int(found)


def most_scratch(case: str) -> dict[str, int]:
    if "picked" in case:
        return PICKED_SCRATCH
    return LATENT_SCRATCH if "latent" in case else SCRATCH


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
    "picked.attend_picks",
    "write.write_kv",
}
FOUR_BITS = {"write_four_bits.write_four_bits"}
HOPPER = {
    "hopper.latent.attend_latent",
    "hopper.latent_tiles.attend_latent_tiles",
    "hopper.shares.attend_shares",
    "hopper.tiles.attend_hopper_tiles",
    "latent_merge.merge_latent",
    "widen.turn_values",
    "widen.widen_keys",
}


MERGES = {"merge.merge_splits"}
DRAFTS = {"draft_attention.attend_drafts"}
INDEXER = {"index_scores.score_keys"}
BLOCKS = {"picked_blocks.attend_picked_blocks"}
PAGES = {
    f"chosen_pages.{name}"
    for name in ("choose_places", "copy_pages", "score_pages", "widen_bounds")
}


@pytest.mark.turns(over="target")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target, script, full):
    arch = arch_of(target)
    lines = script(target, *(["full"] if full else []))
    assert {line["case"] for line in lines} == {
        *cases_of(target, full=full),
        *("merge", "indexer", "chosen pages", "blocks", "drafts", "drafts, latent"),
    }
    expected = PORTABLE | MERGES | DRAFTS | INDEXER | PAGES | BLOCKS
    expected |= HOPPER if arch == "sm90" else set()
    if any("4-bit" in name for name in cases_of(target, full=full)):
        expected |= FOUR_BITS
    assert {line["kernel"] for line in lines} == expected
    assert [line for line in lines if line["spare"] < 0] == []
    if arch in SCRATCH:
        spilling = [line for line in lines if line["scratch"] > most_scratch(line["case"])[arch]]
        assert spilling == []


if __name__ == "__main__":
    main(sys.argv[1], full="full" in sys.argv)
