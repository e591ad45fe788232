"""The forms of draft trees' masks: each from the others, in steps, graphs and around backends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardMode, GraphConfig, InvalidInput, Request, SpecInput
from attnmux.core.composites.mask_forms import MaskFormsBackend, with_mask_forms
from attnmux.core.contract.spec import mask_bounds, unpack_visible, whole_mask
from attnmux.core.contract.tree_masks import draft_depths, pack_visible, with_form
from attnmux.core.graph.buffers import FixedBuffers
from attnmux.core.plugin import NONE, BackendCard, check_trees, limited_drafts
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.parts import undrafted_request
from attnmux.parts.speculation import tree_visibility
from attnmux.testing import (
    Candidate,
    Case,
    GraphFakeBackend,
    fake_card,
    fake_platform,
    graph_card,
    make_setup,
    prepare_step,
    run_case,
    verify,
)
from attnmux.testing.cases.standard import in_graphs
from attnmux.testing.fakes.backend import FakeBackend

PREFIXES = (9, 0, 30)
CPU = torch.device("cpu")


def random_trees(count: int, drafts: int) -> torch.Tensor:
    """[count, drafts, drafts] bool."""
    rng = random.Random()
    parents = [[rng.randrange(-1, node) if node else -1 for node in range(drafts)]] * count
    parents = [[max(each, 0) if node else -1 for node, each in enumerate(row)] for row in parents]
    return tree_visibility(torch.tensor(parents))


def verified(drafts: int, **spec):
    """A step over PREFIXES whose trees have a mask in the given form."""
    step = verify(drafts, *PREFIXES)
    case = Case(name="trees", steps=(step,), spec_topk=4)
    setup = make_setup(case, fake_platform(), CPU)
    batch = prepare_step(setup, step).batch
    return setup, replace(batch, spec_info=SpecInput(draft_token_num=drafts, topk=4, **spec))


def all_forms(visible: torch.Tensor):
    lens = torch.tensor(PREFIXES, dtype=torch.int32)
    bounds = mask_bounds(lens, visible.shape[1])
    return {
        "full": {"custom_mask": whole_mask(visible, lens), "mask_indptr": bounds},
        "qlen_only": {"visible": visible},
        "qlen_only_bitpacking": {"visible_bits": pack_visible(visible)},
    }


@pytest.mark.parametrize("drafts", [1, 7, 8, 9, 16, 33])
def test_bits_are_the_lowest_first(drafts: int) -> None:
    visible = random_trees(3, drafts)
    bits = pack_visible(visible)
    assert bits.shape == (3, drafts, -(-drafts // 8))
    for node in range(drafts):
        one = (bits[..., node // 8] >> node % 8) & 1
        assert torch.equal(one.bool(), visible[..., node])
    assert torch.equal(unpack_visible(bits), visible)


@pytest.mark.parametrize("drafts", [6, 11])
@pytest.mark.parametrize("wanted", BackendCard.TREE_MASKS)
@pytest.mark.parametrize("given", BackendCard.TREE_MASKS)
def test_each_form_is_made_from_each(given: str, wanted: str, drafts: int) -> None:
    forms = all_forms(random_trees(3, drafts))
    _, batch = verified(drafts, **forms[given])
    assert batch.tree_mask == given
    made = with_form(batch, wanted, max_context_len=64).spec_info
    assert made.tree_mask == wanted
    for name, expected in forms[wanted].items():
        assert torch.equal(getattr(made, name), expected)
    without_bounds = replace(batch, spec_info=replace(batch.spec_info, mask_indptr=None))
    assert torch.equal(without_bounds.visible_drafts(), forms["qlen_only"]["visible"])


def test_depths_and_what_windows_leave() -> None:
    visible = tree_visibility(torch.tensor([[-1, 0, 1, 0, 3, 4]]))
    assert draft_depths(visible).tolist() == [[0, 1, 2, 1, 2, 3]]
    prefix = torch.tensor([5], dtype=torch.int32)
    seen, first = limited_drafts(visible, prefix, window=1, chunk=0)
    assert first.tolist() == [[4, 5, 6, 5, 6, 7]]
    assert [row.nonzero().flatten().tolist() for row in seen[0]] == [
        *([0], [0, 1], [1, 2], [0, 3], [3, 4], [4, 5])
    ]
    seen, first = limited_drafts(visible, prefix, window=-1, chunk=4)
    assert first.tolist() == [[4, 4, 4, 4, 4, 8]]
    assert seen[0, 5].tolist() == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        (lambda v: {"visible": v[:2]}, "spec_info.visible"),
        (lambda v: {"visible": v.int()}, "spec_info.visible"),
        (lambda v: {"visible": v.to("meta")}, "spec_info.visible"),
        (lambda v: {"visible_bits": pack_visible(v)[..., :1]}, "spec_info.visible_bits"),
        (lambda v: {"visible_bits": pack_visible(v).int()}, "spec_info.visible_bits"),
        (lambda v: {"visible": v, "visible_bits": pack_visible(v)}, "spec_info"),
    ],
)
def test_other_shapes_dtypes_and_devices_are_refused(changes, argument) -> None:
    setup, batch = verified(9, **changes(random_trees(3, 9)))
    with pytest.raises(InvalidInput) as refused:
        TorchNativeBackend(setup.context).init_forward_metadata(batch)
    assert refused.value.argument == argument


def test_masks_between_drafts_belong_to_verification() -> None:
    setup, batch = verified(9, visible=random_trees(3, 9))
    batch = replace(batch, forward_mode=ForwardMode.EXTEND)
    with pytest.raises(InvalidInput, match="TARGET_VERIFY"):
        TorchNativeBackend(setup.context).init_forward_metadata(batch)


def hiding(row: int, column: int, value: bool = False) -> torch.Tensor:
    visible = tree_visibility(torch.tensor([[-1, 0, 1, 0, 3, 4]] * 3))
    visible[1, row, column] = value
    return visible


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (hiding(2, 2), "hidden from itself in request 1"),
        (hiding(2, 0), "not all of its ancestors in request 1"),
        (hiding(1, 3, value=True), "later one in request 1"),
    ],
)
@pytest.mark.parametrize("form", BackendCard.TREE_MASKS)
def test_what_is_no_tree_is_refused_in_debug_mode(visible, message, form) -> None:
    setup, batch = verified(6, **all_forms(visible)[form])
    with pytest.raises(InvalidInput, match=message):
        check_trees(batch)
    if form != "full":
        backend = TorchNativeBackend(replace(setup.context, debug=True))
        with pytest.raises(InvalidInput, match=message):
            backend.init_forward_metadata(batch)


def test_bits_after_the_last_draft_are_refused_in_debug_mode() -> None:
    bits = pack_visible(random_trees(3, 9))
    bits[2, 4, 1] |= 16
    with pytest.raises(InvalidInput, match="after the last draft in request 2"):
        check_trees(verified(9, visible_bits=bits)[1])


@pytest.mark.parametrize("given", BackendCard.TREE_MASKS)
def test_graphs_hold_a_byte_for_each_pair_of_drafts(given: str) -> None:
    visible = random_trees(3, 6)
    _, batch = verified(6, **all_forms(visible)[given])
    config = GraphConfig(
        batch_sizes=(2, 4),
        forward_mode=ForwardMode.TARGET_VERIFY,
        tokens_per_request=6,
        spec_topk=4,
        visible=True,
        two_batches=True,
    )
    buffers = FixedBuffers(config, {}, seq_len_fill=1, max_context_len=1 << 30, device=CPU)
    template, _ = buffers.views(4)
    address = template.spec_info.visible.data_ptr()
    padded = buffers.load(batch, {}, template)
    assert padded.spec_info.visible.data_ptr() == address
    assert torch.equal(padded.spec_info.visible[:3], visible)
    assert bool(padded.spec_info.visible[3].all())
    halves = [each.spec_info.visible for each in padded.tbo_children]
    assert torch.equal(torch.cat(halves), padded.spec_info.visible)
    assert halves[0].data_ptr() == address
    chain = replace(batch, spec_info=SpecInput(draft_token_num=6))
    assert torch.equal(
        buffers.load(chain, {}, template).spec_info.visible[0], torch.ones(6, 6).tril().bool()
    )


def test_graphs_without_trees_refuse_them() -> None:
    _, batch = verified(6, visible=random_trees(3, 6))
    config = GraphConfig(
        batch_sizes=(4,), forward_mode=ForwardMode.TARGET_VERIFY, tokens_per_request=6
    )
    buffers = FixedBuffers(config, {}, seq_len_fill=1, max_context_len=64, device=CPU)
    with pytest.raises(InvalidInput) as refused:
        buffers.load(batch, {}, buffers.views(4)[0])
    assert refused.value.argument == "spec_info.visible"
    with pytest.raises(InvalidInput, match="one of them"):
        replace(config, visible=True, custom_mask=True)


def test_a_half_has_its_own_rows() -> None:
    visible = random_trees(3, 6)
    for form in ("qlen_only", "qlen_only_bitpacking"):
        _, batch = verified(6, **all_forms(visible)[form])
        assert torch.equal(
            batch.part(1, 3, first_token=6, last_token=18).visible_drafts(), visible[1:]
        )


TREE = Case(
    name="trees",
    steps=(verify(6, 9, 16, 33), verify(6, 17, 10, 34), verify(6, 2, 40, 0)),
    spec_topk=4,
    tree_mask="qlen_only",
    max_context_len=64,
)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("read", BackendCard.TREE_MASKS)
@pytest.mark.parametrize("given", ["qlen_only", "qlen_only_bitpacking"])
def test_backends_get_the_form_that_they_read(given: str, read: str, graph: bool) -> None:
    forms = []

    class Reading(GraphFakeBackend):
        def init_forward_metadata_out_graph(self, batch, in_capture=False):
            forms.append(batch.tree_mask)
            super().init_forward_metadata_out_graph(batch, in_capture)

    card = replace(graph_card(), tree_masks=(read,))
    candidate = Candidate(card=card, platform=fake_platform(), factory=Reading)
    case = replace(TREE, tree_mask=given)
    if graph:
        (case,) = in_graphs((case,))
    outcome = run_case(candidate, case)
    assert outcome.status == "passed", outcome.message
    assert set(forms) == {read}


def test_only_backends_that_lack_a_form_are_wrapped() -> None:
    setup, _ = verified(6, visible=random_trees(3, 6))
    plain = FakeBackend(setup.context)
    assert with_mask_forms(plain, BackendCard.TREE_MASKS) is plain
    assert isinstance(with_mask_forms(plain, ("full",)), MaskFormsBackend)
    asked = replace(setup.context, request=undrafted_request(setup.context.request))
    chains = FakeBackend(replace(asked, request=asked.request.replace(custom_mask=False)))
    assert with_mask_forms(chains, ("full",)) is chains


@pytest.mark.parametrize("form", ["qlen_only", "qlen_only_bitpacking"])
def test_a_converted_step_passes_the_checks_of_debug_mode(form: str) -> None:
    visible = random_trees(3, 6)
    setup, batch = verified(6, **all_forms(visible)[form])
    context = replace(setup.context, debug=True)
    backend = with_mask_forms(FakeBackend(context), ("full",))
    backend.init_forward_metadata(batch)


def test_a_card_names_forms() -> None:
    assert fake_card().tree_masks == BackendCard.TREE_MASKS
    for wrong in ((), ("whole",), "full"):
        with pytest.raises(InvalidInput, match="tree_masks"):
            replace(fake_card(), tree_masks=wrong)


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ("spec_topk=4,sliding_window=8", {"TREE_WINDOWS"}),
        ("spec_topk=4,attention_chunk=16", {"TREE_WINDOWS"}),
        ("spec_topk=4,sliding_window=8,custom_mask=true", set()),
        ("spec_topk=1,sliding_window=8", set()),
        ("spec_topk=4", set()),
    ],
)
def test_trees_with_windows_need_cards_that_count_positions(asked: str, codes: set[str]) -> None:
    request = Request.parse(f"dtype=bf16,head_dim=128,page_size=16,{asked}")
    by_places = Candidate(card=fake_card(tree_windows=NONE), platform=fake_platform())
    assert {reason.code for reason in by_places.refusals(request)} == codes
    assert not Candidate(card=fake_card(), platform=fake_platform()).refusals(request)
