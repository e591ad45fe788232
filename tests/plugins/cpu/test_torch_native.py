from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux.core import AttnmuxError, ForwardMode, InvalidInput, SpecInput
from attnmux.cpu.spans import visibility
from attnmux.cpu.steps import KeyRule, StepLens
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.cpu.torch_native.plan import TileSize
from attnmux.testing import (
    AttentionBackendTests,
    Case,
    CaseSetup,
    Step,
    decode,
    extend,
    find_candidate,
    make_setup,
    prepare_step,
    reference,
    run_case,
    verify,
)

CANDIDATE = find_candidate("torch_native", device="cpu")


class SmallTiles(TorchNativeBackend):
    """Short steps go through what long ones do: many tiles, and many blocks of keys in each."""

    def tile_size(self, layer):
        return TileSize(queries=8, keys=24, logits=96)


SMALL_TILES = replace(CANDIDATE, factory=SmallTiles)


class TestTorchNative(AttentionBackendTests):
    backend = "torch_native"
    device = "cpu"


@pytest.mark.turns(32)
class TestSmallTiles(AttentionBackendTests):
    backend = SMALL_TILES
    page_sizes = (16,)

    def wants(self, case: Case) -> bool:
        """Short cases: they have as many tiles here as long ones have elsewhere."""
        return "-long" not in case.name


