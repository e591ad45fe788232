"""flashinfer's emulator has the library's arguments and conventions, also where they surprise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnmux.core.plugin import GraphStep
from attnmux.emulators.candidates import WRAPPERS
from attnmux.emulators.nvidia import flashinfer as emulator
from attnmux.nvidia.flashinfer.backend import merge, store_natural
from attnmux.nvidia.flashinfer.layers import merged_heads
from attnmux.nvidia.flashinfer.shared import writable_lse
from attnmux.testing import RecordingGraphs

DECODE = emulator.BatchDecodeWithPagedKVCacheWrapper
PAGED = emulator.BatchPrefillWithPagedKVCacheWrapper
RAGGED = emulator.BatchPrefillWithRaggedKVCacheWrapper


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


def test_lse_becomes_natural_and_minus_infinity() -> None:
    # Masked keys of an empty row each add to the sum: log2(100) above -5e4.
    lse = torch.tensor([[-5e4, -5e4 + math.log2(100), -130.0, 0.0, 12.0]])
    store_natural(lse, lse)
    assert lse[0, :2].isneginf().all()
    torch.testing.assert_close(lse[0, 2:], torch.tensor([-130.0, 0, 12]) * math.log(2))


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
    """Two items of a delimiter and a token after a prefix of two; their places count from 0."""
    wrapper = PAGED(workspace(), backend="fa2")
    plan_items(wrapper, (0, 1, 0, 1))
    assert seen(wrapper) == [[0], [0, 1], [0, 1], [0, 1, 3], [0, 1], [0, 1, 5]]
    # One more, and each item has its delimiter in it.
    plan_items(wrapper, (1, 2, 1, 2), longest=(2,))
    assert seen(wrapper) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]
    # Keys further back than the longest item are skipped.
    plan_items(wrapper, (1, 2, 1, 2), longest=(1,))
    assert seen(wrapper) != [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]


def test_items_replace_causality_and_windows_hold() -> None:
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
    """Beyond 1024 threads a block the kernel does not launch."""
    one, other = (
        (torch.randn(5, num_heads, head_dim, dtype=torch.bfloat16), torch.randn(5, num_heads) * 3)
        for _ in range(2)
    )
    out, lse = copied(one)
    merge(WRAPPERS, merged_heads(num_heads, head_dim, 2), (out, lse), other)
    both = torch.stack([one[1], other[1]]).double() * math.log(2)
    weights = both.softmax(0).unsqueeze(-1)
    expected = weights[0] * one[0] + weights[1] * other[0]
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double() * math.log(2), both.logsumexp(0), atol=1e-5, rtol=1e-5)


def test_merge_of_nothing_is_nothing() -> None:
    empty = torch.zeros(3, 4, 64), torch.full((3, 4), -5e4)
    full = torch.randn(3, 4, 64), torch.randn(3, 4)
    out, lse = copied(empty)
    merge(WRAPPERS, 4, (out, lse), empty)
    store_natural(lse, lse)
    assert not out.any()
    assert lse.isneginf().all()
    for one, other in ((empty, full), (full, empty)):
        out, lse = copied(one)
        merge(WRAPPERS, 4, (out, lse), other)
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


def test_nan_spoils_the_rows_of_its_request_alone() -> None:
    wrapper, (keys, values) = DECODE(workspace()), cache()
    wrapper.plan(ints(0, 1, 3, 4), ints(3, 5, 1, 2), ints(2, 3, 4), **HEADS)
    q = torch.randn(3, 4, 64)
    expected = wrapper.run(q, (keys, values))
    keys[5, 1], values[3, 2:], values[1, 3:] = math.nan, math.nan, math.nan
    assert wrapper.run(q, (keys, values)).isnan().flatten(1).all(1).tolist() == [False, True, False]
    keys[5, 1], values[5, 1] = 0, math.inf
    out = wrapper.run(q, (keys, values))
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])


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
        RAGGED(workspace()).plan(ints(0, 0), ints(0, 0), 4, 2, 64)


def test_without_tensor_cores_groups_are_few() -> None:
    heads = {**HEADS, "num_qo_heads": 14}
    with pytest.raises(RuntimeError, match="group_size"):
        DECODE(workspace()).plan(ints(0, 1), ints(3), ints(2), **heads)
    DECODE(workspace(), use_tensor_cores=True).plan(ints(0, 1), ints(3), ints(2), **heads)


MLA_WORKSPACE_BYTES = 18 << 20


class Latents:
    """Requests with random rows, in pages that are no neighbours."""

    def __init__(
        self, *lens: tuple[int, int], heads: int = 16, page: int = 4, causal: bool = True
    ) -> None:
        """lens: keys and rows of each request."""
        generator = torch.Generator().manual_seed(5)
        self.kv_lens, self.q_lens = torch.tensor(lens, dtype=torch.int32).unbind(1)
        self.heads, self.page, self.causal, self.scale = heads, page, causal, 0.1
        counts = (self.kv_lens + page - 1) // page
        self.kv_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        self.qo_indptr = torch.nn.functional.pad(self.q_lens.cumsum(0), (1, 0)).int()
        pages, rows = int(self.kv_indptr[-1]), int(self.qo_indptr[-1])
        self.indices = torch.randperm(pages + 3, generator=generator)[:pages].int()

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        self.cache = random(pages + 3, page, 576)
        self.q, self.q_pe = random(rows, heads, 512), random(rows, heads, 64)
        self.wrapper = emulator.BatchMLAPagedAttentionWrapper(
            torch.empty(MLA_WORKSPACE_BYTES, dtype=torch.uint8)
        )

    def plan(self, **others: Any) -> None:
        given: dict[str, Any] = {
            "qo_indptr": self.qo_indptr,
            "kv_indptr": self.kv_indptr,
            "kv_indices": self.indices,
            "kv_len_arr": self.kv_lens,
            "num_heads": self.heads,
            "head_dim_ckv": 512,
            "head_dim_kpe": 64,
            "page_size": self.page,
            "causal": self.causal,
            "sm_scale": self.scale,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        }
        self.wrapper.plan(**{**given, **others})

    def replan(
        self, *, kv_lens: torch.Tensor | None = None, qo_indptr: torch.Tensor | None = None
    ) -> None:
        """Into the workspace that `plan` left."""
        wrapper = self.wrapper
        wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            self.qo_indptr if qo_indptr is None else qo_indptr,
            self.kv_indptr,
            self.kv_lens if kv_lens is None else kv_lens,
            self.heads,
            512,
            self.causal,
        )

    def run(self, **others: Any) -> Any:
        return self.wrapper.run(
            self.q, self.q_pe, self.cache[..., :512], self.cache[..., 512:], **others
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row by row, output and natural LSE."""
        outs, lses = [], []
        for request, (kv_len, q_len) in enumerate(zip(self.kv_lens, self.q_lens, strict=True)):
            pages = self.indices[self.kv_indptr[request] : self.kv_indptr[request + 1]]
            keys = self.cache[pages.long()].flatten(0, 1).double()
            for place in range(int(q_len)):
                row = int(self.qo_indptr[request]) + place
                seen = int(kv_len - q_len) + place + 1 if self.causal else int(kv_len)
                query = torch.cat([self.q[row], self.q_pe[row]], dim=-1).double()
                logits = query @ keys[:seen].T * self.scale
                outs.append(logits.softmax(-1) @ keys[:seen, :512])
                lses.append(logits.logsumexp(-1))
        return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("part", [slice(0, 512), slice(512, 576)], ids=["latent", "rotary"])
