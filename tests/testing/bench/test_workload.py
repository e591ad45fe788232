"""Workloads: their texts, their sizes, and the default ones of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmux.core import InvalidInput, Platform, Request
from attnmux.testing.bench.grid import default_grid
from attnmux.testing.bench.shapes import check_stated, completed
from attnmux.testing.bench.workload import Workload
from attnmux.testing.reference.dense import visibility

GPU = replace(Platform.parse("nvidia:sm90,cuda=12.8"), memory_bytes=141 * 10**9)
CPU = Platform.parse("cpu:x86_64")


def test_text_of_a_workload() -> None:
    decode = Workload.parse("decode:bs=64,ctx=4096")
    assert decode == Workload(phase="decode", batch_size=64, prefix=4095)
    assert (decode.keys, decode.new, str(decode)) == (4096, 1, "decode:bs=64,ctx=4096")
    extend = Workload.parse("extend:new=512,bs=4,prefix=8192")
    assert extend == Workload(phase="extend", batch_size=4, new=512, prefix=8192)
    assert str(extend) == "extend:bs=4,new=512,prefix=8192"
    assert str(Workload.parse("extend:new=7")) == "extend:bs=1,new=7,prefix=0"


@given(
    st.builds(
        Workload,
        phase=st.just("extend"),
        batch_size=st.integers(1, 999),
        new=st.integers(1, 999),
        prefix=st.integers(0, 9999),
    )
    | st.builds(
        Workload,
        phase=st.just("extend"),
        batch_size=st.integers(1, 9),
        new=st.integers(1, 999),
        prefix=st.integers(0, 9999),
        decoding=st.integers(1, 99),
        ctx=st.integers(1, 9999),
    )
)
def test_texts_round_trip(workload) -> None:
    assert Workload.parse(str(workload)) == workload


@pytest.mark.parametrize(
    "text",
    [
        "",
        "decode",
        "decode:bs=4",
        "decode:bs=0,ctx=5",
        "decode:bs=4,ctx=0",
        "decode:bs=4,ctx=x",
        "decode:bs=4,ctx=-5",
        "decode:bs=4,ctx=5,new=2",
        "decode:bs=4,ctx=5,bs=4",
        "extend:bs=4",
        "extend:bs=4,new=0",
        "extend:bs=4,new=2,decoding=3",
        "extend:bs=4,new=2,ctx=3",
        "extend:bs=4,new=2,decoding=0,ctx=3",
        "decode:bs=4,ctx=9,decoding=3",
        "verify:bs=4,new=2,decoding=3,ctx=9",
        "verify:bs=4,prefix=3",
        "decode:bs=100000,ctx=100000",
    ],
)
def test_invalid_texts_are_refused(text) -> None:
    with pytest.raises(InvalidInput, match="workload"):
        Workload.parse(text)


@pytest.mark.parametrize(
    "fields", [{}, {"sliding_window": 5}, {"attention_chunk": 6}, {"sliding_window": 1}]
)
@pytest.mark.parametrize("workload", ["decode:bs=3,ctx=17", "extend:bs=2,new=9,prefix=8"])
def test_bytes_and_flops(fields, workload) -> None:
    """Counted in the mask of the reference."""
    work = Workload.parse(workload)
    request = Request(num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=32, **fields)
    keep = visibility(
        torch.arange(work.prefix, work.keys),
        work.keys,
        window=fields.get("sliding_window", -1),
        chunk=fields.get("attention_chunk", 0),
    )
    assert work.flops(request) == int(keep.sum()) * work.batch_size * 8 * 2 * (64 + 32)
    seen = int(keep.any(0).sum())
    assert work.kv_bytes(request, 2) == seen * work.batch_size * 2 * (64 + 32) * 2
    assert work.stored_bytes(request, 2) == work.keys * work.batch_size * 2 * (64 + 32) * 2


def test_latents_are_read_once_and_are_both_k_and_v() -> None:
    request = completed(Request(kind="mla"))
    work = Workload.parse("decode:bs=2,ctx=10")
    assert work.kv_bytes(request, 2) == 2 * 10 * 576 * 2
    assert work.flops(request) == 2 * 10 * 16 * 2 * (576 + 512)


def test_the_default_grid_fits_the_device() -> None:
    request = completed(Request())
    gpu, cpu = (default_grid(request, here, 2) for here in (GPU, CPU))
    assert {each.phase for each in gpu} == {each.phase for each in cpu} == {"decode", "extend"}
    assert len(gpu) == len(set(gpu))
    assert max(each.stored_bytes(request, 2) for each in cpu) < 40e6
    assert max(each.stored_bytes(request, 2) for each in gpu) > 1e9
    small = default_grid(request, replace(GPU, memory_bytes=8 * 10**9), 2)
    assert small
    assert all(2 * each.stored_bytes(request, 2) <= 2e9 for each in small)
    assert set(small) < set(gpu)
    # Unknown is not none.
    assert default_grid(request, replace(GPU, memory_bytes=0), 2) == gpu


def test_default_shapes() -> None:
    request = completed(Request.parse("head_dim=64"))
    assert (request.num_q_heads, request.num_kv_heads, request.head_dim) == (32, 8, 64)
    assert request.origins["num_q_heads"] == "default"
    assert request.origins["head_dim"] == "user"
    with pytest.raises(InvalidInput, match="no num_q_heads, num_kv_heads, dtype"):
        check_stated(Request.parse("head_dim=64"))
    check_stated(request)


@pytest.mark.parametrize(
    "text", ["kind=nsa", "cross_attention=yes", "custom_mask=yes", "multi_item=yes"]
)
def test_untimed_features_are_refused(text) -> None:
    with pytest.raises(InvalidInput, match="request"):
        completed(Request.parse(text))


def test_requests_of_different_lengths() -> None:
    work = Workload.uneven([4, 9, 2])
    assert (work.phase, work.batch_size, work.keys) == ("decode", 3, 9)
    assert (work.lengths, work.num_tokens) == ((4, 9, 2), 3)
    assert str(work) == "decode:bs=3,ctx=2..9"
    request = completed(Request())
    even = [Workload(phase="decode", batch_size=1, prefix=length - 1) for length in (4, 9, 2)]
    assert work.kv_bytes(request, 2) == sum(each.kv_bytes(request, 2) for each in even)
    assert work.stored_bytes(request, 2) == sum(each.stored_bytes(request, 2) for each in even)
    assert work.flops(request) == sum(each.flops(request) for each in even)


@pytest.mark.parametrize("lens", [(4, 9), (4, 9, 0), (4, 8, 2)])
def test_lengths_that_do_not_fit_the_step(lens) -> None:
    with pytest.raises(InvalidInput, match="a length for each of 3 requests"):
        Workload(phase="decode", batch_size=3, prefix=8, lens=lens)


def test_prompts_beside_decoding_requests() -> None:
    work = Workload.parse("extend:bs=2,new=5,prefix=7,decoding=3,ctx=40")
    assert (work.num_requests, work.num_tokens, work.keys) == (5, 13, 40)
    assert (work.lengths, work.new_lens) == ((12, 12, 40, 40, 40), (5, 5, 1, 1, 1))
    prompts = Workload.parse("extend:bs=2,new=5,prefix=7")
    decoding = Workload.parse("decode:bs=3,ctx=40")
    request = completed(Request(sliding_window=9))
    for size in (Workload.flops, lambda *args: Workload.kv_bytes(*args, 2)):
        assert size(work, request) == size(prompts, request) + size(decoding, request)
    assert work.stored_bytes(request, 2) > prompts.stored_bytes(request, 2)
    with pytest.raises(InvalidInput, match="decode beside 2 decoding requests"):
        Workload(phase="decode", batch_size=1, prefix=3, decoding=2, ctx=4)
