from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import AttentionCall, LayerSpec, Platform
from attnmux.testing import Case, decode, extend, make_setup, prepare_step, verify

pytest.importorskip("triton")

import triton

from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.kernels.latent_merge import HELD, merge_slices
from attnmux.triton.launches import config_tables, dispatch
from attnmux.triton.launches.config_tables import ConfigTables
from attnmux.triton.launches.dispatch import SHARE_KERNELS, TILE_KERNELS, Dispatch, LayerTraits
from attnmux.triton.launches.operands import Keys, has_whole_rows, whole_rows
from attnmux.triton.launches.shapes import Shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz


@pytest.fixture(autouse=True)
def any_kernel(monkeypatch):
    """Kernels are chosen as if none was interpreted."""
    monkeypatch.setattr(dispatch, "can_compile", lambda address: True)


def gqa(width: int = 128, v_width: int | None = None, **more: Any) -> LayerSpec:
    given: dict[str, Any] = {
        "layer_id": 0,
        "tp_q_head_num": 32,
        "tp_k_head_num": 8,
        "tp_v_head_num": 8,
        "qk_head_dim": width,
        "v_head_dim": v_width or width,
        "scaling": 1.0,
    }
    return LayerSpec(**{**given, **more})


def mla(rank: int = 512, rope: int = 64, **more: Any) -> LayerSpec:
    heads = {"tp_q_head_num": 16, "tp_k_head_num": 1, "tp_v_head_num": 1, "kind": "mla"}
    return gqa(rank + rope, rank, **{**heads, **more})


def traits(
    layer: LayerSpec, dtype: torch.dtype | None = BF16, stored: torch.dtype = BF16, page: int = 1
) -> LayerTraits:
    k = torch.zeros(2, layer.tp_k_head_num, layer.qk_head_dim).to(stored)
    v = torch.zeros(2, layer.tp_v_head_num, layer.v_head_dim).to(stored)
    keys = Keys(k=k, v=v)
    return LayerTraits(layer=layer, shape=Shape.of(layer), dtype=dtype, keys=keys, page_size=page)


def kernels(layer: LayerTraits, arch: str = "sm90", *, hides: bool = False) -> tuple[str, str]:
    """For few new tokens, and for many."""
    found = Dispatch(traits=layer, arch=arch, page_size=16, tables=ConfigTables())
    return found.shares(1, hides=hides).kernel, found.tiles(hides=hides).kernel


@pytest.mark.parametrize(
    ("layer", "shares", "tiles"),
    [
        (gqa(), "hopper", "hopper"),
        (gqa(64), "hopper", "hopper"),
        (gqa(sinks=torch.zeros(32), sliding_window_size=5, logit_cap=3.0), "hopper", "hopper"),
        (gqa(tp_k_head_num=1, tp_v_head_num=1), "hopper", "hopper"),
        (gqa(256), "hopper", "hopper"),
        (gqa(80), "hopper", "hopper"),
        (gqa(96), "hopper", "hopper"),
        (gqa(112), "hopper", "hopper"),
        (gqa(192, 128), "hopper", "hopper"),
        (gqa(128, 64), "portable", "portable"),
        (gqa(72), "portable", "portable"),
        (gqa(48), "portable", "portable"),
        (mla(), "hopper_latent", "hopper_latent"),
        (mla(tp_q_head_num=128), "hopper_latent", "hopper_latent"),
        (mla(256), "portable", "portable"),
        (mla(512, 32), "portable", "portable"),
        (mla(sliding_window_size=7), "portable", "portable"),
        (mla(attention_chunk_size=7), "portable", "portable"),
        (mla(logit_cap=7.0), "portable", "portable"),
        (mla(sinks=torch.zeros(16)), "portable", "portable"),
    ],
)
def test_layers(layer, shares, tiles):
    assert kernels(traits(layer)) == (shares, tiles)