def test_nan_in_latents_spoils_the_rows_of_its_request_alone(part) -> None:
    setup = Latents((5, 2), (9, 3), (4, 1))
    setup.plan()
    expected = setup.run(return_lse=True)
    second = setup.indices[setup.kv_indptr[1]].long()
    setup.cache[second, 0, part] = math.nan
    for found, before in zip(setup.run(return_lse=True), expected, strict=True):
        assert found[2:5].isnan().all()
        assert torch.equal(found[:2], before[:2])
        assert torch.equal(found[5:], before[5:])


def test_a_run_has_the_rows_of_its_plan() -> None:
    setup = Latents((5, 2), (9, 3))
    setup.plan(qo_indptr=torch.tensor([0, 2], dtype=torch.int32), kv_indptr=setup.kv_indptr[:2],
               kv_len_arr=setup.kv_lens[:1])  # fmt: skip
    with pytest.raises(ValueError, match="5 rows"):
        setup.run()


@pytest.mark.parametrize(
    ("lens", "heads", "wrong_row"),
    [
        # Tiles of 128: the first ends in token 6, which sees 65 keys.
        ([(68, 10)], 20, 6),
        # Tiles of 64, since the rows of five requests are few: the first ends within token 0.
        ([(66, 2), (5, 0), (5, 0), (5, 0), (5, 0)], 128, 0),
    ],
)
def test_causal_tiles_that_end_within_a_token_miss_its_key(lens, heads, wrong_row) -> None:
    setup = Latents(*lens, heads=heads)
    setup.plan()
    out, expected = setup.run().double(), setup.expected()[0]
    wrong = ((out - expected).abs() > 0.02).flatten(1).any(1)
    assert wrong.nonzero().flatten().tolist() == [wrong_row]


