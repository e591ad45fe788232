"""flashinfer's conventions, one by one: what the emulator keeps and the adapter has to know."""

from __future__ import annotations

import math

import pytest
import torch

from attnmux.core.library import imported
from attnmux.emulators.nvidia import flashinfer as emulator
from attnmux.nvidia.flashinfer.backend import merge, store_natural
from attnmux.nvidia.flashinfer.layers import merged_heads
from attnmux.nvidia.flashinfer.planning import FlashInferKernels
from attnmux.nvidia.flashinfer.shared import writable_lse

KERNELS = imported(FlashInferKernels, "attnmux.emulators.nvidia.flashinfer")
DECODE = emulator.BatchDecodeWithPagedKVCacheWrapper
PAGED = emulator.BatchPrefillWithPagedKVCacheWrapper

HEADS = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 4,
    "q_data_type": torch.float32,
}


PAGED_HEADS = {name.replace("head_dim", "head_dim_qk"): value for name, value in HEADS.items()}


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 10, dtype=torch.uint8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 4, 2, 64), torch.randn(8, 4, 2, 64)


def copied(state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return state[0].clone(), state[1].clone()


def decode_in_graph(size: int = 2) -> emulator.BatchDecodeWithPagedKVCacheWrapper:
    return DECODE(
        workspace(),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(4, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.zeros(size, dtype=torch.int32),
    )


def test_lse_is_in_base_2_and_empty_rows_are_finite() -> None:
    wrapper = DECODE(workspace())
    wrapper.plan(ints(0, 1, 1), ints(3), ints(2, 0), **HEADS)
    q, (keys, values) = torch.randn(2, 4, 64), cache()
    out, lse = wrapper.run(q, (keys, values), return_lse=True)
    logits = torch.einsum("hd,shd->hs", q[0], keys[3, :2].repeat_interleave(2, 1)) / 8
    torch.testing.assert_close(lse[0], torch.logsumexp(logits, 1) / math.log(2))
    assert not out[1].any()
    assert lse[1].tolist() == [-5e4] * 4


def test_lse_becomes_natural_and_minus_infinity() -> None:
    # Masked keys of an empty row each add to the sum: log2(100) above -5e4.
    lse = torch.tensor([[-5e4, -5e4 + math.log2(100), -130.0, 0.0, 12.0]])
    store_natural(lse, lse)
    assert lse[0, :2].isneginf().all()
    torch.testing.assert_close(lse[0, 2:], torch.tensor([-130.0, 0, 12]) * math.log(2))


def test_a_plan_with_host_lengths_keeps_the_length_of_empty_requests() -> None:
    """Pages count from indptr, so an empty request's last page has to hold 0."""
    wrapper = DECODE(workspace())
    wrapper.plan(ints(0, 0, 1), ints(5), ints(0, 4), **HEADS)
    out = wrapper.run(torch.randn(2, 4, 64), cache())
    assert not out[0].any()
    assert out[1].any()


@pytest.mark.parametrize("window", [0, 1, 3])
def test_window_left_counts_the_keys_before(window) -> None:
    wrapper = DECODE(workspace())
    wrapper.plan(ints(0, 2), ints(1, 6), ints(3), window_left=window, **HEADS)
    q, (keys, values) = torch.randn(1, 4, 64), cache()
    out = wrapper.run(q, (keys, values))
    seen_k, seen_v = (
        torch.cat([part[1], part[6, :3]])[-window - 1 :].repeat_interleave(2, 1).transpose(0, 1)
        for part in (keys, values)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), seen_k, seen_v)
    torch.testing.assert_close(out, expected.transpose(0, 1))


def test_custom_mask_keeps_where_true() -> None:
    wrapper = PAGED(workspace(), backend="fa2")
    mask = torch.tensor([True, False, True, False, True, True, False, True, True])
    # 3 tokens on 3 keys, then 1 token on 5: the second request begins in a byte of its own.
    mask = torch.cat([mask, torch.tensor([True, False, False, False, True])])
    wrapper.plan(
        ints(0, 3, 4), ints(0, 1, 3), ints(2, 4, 7), ints(3, 1), custom_mask=mask, **PAGED_HEADS
    )
    keys, values = cache()
    values[:] = 0
    values[2, :3, :, 0] = torch.tensor([[1.0], [10.0], [100.0]])
    values[4, 0, :, 0], values[7, 0, :, 0], values[4, 1:, :, 0] = 4, 6, 1000
    out = wrapper.run(torch.zeros(4, 4, 64), (keys, values))
    assert out[:, 0, 0].tolist() == pytest.approx([50.5, 55, 55, 5])


def plan_items(wrapper, places, prefix_lens=(2,), longest=(9,), width=None, **kwargs) -> None:
    """One request of 6 tokens, none of them cached, in pages 3 and 5."""
    wrapper.plan(
        ints(0, 6), ints(0, 2), ints(3, 5), ints(2),
        prefix_len_ptr=ints(*prefix_lens).to(torch.uint32),
        token_pos_in_items_ptr=ints(*places).to(torch.uint16),
        token_pos_in_items_len=len(places) if width is None else width,
        max_item_len_ptr=ints(*longest).to(torch.uint16),
        **PAGED_HEADS, **kwargs,
    )  # fmt: skip


def seen(wrapper) -> list[list[int]]:
    """The keys that each of the 6 tokens sees, told by a value of its own each."""
    keys, values = cache()
    values[:] = 0
    flat = torch.cat([values[3], values[5, :2]])
    flat[:, :, :6] = torch.eye(6).unsqueeze(1)
    values[3], values[5, :2] = flat[:4], flat[4:]
    out = wrapper.run(torch.zeros(6, 4, 64), (keys, values))
    return [row.nonzero().flatten().tolist() for row in out[:, 0, :6]]


def test_items_begin_with_a_delimiter_that_they_do_not_see() -> None:
    """Two items of a delimiter and a token behind a prefix of two; their places count from 0."""
    wrapper = PAGED(workspace(), backend="fa2")
    plan_items(wrapper, (0, 1, 0, 1))
    assert seen(wrapper) == [[0], [0, 1], [0, 1], [0, 1, 3], [0, 1], [0, 1, 5]]
    # One more, and each item has its delimiter in it.
    plan_items(wrapper, (1, 2, 1, 2), longest=(2,))
    assert seen(wrapper) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]
    # Keys further back than the longest item are skipped.
    plan_items(wrapper, (1, 2, 1, 2), longest=(1,))
    assert seen(wrapper) != [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]


