"""What the emulators of FlashMLA refuse or spoil; the adapter's tests prove what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.emulators.nvidia.flash_mla import flash_mla, sgl_kernel
from attnmux.emulators.nvidia.flash_mla.kernel import FP8

PAGE, DIM, RANK = 64, 576, 512


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(*lens: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A cache with that many keys a request, on pages in falling order; all else is NaN."""
    counts = [-(-length // PAGE) for length in lens]
    pages = torch.arange(sum(counts), 0, -1, dtype=torch.int32).split(counts)
    table = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32)
    cache = torch.randn(sum(counts) + 1, PAGE, 1, DIM)
    cache[0] = torch.nan
    for row, own, length in zip(table, pages, lens, strict=True):
        row[: len(own)] = own
        if length % PAGE:
            cache[own[-1], length % PAGE :] = torch.nan
    return {"k_cache": cache.to(dtype), "block_table": table, "cache_seqlens": int32(*lens)}


def run(q: torch.Tensor, cache: dict[str, torch.Tensor], **arguments: Any):
    """Through one of the packages."""
    is_fp8 = q.dtype == FP8
    tiles, splits = sgl_kernel.get_mla_metadata(
        cache["cache_seqlens"], q.shape[1] * q.shape[2], 1, is_fp8_kvcache=is_fp8
    )
    if is_fp8:
        arguments = {"descale_q": torch.ones(1), "descale_k": torch.ones(1), **arguments}
    made = {"tile_scheduler_metadata": tiles, "num_splits": splits}
    return sgl_kernel.flash_mla_with_kvcache(q=q, head_dim_v=RANK, **{**cache, **made, **arguments})


def test_a_query_without_keys_has_a_positive_infinity() -> None:
    q = torch.randn(2, 1, 3, DIM).bfloat16()
    out, lse = run(q, paged(0, 5))
    assert not out[0].any()
    assert lse[0].isposinf().all()
    assert lse[1].isfinite().all()
    out, lse = run(torch.randn(1, 3, 2, DIM).bfloat16(), paged(2), causal=True)
    assert not out[0, 0].any()
    assert lse[0, :, 0].isposinf().all()


def test_fp8_rounds_the_weights() -> None:
    cache = paged(2, dtype=FP8)
    rows = cache["k_cache"].float()
    rows[1, :2] = 0
    rows[1, 0, 0, 0], rows[1, 1, 0, 1] = 1, 1
    cache["k_cache"] = rows.to(FP8)
    q = torch.zeros(1, 1, 1, DIM)
    q[..., 0] = 1
    out, _ = run(q.to(FP8), cache, softmax_scale=1.0)
    total = 1 + torch.tensor(-1.0).exp()
    rounded = torch.tensor(-1.0).exp().to(FP8).float()
    torch.testing.assert_close(out[0, 0, 0, 1].float(), (rounded / total), atol=1e-3, rtol=4e-3)


def test_fp8_may_not_have_a_request_without_keys() -> None:
    out, lse = run(torch.randn(2, 1, 4, DIM).to(FP8), paged(0, 5, dtype=FP8))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_fp8_hides_later_keys_in_two_pages_alone() -> None:
    """The last of which may hold one key."""
    cache = paged(129, dtype=FP8)

    def attend(num_queries: int, *, causal: bool) -> torch.Tensor:
        return run(torch.randn(1, num_queries, 1, DIM).to(FP8), cache, causal=causal)[0]

    assert attend(66, causal=True).isfinite().all()
    assert attend(67, causal=True).isnan().all()
    assert attend(67, causal=False).isfinite().all()


def test_fp8_has_no_schedule_of_more_rows_than_the_device_takes() -> None:
    lens = int32(5, 6)
    tiles, _ = sgl_kernel.get_mla_metadata(lens, 132 * 64, 1, is_fp8_kvcache=True)
    assert len(tiles) == 1
    with pytest.raises(RuntimeError, match="Assertion now_idx"):
        sgl_kernel.get_mla_metadata(lens, 132 * 64 + 1, 1, is_fp8_kvcache=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_a_schedule_of_something_else_shows(dtype) -> None:
    q, cache = torch.randn(2, 1, 4, DIM).to(dtype), paged(5, 70, dtype=dtype)
    is_fp8 = dtype == FP8

    def with_schedule(lens: torch.Tensor, num_rows: int, *, is_fp8: bool) -> torch.Tensor:
        tiles, splits = sgl_kernel.get_mla_metadata(lens, num_rows, 1, is_fp8_kvcache=is_fp8)
        return run(q, cache, tile_scheduler_metadata=tiles, num_splits=splits)[0]

    assert with_schedule(int32(5, 70), 4, is_fp8=is_fp8).isfinite().all()
    assert with_schedule(int32(5, 71), 4, is_fp8=is_fp8).isnan().all()
    assert with_schedule(int32(70, 5), 4, is_fp8=is_fp8).isnan().all()
    assert with_schedule(int32(5, 70), 8, is_fp8=is_fp8).isnan().all()
    assert with_schedule(int32(5, 70), 4, is_fp8=not is_fp8).isnan().all()


def test_parts_fall_as_queries_rise() -> None:
    def parts(num_rows: int) -> int:
        tiles, splits = sgl_kernel.get_mla_metadata(int32(5, 6), num_rows, 1)
        assert splits.shape == (3,)
        return len(tiles)

    assert [parts(rows) for rows in (1, 64, 65, 128, 10_000)] == [132, 132, 66, 66, 1]


def test_the_other_package_carries_the_schedule_in_an_object() -> None:
    q, cache = torch.randn(2, 1, 4, DIM).bfloat16(), paged(5, 70)
    expected = run(q, cache, causal=True)
    made, nothing = flash_mla.get_mla_metadata("whatever", is_given=True)
    assert nothing is None

    def attend(lens: torch.Tensor = cache["cache_seqlens"], **changes: Any):
        arguments = {"causal": True, "use_legacy": True, **cache, "cache_seqlens": lens, **changes}
        return flash_mla.flash_mla_with_kvcache(
            q, head_dim_v=RANK, tile_scheduler_metadata=made, **arguments
        )

    # The first call makes the schedule, and later ones keep it.
    for out, lse in (attend(), attend()):
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    assert attend(int32(5, 69))[0].isnan().all()
    made.tile_scheduler_metadata, made.num_splits = flash_mla.get_mla_decoding_metadata(
        int32(5, 69), 4, 1, use_legacy=True
    )
    assert attend(int32(5, 69))[0].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_legacy": False}, AssertionError, "removed from the current kernels"),
        ({"descale_q": torch.ones(1)}, AssertionError, "dense fp8 path only"),
        ({"is_fp8_kvcache": True}, AssertionError, "needs metadata"),
        ({"num_splits": int32(1)}, AssertionError, "num_splits must be None"),
        ({"tile_scheduler_metadata": int32(1)}, AssertionError, "FlashMLASchedMeta"),
        ({"indices": int32(1)}, NotImplementedError, "sparse"),
    ],
)
def test_what_the_other_package_refuses(changes, error, message) -> None:
    made, _ = flash_mla.get_mla_metadata()
    arguments = {"tile_scheduler_metadata": made, "use_legacy": True, **paged(5, 70), **changes}
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(
            torch.zeros(2, 1, 4, DIM).bfloat16(), head_dim_v=RANK, **arguments
        )


