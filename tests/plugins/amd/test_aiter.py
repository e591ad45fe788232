"""The adapters on AITER's own Triton kernels, through Triton's interpreter."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from attnmux.core import InvalidInput, Platform
from attnmux.testing import AttentionBackendTests, Case, decode, extend, verify
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterTests,
    AdapterWorld,
    assert_passes,
    check_layers_outside_the_pool,
    outputs,
    recorded,
)

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("aiter") is None:
    pytest.skip("needs triton and amd-aiter", allow_module_level=True)

from attnmux.amd import aiter_latents  # where there is an AITER
from attnmux.amd.aiter import make  # where there is an AITER
from attnmux.amd.cards.aiter import AITER
from attnmux.emulators.amd.aiter import aiter_kernels

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one after the other."""
    monkeypatch.setattr(aiter_latents, "PROGRAMS", 4)


WORLD = AdapterWorld(
    library=make,
    kernels=aiter_kernels(),
    platform=Platform.parse("amd:gfx942"),
    settings={"page_size": 16},
)
CANDIDATE = WORLD.candidate(AITER)
SLOW = ("128-heads", "long", "host-lens", "max-length", "window-pool-", "windows-pool", "-dim-256")
"""Parts of the names of cases for which the interpreter takes seconds."""


class TestAiter(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16,)
    executions = ("eager",)

    def wants(self, case: Case) -> bool:
        return not any(part in case.name for part in SLOW)


class TestAiterInGraphs(TestAiter):
    executions = ("graph",)

    def wants(self, case: Case) -> bool:
        """Steps of each kind: what they hold is the eager cases' matter."""
        kinds = ("padding", "changing", "verify", "kv-in-pool")
        return super().wants(case) and any(kind in case.name for kind in kinds)


class TestAiterAdapter(AdapterTests):
    adapter = WORLD
    step = decode(9, 4)


class TestAiterLatentAdapter(AdapterTests):
    adapter = AdapterWorld(
        library=make,
        kernels=WORLD.kernels,
        platform=WORLD.platform,
        settings={**LATENT, "page_size": 16},
    )
    step = decode(9, 4)


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("step", [decode(70, 5), extend((40, 3), (0, 50)), verify(4, 60, 5)])
def test_other_pages(page_size, step) -> None:
    assert_passes(CANDIDATE, step, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 64])
def test_trees_over_latents_at_any_page(page_size) -> None:
    assert_passes(CANDIDATE, verify(4, 30, 5), page_size=page_size, spec_topk=4, **LATENT)


def test_many_keys_are_split_and_merged() -> None:
    """Beyond 512 keys `unified_attention` splits them."""
    settings = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 64, "v_head_dim": 64}
    assert_passes(CANDIDATE, decode(700), page_size=64, max_context_len=1024, **settings)


def test_rows_of_the_table_have_room_for_whole_tiles() -> None:
    for step in (extend((5, 20)), decode(9, 4)):
        (first, *_) = WORLD.calls(step, max_context_len=40, kv_in_pool=True)
        table = first.kwargs["block_table"]
        assert table.shape[1] * 16 % 64 == 0


def test_the_pool_is_read_where_it_lies() -> None:
    kernels, calls = recorded(WORLD.kernels)
    backend, made = WORLD.prepared(decode(9, 4), kernels=kernels)
    outputs(backend, made)
    k, v = backend.context.token_to_kv_pool.get_kv_buffer(made.inputs[0].layer.layer_id)
    assert calls[0].kwargs["k"].data_ptr() == k.data_ptr()
    assert calls[0].kwargs["v"].data_ptr() == v.data_ptr()


def test_keys_of_the_call_with_a_window_are_refused() -> None:
    backend, made = WORLD.prepared(
        extend((0, 5)), windows=(3,), kv_in_pool=False, save_kv_cache=False
    )
    with pytest.raises(InvalidInput, match="save_kv_cache"):
        outputs(backend, made)


def test_layers_outside_the_pool() -> None:
    check_layers_outside_the_pool(WORLD, extend((0, 5), (0, 4)))


@pytest.mark.parametrize(
    "settings",
    [{"page_size": 1}, {"head_dim": 96, "v_head_dim": 96}, {"head_dim": 128, "v_head_dim": 64}],
)
def test_what_the_kernels_do_not_serve_is_refused(settings: dict[str, Any]) -> None:
    world = WORLD.world(decode(5), **settings)
    with pytest.raises(InvalidInput):
        WORLD.backend(world.context)


def test_slots_whose_rows_lie_beyond_32_bits_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_latents, "INT32", 1000)
    settings = {**LATENT, "num_q_heads": 4}
    (call,) = WORLD.calls(decode(9), kv_in_pool=True, **settings)[:1]
    assert call.kwargs["kv_indices"].dtype is torch.int64
    assert_passes(CANDIDATE, decode(9), extend((4, 3)), page_size=16, **settings)
