"""Extend steps over 8-bit pools whose keys are widened first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import GraphUnsupported, InvalidInput, Platform
from attnmux.emulators.gluon import emulated
from attnmux.testing import Candidate, Case, extend, make_setup, prepare_step
from attnmux.testing.run.runner import run_case
from attnmux.triton.plugin import ROUNDED_ERROR, TRITON

pytest.importorskip("triton")

from attnmux.triton.attention import wide_tiles
from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.attention.rounding import rounding
from attnmux.triton.attention.tiles import TileAttention
from attnmux.triton.attention.wide_places import pieces_of
from attnmux.triton.attention.wide_tiles import LEAST_ROWS, WideTileAttention, is_worth
from attnmux.triton.kernels.widen import turn_values
from attnmux.triton.launches import dispatch
from attnmux.triton.launches.configs import HOPPER, PORTABLE

SM90 = Platform.parse("nvidia:sm90,cuda=13.0")
CANDIDATE = Candidate(
    card=replace(TRITON, requires=(), factory="attnmux.triton.attention.factory:triton"),
    platform=SM90,
    device="cpu",
    factory=lambda context, options: TritonBackend(context, options, compute_units=1),
)
NAMES = {
    "extend-empty-prefix-fp8_e4m3-host-lens",
    "extend-fp8_e4m3",
    "extend-fp8_e4m3-float16",
    "extend-fp8_e4m3-kv-in-pool",
    "extend-fp8_e4m3-scales-lse",
    "extend-fp8_e5m2-dim-64",
    "extend-fp8_e5m2-scales",
}
CASES = {
    case.name: case
    for page_size in (1, 16)
    for case in CANDIDATE.cases((page_size,))
    if case.name.removesuffix(f"-page{page_size}") in NAMES
}
OTHER_DIMS = (96, 96), (192, 128)
CASES |= {
    f"dims-{k}-{v}": replace(CASES["extend-fp8_e4m3-page16"], head_dim=k, v_head_dim=v)
    for k, v in OTHER_DIMS
}
CASES["sinks"] = replace(CASES["extend-fp8_e4m3-page16"], sinks=True)


@pytest.fixture
def widened(monkeypatch):
    """The calls that are served by widening, with the kernel that can be interpreted."""
    calls = []
    serve = WideTileAttention.__call__

    def note(self, *args):
        served = serve(self, *args)
        if served:
            calls.append(args)
        return served

    monkeypatch.setattr(wide_tiles, "WIDE_KERNELS", frozenset({PORTABLE}))
    monkeypatch.setattr(wide_tiles, "LEAST_ROWS", 0)
    monkeypatch.setattr(WideTileAttention, "__call__", note)
    return calls


def test_every_name_is_a_case():
    assert len(CASES) == 2 * len(NAMES) + len(OTHER_DIMS) + 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.turns(8)
def test_agrees_with_reference(name, widened):
    outcome = run_case(CANDIDATE, replace(CASES[name], host_lens=True))
    assert outcome.status == "passed", outcome.message
    assert widened


FP8 = {"kv_dtype": "fp8_e4m3", "dtype": "bfloat16", "host_lens": True}
LONG = extend((200, 400), (0, 700))


@pytest.mark.parametrize(
    ("step", "options", "is_widened"),
    [
        (LONG, FP8, True),
        (LONG, {**FP8, "host_lens": False}, False),
        (LONG, {**FP8, "kv_dtype": "bfloat16"}, False),
        (LONG, {**FP8, "windows": (64, None)}, False),
        (extend((570, 30), (660, 40)), FP8, False),
        (extend((570, 30), (660, 40)), {**FP8, "deterministic": True}, True),
    ],
)
def test_steps_with_many_rows_for_each_key_are_widened(monkeypatch, step, options, is_widened):
    monkeypatch.setattr(wide_tiles, "WIDE_KERNELS", frozenset({PORTABLE}))
    case = Case(name="of-this-test", max_context_len=1024, steps=(step,), **options)
    setup = make_setup(case, SM90, "cpu")
    backend = TritonBackend(setup.context, {}, compute_units=24)
    made = prepare_step(setup, step, host_lens=case.host_lens)
    given = made.inputs[0]

    def run(in_capture):
        backend.init_forward_metadata_out_graph(made.batch, in_capture)
        backend.init_forward_metadata_in_graph(made.batch)
        backend.forward(given.q, given.k, given.v, given.layer, made.batch)

    def launched(in_capture):
        launches = backend.launcher.rehearse(lambda: run(in_capture))
        return {launch.bound.kernel.__name__ for launch in launches}

    assert ("widen_keys" in launched(False)) == is_widened
    if options.get("deterministic"):
        with pytest.raises(GraphUnsupported, match="run it eagerly"):
            launched(True)
    else:
        assert "widen_keys" not in launched(True)


@pytest.mark.parametrize(
    ("lens", "new", "expected"),
    [
        ((8192,), (512,), True),
        ((8192,), (127,), False),
        ((8192, 8192), (300, 1), True),
        ((8192, 8192), (200, 1), False),
        ((0,), (0,), False),
    ],
)
def test_keys_are_widened_where_that_pays(lens, new, expected):
    lens, new = torch.tensor(lens, dtype=torch.int32), torch.tensor(new, dtype=torch.int32)
    assert is_worth(lens, new, 4, LEAST_ROWS) == expected


@pytest.mark.parametrize("name", ["extend-fp8_e4m3-scales-lse-page16", "sinks"])
def test_parts_of_the_heads_are_served_in_turn(name, widened, monkeypatch):
    """Whose results are those of all heads at a time."""
    monkeypatch.setattr(wide_tiles, "MOST_BYTES", 1)
    counts = []
    serve = WideTileAttention._attend_part

    def note(self, part, *args):
        counts.append(len(part.kv_heads))
        serve(self, part, *args)

    monkeypatch.setattr(WideTileAttention, "_attend_part", note)
    outcome = run_case(CANDIDATE, replace(CASES[name], host_lens=True))
    assert outcome.status == "passed", outcome.message
    assert set(counts) == {1}
    assert len(counts) == CASES[name].num_kv_heads * len(widened) > len(widened)


ROUNDED = {
    "extend-fp8_e4m3-page16": {},
    "extend-fp8_e4m3-page1": {"head_dim": 64, "v_head_dim": 64},
    "extend-fp8_e4m3-kv-in-pool-page16": {"head_dim": 256, "v_head_dim": 256},
    "extend-fp8_e4m3-scales-lse-page16": {"head_dim": 128, "v_head_dim": 128},
    "sinks": {"logit_cap": 3.0, "head_dim": 64, "v_head_dim": 64},
}
"""Cases whose Q has values of e4m3: they are as exact with rounded queries as without."""


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("rounds", ["queries", "all"])
@pytest.mark.turns(2)
def test_agrees_with_reference_if_products_have_eight_bits(name, rounds, monkeypatch):
    """V alone is widened or turned, also for parts of the heads."""
    monkeypatch.setattr(dispatch, "can_compile", lambda address: True)
    monkeypatch.setattr(wide_tiles, "LEAST_ROWS", 0)
    monkeypatch.setattr(wide_tiles, "MOST_BYTES", 1)
    read = []
    attend = TileAttention.__call__

    def note(self, call, step, plans, slots, results, keys=None):
        read.append((keys.k.dtype, keys.v.dtype))
        attend(self, call, step, plans, slots, results, keys)

    monkeypatch.setattr(TileAttention, "__call__", note)
    case = replace(CASES[name], host_lens=True, **ROUNDED[name])
    with emulated() as launched:
        outcome = run_case(replace(CANDIDATE, options={"fp8_products": rounds}), case)
    assert outcome.status == "passed", outcome.message
    assert "attend_hopper_tiles" in launched
    v_dtype = torch.bfloat16 if rounds == "queries" else torch.float8_e4m3fn
    assert set(read) == {(torch.float8_e4m3fn, v_dtype)}


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("width", [64, 128])
def test_values_are_turned_in_pieces(page, width):
    lens = torch.tensor([70, 0, 200], dtype=torch.int32)
    table = torch.randperm(3 * 208 // page, dtype=torch.int32).view(3, -1)
    v = torch.randn(3 * 208, 2, width).to(torch.float8_e4m3fn)
    pieces = pieces_of(lens)
    assert pieces.tolist() == [2, 0, 4]
    starts = (pieces.cumsum(0) - pieces).int()
    turned = torch.empty(6, 2, width, 64, dtype=v.dtype)
    turn_values[2, 4, 3](
        *(v.view(torch.int32), 2 * width // 4, width // 4, table, table.stride(0), None),
        *(lens, starts, turned.view(torch.int32)),
        **{"HEADS": 2, "WORDS": width // 4, "PAGE": page},
    )
    order = torch.tensor([8 * b + 2 * t + c for t in range(4) for b in (0, 1) for c in (0, 1)])
    for row, length in enumerate(lens.tolist()):
        key = torch.arange(length)
        values = torch.zeros(int(pieces[row]) * 64, 2, width)
        values[:length] = v[table[row].long()[key // page] * page + key % page].float()
        expected = values.view(-1, 16, 2, width)[:, order].view(-1, 64, 2, width)
        found = turned[starts[row] :][: pieces[row]].float()
        assert found.equal(expected.permute(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("changes", "is_rounded"),
    [
        ({}, True),
        ({"kv_dtype": "fp8_e5m2"}, False),
        ({"head_dim": 192, "v_head_dim": 128}, False),
        ({"head_dim": 96, "v_head_dim": 96}, False),
    ],
)
def test_queries_are_rounded_for_the_widths_of_the_kernel(monkeypatch, changes, is_rounded):
    """Other layers over 8-bit pools are widened as without the option."""
    monkeypatch.setattr(dispatch, "can_compile", lambda address: True)
    case = Case(
        name="of-this-test", steps=(LONG,), **{"head_dim": 128, "v_head_dim": 128, **FP8, **changes}
    )
    context = make_setup(case, SM90, "cpu").context
    layers = TritonBackend(context, {"fp8_products": "all"}, compute_units=3)._layers.values()
    for layer in layers:
        assert layer.tiles.kernel == PORTABLE
        wide = wide_tiles.wide_layer(layer, "all")
        assert wide.tiles.kernel == HOPPER
        assert wide.dispatch.traits.rounds == ("all" if is_rounded else "none")


@pytest.mark.parametrize(
    ("option", "max_error", "expected"),
    [
        ("none", None, "none"),
        ("all", None, "all"),
        ("none", ROUNDED_ERROR, "all"),
        ("queries", ROUNDED_ERROR, "queries"),
        ("all", ROUNDED_ERROR, "all"),
        ("none", ROUNDED_ERROR - 1, "none"),
    ],
)
def test_a_request_admits_rounding_by_its_error(option, max_error, expected):
    request = Case(name="of-this-test", steps=(LONG,)).request.replace(max_error=max_error)
    assert rounding({"fp8_products": option}, request) == expected


def test_the_option_does_not_go_with_a_smaller_error():
    request = Case(name="of-this-test", steps=(LONG,)).request.replace(max_error=2)
    with pytest.raises(InvalidInput, match="at least 16"):
        rounding({"fp8_products": "queries"}, request)
