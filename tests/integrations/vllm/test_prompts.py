"""Prompts of MLA that begin in a step are expanded; all else of it is absorbed."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("attnmux.vllm")

from attnmux.core import ForwardMode
from attnmux.vllm.block_table import BlockTable
from attnmux.vllm.steps import StepBuilder

PAGE = 4


def builder() -> StepBuilder:
    table = BlockTable(5, 8, page_size=PAGE, device="cpu")
    return StepBuilder(table, max_num_tokens=64, seq_len_fill=1)


def step(new: list[int], cached: list[int], *, has_bound: bool = True) -> Any:
    """vLLM's description of a step, in which request i has pages 4 * i + 1 and so on."""
    starts = torch.tensor([0, *new]).cumsum(0).int()
    lens = torch.tensor(new).int() + torch.tensor(cached).int()
    pages = 1 + torch.arange(4 * len(new)).view(len(new), 4)
    slots = [
        int(pages[i, at // PAGE]) * PAGE + at % PAGE
        for i, (count, before) in enumerate(zip(new, cached, strict=True))
        for at in range(before, before + count)
    ]
    return SimpleNamespace(
        num_reqs=len(new),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=int(lens.max()),
        block_table_tensor=pages.int(),
        slot_mapping=torch.tensor(slots),
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens if has_bound else None,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
    )


@pytest.mark.parametrize(
    ("new", "cached", "num_prompts"),
    [
        ([5, 7], [0, 0], 2),
        ([1, 1, 5], [3, 9, 0], 1),
        ([1, 4, 5, 6], [3, 4, 0, 0], 2),
        ([1, 5, 4], [3, 0, 4], 0),
        ([1, 1], [3, 9], 0),
        ([1, 1, 5], [0, 9, 0], 1),
        ([5, 1], [0, 0], 0),
    ],
)
def test_prompts_are_those_at_the_end_that_have_no_prefix(new, cached, num_prompts):
    common, steps = step(new, cached), builder()
    assert steps.num_prompts(common) == num_prompts
    assert steps.num_prompts(step(new, cached, has_bound=False)) == 0


def test_a_step_in_two_parts():
    common, steps = step([1, 4, 5, 6], [3, 4, 0, 0]), builder()
    batch, prompts = steps.step(common, 2)
    assert (batch.batch_size, batch.num_tokens, batch.forward_mode) == (2, 5, ForwardMode.MIXED)
    assert batch.seq_lens.tolist() == [4, 8]
    assert batch.extend_prefix_lens.tolist() == [3, 4]
    assert batch.positions.tolist() == [3, 4, 5, 6, 7]
    assert (prompts.batch_size, prompts.num_tokens) == (2, 11)
    assert prompts.seq_lens.tolist() == prompts.extend_seq_lens_cpu.tolist() == [5, 6]
    assert prompts.positions.tolist() == [*range(5), *range(6)]
    whole = common.slot_mapping.tolist()
    assert batch.out_cache_loc.tolist() + prompts.out_cache_loc.tolist() == whole


@pytest.mark.parametrize(
    ("new", "mode"), [([1, 1, 5], ForwardMode.DECODE), ([5], ForwardMode.IDLE)]
)
def test_what_is_left_decodes_or_is_nothing(new, mode):
    batch, prompts = builder().step(step(new, [2 if count == 1 else 0 for count in new]), 1)
    assert (batch.forward_mode, batch.num_tokens) == (mode, len(new) - 1)
    assert prompts.seq_lens.tolist() == [5]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_debugged", [False, True])
def test_expanded_prompts_give_the_text_of_absorbed_ones(
    checkpoint, prompts, monkeypatch, is_debugged
):
    """Also next to requests that decode, and before chunks that have a prefix."""
    pytest.importorskip("vllm")
    theirs = importlib.import_module("tests.integrations.vllm.test_engine")
    group = importlib.import_module("attnmux.vllm.group")
    seen: list[tuple[int, int]] = []
    made = group.Step.__post_init__

    def counted(self: Any) -> None:
        made(self)
        seen.append((self.num_decode_tokens, self.num_prefills))

    monkeypatch.setattr(group.Step, "__post_init__", counted)
    monkeypatch.setenv("ATTNMUX_DEBUG", str(int(is_debugged)))
    engine = {"max_num_batched_tokens": 128}
    expanded = theirs.texts(checkpoint("mla"), "ATTNMUX", prompts, rounds=2, **engine)
    assert {(bool(absorbed), bool(begun)) for absorbed, begun in seen} == {
        *((True, True), (True, False), (False, True))
    }
    monkeypatch.setattr(group, "prompt_backend", lambda *_, **__: None)
    seen.clear()
    assert theirs.texts(checkpoint("mla"), "ATTNMUX", prompts, rounds=2, **engine) == expanded
    assert not any(begun for _, begun in seen)
