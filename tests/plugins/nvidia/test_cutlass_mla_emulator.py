"""What the emulator of `cutlass_mla_decode` refuses or spoils."""

from __future__ import annotations

import pytest
import torch

from attnmux.emulators.nvidia import cutlass_mla as emulator


def cache_of(*lens: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Pages in falling order; unused pages are NaN, and what follows the keys is large."""
    counts = [-(-length // 128) for length in lens]
    pages = torch.arange(sum(counts), 0, -1, dtype=torch.int32).split(counts)
    table = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32)
    rows = torch.randn(sum(counts) + 1, 128, 576)
    rows[0] = torch.nan
    for row, own, length in zip(table, pages, lens, strict=True):
        row[: len(own)] = own
        if length % 128:
            rows[own[-1], length % 128 :] = 100
    return {
        "kv_c_and_k_pe_cache": rows.to(dtype),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "page_table": table,
    }


def workspace(width: int, batch_size: int, splits: int = 1) -> torch.Tensor:
    size = emulator.cutlass_mla_get_workspace_size(128 * width, batch_size, num_kv_splits=splits)
    return torch.zeros(size, dtype=torch.uint8)


def test_a_row_without_keys_is_not_written() -> None:
    cache, q = cache_of(0, 5), torch.randn(2, 4, 512).bfloat16()
    out = emulator.cutlass_mla_decode(
        q, q[..., :64], **cache, workspace=workspace(1, 2), sm_scale=1.0
    )
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_size_of_scratch_memory() -> None:
    size = emulator.cutlass_mla_get_workspace_size
    one = 128 * (512 + 1) * 4
    assert size(4096, 3) == 3 * one
    assert size(4096, 3, num_kv_splits=5) == 15 * one
    # 32 tiles and 148 SMs: as many parts as tiles, then as many as there are SMs for.
    assert size(4096, 1, num_kv_splits=-1) == 32 * one
    assert size(4096, 37, num_kv_splits=-1) == 37 * 4 * one
    assert size(4096, 1, 8, num_kv_splits=-1) == 8 * one
    with pytest.raises(AssertionError, match="num_batches"):
        size(4096, 0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"q_nope": torch.zeros(2, 129, 512).bfloat16()}, AssertionError),
        ({"q_nope": torch.zeros(2, 4, 512)}, AssertionError),
        ({"q_pe": torch.zeros(2, 4, 32).bfloat16()}, AssertionError),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, AssertionError),
        ({"page_table": torch.zeros(2, 1, dtype=torch.int64)}, AssertionError),
        ({"page_table": torch.zeros(3, 1, dtype=torch.int32)}, AssertionError),
        ({"page_table": torch.zeros(2, 0, dtype=torch.int32)}, AssertionError),
        ({"page_table": torch.zeros(2, 2, dtype=torch.int32)[:, :1]}, RuntimeError),
        ({"kv_c_and_k_pe_cache": torch.zeros(3, 64, 576).bfloat16()}, AssertionError),
        ({"workspace": workspace(1, 1)}, RuntimeError),
    ],
)
def test_what_the_library_refuses(changes, error) -> None:
    arguments = {
        "q_nope": torch.zeros(2, 4, 512).bfloat16(),
        "q_pe": torch.zeros(2, 4, 64).bfloat16(),
        "workspace": workspace(1, 2),
        "sm_scale": 1.0,
        **cache_of(3, 6),
    }
    emulator.cutlass_mla_decode(**arguments)
    with pytest.raises(error):
        emulator.cutlass_mla_decode(**{**arguments, **changes})