@pytest.mark.parametrize(
    ("layer", "queries", "rows_of_a_tile"),
    [
        (traits(gqa()), 8, None),
        (traits(gqa()), 9, 64),
        (traits(gqa()), 17, 128),
        (traits(gqa(64)), 16, 64),
        (traits(gqa(256)), 9, 128),
        (traits(gqa(72)), 64, None),
        (traits(gqa(), stored=E4M3), 8, None),
        (traits(gqa(), stored=E4M3), 9, 64),
        (traits(gqa(), stored=E4M3), 17, 128),
        (traits(gqa(64), stored=E4M3), 8, None),
        (traits(gqa(64), stored=E4M3), 9, 64),
        (traits(gqa(256), stored=E4M3), 9, 64),
        (traits(gqa(256), stored=E4M3), 17, 128),
        (traits(mla()), 64, None),
    ],
)
def test_chains(layer, queries, rows_of_a_tile):
    """Of 4 query heads a KV head; None: in shares."""
    found = Dispatch(traits=layer, arch="sm90", page_size=16).chains(queries)
    assert (None if found is None else found.block_m) == rows_of_a_tile


@pytest.mark.parametrize(
    ("dtype", "stored", "shares", "tiles", "latent"),
    [
        (BF16, BF16, "hopper", "hopper", "hopper_latent"),
        (FP16, FP16, "hopper", "hopper", "hopper_latent"),
        (BF16, E4M3, "hopper", "portable", "portable"),
        (FP16, E5M2, "hopper", "portable", "portable"),
        (BF16, FNUZ, "portable", "portable", "portable"),
        (BF16, FP16, "portable", "portable", "portable"),
        (FP32, FP32, "portable", "portable", "portable"),
        (None, BF16, "portable", "portable", "portable"),
    ],
)
def test_dtypes(dtype, stored, shares, tiles, latent):
    assert kernels(traits(gqa(), dtype, stored)) == (shares, tiles)
    assert kernels(traits(mla(), dtype, stored)) == (latent, latent)


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm100", "sm120", "gfx942", "xe2", ""])
def test_other_architectures(arch):
    for layer in (gqa(), gqa(64), mla()):
        assert kernels(traits(layer), arch) == ("portable", "portable")


@pytest.mark.parametrize(
    "bias", [{"alibi_slopes": torch.ones(32)}, {"relative_bias": torch.ones(32, 9)}]
)
def test_layers_with_biases_have_the_portable_kernels(bias):
    found = Dispatch(traits=traits(gqa(**bias)), arch="sm90", page_size=1)
    assert found.shares(1, hides=False).kernel == "portable"
    assert found.tiles(hides=False).kernel == "portable"


def test_steps_with_masks_or_items():
    assert kernels(traits(gqa()), hides=True) == ("hopper", "portable")
    assert kernels(traits(mla()), hides=True) == ("portable", "portable")


def test_latent_keys_are_looked_up_slot_by_slot():
    assert kernels(traits(mla(), page=16)) == ("portable", "portable")


def test_a_layer_that_no_pool_stores_has_keys_of_the_model_s_dtype():
    encoder = gqa(is_causal=False)
    assert kernels(replace(traits(encoder), keys=None)) == ("hopper", "hopper")
    assert kernels(replace(traits(encoder, None), keys=None)) == ("portable", "portable")


def test_rows_of_a_pool_that_are_not_aligned():
    buffer = torch.zeros(4, 8, 136, dtype=BF16)
    for keys, expected in (
        (buffer[..., :128], "portable"),
        (buffer.flatten()[1 : 1 + 2 * 8 * 128].view(2, 8, 128), "portable"),
        (buffer.flatten()[: 2 * 8 * 128].view(2, 8, 128), "hopper"),
    ):
        layer = replace(traits(gqa()), keys=Keys(k=keys, v=keys))
        assert kernels(layer) == (expected, expected)


def test_keys_of_8_bits_have_an_entry_of_their_own():
    found = [
        Dispatch(traits=traits(gqa(), BF16, stored), arch="sm90", page_size=1).shares(
            1, hides=False
        )
        for stored in (BF16, E4M3)
    ]
    assert [(config.block_n, config.num_stages) for config in found] == [(64, 4), (128, 4)]


@pytest.mark.parametrize(
    ("layer", "queries", "rows"),
    [(gqa(), 1, 8), (gqa(), 4, 16), (gqa(), 40, 32), (mla(), 1, 64), (mla(), 5, 64)],
)
def test_rows_of_a_tile(layer, queries, rows):
    found = Dispatch(traits=traits(layer), arch="sm90", page_size=1)
    assert found.shares(queries, hides=False).block_m == rows