def test_a_run_reads_the_workspace_and_the_indices_where_they_are() -> None:
    """Which is what a captured run does."""
    setup = Latents((9, 1), (70, 1), causal=False)
    setup.plan()
    first = setup.run()
    kept = setup.wrapper._int_workspace_buffer
    setup.replan(kv_lens=torch.tensor([9, 12], dtype=torch.int32))
    second = setup.run()
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    setup.indices.copy_(setup.indices.flip(0))
    assert not torch.equal(setup.run()[0], second[0])
    setup.plan()
    assert setup.wrapper._int_workspace_buffer is not kept
    assert (kept == 255).all()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"kv_data_type": torch.float8_e4m3fn}, RuntimeError, "float8"),
        ({"kv_len_arr": torch.zeros(1, dtype=torch.int32)}, ValueError, "page counts"),
        ({"kv_len_arr": torch.zeros(1, dtype=torch.int64)}, ValueError, "int32"),
        ({"qo_indptr": torch.tensor([3, 0], dtype=torch.int32)}, ValueError, "nondecreasing"),
        ({"kv_indices": torch.zeros(2, dtype=torch.int32)}, ValueError, "fewer entries"),
        ({"head_dim_ckv": 256}, NotImplementedError, "512"),
    ],
)
def test_plans_that_it_refuses(given, error, says) -> None:
    with pytest.raises(error, match=says):
        Latents((9, 3)).plan(**given)


@pytest.mark.parametrize(("rows", "fits"), [(16384, True), (16500, False)])
def test_a_plan_has_room_for_so_many_tiles(rows, fits) -> None:
    """One of 128 heads for each token; none of the keys is split, for there are few."""
    setup = Latents((9, 3), heads=128, page=1)
    lens = torch.tensor([rows], dtype=torch.int32)
    bounds = torch.tensor([0, rows], dtype=torch.int32)
    pages = torch.arange(rows, dtype=torch.int32)
    given = {
        "kv_len_arr": lens, "qo_indptr": bounds, "kv_indptr": bounds, "kv_indices": pages
    }  # fmt: skip
    if fits:
        setup.plan(**given)
    else:
        with pytest.raises(RuntimeError, match="works"):
            setup.plan(**given)


def test_a_workspace_for_two_tiles_of_each_sm() -> None:
    setup = Latents((9, 3))
    needed = 2 * 132 * 64 * (512 * 2 + 4)
    setup.wrapper._float_workspace_buffer = torch.empty(needed, dtype=torch.uint8)
    setup.plan()
    setup.wrapper._float_workspace_buffer = torch.empty(needed - 16, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="mla_partial"):
        setup.plan()


def test_runs_that_it_refuses() -> None:
    setup = Latents((9, 3))
    with pytest.raises(RuntimeError, match="before plan"):
        setup.run()
    setup.plan()
    with pytest.raises(ValueError, match="out"):
        setup.run(out=torch.empty_like(setup.q_pe))
    with pytest.raises(ValueError, match="lse"):
        setup.run(lse=torch.empty(3, 16, dtype=torch.float64), return_lse=True)
    with pytest.raises(NotImplementedError, match="LSE"):
        setup.run(lse=torch.empty(16, 3).t(), return_lse=True)
    with pytest.raises(NotImplementedError):
        setup.run(o_scale=1.0)
    whole, setup.q = setup.q, setup.q[:2]
    with pytest.raises(ValueError, match="rows"):
        setup.run()
    setup.q = whole.half()
    with pytest.raises(ValueError, match="float16"):
        setup.run()
    odd = torch.zeros(3, 16 * 512 + 1, dtype=torch.bfloat16)
    setup.q = odd[:, 1:].view(3, 16, 512)
    with pytest.raises(RuntimeError, match="misaligned"):
        setup.run()


def test_a_captured_launch_has_the_blocks_of_its_plan() -> None:
    """16 heads of 4 rows a request are a tile of 64; of 5 they are tiles of 128."""
    setup = Latents((20, 4), (30, 4))
    setup.plan()
    step = GraphStep(prepare=lambda: None, forward=setup.run, host_tensors=())
    graph = RecordingGraphs().capture(step)
    setup.replan(kv_lens=setup.kv_lens - 1)
    graph.replay()
    assert graph.outputs.isfinite().all()
    setup.replan(qo_indptr=torch.tensor([0, 3, 10], dtype=torch.int32))
    graph.replay()
    assert graph.outputs.isnan().all()
