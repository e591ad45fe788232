from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import AttnmuxError, InvalidInput, Platform
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    CaseSetup,
    PreparedStep,
    Step,
    decode,
    extend,
    make_setup,
    prepare_step,
    verify,
)
from attnmux.testing.reference import attention
from attnmux.triton.plugin import TRITON

pytest.importorskip("triton")

from attnmux.triton.attention import step_parts
from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.attention.share_plans import SplitOptions

CANDIDATE = Candidate(
    card=replace(
        TRITON,
        requires=(),
        factory="attnmux.triton.attention.factory:triton",
        # Another backend serves picked keys
        clauses=tuple(each for each in TRITON.clauses if not each.kind.admits("nsa")),
    ),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    # So few programs that requests are split and programs take several.
    factory=lambda context, options: TritonBackend(context, options, compute_units=3),
)


ONCE_MORE = {
    "decode-changing-batch-size",
    "decode-deterministic",
    "decode-fp8_e4m3-scales",
    "decode-larger-than-graphs",
    "decode-length-0-and-1",
    "decode-long-windows",
    "decode-nan",
    "decode-padding",
    "decode-sinks-lse",
    "decode-two-windows-pool",
    "decode-uneven",
    "decode-window-pool-padding",
    "draft-extend",
    "encoder",
    "extend-cross",
    "extend-cross-unsaved",
    "extend-empty-prefix",
    "extend-fp8_e5m2-scales",
    "extend-multi-item",
    "extend-nan",
    "extend-padding",
    "extend-prefix",
    "extend-shared-prefix",
    "extend-window",
    "mixed",
    "mla-decode",
    "mla-decode-nan",
    "mla-decode-padding",
    "mla-expanded-prefill",
    "mla-extend",
    "mla-verify-chain",
    "verify-and-decode",
    "verify-larger-than-graphs",
    "verify-padding",
    "verify-tree",
    "verify-tree-window",
}
"""Cases of each kind, which run in graphs too."""
AT_PAGE_ONE = {
    "decode-fp8_e4m3-scales",
    "decode-nan",
    "decode-uneven",
    "decode-window-pool-padding",
    "extend-cross",
    "extend-nan",
    "extend-prefix",
    "extend-window",
    "mixed",
    "mla-decode",
    "mla-extend",
    "verify-tree",
}
"""Cases of each way to look up slots."""


class TestTritonInterpreted(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16,)
    executions = ("eager",)


class TestTritonOnCDNA3(AttentionBackendTests):
    """The 8-bit floats of gfx942, which others do not read."""

    backend = replace(CANDIDATE, platform=Platform.parse("amd:gfx942"))
    page_sizes = (16,)
    executions = ("eager",)

    def wants(self, case: Case) -> bool:
        return "fnuz" in case.name


class TestMixedStepsInParts(AttentionBackendTests):
    """With as few keys as the suite's, mixed steps would stay whole."""

    backend = CANDIDATE
    page_sizes = (16,)
    executions = ("eager",)

    @pytest.fixture(autouse=True)
    def few_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_parts, "LEAST_VALUES", 1)
        monkeypatch.setattr(step_parts, "SECOND_LAUNCH_US", -1e9)

    def wants(self, case: Case) -> bool:
        return "mixed" in case.name and case.host_lens


class TestTritonInterpretedInGraphs(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16,)
    executions = ("graph",)

    def wants(self, case: Case) -> bool:
        return case.name.removesuffix("-page16-graph") in ONCE_MORE


class TestTritonInterpretedAtPageOne(AttentionBackendTests):
    """Kernels see a page as a list of slots: checks that these are read and written."""

    backend = CANDIDATE
    page_sizes = (1,)
    executions = ("eager",)

    def wants(self, case: Case) -> bool:
        return case.name.removesuffix("-page1") in AT_PAGE_ONE


def test_every_name_of_once_more_is_a_case():
    assert {case.name.removesuffix("-page1") for case in CANDIDATE.cases((1,))} >= {
        *ONCE_MORE,
        *AT_PAGE_ONE,
    }


def backend_of(
    step: Step, *, max_batch_size: int | None = None, **options: object
) -> tuple[TritonBackend, Any]:
    case = Case(name="of-this-test", max_context_len=4096, steps=(step,), deterministic=True)
    setup = make_setup(case, CANDIDATE.platform, "cpu")
    context = setup.context
    if max_batch_size is not None:
        context = replace(context, max_batch_size=max_batch_size)
    return TritonBackend(context, options, compute_units=3), setup


def test_more_requests_than_there_is_room_for_are_refused():
    backend, setup = backend_of(decode(200, 133), max_batch_size=1)
    step = prepare_step(setup, decode(200, 133))
    with pytest.raises(InvalidInput, match="max_batch_size, 1"):
        backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    with pytest.raises(AttnmuxError, match="no step is prepared"):
        backend.forward(given.q, given.k, given.v, given.layer, step.batch)


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, [10, 5]),
        ({"num_kv_splits": 2}, [2, 2]),
        ({"split_tile_size": 512}, [5, 3]),
        ({"split_tile_size": 512, "num_kv_splits": 3}, [3, 3]),
        ({"reduce_in_fp32": True}, [10, 5]),
    ],
)
@pytest.mark.turns(2)
def test_a_deterministic_result_does_not_depend_on_the_batch(options, splits):
    step = decode(2500, 1100)
    backend, setup = backend_of(step, **options)
    both = prepare_step(setup, step)
    backend.init_forward_metadata(both.batch)
    (plan,) = backend._attention._shares.values()
    assert plan.buffers["stops"][:3].diff().tolist() == splits
    assert plan.buffers["partial"].dtype == torch.float32
    given = both.inputs[0]
    together = backend.forward(given.q, given.k, given.v, given.layer, both.batch)
    for place in (0, 1):
        alone = replace(
            both.batch,
            batch_size=1,
            **{
                name: getattr(both.batch, name)[place : place + 1]
                for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions")
            },
            seq_lens_cpu=None,
        )
        backend.init_forward_metadata(alone)
        q = given.q[place : place + 1]
        assert torch.equal(
            backend.forward(q, None, None, given.layer, alone), together[place : place + 1]
        )