@pytest.mark.parametrize(
    ("layer", "stored", "arch", "rows"),
    [
        (gqa(64, 16), E4M3, "sm90", (32, 32)),
        (gqa(128, 32), E5M2, "sm90", (32, 32)),
        (gqa(64, 1), E4M3, "sm90", (32, 32)),
        (gqa(96, 64), E4M3, "sm90", (128, 64)),
        (gqa(64, 16), BF16, "sm90", (128, 64)),
        (gqa(64, 16), E4M3, "sm80", (128, 64)),
    ],
)
def test_narrow_v_of_8_bits_keeps_to_tiles_that_compile_correctly(layer, stored, arch, rows):
    found = Dispatch(traits=traits(layer, stored=stored), arch=arch, page_size=1)
    tiles, shares = found.tiles(hides=False), found.shares(10, hides=False)
    assert (tiles.block_m, shares.block_m) == rows


def test_whole_rows():
    whole = torch.randn(3, 4, 64).to(BF16)
    assert whole_rows(whole) is whole
    torch.testing.assert_close(whole_rows(whole, FP32), whole.float())
    token, head, column = whole.stride()
    odd = torch.randn(4096).to(BF16)
    for stride, offset in (
        ((token, head, column), 1),
        ((4 * 65, 65, column), 0),
        ((token + 8, head, column), 0),
        ((2 * token, head, 2), 0),
    ):
        rows = odd.as_strided((3, 4, 32), stride, offset)
        assert not has_whole_rows(rows)
        copied = whole_rows(rows)
        assert has_whole_rows(copied)
        assert torch.equal(copied, rows)


def test_a_single_token_s_stride_may_be_any():
    rows = torch.randn(1, 4, 64).to(BF16).as_strided((1, 4, 64), (3, 64, 1))
    assert rows.is_contiguous()
    assert has_whole_rows(whole_rows(rows))