def queries(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": queries(2, 1, 4, DIM, dtype=torch.float32)}, "kBFloat16"),
        ({"q": queries(2, 1, 4, DIM, dtype=torch.float16)}, "must have the same dtype"),
        ({"q": queries(2, 1, 4, RANK)}, "head_size_k == 576"),
        ({"q": queries(3, 1, 4, DIM)}, "block_table must have shape"),
        ({"q": queries(2 * 4 * DIM + 1)[1:].view(2, 1, 4, DIM)}, "misaligned"),
        ({"head_dim_v": 576}, "head_size_v == 512"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "block_table must have dtype"),
        ({"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, "seqlens_k must have dtype"),
        ({"k_cache": queries(5, 32, 1, DIM)}, "page_block_size must be 64"),
        ({"num_splits": int32(0, 1)}, "num_splits must have shape"),
        ({"tile_scheduler_metadata": torch.zeros(9, 8, dtype=torch.int32)}, "must have shape"),
        ({"is_fp8_kvcache": True}, "fwd_kvcache_mla_fp8"),
    ],
)
def test_what_the_library_refuses(changes, message) -> None:
    tiles, splits = sgl_kernel.get_mla_metadata(int32(5, 70), 4, 1)
    arguments = {
        "q": queries(2, 1, 4, DIM),
        "head_dim_v": RANK,
        "tile_scheduler_metadata": tiles,
        "num_splits": splits,
        **paged(5, 70),
    }
    with pytest.raises(RuntimeError, match=message):
        sgl_kernel.flash_mla_with_kvcache(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("descales", "message"),
    [
        ((None, None), "descale is required"),
        ((torch.ones(2), torch.ones(1)), r"descale_q_ must have shape \(1\)"),
        ((torch.ones(1), torch.ones(1).double()), "descale_k_ must have dtype float32"),
    ],
)
def test_descales_that_the_library_refuses(descales, message) -> None:
    q, cache = queries(2, 1, 4, DIM).to(FP8), paged(5, 70, dtype=FP8)
    with pytest.raises(RuntimeError, match=message):
        run(q, cache, descale_q=descales[0], descale_k=descales[1])


def test_schedules_that_the_library_refuses() -> None:
    for lens, num_rows, message in (
        (torch.zeros(2, dtype=torch.int64), 4, "must have dtype int32"),
        (int32(), 4, "batch size must be positive"),
        (torch.zeros(4, dtype=torch.int32)[::2], 4, "must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            sgl_kernel.get_mla_metadata(lens, num_rows, 1)
    many = torch.ones(4096, dtype=torch.int32)
    assert sgl_kernel.get_mla_metadata(many, 4, 1)
    with pytest.raises(RuntimeError, match="MaxBatchSize"):
        sgl_kernel.get_mla_metadata(many, 4, 1, is_fp8_kvcache=True)
