"""Prompts of MLA are a part of a step of their own, which may run with expanded heads."""

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


def step(new: list[int], cached: list[int], prompts: list[int] | None = None) -> Any:
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
        seq_lens_cpu_upper_bound=lens,
        is_prefilling=None if prompts is None else torch.tensor(prompts).bool(),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
    )


@pytest.mark.parametrize(
    ("new", "prompts", "expected"),
    [
        ([5, 7], [1, 1], 2),
        ([1, 1, 5], [0, 0, 1], 1),
        ([1, 4, 5, 6], [0, 0, 1, 1], 2),
        ([1, 5, 4], [0, 1, 0], 0),
        ([1, 1], [0, 1], 0),
        ([1, 5, 1], [0, 1, 1], 2),
    ],
)
def test_prompts_are_those_at_the_end(new, prompts, expected):
    steps, common = builder(), step(new, [0] * len(new), prompts)
    assert steps.num_prompts(common) == expected
    common.seq_lens_cpu_upper_bound = None
    assert steps.num_prompts(common) == 0
    assert steps.num_prompts(step(new, [0] * len(new), None)) == 0


def test_a_step_in_two_parts():
    common, steps = step([1, 4, 5, 6], [3, 4, 0, 7], [0, 0, 1, 1]), builder()
    batch, prompts = steps.in_two_parts(common, 2)
    assert (batch.batch_size, batch.num_tokens, batch.forward_mode) == (2, 5, ForwardMode.MIXED)
    assert batch.seq_lens.tolist() == [4, 8]
    assert batch.extend_prefix_lens.tolist() == [3, 4]
    assert batch.positions.tolist() == [3, 4, 5, 6, 7]
    assert (prompts.batch_size, prompts.num_tokens) == (2, 11)
    assert prompts.seq_lens.tolist() == prompts.seq_lens_cpu.tolist() == [5, 13]
    assert prompts.extend_prefix_lens_cpu.tolist() == [0, 7]
    assert prompts.positions.tolist() == [*range(5), *range(7, 13)]
    assert prompts.req_pool_indices.tolist() == [3, 4]
    whole = common.slot_mapping.tolist()
    assert batch.out_cache_loc.tolist() + prompts.out_cache_loc.tolist() == whole


@pytest.mark.parametrize(
    ("new", "mode"), [([1, 1, 5], ForwardMode.DECODE), ([5], ForwardMode.IDLE)]
)
def test_what_is_left_decodes_or_is_nothing(new, mode):
    cached = [2 if count == 1 else 0 for count in new]
    batch, prompts = builder().in_two_parts(step(new, cached), 1)
    assert (batch.forward_mode, batch.num_tokens) == (mode, len(new) - 1)
    assert prompts.seq_lens.tolist() == [5]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_debugged", [False, True])
def test_expanded_prompts_give_the_text_of_absorbed_ones(
    checkpoint, prompts, monkeypatch, is_debugged
):
    """Also next to requests that decode, and behind a prefix that is cached."""
    pytest.importorskip("vllm")
    theirs = importlib.import_module("tests.integrations.vllm.test_engine")
    group = importlib.import_module("attnmux.vllm.group")
    expanding = importlib.import_module("attnmux.parts.chunked_prefix").ChunkedPrefixBackend
    seen: list[tuple[bool, bool]] = []
    ran: list[int] = []
    made, attend = group.Step.__post_init__, expanding._keys

    def counted(self: Any) -> None:
        made(self)
        seen.append((self.num_decode_tokens > 0, self.num_prefills > 0))

    def expanded(self: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(len(self._parts.parts))
        return attend(self, slots, *args, **kwargs)

    monkeypatch.setattr(group.Step, "__post_init__", counted)
    monkeypatch.setattr(expanding, "_keys", expanded)
    monkeypatch.setenv("ATTNMUX_DEBUG", str(int(is_debugged)))
    engine = {"max_num_batched_tokens": 48}
    ours = theirs.texts(checkpoint("mla"), "ATTNMUX", prompts, rounds=2, **engine)
    assert set(seen) == {(True, True), (True, False), (False, True)}
    assert {1, 2} <= set(ran)
    monkeypatch.setattr(group, "EXPANDED", ("expanded_prompts", "none", "extend"))
    seen.clear()
    ran.clear()
    assert theirs.texts(checkpoint("mla"), "ATTNMUX", prompts, rounds=2, **engine) == ours
    assert not any(prompts for _, prompts in seen)
    assert not ran
