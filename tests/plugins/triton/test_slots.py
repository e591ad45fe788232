"""The tables of pools that are not addressed by the request table's slots."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import ForwardMode, Platform
from attnmux.testing import Case, decode, extend, make_setup, prepare_step

pytest.importorskip("triton")

from attnmux.triton.attention.slots import BLOCK, SlotGroup, SlotTables
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.launches.bound_kernel import Launcher

WINDOW = 20
STEPS = {
    "decode": decode(900, 40, 1),
    "verify": extend((880, 4), (30, 4), (0, 4), mode=ForwardMode.TARGET_VERIFY),
    "extend": extend((600, 30), (0, 40), (7, 0)),
}


def filled(name: str, page_size: int, monkeypatch, *, by_translating: bool):
    """The step, and the window group's table, which held -7 everywhere before."""
    case = Case(
        name="window-pool",
        steps=(STEPS[name],),
        windows=(WINDOW, None),
        window_pool=True,
        page_size=page_size,
        max_context_len=1024,
    )
    setup = make_setup(case, Platform.parse("nvidia:sm90,cuda=13.0"), "cpu")
    context = setup.context
    step = TritonStep.of(prepare_step(setup, STEPS[name]).batch)
    groups = frozenset(SlotGroup.of(layer, context) for layer in context.layers)
    (group,) = (group for group in groups if group.pool_group)
    tables = SlotTables(groups, context, Launcher())
    table = tables.of(group).table.fill_(-7)
    if by_translating:
        pool = context.token_to_kv_pool
        monkeypatch.setattr(pool, "slot_map", lambda layer_id: None)
    tables.fill(step)
    return table, step


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", STEPS)
def test_only_what_the_step_sees_is_looked_up(name, page_size, monkeypatch):
    wanted, step = filled(name, page_size, monkeypatch, by_translating=True)
    found, _ = filled(name, page_size, monkeypatch, by_translating=False)
    news = [step.queries] * 3 if step.queries else step.new_lens().tolist()
    for request, (length, new) in enumerate(zip(step.key_lens().tolist(), news, strict=True)):
        # From the block that holds the first key in the window of the first new token.
        block = BLOCK * page_size
        first = max(length - new - WINDOW, 0) // block * block // page_size
        end = -(-length // page_size)
        assert torch.equal(found[request, first:end], wanted[request, first:end])
        assert (found[request, :first] == -7).all()
        assert (found[request, end:] == -7).all()


def test_the_table_is_filled_in_one_launch(monkeypatch):
    launches: list[str] = []
    monkeypatch.setattr(
        "attnmux.triton.launches.bound_kernel.BoundKernel.__call__",
        lambda self, *given, **more: launches.append(self.kernel.__name__),
    )
    filled("decode", 1, monkeypatch, by_translating=False)
    assert launches == ["fill_seen_pages"]