class CountedGathers(TorchDispatchMode):
    """Counts the rows that index_select fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.index_select:
            self.rows["all"] += args[2].numel()
        return func(*args, **(kwargs or {}))


def world_of(step: Step, **case_settings: Any) -> CaseSetup:
    case = Case(name="of-this-test", steps=(step,), max_context_len=4096, **case_settings)
    return make_setup(case, CANDIDATE.platform, "cpu")


def attend(setup: CaseSetup, backend: TorchNativeBackend, step: Step) -> list[torch.Tensor]:
    """The output of each layer."""
    prepared = prepare_step(setup, step)
    backend.init_forward_metadata(prepared.batch)
    return [
        backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)
        for given in prepared.inputs
    ]


REQUESTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    page_size=st.sampled_from((1, 16)),
    window=st.sampled_from((None, 0, 5, 30)),
    chunk=st.sampled_from((None, 8)),
    sinks=st.booleans(),
    decodes=st.booleans(),
)
def test_tiles_of_any_lengths(requests, page_size, window, chunk, sinks, decodes):
    step = decode(*(sum(request) for request in requests)) if decodes else extend(*requests)
    case = Case(
        name="any-lengths",
        steps=(step,),
        page_size=page_size,
        windows=(window, None),
        attention_chunk=chunk,
        sinks=sinks,
        lse=True,
    )
    outcome = run_case(SMALL_TILES, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("step_of", [lambda n: decode(n, n), lambda n: extend((0, n))])
def test_scratch_does_not_grow_with_the_context(step_of):
    def scratch(length: int) -> int:
        setup = world_of(step_of(length))
        attend(setup, SmallTiles(setup.context), step_of(length))
        return setup.context.workspace.nbytes

    assert scratch(480) == scratch(96)


def test_layers_share_scratch():
    step = extend((5, 40), (0, 9))
    one, three = world_of(step, windows=(None,)), world_of(step, windows=(None, 7, None))
    for setup in (one, three):
        attend(setup, TorchNativeBackend(setup.context), step)
    assert three.context.workspace.nbytes == one.context.workspace.nbytes


def test_work_is_bounded_by_the_window():
    def rows_gathered(length: int, step: Step) -> int:
        setup = world_of(step, windows=(16,), num_q_heads=2, num_kv_heads=1)
        prepared, backend = prepare_step(setup, step), SmallTiles(setup.context)
        backend.init_forward_metadata(prepared.batch)
        given = prepared.inputs[0]
        with CountedGathers() as counted:
            backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)
        return counted.rows["all"]

    # K and V of the token itself and of 16 before it, whatever the length.
    for length in (100, 1000):
        assert rows_gathered(length, decode(length)) == 2 * 17
    # Eight queries at a time see 24 keys between them.
    assert rows_gathered(400, extend((0, 400))) <= 2 * 24 * 400 / 8


def test_causality_bounds_the_work():
    step = extend((0, 400))
    setup = world_of(step, windows=(None,), num_q_heads=2, num_kv_heads=1)
    prepared, backend = prepare_step(setup, step), SmallTiles(setup.context)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    with CountedGathers() as counted:
        backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)
    blocks = 400 // 8
    assert counted.rows["all"] == 2 * 8 * blocks * (blocks + 1) / 2


def test_metadata_is_made_once_a_step():
    step = decode(40, 7)
    setup = world_of(step, kv_in_pool=True)
    backend = TorchNativeBackend(setup.context)
    prepared = prepare_step(setup, step)
    backend.init_forward_metadata(prepared.batch)

    def run() -> list[torch.Tensor]:
        return [
            backend.forward(given.q, None, None, given.layer, prepared.batch)
            for given in prepared.inputs
        ]

    before = run()
    setup.context.req_to_token_pool.req_to_token.zero_()
    prepared.batch.seq_lens.zero_()
    torch.testing.assert_close(run(), before, rtol=0, atol=0)


@pytest.mark.parametrize("step", [decode(1, 300, 40, 41, 7), extend((0, 50), (31, 9), (200, 130))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_results_do_not_depend_on_the_batch(step, dtype):
    case = Case(
        name="alone",
        steps=(step,),
        dtype=dtype,
        max_context_len=512,
        kv_in_pool=True,
        deterministic=True,
    )
    outcome = run_case(CANDIDATE, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_scales_are_those_that_the_pool_divides_by(kind, monkeypatch):
    latent = {"num_kv_heads": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "kind": "mla"}
    step = extend((3, 6), (0, 2))
    setup = world_of(
        step, dtype="float32", kv_scales=(0.5, 3.0), **(latent if kind == "mla" else {})
    )
    pool = setup.context.token_to_kv_pool
    prepared, backend = prepare_step(setup, step), TorchNativeBackend(setup.context)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]

    def run() -> torch.Tensor:
        ropes = {"q_rope": given.q_rope, "k_rope": given.k_rope}
        return backend.forward(given.q, given.k, given.v, given.layer, prepared.batch, **ropes)

    as_they_are = run()
    # Latents are K and V
    as_one = kind == "mla"
    monkeypatch.setattr(pool, "read_scales", lambda k, v: (k, k if as_one else v))
    divided = run()
    expected, _ = reference.attention(
        given.q,
        given.layer,
        prepared.batch,
        setup.context.req_to_token_pool.req_to_token,
        pool,
        q_rope=given.q_rope,
    )
    torch.testing.assert_close(divided.double(), expected, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(divided, as_they_are)


@pytest.mark.parametrize("change", [lambda mask: mask[:-1], lambda mask: mask.int()])
def test_a_mask_that_does_not_fit_is_refused(change):
    step = verify(4, 9, 3)
    setup = world_of(step, spec_topk=4)
    batch = prepare_step(setup, step).batch
    spec_info = replace(batch.spec_info, custom_mask=change(batch.spec_info.custom_mask))
    with pytest.raises(InvalidInput, match="custom_mask: expected bool of shape"):
        TorchNativeBackend(setup.context).init_forward_metadata(replace(batch, spec_info=spec_info))


def test_a_mask_may_have_more_values_than_an_int32_counts():
    new = torch.tensor([3, 2], dtype=torch.int32)
    num_keys = torch.tensor([2**30, 5], dtype=torch.int32)
    keep = torch.ones(1, dtype=torch.bool).expand(3 * 2**30 + 10)
    mask = visibility(
        KeyRule(window=-1, chunk=0, is_causal=True, is_cross=False, in_call=False),
        SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=SpecInput(draft_token_num=3, custom_mask=keep),
            multi_item=None,
            masks_drafts=False,
        ),
        StepLens(new=new, cached=num_keys - new, encoder=torch.zeros_like(new)),
    ).mask
    assert mask.row.tolist() == [0, 2**30, 2**31, 3 * 2**30, 3 * 2**30 + 5]


def test_gradients_are_not_followed():
    step = extend((0, 6))
    setup = world_of(step)
    prepared, backend = prepare_step(setup, step), TorchNativeBackend(setup.context)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    q = given.q.clone().requires_grad_()
    out = backend.forward(q, given.k, given.v, given.layer, prepared.batch)
    assert not out.requires_grad


def test_forward_needs_a_prepared_step():
    step = decode(3)
    setup = world_of(step)
    prepared, backend = prepare_step(setup, step), TorchNativeBackend(setup.context)
    given = prepared.inputs[0]
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)
