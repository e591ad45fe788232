from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, Platform
from attnmux.core.plugin import rehearse, topk_slots
from attnmux.emulators.nvidia.flash_mla.vllm import FlashMLAOperators
from attnmux.emulators.nvidia.flash_mla_sparse import FlashMLA, SglKernel, sparse_prefill
from attnmux.nvidia.cards.nsa import NSA
from attnmux.nvidia.latent import picked
from attnmux.nvidia.latent.flashmla_kernels import (
    NSAKernels,
    sparse_from_flash_mla,
    sparse_from_sgl_kernel,
    sparse_of_vllm,
)
from attnmux.nvidia.latent.nsa import NSABackend, make
from attnmux.testing import AttentionBackendTests, Candidate, Case, decode, extend, run_case
from attnmux.testing.adapters.picked import PickedAdapterTests, PickedWorld
from attnmux.testing.adapters.tests import LATENT, recorded

EMULATED = {
    "sgl_kernel": sparse_from_sgl_kernel(SglKernel),
    "flash_mla": sparse_from_flash_mla(FlashMLA),
    "vllm": sparse_of_vllm(FlashMLAOperators.sparse_prefill_fwd),
}
HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
LN2 = math.log(2)


def candidate(kernels: NSAKernels, *, lse_unit: float | None = None) -> Candidate:
    """lse_unit: instead of the measured one."""

    def factory(context, options) -> NSABackend:
        backend = NSABackend(context, options, kernels)
        backend._lse_unit = lse_unit or backend._lse_unit
        return backend

    return Candidate(
        card=replace(NSA, requires=()),
        platform=HOPPER,
        device="cpu",
        factory=factory,
    )


class TestNSA(AttentionBackendTests):
    """Page 64 is the card's only one."""

    backend = candidate(EMULATED["sgl_kernel"])
    page_sizes = (64,)


SETTINGS: dict[str, Any] = {
    **LATENT,
    "kind": "nsa",
    "page_size": 64,
    "max_context_len": 320,
    "index_topk": 64,
}
FP8: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)}
CASES = {
    "nothing": ((decode(1, 0, 70), decode(0, 0, 3)), {"lse": True}),
    "odd-topk": ((decode(90, 3), extend((80, 3), (0, 7))), {"index_topk": 33, "lse": True}),
    "topk-of-the-kernel": ((decode(200, 3),), {"index_topk": 128}),
    "larger-topk": ((decode(200, 3),), {"index_topk": 130}),
    "heads": ((decode(90, 3), extend((70, 5))), {"num_q_heads": 72, "lse": True}),
    "scale": ((decode(90, 3),), {"scaling": 0.1, "lse": True}),
    # More tokens than rows are widened for at once
    "fp8-stretches": ((extend((0, 61), (90, 9)),), {**FP8, "lse": True}),
    "fp8-graph": ((decode(90, 3, 0), decode(64, 65, 1)), {**FP8, "graph": True}),
    "graph-padding": ((decode(90, 3, 70), decode(64, 65, 1)), {"graph": True, "lse": True}),
    "nothing-new": ((extend((90, 0), (3, 0)),), {}),
}


@pytest.mark.parametrize("library", EMULATED)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.turns(4)
def test_agrees_with_reference(library, name) -> None:
    steps, settings = CASES[name]
    case = Case(name=name, steps=steps, **{**SETTINGS, **settings})
    outcome = run_case(candidate(EMULATED[library]), case)
    assert outcome.status == "passed", outcome.message


SPARSE = PickedWorld(
    library=replace(make, backend=NSABackend),
    kernels=EMULATED["sgl_kernel"],
    platform=HOPPER,
    settings=SETTINGS,
)


class TestNSAAdapter(PickedAdapterTests):
    adapter = SPARSE


@pytest.mark.parametrize(("library", "unit"), [("sgl_kernel", LN2), ("flash_mla", 1.0)])
def test_the_unit_of_lse_is_measured(library, unit) -> None:
    """Whatever a package documents."""
    context = SPARSE.world(decode(3)).context
    assert SPARSE.backend(context, kernels=EMULATED[library])._lse_unit == unit


def test_an_lse_of_neither_base_is_refused() -> None:
    def odd(*args, **named):
        out, top, lse = SglKernel.flash_mla_sparse_fwd(*args, **named)
        return out, top, lse * 3

    kernels = replace(EMULATED["sgl_kernel"], flash_mla_sparse_fwd=odd)
    with pytest.raises(BackendFailed, match=r"have LSE 3\.0000, neither ln 2 nor log2 2"):
        SPARSE.backend(SPARSE.world(decode(3)).context, kernels=kernels)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_the_trial_attends_in_each_phase(kv_dtype) -> None:
    kernels, calls = recorded(EMULATED["sgl_kernel"])
    context = SPARSE.world(decode(3), extend((0, 3)), kv_dtype=kv_dtype).context
    backend = SPARSE.backend(context, kernels=kernels)
    calls.clear()
    rehearse(backend)
    assert [call.name for call in calls] == ["topk_slots", "flash_mla_sparse_fwd"] * 2