@pytest.mark.parametrize("name", ["num_kv_splits", "split_tile_size"])
def test_options_below_0_are_refused(name):
    with pytest.raises(InvalidInput, match=f"triton.{name}: expected 1 or more.*got -1"):
        backend_of(decode(2), **{name: -1})


def test_without_options_keys_are_shared_by_the_batch_and_parts_are_float32():
    splits = SplitOptions.of({}, deterministic=False)
    assert splits.splitting(64) is None
    assert splits.part_dtype(None, torch.bfloat16) == torch.float32


@pytest.mark.parametrize(
    ("options", "deterministic", "dtype"),
    [
        ({"num_kv_splits": 2}, False, torch.bfloat16),
        ({"num_kv_splits": 2, "reduce_in_fp32": True}, False, torch.float32),
        ({}, True, torch.float32),
    ],
)
def test_parts_of_deterministic_results_are_float32(options, deterministic, dtype):
    splits = SplitOptions.of(options, deterministic=deterministic)
    assert splits.part_dtype(splits.splitting(64), torch.bfloat16) == dtype


STEPS = {
    "decode": decode(0, 60, 1),
    "extend": extend((0, 0), (3, 7), (20, 30)),
    "verify": verify(4, 0, 50),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_sink_of_minus_infinity_is_none(step):
    """For a request without keys too."""
    setup = make_setup(Case(name="sinks", steps=(step,), sinks=True), CANDIDATE.platform, "cpu")
    layer = setup.context.layers[0]
    assert layer.sinks is not None
    layer.sinks[::2] = -torch.inf
    backend = TritonBackend(setup.context, {}, compute_units=3)
    made = prepare_step(setup, step)
    given, lse = made.inputs[0], torch.empty(made.inputs[0].q.shape[:2])
    backend.init_forward_metadata(made.batch)
    out = backend.forward(given.q, given.k, given.v, layer, made.batch, lse=lse)
    agree(setup, made, out, lse)


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_whole_blocks_of_4_bit_keys_are_read_without_comparisons(cap):
    """Of one token, around the borders of blocks of 128."""
    step = decode(300, 127, 1, 128, 129, 257)
    fields = {"kv_dtype": "fp4_e2m1", "kv_scales": (0.5, 3.0), "logit_cap": cap}
    case = Case(name="4-bit", steps=(step,), lse=True, max_context_len=304, **fields)
    setup = make_setup(case, CANDIDATE.platform, "cpu")
    backend = TritonBackend(setup.context, {}, compute_units=3)
    made = prepare_step(setup, step)
    given, lse = made.inputs[0], torch.empty(made.inputs[0].q.shape[:2])
    backend.init_forward_metadata(made.batch)
    out = backend.forward(given.q, given.k, given.v, given.layer, made.batch, lse=lse)
    agree(setup, made, out, lse)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.turns(2)
def test_results_may_lie_in_any_order(step):
    """The heads of a token apart, and the columns of a head."""
    backend, setup = backend_of(step)
    made = prepare_step(setup, step)
    given = made.inputs[0]
    tokens, heads, width = given.q.shape
    room = torch.full((heads, tokens, 2 * width), 7.0, dtype=given.q.dtype)
    out, lse = room[..., ::2].transpose(0, 1), torch.full((heads, tokens), 7.0).t()
    backend.init_forward_metadata(made.batch)
    result = backend.forward(given.q, given.k, given.v, given.layer, made.batch, out=out, lse=lse)
    assert result is out
    agree(setup, made, out, lse)
    assert (room[..., 1::2] == 7.0).all()


def agree(setup: CaseSetup, step: PreparedStep, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Asserts that the first layer's results are the reference's."""
    context, given = setup.context, step.inputs[0]
    expected = attention(
        given.q,
        given.layer,
        step.batch,
        context.req_to_token_pool.req_to_token,
        context.token_to_kv_pool,
    )
    for found, wanted in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (decode(9, 5), "seq_lens"),
        (decode(9, 5), "req_pool_indices"),
        (extend((4, 3), (0, 5)), "extend_seq_lens"),
        (extend((4, 3), (0, 5)), "extend_prefix_lens"),
    ],
)
def test_lengths_that_are_not_contiguous_are_refused(step, name):
    backend, setup = backend_of(step)
    batch = prepare_step(setup, step).batch
    values = getattr(batch, name)
    apart = torch.stack([values, values], 1)[:, 0]
    with pytest.raises(InvalidInput, match=f"{name}: expected values side by side"):
        backend.init_forward_metadata(replace(batch, **{name: apart}))


def test_a_layer_that_the_pool_does_not_store_needs_its_own_keys():
    backend, setup = backend_of(extend((0, 5)))
    step = prepare_step(setup, extend((0, 5)))
    backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    stranger = replace(given.layer, is_causal=False)
    layer = TritonLayer.of(stranger, setup.context)
    with pytest.raises(AttnmuxError, match="not in the KV pool"):
        layer.required_keys()
