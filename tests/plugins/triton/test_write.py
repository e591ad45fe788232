"""The backend writes the same bits as the pool's own methods."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux.core import (
    InvalidInput,
    KVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    Platform,
    SWAKVPool,
)
from attnmux.core.contract.dtypes import ACTIVATION_DTYPES, STORABLE_DTYPES
from attnmux.testing import Case, decode, make_setup, prepare_step
from attnmux.testing.fakes.backend import FakeBackend

pytest.importorskip("triton")

from attnmux.triton.attention.backend import TritonBackend  # where there is a Triton
from attnmux.triton.attention.write import LayerWriter, PoolWriter, make_writer  # as above

PAGE_SIZE = 4
NUM_SLOTS = 36
ANY_SCALE = st.sampled_from([None, 1.0, 0.37, 2.5])


def mha(dtype: torch.dtype, layer_id: int = 5, heads: int = 3, dims: Any = (10, 7)) -> KVPool:
    return MHATokenToKVPool(
        size=NUM_SLOTS - PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=dtype,
        layer_ids=[layer_id],
        num_kv_heads=heads,
        head_dim=dims[0],
        v_head_dim=dims[1],
        device="cpu",
    )


def mla(dtype: torch.dtype, layer_id: int = 5, dims: Any = (12, 5)) -> KVPool:
    return MLATokenToKVPool(
        size=NUM_SLOTS - PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=dtype,
        layer_ids=[layer_id],
        kv_lora_rank=dims[0],
        qk_rope_head_dim=dims[1],
        device="cpu",
    )


def layer_of(pool: KVPool, layer_id: int = 5, **changes: Any) -> LayerSpec:
    k, v = pool.get_kv_buffer(layer_id)
    is_latent = k.data_ptr() == v.data_ptr()
    made = LayerSpec(
        layer_id=layer_id,
        tp_q_head_num=k.shape[1],
        tp_k_head_num=k.shape[1],
        tp_v_head_num=k.shape[1],
        qk_head_dim=k.shape[2],
        v_head_dim=v.shape[2],
        scaling=1.0,
        kind="mla" if is_latent else "mha",
    )
    return replace(made, **changes)


def rows_of(layer: LayerSpec, num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Values of all magnitudes, some of which no format holds."""
    heads, rope = layer.tp_k_head_num, layer.qk_rope_head_dim
    made = []
    for width in (layer.qk_head_dim - rope, rope or layer.v_head_dim):
        rows = torch.randn(num_tokens, heads, width) * 2.0 ** torch.randint(
            -14, 18, (num_tokens, heads, width)
        )
        odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 448.0, 464.0, 1e5])
        picked = odd[torch.randint(0, len(odd), rows.shape)]
        made.append(torch.where(torch.rand(rows.shape) < 0.1, picked, rows).to(dtype))
    return made


def as_the_pool_does(pool: KVPool, layer: LayerSpec, loc: torch.Tensor, rows: Any) -> None:
    if layer.kind == "mla":
        pool.set_mla_kv_buffer(layer, loc, *rows, layer.k_scale)
    else:
        pool.set_kv_buffer(layer, loc, *rows, layer.k_scale, layer.v_scale)


def in_one_launch(pool: KVPool, layer: LayerSpec, loc: torch.Tensor, rows: Any) -> None:
    writer = LayerWriter.of(pool, layer, loc, rows[0], is_latent=layer.kind == "mla")
    writer.write(layer, loc, *rows)


NOT_A_NUMBER = 1 << 40


def bits(buffer: torch.Tensor) -> torch.Tensor:
    """The bits as integers, with one value for every NaN."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[buffer.itemsize]
    return buffer.view(word).long().masked_fill(buffer.float().isnan(), NOT_A_NUMBER)


def assert_same(pool: KVPool, expected: KVPool, layer_id: int = 5) -> None:
    """Beyond slot 0, which is padding's."""
    for ours, theirs in zip(
        pool.get_kv_buffer(layer_id), expected.get_kv_buffer(layer_id), strict=True
    ):
        assert torch.equal(bits(ours[1:]), bits(theirs[1:]))