def test_the_wrong_unit_shows() -> None:
    """The suite's tolerance tells the bases apart."""
    case = Case(name="lse", steps=(decode(90, 3),), lse=True, **SETTINGS)
    outcome = run_case(candidate(EMULATED["sgl_kernel"], lse_unit=1.0), case)
    assert outcome.status == "failed"
    assert "LSE" in outcome.message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_q_heads": 130}, "expected at most 128, got 130 query heads"),
        ({"dtype": "float16"}, "token_to_kv_pool: expected torch.bfloat16 or"),
        ({"kv_dtype": "fp8_e5m2"}, "got torch.float8_e5m2"),
        ({"kv_lora_rank": 256}, "expected mla, 512 [+] 64"),
        ({"windows": (8,)}, "got a layer with sliding_window"),
        ({"sinks": True}, "got a layer with sinks"),
        ({"logit_cap": 30.0}, "got a layer with logit_cap"),
    ],
)
def test_refuses_what_is_not_on_the_card(settings, said) -> None:
    SPARSE.refuses(said, decode(3), **settings)


def test_the_factory_takes_the_first_package_that_runs(monkeypatch) -> None:
    context = SPARSE.world(decode(3)).context
    monkeypatch.setitem(sys.modules, "attnmux.triton.functions.picks", None)

    def broken(*args, **named):
        raise RuntimeError("no kernel image")

    absent = dict.fromkeys(("flash_mla", "sgl_kernel", "sgl_kernel.flash_mla"))
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendFailed, match=r"flash_mla: .*; sgl_kernel\.flash_mla: "):
        make(context)
    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(flash_mla_sparse_fwd=broken))
    with pytest.raises(BackendFailed, match=r"flash_mla: .*no kernel image"):
        make(context)
    # FlashMLA's own build, which has no legacy half
    own = SimpleNamespace(flash_mla_sparse_fwd=SglKernel.flash_mla_sparse_fwd)
    monkeypatch.setitem(sys.modules, "flash_mla", own)
    with pytest.raises(BackendFailed, match=r"flash_mla: .*use_legacy"):
        make(context)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(flash_mla=SglKernel))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", SglKernel)
    assert make(context)._lse_unit == LN2


@pytest.mark.parametrize("offered", [None, lambda table, rows, picks: picks])
def test_picks_are_looked_up_by_an_offered_kernel(monkeypatch, offered) -> None:
    monkeypatch.setattr(picked, "shared_kernel", lambda name, context: offered)
    monkeypatch.setitem(sys.modules, "flash_mla", FlashMLA)
    kernels = make(SPARSE.world(decode(3)).context).kernels
    assert kernels.topk_slots is (offered or topk_slots)


def test_the_emulator_s_lse() -> None:
    """A key counts as often as it is named, keys beyond the end do not, and no keys give +inf."""
    kv = torch.zeros(4, 1, 576, dtype=torch.bfloat16)
    kv[3] = torch.nan
    q = torch.zeros(3, 64, 576, dtype=torch.bfloat16)
    picks = torch.full((3, 1, 128), -1, dtype=torch.int32)
    picks[0, 0, :3] = torch.tensor([0, 1, 99])
    picks[1, 0, 5:8] = torch.tensor([1, 0, 1])
    out, top, lse = sparse_prefill(q, kv, picks, 1.0, 512, None, None)
    torch.testing.assert_close(lse[:2, 0], torch.tensor([2.0, 3.0]).log())
    assert not out[2].any()
    assert bool(lse[2].isposinf().all())
    assert bool(top[2].isneginf().all())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.zeros(1, 16, 576, dtype=torch.bfloat16)}, "Unsupported h_q: 16"),
        ({"q": torch.zeros(1, 64, 576)}, "bf16"),
        ({"q": torch.zeros(0, 64, 576, dtype=torch.bfloat16)}, "empty grid"),
        ({"kv": torch.zeros(4, 1, 512, dtype=torch.bfloat16)}, "kv has shape"),
        ({"kv": torch.zeros(4, 1, 576, dtype=torch.float8_e4m3fn)}, "bf16"),
        ({"indices": torch.zeros(1, 1, 64, dtype=torch.int32)}, "a multiple of 128, not 64"),
        ({"indices": torch.zeros(1, 1, 128)}, "int32"),
        ({"d_v": 256}, "Invalid d_v 256"),
    ],
)
def test_the_emulator_refuses_what_the_library_does(change, said) -> None:
    plain = {
        "q": torch.zeros(1, 64, 576, dtype=torch.bfloat16),
        "kv": torch.zeros(4, 1, 576, dtype=torch.bfloat16),
        "indices": torch.zeros(1, 1, 128, dtype=torch.int32),
        "sm_scale": 1.0,
    }
    with pytest.raises(RuntimeError, match=said):
        SglKernel.flash_mla_sparse_fwd(**{**plain, **change})
    SglKernel.flash_mla_sparse_fwd(**plain)
    with pytest.raises(RuntimeError, match="d_qk must be 512"):
        FlashMLA.flash_mla_sparse_fwd(**plain)
    with pytest.raises(AssertionError, match="legacy"):
        FlashMLA.flash_mla_sparse_fwd(**plain, return_log2_lse=True)
    assert FlashMLA.flash_mla_sparse_fwd(**plain, use_legacy=True, return_log2_lse=False)[1] is None
