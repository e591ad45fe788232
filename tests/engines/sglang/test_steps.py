"""Steps, layers and pools that a CPU's engine cannot show: drafts, verification, window pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("attnmux.sglang")

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode as SglangMode

from attnmux.core import ForwardMode, InvalidInput
from attnmux.core.spec import tree_visibility, whole_mask
from attnmux.sglang import plugin
from attnmux.sglang.draft import AttnmuxMultiStepDraftBackend
from attnmux.sglang.steps import StepBuilder

PREFIXES = [5, 3]
PARENTS = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 1]])


def _builder(**given: Any) -> StepBuilder:
    device = torch.device("cpu")
    return StepBuilder(max_batch_size=4, max_num_tokens=16, device=device, **given)


def _batch(mode: SglangMode, lens: list[int], num_tokens: int, **given: Any) -> SimpleNamespace:
    values = {
        "forward_mode": mode,
        "batch_size": len(lens),
        "req_pool_indices": torch.arange(1, len(lens) + 1),
        "seq_lens": torch.tensor(lens),
        "seq_lens_cpu": torch.tensor(lens),
        "out_cache_loc": torch.arange(1, num_tokens + 1),
        "extend_seq_lens": None,
        "extend_seq_lens_cpu": None,
        "spec_info": None,
        **given,
    }
    return SimpleNamespace(**values)


@pytest.mark.parametrize("masked", ["whole", "draft"])
def test_a_tree_is_verified_with_its_mask(masked: str) -> None:
    prefixes = torch.tensor(PREFIXES)
    whole = whole_mask(tree_visibility(PARENTS), prefixes)
    mask = whole if masked == "whole" else tree_visibility(PARENTS).flatten()
    spec = SimpleNamespace(draft_token_num=4, topk=2, custom_mask=mask)
    step = _builder().step(_batch(SglangMode.TARGET_VERIFY, PREFIXES, 8, spec_info=spec))
    assert step.forward_mode is ForwardMode.TARGET_VERIFY
    assert step.seq_lens.tolist() == PREFIXES == step.extend_prefix_lens.tolist()
    assert step.positions.tolist() == [5, 6, 7, 8, 3, 4, 5, 6]
    assert step.spec_info.mask_indptr.tolist() == [0, 36, 64]
    torch.testing.assert_close(step.spec_info.custom_mask, whole)


def test_a_chain_is_verified_without_a_mask() -> None:
    spec = SimpleNamespace(draft_token_num=4, topk=1, custom_mask=torch.ones(64, dtype=torch.bool))
    step = _builder().step(_batch(SglangMode.TARGET_VERIFY, PREFIXES, 8, spec_info=spec))
    assert step.spec_info.custom_mask is None
    assert step.extend_seq_lens.tolist() == [4, 4]


def test_a_draft_is_extended_by_what_it_may_accept() -> None:
    positions = torch.arange(8)
    lens = [9, 7]
    step = _builder().step(_batch(SglangMode.DRAFT_EXTEND_V2, lens, 8, positions=positions))
    assert step.forward_mode is ForwardMode.DRAFT_EXTEND
    assert step.extend_prefix_lens.tolist() == PREFIXES
    assert step.extend_seq_lens.tolist() == [4, 4]


@pytest.mark.parametrize("draft_step", [0, 2])
def test_a_step_of_a_draft_sees_the_steps_before_it(draft_step: int) -> None:
    step = _builder(draft_step=draft_step).step(_batch(SglangMode.DECODE, PREFIXES, 2))
    assert step.seq_lens.tolist() == [6 + draft_step, 4 + draft_step]
    assert step.seq_lens_cpu.tolist() == step.seq_lens.tolist()
    assert step.positions.tolist() == [5 + draft_step, 3 + draft_step]


def test_a_padded_step_writes_to_slot_0_and_keeps_its_addresses() -> None:
    builder = _builder()
    first = builder.step(_batch(SglangMode.DECODE, [5, 3, 1, 1], 4))
    padded = builder.step(_batch(SglangMode.DECODE, [6, 4, 1, 1], 2))
    assert padded.out_cache_loc.tolist() == [1, 2, 0, 0]
    assert padded.seq_lens.data_ptr() == first.seq_lens.data_ptr()
    assert padded.num_tokens == 4


def test_a_step_larger_than_the_buffers_runs() -> None:
    step = _builder().step(
        _batch(
            SglangMode.EXTEND,
            [30],
            25,
            extend_seq_lens=torch.tensor([25]),
            extend_seq_lens_cpu=[25],
        )
    )
    assert step.positions.tolist() == list(range(5, 30))
    assert step.extend_prefix_lens_cpu.tolist() == [5]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidInput, match="forward_mode: expected EXTEND"):
        _builder().step(_batch(SglangMode.DLLM_EXTEND, [1], 1))


def test_a_draft_tree_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="--speculative-draft-attention-backend"):
        AttnmuxMultiStepDraftBackend(SimpleNamespace(), topk=2, num_steps=3)


def test_sglangs_factory_of_drafts_knows_attnmux() -> None:
    """The hook that SGLang's registry calls, with a factory that asks for a tree."""
    factory = SimpleNamespace(draft_model_runner=SimpleNamespace(), topk=2, speculative_num_steps=3)

    def original(self: Any, name: str, known: dict[str, Any], *, stamps_children: bool) -> Any:
        assert set(known) == {"triton", "attnmux"}
        return known["attnmux"]()

    with pytest.raises(ValueError, match=r"--speculative-eagle-topk: expected 1 .*got 2"):
        plugin._with_drafts(
            original, factory, "decode_attention_backend", {"triton": None}, stamps_children=True
        )