def test_items_stand_above_causality_and_windows_hold() -> None:
    wrapper = PAGED(workspace(), backend="fa2")
    plan_items(wrapper, (1, 2, 1, 2), causal=False, window_left=3)
    assert seen(wrapper) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 4], [4, 5]]


def test_places_of_items_are_read_by_address() -> None:
    wrapper = PAGED(workspace(), backend="fa2")
    for given in ({"width": 3}, {"prefix_lens": (2, 3)}, {"longest": ()}):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            plan_items(wrapper, (1, 2, 1, 2), **given)
    with pytest.raises(RuntimeError, match="illegal memory access: prefix_len_ptr"):
        wrapper.plan(
            ints(0, 6), ints(0, 2), ints(3, 5), ints(2), prefix_len_ptr=ints(2), **PAGED_HEADS
        )


def with_sinks(**kwargs) -> emulator.BatchPrefillWithPagedKVCacheWrapper:
    source = emulator.attention_sink_decl["fa2"]
    built_for = torch.float32, torch.float32, torch.float32, torch.int32, 64, 64
    softmax = ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", source
    made = {"backend": "fa2", "jit_args": ["name", *built_for, *softmax], **kwargs}
    return PAGED(workspace(), **made)


def test_sinks_are_in_the_lse_and_scale_comes_with_each_run() -> None:
    wrapper = with_sinks()
    wrapper.plan(ints(0, 1, 2), ints(0, 1, 1), ints(3), ints(2, 0), sm_scale=7.0, **PAGED_HEADS)
    q, (keys, values), sinks = torch.randn(2, 4, 64), cache(), torch.randn(4)
    given = {"return_lse": True, "k_scale": 5.0}
    out, lse = wrapper.run(q, (keys, values), sinks, 0.125, **given)
    logits = torch.einsum("hd,shd->hs", q[0], keys[3, :2].repeat_interleave(2, 1)) / 8
    logits = torch.cat([logits, sinks.unsqueeze(1)], 1)
    torch.testing.assert_close(lse[0], logits.logsumexp(1) / math.log(2))
    weights = logits.softmax(1)[:, :2]
    expected = torch.einsum("hs,shd->hd", weights, values[3, :2].repeat_interleave(2, 1))
    torch.testing.assert_close(out[0], expected)
    assert not out[1].any()
    torch.testing.assert_close(lse[1], sinks / math.log(2))


