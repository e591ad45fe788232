"""The tensors that graphs read: at fixed addresses, with padding behind the batch."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from attnmux.core import ForwardBatch, ForwardMode, GraphConfig, InvalidInput, ModelInput, SpecInput
from attnmux.core.contract.spec import whole_mask
from attnmux.core.graph.buffers import FixedBuffers
from attnmux.core.plugin import mask_indptr
from attnmux.parts.speculation import tree_visibility

CPU = torch.device("cpu")
DRAFT = 3


def make(fill: int = 1, inputs=None, **settings) -> FixedBuffers:
    config = GraphConfig(**{"batch_sizes": (1, 2, 4, 8), **settings})
    return FixedBuffers(config, inputs or {}, seq_len_fill=fill, max_context_len=32, device=CPU)


def decode_batch(*lens: int, **changes) -> ForwardBatch:
    size = len(lens)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        req_pool_indices=torch.arange(size) + 3,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        out_cache_loc=torch.arange(size) + 100,
        positions=torch.tensor(lens) - 1,
        seq_lens_cpu=torch.tensor(lens, dtype=torch.int32),
        seq_lens_sum=sum(lens),
    )
    return replace(batch, **changes)


def verify_batch(*prefixes: int, mask: bool = True, **changes) -> ForwardBatch:
    lens = torch.tensor(prefixes, dtype=torch.int32)
    num_tokens = len(prefixes) * DRAFT
    parents = torch.tensor([[-1, 0, 0]] * len(prefixes))
    spec = SpecInput(draft_token_num=DRAFT, topk=2 if mask else 1)
    if mask:
        spec = replace(
            spec,
            custom_mask=whole_mask(tree_visibility(parents), lens),
            mask_indptr=mask_indptr(DRAFT, lens + DRAFT),
        )
    return decode_batch(
        *prefixes,
        forward_mode=ForwardMode.TARGET_VERIFY,
        out_cache_loc=torch.arange(num_tokens) + 50,
        positions=torch.arange(num_tokens),
        extend_seq_lens=torch.full_like(lens, DRAFT),
        extend_prefix_lens=lens,
        extend_num_tokens=num_tokens,
        spec_info=spec,
        **changes,
    )


def addresses(batch: ForwardBatch) -> dict[str, int]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {n: v.data_ptr() for n, v in values.items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("fill", [0, 1])
def test_rows_after_the_batch_are_padding(fill: int) -> None:
    buffers = make(fill, host_lens=True, encoder=True)
    template, _ = buffers.views(4)
    batch = decode_batch(7, 9, 2, encoder_lens=torch.tensor([4, 0, 5], dtype=torch.int32))
    padded = buffers.load(batch, {}, template)
    assert padded.batch_size == 4
    assert padded.req_pool_indices.tolist() == [3, 4, 5, 0]
    assert padded.seq_lens.tolist() == [7, 9, 2, fill]
    assert padded.seq_lens_cpu.tolist() == [7, 9, 2, fill]
    assert padded.seq_lens_sum == 18 + fill
    assert padded.out_cache_loc.tolist() == [100, 101, 102, 0]
    assert padded.positions.tolist() == [6, 8, 1, 0]
    assert padded.encoder_lens.tolist() == [4, 0, 5, 0]
    assert padded.encoder_out_cache_loc.shape == (0,)


def test_a_smaller_batch_leaves_nothing_behind() -> None:
    buffers = make()
    template, _ = buffers.views(8)
    buffers.load(decode_batch(*range(10, 18)), {}, template)
    padded = buffers.load(decode_batch(5, 6), {}, template)
    assert padded.seq_lens.tolist() == [5, 6, 1, 1, 1, 1, 1, 1]
    assert padded.req_pool_indices.tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    assert padded.out_cache_loc.tolist() == [100, 101, 0, 0, 0, 0, 0, 0]
    buffers.clear()
    assert template.seq_lens.tolist() == [1] * 8


def test_addresses_are_those_of_the_first_view() -> None:
    buffers = make(host_lens=True)
    template, _ = buffers.views(4)
    small, _ = buffers.views(2)
    assert addresses(template) == addresses(small)
    assert addresses(buffers.load(decode_batch(3, 4, 5), {}, template)) == addresses(template)


def test_values_that_are_no_tensors_are_those_of_the_step() -> None:
    buffers = make(host_lens=True)
    template, _ = buffers.views(2)
    assert buffers.load(decode_batch(4, 5), {}, template).seq_lens_sum == 9
    unknown = decode_batch(4, 5, seq_lens_sum=None, actual_forward_mode=ForwardMode.IDLE)
    padded = buffers.load(unknown, {}, template)
    assert padded.seq_lens_sum is None
    assert padded.actual_forward_mode is ForwardMode.IDLE
    assert buffers.load(decode_batch(4, 5), {}, padded).actual_forward_mode is None


def test_inputs_of_the_model_may_have_any_other_dimensions() -> None:
    given = {
        "input_ids": ModelInput(dtype=torch.int32),
        "mrope_positions": ModelInput(dtype=torch.int64, leading=(3,)),
        "hidden_states": ModelInput(dtype=torch.bfloat16, trailing=(2, 5)),
    }
    buffers = make(inputs=given)
    template, views = buffers.views(4)
    batch = decode_batch(3, 4, 5)
    inputs = {
        "input_ids": torch.tensor([7, 8, 9], dtype=torch.int32),
        "mrope_positions": torch.arange(9).view(3, 3) + 1,
        "hidden_states": torch.randn(3, 2, 5).bfloat16(),
    }
    buffers.load(batch, inputs, template)
    assert views["input_ids"].tolist() == [7, 8, 9, 0]
    assert views["mrope_positions"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 0]]
    assert torch.equal(views["hidden_states"][:3], inputs["hidden_states"])
    assert not views["hidden_states"][3].any()
    buffers.load(
        decode_batch(3),
        {
            name: value[..., :1] if name == "mrope_positions" else value[:1]
            for name, value in inputs.items()
        },
        template,
    )
    assert views["mrope_positions"].tolist() == [[1, 0, 0, 0], [4, 0, 0, 0], [7, 0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "inputs", "argument"),
    [
        ({"seq_lens": torch.tensor([4, 5])}, None, "seq_lens"),
        ({"positions": torch.tensor([4])}, None, "positions"),
        ({"seq_lens_cpu": None}, None, "seq_lens_cpu"),
        ({}, {}, "input_ids"),
        ({}, {"input_ids": torch.zeros(1, dtype=torch.int64)}, "input_ids"),
    ],
)
def test_refuses_other_tensors_and_changes_nothing(changes, inputs, argument) -> None:
    buffers = make(inputs={"input_ids": ModelInput(dtype=torch.int64)}, host_lens=True)
    template, _ = buffers.views(4)
    good = {"input_ids": torch.tensor([1, 2])}
    buffers.load(decode_batch(7, 9), good, template)
    with pytest.raises(InvalidInput) as refused:
        buffers.load(decode_batch(4, 5, **changes), good if inputs is None else inputs, template)
    assert refused.value.argument == argument
    assert template.seq_lens.tolist() == [7, 9, 1, 1]


def test_verification_has_its_tokens_and_lengths() -> None:
    buffers = make(forward_mode=ForwardMode.TARGET_VERIFY, tokens_per_request=DRAFT, host_lens=True)
    template, _ = buffers.views(4)
    padded = buffers.load(verify_batch(8, 5, mask=False), {}, template)
    assert padded.num_tokens == 4 * DRAFT
    assert padded.out_cache_loc.tolist() == [50, 51, 52, 53, 54, 55, *[0] * 6]
    assert padded.seq_lens.tolist() == padded.extend_prefix_lens.tolist() == [8, 5, 1, 1]
    assert padded.extend_seq_lens.tolist() == padded.extend_seq_lens_cpu.tolist() == [DRAFT] * 4
    assert padded.extend_prefix_lens_cpu.tolist() == [8, 5, 1, 1]
    assert padded.spec_info.draft_token_num == DRAFT
    assert padded.spec_info.custom_mask is None


@pytest.mark.parametrize("fill", [0, 1])
def test_masks_of_drafts_lie_in_one_buffer(fill: int) -> None:
    buffers = make(
        fill,
        forward_mode=ForwardMode.TARGET_VERIFY,
        tokens_per_request=DRAFT,
        spec_topk=2,
        custom_mask=True,
    )
    template, _ = buffers.views(4)
    address = template.spec_info.custom_mask.data_ptr()
    of_padding = DRAFT * (fill + DRAFT)
    for prefixes in ((8, 5, 4, 9), (2, 3), (20, 1, 6)):
        batch = verify_batch(*prefixes)
        spec = buffers.load(batch, {}, template).spec_info
        total = batch.spec_info.custom_mask.numel()
        assert spec.custom_mask.data_ptr() == address
        assert spec.topk == 2
        assert torch.equal(spec.custom_mask[:total], batch.spec_info.custom_mask)
        padding = 4 - len(prefixes)
        assert bool(spec.custom_mask[total : total + padding * of_padding].all())
        indptr = [*batch.spec_info.mask_indptr.tolist()]
        indptr += [total + (row + 1) * of_padding for row in range(padding)]
        assert spec.mask_indptr.tolist() == indptr


def test_refuses_masks_that_do_not_fit() -> None:
    buffers = make(
        forward_mode=ForwardMode.TARGET_VERIFY, tokens_per_request=DRAFT, custom_mask=True
    )
    template, _ = buffers.views(4)
    batch = verify_batch(8, 5)
    for changes, argument in (
        ({"custom_mask": None}, "spec_info.custom_mask"),
        ({"custom_mask": torch.ones(10_000, dtype=torch.bool)}, "spec_info.custom_mask"),
        ({"mask_indptr": torch.zeros(2, dtype=torch.int32)}, "spec_info.mask_indptr"),
    ):
        changed = replace(batch, spec_info=replace(batch.spec_info, **changes))
        with pytest.raises(InvalidInput) as refused:
            buffers.load(changed, {}, template)
        assert refused.value.argument == argument


def test_both_halves_are_views_and_one_may_be_empty() -> None:
    buffers = make(two_batches=True, host_lens=True)
    template, _ = buffers.views(4)
    padded = buffers.load(decode_batch(7, 9, 2), {}, template)
    first, second = padded.tbo_children
    assert first.seq_lens.tolist() == [7, 9]
    assert second.seq_lens.tolist() == [2, 1]
    assert (first.seq_lens_sum, second.seq_lens_sum) == (16, 3)
    assert addresses(second)["seq_lens"] == addresses(template)["seq_lens"] + 8
    assert addresses(first) == addresses(template.tbo_children[0])
    swapped = buffers.load(decode_batch(9, 2, 7), {}, template)
    assert [child.seq_lens_sum for child in swapped.tbo_children] == [11, 8]
    alone, _ = buffers.views(1)
    assert [child.batch_size for child in alone.tbo_children] == [0, 1]


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (4, 2)}, "batch_sizes"),
        ({"forward_mode": ForwardMode.EXTEND}, "forward_mode"),
        ({"tokens_per_request": 0}, "tokens_per_request"),
        ({"forward_mode": ForwardMode.DRAFT_EXTEND, "two_batches": True}, "two_batches"),
        ({"custom_mask": True}, "custom_mask"),
    ],
)
def test_refuses_what_no_graph_is_captured_for(settings, argument) -> None:
    with pytest.raises(InvalidInput) as refused:
        GraphConfig(**{"batch_sizes": (1,), **settings})
    assert refused.value.argument == argument


def test_halves_have_their_own_masks() -> None:
    settings = {"forward_mode": ForwardMode.TARGET_VERIFY, "tokens_per_request": DRAFT}
    buffers = make(custom_mask=True, two_batches=True, host_lens=True, **settings)
    template, _ = buffers.views(4)
    batch = verify_batch(3, 4, 2)
    batch = replace(batch, seq_lens_cpu=batch.seq_lens.clone())
    padded = buffers.load(batch, {}, template)
    whole = batch.spec_info
    middle = int(whole.mask_indptr[2])
    for half, expected in zip(
        padded.tbo_children,
        (whole.custom_mask[:middle], whole.custom_mask[middle:]),
        strict=True,
    ):
        spec = half.spec_info
        assert spec.mask_indptr.shape == (3,)
        assert int(spec.mask_indptr[0]) == 0
        assert torch.equal(spec.custom_mask[: len(expected)], expected)
    last = padded.tbo_children[1].spec_info
    assert bool(last.custom_mask[int(last.mask_indptr[1]) : int(last.mask_indptr[2])].all())
    addresses_before = [half.spec_info.custom_mask.data_ptr() for half in template.tbo_children]
    assert addresses_before == [
        half.spec_info.custom_mask.data_ptr() for half in padded.tbo_children
    ]
    buffers.clear()
    assert last.mask_indptr.tolist() == [0, DRAFT * (1 + DRAFT), 2 * DRAFT * (1 + DRAFT)]


def test_an_indexer_has_a_buffer_that_no_step_loads() -> None:
    """The captured model writes it; a step needs to bring none."""
    settings = {"forward_mode": ForwardMode.TARGET_VERIFY, "tokens_per_request": DRAFT}
    buffers = make(index_topk=5, **settings)
    small, large = buffers.views(2)[0], buffers.views(4)[0]
    assert (small.topk_indices.shape, large.topk_indices.shape) == ((6, 5), (12, 5))
    assert small.topk_indices.data_ptr() == large.topk_indices.data_ptr()
    assert bool((large.topk_indices == -1).all())
    large.topk_indices.fill_(7)
    picks = torch.zeros((6, 5), dtype=torch.int32)
    padded = buffers.load(verify_batch(3, 4, mask=False, topk_indices=picks), {}, large)
    assert padded.topk_indices.data_ptr() == large.topk_indices.data_ptr()
    assert bool((padded.topk_indices == 7).all())
    assert make().views(2)[0].topk_indices is None


def test_halves_have_their_own_picks() -> None:
    whole, _ = make(index_topk=5, two_batches=True).views(4)
    first, second = whole.tbo_children
    assert first.topk_indices.data_ptr() == whole.topk_indices.data_ptr()
    assert second.topk_indices.data_ptr() == whole.topk_indices[2:].data_ptr()
    assert first.topk_indices.shape == second.topk_indices.shape == (2, 5)