MLA: dict[str, Any] = {
    "kind": "mla",
    "num_kv_heads": 1,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
GQA: dict[str, Any] = {"head_dim": 128, "v_head_dim": 128}
TREE: dict[str, Any] = {"spec_topk": 4}


def launched_by(step: Any, change: Any = None, **case: Any) -> dict[str, dict[str, Any]]:
    """The arguments of each launch of a step, by the kernel's module, a plan's by its name."""
    setup = make_setup(
        Case(name="of-this-test", steps=(step,), windows=(None,), **case),
        Platform.parse("nvidia:sm90,cuda=13.0"),
        "cpu",
    )
    backend = TritonBackend(setup.context, {}, compute_units=3)
    made = prepare_step(setup, step)
    given = made.inputs[0]
    if change is not None:
        given = change(given)

    def taken() -> None:
        backend.init_forward_metadata(made.batch)
        call = AttentionCall(
            given.q,
            given.k,
            given.v,
            given.layer,
            case.get("save_kv_cache", True),
            given.q_rope,
            given.k_rope,
        )
        backend.forward_extend(call, made.batch)

    launched = {}
    for launch in backend.launcher.rehearse(taken):
        kernel = launch.bound.kernel
        is_plan = kernel.__name__.startswith("plan")
        name = (
            kernel.__name__
            if is_plan
            else kernel.fn.__module__.removeprefix(f"{dispatch.KERNELS}.")
        )
        launched[name] = dict(zip(kernel.arg_names, launch.values, strict=True))
    return launched


@pytest.mark.parametrize(
    ("step", "case", "kernel"),
    [
        (decode(45, 3), GQA, "hopper.shares"),
        (verify(3, 40, 4), GQA, "hopper.shares"),
        (verify(20, 40, 4), GQA, "hopper.tiles"),
        (verify(5, 40, 4), {**GQA, **TREE}, "hopper.shares"),
        (verify(20, 40, 4), {**GQA, **TREE}, "hopper.shares"),
        (extend((16, 41), (0, 7)), GQA, "hopper.tiles"),
        (extend((16, 8), items=((3, 4),)), GQA, "tiles"),
        (decode(45, 3), MLA, "hopper.latent"),
        (verify(3, 40, 4), MLA, "hopper.latent"),
        (verify(5, 40, 4), {**MLA, **TREE}, "shares"),
        (extend((16, 41), (0, 7)), MLA, "hopper.latent_tiles"),
    ],
)
def test_the_kernel_of_a_step(step, case, kernel):
    launched = {name for name in launched_by(step, **case) if not name.startswith("plan")}
    merge = {"latent_merge"} if kernel == "hopper.latent" else set()
    assert launched - {"indices"} == {kernel} | merge


def test_each_kernel_s_tiles_are_planned_for_it():
    """A step's mask may leave it to a kernel whose tiles are others."""
    plain, tree = (launched_by(verify(5, 40, 4), **MLA, **more) for more in ({}, TREE))
    assert plain["plan_shares"]["BLOCK_N"] == 64
    assert tree["plan_shares"]["BLOCK_N"] == tree["shares"]["BLOCK_N"] == 32


def test_rows_that_are_not_aligned_are_copied():
    def shifted(given: Any) -> Any:
        def moved(rows: torch.Tensor) -> torch.Tensor:
            wide = torch.zeros(*rows.shape[:2], rows.shape[2] + 1, dtype=rows.dtype)
            wide[..., 1:] = rows
            return wide[..., 1:]

        return dataclasses.replace(given, q=moved(given.q), k=moved(given.k), v=moved(given.v))

    for step, more, kernel in (
        (decode(45, 3), {}, "hopper.shares"),
        (extend((16, 41)), {}, "hopper.tiles"),
        (extend((0, 41)), {"save_kv_cache": False}, "hopper.tiles"),
    ):
        values = launched_by(step, shifted, **GQA, **more)[kernel]
        for name in ("q", "k", "v"):
            assert values[name].data_ptr() % 16 == 0
            assert values[f"{name}_stride"] % 16 == 0
            assert values[f"{name}_head_stride"] % 16 == 0


def test_keys_of_a_call_are_converted_to_the_dtype_of_q():
    def as_floats(given: Any) -> Any:
        return dataclasses.replace(given, k=given.k.float(), v=given.v.float())

    values = launched_by(extend((0, 41)), as_floats, **GQA, save_kv_cache=False)["hopper.tiles"]
    assert values["k"].dtype == values["v"].dtype == values["q"].dtype


def test_parts_of_a_batch_are_merged_in_slices_by_its_size():
    one, many = (launched_by(decode(*[45] * size), **MLA)["latent_merge"] for size in (1, 4))
    assert one["SLICE_ROWS"] < many["SLICE_ROWS"]


def test_deterministic_slices_do_not_depend_on_the_batch():
    one, many = (
        launched_by(decode(*[45] * size), **MLA, deterministic=True)["latent_merge"]
        for size in (1, 4)
    )
    assert all(one[name] == many[name] for name in ("SLICE_ROWS", "COLUMNS", "PARTS"))


@pytest.mark.parametrize(
    ("items", "part_rows", "slices"),
    [(1, 1, 4), (1, 16, 64), (64, 16, 16), (256, 16, 4), (1, 64, 256)],
)
def test_slices_cover_an_item(items, part_rows, slices):
    found, constants = merge_slices(items, part_rows, 132)
    assert found == slices
    values = constants["SLICE_ROWS"] * constants["COLUMNS"]
    assert found * values == part_rows * 512
    assert constants["PARTS"] * values == HELD


def test_another_release_of_gluon_leaves_the_portable_kernels(monkeypatch):
    monkeypatch.undo()
    address = SHARE_KERNELS["hopper"].address
    dispatch.kernel_at(address)  # in the mode in which Triton itself was imported
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton, "__version__", "3.6.1")
    assert dispatch.can_compile(address)
    assert not dispatch.can_compile("attnmux.triton.kernels.not_there:kernel")
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert not dispatch.can_compile(address)
    assert kernels(traits(gqa())) == ("portable", "portable")
    monkeypatch.setattr(triton, "__version__", "3.6.1")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert kernels(traits(gqa())) == ("portable", "portable")


def test_every_config_names_a_known_kernel():
    assert {entry.config.kernel for entry in config_tables.SHARES} == SHARE_KERNELS.keys()
    assert {entry.config.kernel for entry in config_tables.TILES} == TILE_KERNELS.keys()
