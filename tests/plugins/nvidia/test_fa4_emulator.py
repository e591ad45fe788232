"""The emulator of `flash_attn.cute` has the conventions and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnmux.emulators.nvidia.flash_attn_cute import FlashAttnCute


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def call(arch: int, given: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    return FlashAttnCute(arch=arch).flash_attn_varlen_func(**{"return_lse": True, **given})


def packed(arch: int = 90, dim: int = 64, **more: Any) -> tuple[torch.Tensor, Any]:
    """Two requests, of three tokens and of two; four heads over two."""
    given = {"q": rows(5, 4, dim), "k": rows(5, 2, dim), "v": rows(5, 2, dim)}
    bounds = {"cu_seqlens_q": ints(0, 3, 5), "cu_seqlens_k": ints(0, 3, 5)}
    return call(arch, {**given, **bounds, **more})


def paged(
    page_size: int = 128, dim: int = 64, arch: int = 90, **more: Any
) -> tuple[torch.Tensor, Any]:
    """One request of two tokens on top of three."""
    k, v = rows(2, 9, page_size, 2, dim)
    keys = {"seqused_k": ints(5), "page_table": ints(*range(1, 9)).view(1, -1)}
    given = {"q": rows(2, 4, dim), "k": k, "v": v, "cu_seqlens_q": ints(0, 2), **keys}
    return call(arch, {**given, **more})


def latent(heads: int = 16, arch: int = 100, **more: Any) -> tuple[torch.Tensor, Any]:
    cache = rows(3, 128, 1, 576)
    queries = {"q": rows(2, heads, 64), "qv": rows(2, heads, 512), "cu_seqlens_q": ints(0, 2)}
    keys = {"seqused_k": ints(5), "page_table": ints(2).view(1, 1), "causal": True}
    given = {"k": cache[..., 512:], "v": cache[..., :512], **queries, **keys}
    return call(arch, {**given, **more})


def test_a_row_without_keys() -> None:
    """Causality counts from the end: of two queries over one key, the first has none."""
    sinks = torch.ones(4, dtype=torch.bfloat16)
    for arch, with_sink in ((90, math.nan), (100, 1.0)):
        out, lse = paged(arch=arch, seqused_k=ints(1), causal=True)
        assert not out[0].any()
        assert lse[:, 0].isneginf().all()
        _, lse = paged(arch=arch, seqused_k=ints(1), causal=True, learnable_sink=sinks)
        torch.testing.assert_close(lse[0, 0].item(), with_sink, equal_nan=True)


def test_a_request_without_keys_is_garbage() -> None:
    out, lse = paged(seqused_k=ints(0), causal=True)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_rows_of_no_request_are_not_computed() -> None:
    out, _ = packed(q=rows(7, 4, 64), causal=True)
    assert out[:5].isfinite().all()
    assert out[5:].isnan().all()


@pytest.mark.parametrize(("page_size", "spoils"), [(128, True), (64, False)])
def test_v_after_the_end_of_a_whole_page_must_be_finite(page_size, spoils) -> None:
    v = rows(9, page_size, 2, 64)
    v[1, 5:] = torch.nan
    out, _ = paged(page_size=page_size, v=v, causal=True)
    assert bool(out.isnan().any()) == spoils


def test_no_keys_at_all() -> None:
    out, lse = packed(k=rows(0, 2, 64), v=rows(0, 2, 64), cu_seqlens_k=ints(0, 0, 0))
    assert not out.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dim": 60}, "not supported"),
        ({"k": rows(5, 2, 64).half()}, "float16 != torch.bfloat16"),
        ({"learnable_sink": torch.ones(4)}, "must be bfloat16"),
        ({"num_splits": 2}, "SplitKV"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 5])}, "int32"),
        ({"page_table": ints(1, 1).view(2, 1)}, "not supported with cu_seqlens_k"),
        ({"q": rows(5, 3, 64)}, "divisible"),
        ({"dim": 256, "arch": 100, "v": rows(5, 2, 128)}, "not supported"),
    ],
)
def test_refused_over_packed_keys(more, message) -> None:
    with pytest.raises(AssertionError, match=message):
        packed(**more)


def test_misaligned_rows_fault() -> None:
    with pytest.raises(RuntimeError, match="misaligned"):
        packed(q=rows(5, 4 * 64 + 1)[:, 1:].view(5, 4, 64))


@pytest.mark.parametrize(
    ("heads", "dim", "pack_gqa", "compiles"),
    [(10, 72, None, False), (10, 72, False, True), (10, 80, None, True), (8, 72, None, True),
     (6, 72, None, True), (6, 104, None, False)],
)  # fmt: skip
def test_packed_heads_that_fill_no_tile_need_regular_dims(heads, dim, pack_gqa, compiles) -> None:
    more = {"q": rows(5, heads, dim), "dim": dim, "pack_gqa": pack_gqa}
    if compiles:
        assert packed(**more)[0].isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="pred"):
            packed(**more)


def test_pages_smaller_than_a_tile_need_regular_dims() -> None:
    with pytest.raises(AssertionError, match="irregular"):
        paged(page_size=64, dim=72)


def test_pages_of_128_where_a_tile_has_fewer_keys() -> None:
    with pytest.raises(RuntimeError, match="128"):
        paged(dim=256)
    assert paged(page_size=64, dim=256, causal=True, window_size=(4, 0))[0].isfinite().all()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"arch": 90}, "not supported"),
        ({"softcap": 3.0}, "softcap"),
        ({"window_size": (4, 0)}, "window"),
        ({"heads": 24}, "packed"),
    ],
)
def test_refused_over_latents(more, message) -> None:
    with pytest.raises(AssertionError, match=message):
        latent(**more)