def test_what_is_compiled_with_sinks() -> None:
    with pytest.raises(ValueError, match="should not be auto"):
        with_sinks(backend="auto")
    wrapper = with_sinks()
    plan = ints(0, 1), ints(0, 1), ints(3), ints(2)
    for other in ({"window_left": 3}, {"head_dim_qk": 128}, {"q_data_type": torch.float16}):
        with pytest.raises(ValueError, match="compiled for"):
            wrapper.plan(*plan, **{**PAGED_HEADS, **other})
    with_sinks(jit_kwargs={"use_sliding_window": True}).plan(*plan, window_left=3, **PAGED_HEADS)
    names = {
        emulator.get_batch_prefill_attention_sink_uri(
            "fa2", torch.float16, kv_dtype, torch.float16, torch.int32, dim, dim, 0, windowed
        )
        for kv_dtype in (torch.float16, torch.float8_e4m3fn)
        for dim in (64, 128)
        for windowed in (False, True)
    }
    assert len(names) == 8


def test_lse_that_lies_apart_is_copied() -> None:
    lse = torch.zeros(4, 3).t()
    assert writable_lse(None) is None
    base_2 = writable_lse(lse)
    assert base_2 is not None
    assert base_2.is_contiguous()
    base_2.fill_(2)
    store_natural(base_2, lse)
    torch.testing.assert_close(lse, torch.full_like(lse, 2 * math.log(2)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_heads", [8, 64, 71, 96, 128])
def test_merge_is_attention_over_both_parts(num_heads, head_dim) -> None:
    """Beyond 1024 threads a block the kernel does not launch; a natural-log kernel in its place
    would weigh base-2 LSE wrongly."""
    one, other = (
        (torch.randn(5, num_heads, head_dim, dtype=torch.bfloat16), torch.randn(5, num_heads) * 3)
        for _ in range(2)
    )
    out, lse = copied(one)
    merge(KERNELS, merged_heads(num_heads, head_dim, 2), (out, lse), other)
    both = torch.stack([one[1], other[1]]).double() * math.log(2)
    weights = both.softmax(0).unsqueeze(-1)
    expected = weights[0] * one[0] + weights[1] * other[0]
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double() * math.log(2), both.logsumexp(0), atol=1e-5, rtol=1e-5)
    in_wrong_base = torch.stack([one[1], other[1]]).softmax(0).unsqueeze(-1)
    wrong = in_wrong_base[0] * one[0] + in_wrong_base[1] * other[0]
    assert not torch.allclose(wrong.double(), expected, atol=1e-2, rtol=1e-2)


def test_merge_of_nothing_is_nothing() -> None:
    empty = torch.zeros(3, 4, 64), torch.full((3, 4), -5e4)
    full = torch.randn(3, 4, 64), torch.randn(3, 4)
    out, lse = copied(empty)
    merge(KERNELS, 4, (out, lse), empty)
    store_natural(lse, lse)
    assert not out.any()
    assert lse.isneginf().all()
    for one, other in ((empty, full), (full, empty)):
        out, lse = copied(one)
        merge(KERNELS, 4, (out, lse), other)
        torch.testing.assert_close(out, full[0])
        torch.testing.assert_close(lse, full[1])


def test_the_merge_kernel_has_a_limit() -> None:
    state = torch.zeros(1, 65, 128, dtype=torch.bfloat16), torch.zeros(1, 65)
    with pytest.raises(RuntimeError, match="launch failed"):
        emulator.merge_state_in_place(*state, *state)


def test_run_obeys_the_plan() -> None:
    wrapper = DECODE(workspace())
    with pytest.raises(RuntimeError, match="before plan"):
        wrapper.run(torch.randn(1, 4, 64), cache())
    wrapper.plan(ints(0, 1), ints(3), ints(2), **HEADS)
    with pytest.raises(ValueError, match="planned were"):
        wrapper.run(torch.randn(2, 4, 64), cache())
    with pytest.raises(ValueError, match="does not match"):
        wrapper.run(torch.randn(1, 4, 64, dtype=torch.bfloat16), cache())
    with pytest.raises(ValueError, match="planned were"):
        wrapper.run(torch.randn(1, 8, 64), cache())
    odd = torch.randn(1, 4 * 64 + 1)[:, 1:].view(1, 4, 64)
    with pytest.raises(RuntimeError, match="misaligned"):
        wrapper.run(odd, cache())
    with pytest.raises(RuntimeError, match="strides"):
        wrapper.run(torch.randn(1, 4, 64), (cache()[0], torch.randn(8, 4, 2, 32)))


def test_a_graph_wrapper_is_of_one_batch_size_and_its_buffers() -> None:
    wrapper = decode_in_graph()
    with pytest.raises(RuntimeError, match="plan was never called"):
        emulator.fast_decode_plan(wrapper, ints(0, 1, 2), ints(1, 2), ints(1, 1), **HEADS)
    with pytest.raises(ValueError, match="batch size should be fixed"):
        wrapper.plan(ints(0, 1), ints(3), ints(2), **HEADS)
    with pytest.raises(ValueError, match="allocated buffer"):
        wrapper.plan(ints(0, 2, 5), ints(1, 2, 3, 4, 5), ints(1, 1), **HEADS)


def test_a_graph_wrapper_splits_keys() -> None:
    wrapper = PAGED(
        workspace(),
        use_cuda_graph=True,
        qo_indptr_buf=torch.zeros(2, dtype=torch.int32),
        paged_kv_indptr_buf=torch.zeros(2, dtype=torch.int32),
        paged_kv_indices_buf=torch.zeros(4, dtype=torch.int32),
        paged_kv_last_page_len_buf=torch.zeros(1, dtype=torch.int32),
    )
    with pytest.raises(RuntimeError, match="illegal memory access"):
        wrapper.plan(ints(0, 1), ints(0, 1), ints(3), ints(2), disable_split_kv=True, **PAGED_HEADS)


def test_fast_plan_copies_nothing() -> None:
    wrapper = decode_in_graph(1)
    wrapper.plan(ints(0, 1), ints(3), ints(2), **HEADS)
    q, kv = torch.randn(1, 4, 64), cache()
    first = wrapper.run(q, kv)
    emulator.fast_decode_plan(wrapper, ints(0, 2), ints(3, 5), ints(4), **HEADS)
    assert torch.equal(wrapper.run(q, kv), first)


def test_plans_that_share_an_int_workspace_overwrite_each_other() -> None:
    one, other = decode_in_graph(1), decode_in_graph(1)
    shared = torch.zeros(64, dtype=torch.uint8)
    for wrapper in (one, other):
        wrapper.reset_workspace_buffer(workspace(), shared)
        wrapper.plan(ints(0, 1), ints(3), ints(2), **HEADS)
    q, kv = torch.randn(1, 4, 64), cache()
    assert one.run(q, kv).isnan().all()
    assert other.run(q, kv).isfinite().all()


def test_workspace_is_aligned() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        DECODE(workspace()[1:])


def test_no_rows_cannot_be_launched() -> None:
    with pytest.raises(RuntimeError, match="no blocks"):
        emulator.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(
            ints(0, 0), ints(0, 0), 4, 2, 64
        )


def test_without_tensor_cores_groups_are_few() -> None:
    heads = {**HEADS, "num_qo_heads": 14}
    with pytest.raises(RuntimeError, match="group_size"):
        DECODE(workspace()).plan(ints(0, 1), ints(3), ints(2), **heads)
    DECODE(workspace(), use_tensor_cores=True).plan(ints(0, 1), ints(3), ints(2), **heads)