def slots(num_tokens: int) -> torch.Tensor:
    return 1 + torch.randperm(NUM_SLOTS - 1)[:num_tokens]


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES)
@pytest.mark.parametrize(("heads", "dims"), [(3, (128, 128)), (1, (16, 16)), (5, (80, 48))])
@settings(max_examples=3, deadline=None)
@given(num_tokens=st.integers(0, NUM_SLOTS - 1), k_scale=ANY_SCALE, v_scale=ANY_SCALE)
def test_four_bits(heads, dims, dtype, num_tokens, k_scale, v_scale):
    pool, expected = (mha(torch.float4_e2m1fn_x2, heads=heads, dims=dims) for _ in range(2))
    widths = {"qk_head_dim": dims[0], "v_head_dim": dims[1]}
    layer = layer_of(pool, k_scale=k_scale, v_scale=v_scale, **widths)
    loc, rows = slots(num_tokens), rows_of(layer, num_tokens, dtype)
    # Halfway between two numbers, often
    rows[0][: num_tokens // 2] = torch.randint(-24, 25, rows[0][: num_tokens // 2].shape) * 0.25
    as_the_pool_does(expected, layer, loc, rows)
    in_one_launch(pool, layer, loc, rows)
    for ours, theirs in zip(pool.memory(5), expected.memory(5), strict=True):
        assert torch.equal(ours.view(torch.uint8)[1:], theirs.view(torch.uint8)[1:])


@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize("stored", STORABLE_DTYPES)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES)
@settings(max_examples=4, deadline=None)
@given(num_tokens=st.integers(0, NUM_SLOTS - 1), k_scale=ANY_SCALE, v_scale=ANY_SCALE)
def test_every_dtype(make, stored, dtype, num_tokens, k_scale, v_scale):
    pool, expected = make(stored), make(stored)
    layer = layer_of(pool, k_scale=k_scale, v_scale=v_scale)
    loc, rows = slots(num_tokens), rows_of(layer, num_tokens, dtype)
    in_one_launch(pool, layer, loc, rows)
    as_the_pool_does(expected, layer, loc, rows)
    assert_same(pool, expected)


@pytest.mark.parametrize("stored", KVPool.FP8_DTYPES)
def test_ties_and_the_whole_range(stored):
    """Between all neighbours of the format, and at its ends."""
    values = torch.arange(256, dtype=torch.uint8).view(stored).float()
    values = values[values.isfinite()].unique()
    between = (values[1:] + values[:-1]) / 2
    largest = values.max()
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38, -1e38, 1e-38])
    every = torch.cat([values, between, between.nextafter(largest), largest + between, ends])
    rows = torch.zeros(30, 3, 17)
    # Times 41 and divided by it they are themselves; times 1 / 41 they are not.
    for scale, factor in ((None, 1.0), (3.0, 1.0), (41.0, 41.0)):
        rows.view(-1)[: every.numel()] = every * factor
        given_rows = [rows[..., :10], rows[..., 10:]]
        pool, expected = mha(stored), mha(stored)
        layer = layer_of(pool, k_scale=scale, v_scale=scale)
        in_one_launch(pool, layer, torch.arange(1, 31), given_rows)
        as_the_pool_does(expected, layer, torch.arange(1, 31), given_rows)
        assert_same(pool, expected)


@pytest.mark.parametrize(("heads", "dims"), [(1, (1, 1)), (2, (1100, 3)), (24, (16, 64))])
def test_any_width(heads, dims):
    """More columns than a tile has, and fewer tokens or more."""
    pool, expected = (mha(torch.bfloat16, heads=heads, dims=dims) for _ in range(2))
    layer = layer_of(pool)
    loc, rows = slots(9), rows_of(layer, 9, torch.float32)
    in_one_launch(pool, layer, loc, rows)
    as_the_pool_does(expected, layer, loc, rows)
    assert_same(pool, expected)


