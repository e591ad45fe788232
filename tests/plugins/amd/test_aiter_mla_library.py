"""The adapter on AITER's own `aiter.mla`: its Python, and its Triton kernel that merges parts of
the keys, through the interpreter. A stand-in computes the parts, in place of the assembly."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("aiter") is None:
    pytest.skip("needs triton and amd-aiter", allow_module_level=True)

from attnmux.amd.aiter_mla import AiterMLAKernels, make
from attnmux.amd.cards.aiter_mla import AITER_MLA
from attnmux.amd.cards.aiter_mla_prefill import AITER_MLA_PREFILL
from attnmux.core import Platform
from attnmux.core.plugin import KernelLibrary
from attnmux.emulators.amd import aiter_mla as emulator
from attnmux.emulators.amd.aiter import aiter_kernels
from attnmux.emulators.amd.aiter_mla_work import merge, work
from attnmux.emulators.nvidia.dense import attend
from attnmux.testing import Candidate, decode, extend, verify
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterWorld,
    assert_passes,
    check_graphs_side_by_side,
)

KEYS = {(16, torch.bfloat16): 64, (16, torch.float8_e4m3fnuz): 64}
"""Keys of a part are a multiple of these; with 128 heads or several queries each, of 16."""


def mla_decode_stage1_asm_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    slots: torch.Tensor,
    last_page_lens: torch.Tensor,
    parts_indptr: torch.Tensor | None,
    work_metadata: torch.Tensor | None,
    work_indptr: torch.Tensor | None,
    work_info_set: torch.Tensor | None,
    max_seqlen_q: int,
    scale: float,
    merged: torch.Tensor,
    lse: torch.Tensor,
    output: torch.Tensor,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
) -> None:
    """The parts of each request's keys, and their LSE, by the arguments of asm_mla.cu."""
    if work_metadata is not None:
        assert parts_indptr is None
        plan = work_metadata, work_indptr, work_info_set
        work(q, kv, slots, *plan, scale, merged, lse, output, q_scale, kv_scale)  # type: ignore[arg-type]  # with one, all are there
        return
    count, heads = merged.shape[1], q.shape[1]
    factor = 1.0 if kv_scale is None else kv_scale
    granule = KEYS.get((heads, q.dtype), 16) if max_seqlen_q == 1 else 16
    length = kv_indptr.diff()
    room = -(-length // (count * granule)) * granule
    key = torch.arange(len(slots)) - kv_indptr[:-1, None]
    is_own = (key >= 0) & (key < length[:, None])
    rows = kv[:, 0, 0][slots.long()].float().where(is_own[..., None], 0).unsqueeze(2) * factor
    last = length[:, None] - max_seqlen_q + torch.arange(max_seqlen_q)
    is_seen = is_own[:, None] & (key[:, None] <= last[..., None])
    queries = q.float().unflatten(0, (len(length), max_seqlen_q))  # type: ignore[no-untyped-call]  # torch's
    for part in range(count):
        is_in_part = (key >= part * room[:, None]) & (key < (part + 1) * room[:, None])
        keep = is_seen & is_in_part[:, None]
        found, own_lse = attend(queries, rows, rows[..., :512], keep, scale=scale)
        lse[:, part, :, 0] = own_lse.flatten(0, 1)
        if count > 1 or (heads == 16 and q.dtype == torch.bfloat16 and max_seqlen_q == 1):
            merged[:, part] = found.flatten(0, 1).to(merged.dtype)
        else:  # the result itself, in bf16 at the front of the memory
            first = merged.view(torch.bfloat16).flatten()[: found.numel()]
            first.copy_(found.flatten())


def mla_prefill_asm_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    slots: torch.Tensor,
    last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    merged: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """The result itself, in bf16 where the caller has it."""
    emulator.mla_prefill_fwd(
        q,
        kv,
        merged.squeeze(1),
        qo_indptr,
        kv_indptr,
        slots,
        last_page_lens,
        max_seqlen_q,
        sm_scale=scale,
    )


def mla_reduce_v1(
    parts: torch.Tensor,
    lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    final_map: torch.Tensor,
    partial_map: torch.Tensor,
    output: torch.Tensor,
    final_lse: torch.Tensor | None = None,
) -> None:
    merge(parts, lse, reduce_indptr, final_map, partial_map, output)


LAUNCHES = {
    function.__name__: function
    for function in (mla_decode_stage1_asm_fwd, mla_prefill_asm_fwd, mla_reduce_v1)
}


PLANS = "get_mla_metadata_info_v1", "get_mla_metadata_v1"


class OnHost(ModuleType):
    """torch, whose tensors for "cuda" are on the host."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def arange(*args: Any, device: str, **kwargs: Any) -> torch.Tensor:
        assert device == "cuda"
        return torch.arange(*args, **kwargs)


@pytest.fixture
def kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[AiterMLAKernels]:
    aiter_kernels()  # `aiter` without its `__init__`, which builds for a device
    chip, dtypes = ModuleType("aiter.jit.utils.chip_info"), ModuleType("aiter.dtypes")
    vars(chip).update(get_cu_num=lambda: 8)
    vars(dtypes).update(fp8=torch.float8_e4m3fnuz, bf16=torch.bfloat16, fp32=torch.float32)
    for module in (chip, dtypes, ModuleType("aiter.jit"), ModuleType("aiter.jit.utils")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    aiter = sys.modules["aiter"]
    monkeypatch.setattr(aiter, "dtypes", dtypes, raising=False)
    plans = {name: getattr(emulator, name) for name in PLANS}
    for name, function in {**LAUNCHES, **plans}.items():
        monkeypatch.setattr(aiter, name, function, raising=False)
    monkeypatch.delitem(sys.modules, "aiter.mla", raising=False)
    mla = importlib.import_module("aiter.mla")
    monkeypatch.setattr(mla, "torch", OnHost("torch"))
    yield KernelLibrary.imported(AiterMLAKernels, "aiter.mla", "aiter")
    del sys.modules["aiter.mla"]


def world(kernels: AiterMLAKernels) -> AdapterWorld:
    return AdapterWorld(
        library=make,
        kernels=kernels,
        platform=Platform.parse("amd:gfx942"),
        settings={**LATENT, "page_size": 1},
    )


def candidate(kernels: AiterMLAKernels) -> Candidate:
    return world(kernels).candidate(AITER_MLA)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("stored", ["bfloat16", "fp8_e4m3fnuz"])
def test_steps(kernels, stored, graph) -> None:
    steps = (decode(45, 3, 130, 0), decode(1, 0), decode(0, 0), decode(300))
    settings = {**LATENT, "page_size": 1, "kv_dtype": stored, "max_context_len": 320}
    assert_passes(candidate(kernels), *steps, **settings, graph=graph)


@pytest.mark.parametrize("stored", ["bfloat16", "fp8_e4m3fnuz"])
def test_128_heads(kernels, stored) -> None:
    settings = {**LATENT, "num_q_heads": 128, "page_size": 1, "kv_dtype": stored}
    assert_passes(candidate(kernels), decode(45, 3), decode(9), **settings)


@pytest.mark.turns(12)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("heads", "stored", "drafts"),
    [
        *((16, "bfloat16", drafts) for drafts in (1, 2, 3, 4, 6)),
        *((16, "fp8_e4m3fnuz", drafts) for drafts in (2, 4)),
        (128, "bfloat16", 2),
        (128, "fp8_e4m3fnuz", 2),
    ],
)
def test_chains(kernels, heads, stored, drafts, graph) -> None:
    steps = verify(drafts, 45, 0, 130), verify(drafts, 3)
    settings = {
        **LATENT,
        "page_size": 1,
        "kv_dtype": stored,
        "num_q_heads": heads,
        "max_context_len": 320,
    }
    assert_passes(candidate(kernels), *steps, **settings, spec_topk=1, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("stored", ["bfloat16", "fp8_e4m3fnuz"])
def test_work_that_is_planned_ahead(kernels, stored, graph) -> None:
    steps = decode(45, 3, 130, 0), decode(300)
    # 64 heads over e4m3 are refused.
    heads = 64 if stored == "bfloat16" else 48
    settings = {**LATENT, "page_size": 1, "kv_dtype": stored, "num_q_heads": heads}
    assert_passes(candidate(kernels), *steps, **settings, max_context_len=320, graph=graph)


def test_prompts(kernels) -> None:
    step = extend((0, 60), (37, 3), (0, 0), (9, 1))
    assert_passes(world(kernels).candidate(AITER_MLA_PREFILL), step, **LATENT, page_size=1)


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_launch_has_the_library_s_arguments(name) -> None:
    """By position, under other names."""
    spec = importlib.util.find_spec("aiter")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "ops/attention.py")
    (found,) = (
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    ours = inspect.signature(LAUNCHES[name]).parameters
    assert len(ours) == len(found.args.args)


def test_graphs_keep_the_parts_that_they_were_captured_with(kernels) -> None:
    check_graphs_side_by_side(world(kernels), decode(9, 4), decode(5, 6, 7))