def as_slices(rows: torch.Tensor) -> torch.Tensor:
    """K and V as slices of one projection, so that tokens are far apart."""
    room = torch.full((rows.shape[0], 2, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
    room[:, 1] = rows
    return room[:, 1]


def heads_first(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(0, 1).contiguous().transpose(0, 1)


def columns_apart(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize("spread", [as_slices, heads_first, columns_apart])
def test_any_strides(make, spread):
    pool, expected = make(torch.float8_e4m3fn), make(torch.float8_e4m3fn)
    layer = layer_of(pool, k_scale=0.5)
    loc, rows = slots(7), rows_of(layer, 7, torch.bfloat16)
    every_other = torch.stack([loc, loc - 1], 1)[:, 0]
    in_one_launch(pool, layer, every_other, [spread(part) for part in rows])
    as_the_pool_does(expected, layer, loc, rows)
    assert_same(pool, expected)


def test_what_requires_a_gradient():
    pool, expected = mha(torch.float32), mha(torch.float32)
    layer = layer_of(pool)
    loc, rows = slots(3), [part.requires_grad_() for part in rows_of(layer, 3, torch.float32)]
    in_one_launch(pool, layer, loc, rows)
    as_the_pool_does(expected, layer, loc, rows)
    assert_same(pool, expected)
    assert not any(buffer.requires_grad for buffer in pool.get_kv_buffer(5))


def window_pool(make) -> SWAKVPool:
    """Layer 6 is the window's, whose pages are in the opposite order."""
    pool = SWAKVPool(full=make(torch.float16, 5), swa=make(torch.float16, 6))
    pages = torch.arange(1, NUM_SLOTS // PAGE_SIZE)
    pool.pair(pages, pages.flip(0))
    return pool


@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize("layer_id", [5, 6])
def test_a_pool_that_translates_slots(make, layer_id):
    pool, expected = window_pool(make), window_pool(make)
    layer = layer_of(pool, layer_id)
    loc, rows = slots(11), rows_of(layer, 11, torch.float16)
    in_one_launch(pool, layer, loc, rows)
    as_the_pool_does(expected, layer, loc, rows)
    for stored in (5, 6):
        assert_same(pool, expected, stored)


def test_a_writer_compiles_over_a_pool_that_alone_can_translate(monkeypatch):
    """It has no table for kernels, and its look-up fails for a slot that does not exist."""
    pool = window_pool(mha)
    monkeypatch.setattr(SWAKVPool, "slot_map", lambda *_: None)
    for layer_id in (5, 6):
        PoolWriter(pool).warm_up(layer_of(pool, layer_id), torch.float16)


@pytest.mark.parametrize("layer_id", [5, 6])
def test_a_table_of_slots_in_int64(layer_id, monkeypatch):
    """SGLang's table has that dtype."""
    pool, expected = window_pool(mha), window_pool(mha)
    found = SWAKVPool.slot_map
    monkeypatch.setattr(
        SWAKVPool,
        "slot_map",
        lambda self, at: None if found(self, at) is None else found(self, at).long(),
    )
    layer = layer_of(pool, layer_id)
    loc, rows = slots(11), rows_of(layer, 11, torch.float16)
    in_one_launch(pool, layer, loc, rows)
    as_the_pool_does(expected, layer, loc, rows)
    assert_same(pool, expected, layer_id)


@pytest.mark.parametrize("layer_id", [5, 6])
def test_a_pool_of_several_dtypes(layer_id):
    """Each layer is rounded and scaled as its own dtype is."""

    def pools() -> SWAKVPool:
        return SWAKVPool(full=mha(torch.float8_e4m3fn, 5), swa=mha(torch.float32, 6))

    pool, expected = pools(), pools()
    layer = layer_of(pool, layer_id, k_scale=0.37, v_scale=2.5)
    loc, rows = slots(11), rows_of(layer, 11, torch.float32)
    PoolWriter(pool).write(layer, loc, *rows, is_latent=False)
    as_the_pool_does(expected, layer, loc, rows)
    assert_same(pool, expected, layer_id)


def test_slots_that_there_are_not():
    """They are skipped, and no memory after the pool changes. Padding writes to slot 0."""
    room = torch.zeros(NUM_SLOTS + 8, 3, 10)
    pool, expected = mha(torch.float32), mha(torch.float32)
    first = pool.layer_ids[0]
    pool._hold({**pool._buffers, first: (room[4:-4], pool.get_value_buffer(first))})
    layer = layer_of(pool)
    rows = rows_of(layer, 6, torch.float32)
    loc = torch.tensor([7, -1, NUM_SLOTS, 0, 2**40, 0])
    in_one_launch(pool, layer, loc, rows)
    as_the_pool_does(expected, layer, loc[:1], [part[:1] for part in rows])
    assert_same(pool, expected)
    assert not room[:4].any()
    assert not room[-4:].any()


class Launches(TorchDispatchMode):
    """Counts operations, and launches among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def backend_of(**changes: Any) -> tuple[TritonBackend, Any]:
    """A backend, and a decode step that it is given."""
    case = Case(name="a step", steps=(decode(9, 2),), **changes)
    setup = make_setup(case, Platform.parse("nvidia:sm90,cuda=13.0"), "cpu")
    return TritonBackend(setup.context, {}, compute_units=3), prepare_step(setup, case.steps[0])


LATENT = {
    "kind": "mla",
    "num_kv_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
}


@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "fp8_e4m3"}, LATENT])
def test_one_launch_and_nothing_else(changes):
    backend, step = backend_of(**changes)
    pool = backend.context.token_to_kv_pool
    for call in step.inputs:
        for _ in range(2):  # the first asks the pool whether it stores such a layer
            for buffer in pool.get_kv_buffer(call.layer.layer_id):
                buffer.view(torch.uint8).zero_()
            with Launches() as seen:
                backend.save_kv(call.k, call.v, call.layer, step.batch, k_rope=call.k_rope)
        assert seen.names == ["attnmux_interpreted.launch.default"]
        k, _ = pool.get_kv_buffer(call.layer.layer_id)
        assert k[step.batch.out_cache_loc].float().any(-1).all()


def refusal(save: Callable[[], None]) -> tuple[str, str]:
    with pytest.raises(InvalidInput) as caught:
        save()
    return caught.value.argument, str(caught.value)


BAD: dict[str, Callable[[Any], dict[str, Any]]] = {
    "no V": lambda call: {"v": None},
    "V of K's width": lambda call: {"v": call.k},
    "too few tokens": lambda call: {"k": call.k[:1]},
    "tokens that are too many": lambda call: {"v": torch.cat([call.v, call.v])},
    "a dtype of none": lambda call: {"k": call.k.double()},
    "a dtype of none in V": lambda call: {"v": call.v.int()},
    "another device": lambda call: {"v": call.v.to("meta")},
    "a latent": lambda call: {"v": None, "k_rope": call.k},
    "a latent and V": lambda call: {"k_rope": call.k},
    "an unknown layer": lambda call: {"layer": replace(call.layer, layer_id=77)},
    "cross attention without slots": lambda call: {
        "layer": replace(call.layer, is_cross_attention=True)
    },
}


def without_writer(backend: TritonBackend) -> TritonBackend:
    """The same backend, whose rows the pool's own methods write."""
    plain = copy.copy(backend)
    plain._kv_writer = None
    return plain


@pytest.mark.parametrize("has_written", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_refuses_as_the_pool_does(case, has_written):
    backend, step = backend_of(kv_dtype="fp8_e5m2", head_dim=16, v_head_dim=12)
    call = step.inputs[0]
    given = {"k": call.k, "v": call.v, "layer": call.layer, "k_rope": None, "batch": step.batch}
    if has_written:
        backend.save_kv(**given)
    memory = backend.context.token_to_kv_pool.get_kv_buffer(call.layer.layer_id)
    before = [bits(buffer) for buffer in memory]
    given |= BAD[case](call)
    ours = refusal(lambda: backend.save_kv(**given))
    theirs = refusal(lambda: without_writer(backend).save_kv(**given))
    assert ours == theirs
    assert all(map(torch.equal, before, map(bits, memory)))


@pytest.mark.parametrize(
    "change",
    [
        lambda call: {"k_rope": call.k_rope[..., :3]},
        lambda call: {"k": torch.cat([call.k, call.k], -1)},
        lambda call: {"k_rope": None, "v": call.k},
    ],
)
def test_refuses_what_a_pool_of_latents_does(change):
    backend, step = backend_of(kv_dtype="fp8_e4m3", **LATENT)
    call = step.inputs[0]
    given = {"k": call.k, "v": None, "layer": call.layer, "k_rope": call.k_rope}
    given |= {"batch": step.batch} | change(call)
    ours = refusal(lambda: backend.save_kv(**given))
    assert ours == refusal(lambda: without_writer(backend).save_kv(**given))


@pytest.mark.parametrize(
    "loc", [torch.tensor([3, 4], dtype=torch.int32), torch.tensor([[3, 4]]), torch.tensor(3)]
)
def test_refuses_slots_that_are_no_vector(loc):
    backend, step = backend_of()
    call, batch = step.inputs[0], replace(step.batch, out_cache_loc=loc)
    ours = refusal(lambda: backend.save_kv(call.k, call.v, call.layer, batch))
    theirs = refusal(lambda: without_writer(backend).save_kv(call.k, call.v, call.layer, batch))
    assert ours == theirs


@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_warming_up_writes_nothing(make, stored):
    pool, untouched = make(stored), make(stored)
    PoolWriter(pool).warm_up(layer_of(pool), torch.bfloat16)
    assert_same(pool, untouched)


@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "fp8_e4m3"}, LATENT])
def test_serves_other_backends(changes):
    """`save_kv` of a backend without a writer of its own, by the context's and by the pool."""
    backend, step = backend_of(**changes)
    context = backend.context
    writer = make_writer(context)
    saved = []
    for kv_writer in (writer, None):
        other = FakeBackend(replace(context, kv_writer=kv_writer))
        for _ in range(2):  # the first asks the pool whether it stores such a layer
            context.token_to_kv_pool.zero()
            with Launches() as seen:
                for call in step.inputs:
                    other.save_kv(call.k, call.v, call.layer, step.batch, k_rope=call.k_rope)
        is_fused = seen.names == ["attnmux_interpreted.launch.default"] * len(step.inputs)
        assert is_fused == (kv_writer is not None)
        buffers = [context.token_to_kv_pool.get_kv_buffer(each.layer_id) for each in context.layers]
        saved.append([bits(buffer) for pair in buffers for buffer in pair])
    assert all(map(torch.equal, *saved))
