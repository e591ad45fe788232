from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core.layer import LayerSpec

pytest.importorskip("triton")

from attnmux.triton.launch import Launches
from attnmux.triton.launch_tables import SHARES, TILES
from attnmux.triton.launch_types import Entry, ShareLaunch, TileLaunch, dims_of, width_of
from attnmux.triton.shapes import Shape

GQA = Shape.of(
    LayerSpec(
        layer_id=0,
        tp_q_head_num=32,
        tp_k_head_num=8,
        tp_v_head_num=8,
        qk_head_dim=128,
        v_head_dim=128,
        scaling=1.0,
    )
)
MLA = Shape.of(
    LayerSpec(
        layer_id=0,
        tp_q_head_num=128,
        tp_k_head_num=1,
        tp_v_head_num=1,
        qk_head_dim=576,
        v_head_dim=512,
        scaling=1.0,
        kind="mla",
    )
)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "xe2", "unheard-of"])
def test_what_any_gpu_takes(arch):
    assert Launches().tiles(GQA, arch) == TileLaunch(
        block_m=64, block_n=64, num_warps=4, num_stages=2
    )
    assert Launches().shares(GQA, 1, arch) == ShareLaunch(
        block_m=16,
        block_n=64,
        num_warps=4,
        num_stages=2,
        programs_per_unit=2,
        least_share=2,
        merged_rows=32,
    )
    assert Launches().tiles(MLA, arch) == TileLaunch(
        block_m=32, block_n=16, num_warps=4, num_stages=2
    )
    assert Launches().shares(MLA, 1, arch) == ShareLaunch(
        block_m=16,
        block_n=16,
        num_warps=4,
        num_stages=2,
        programs_per_unit=1,
        least_share=4,
        merged_rows=16,
    )


@pytest.mark.parametrize("width", ["narrow", "wide", "latent"])
def test_there_is_an_entry_for_whatever_comes(width):
    for table in (TILES, SHARES):
        assert any(
            (entry.arch, entry.width, entry.dims, entry.page) == ("", width, None, None)
            for entry in table
        )


PLAIN = TileLaunch(block_m=64, block_n=64, num_warps=4, num_stages=2)


def of(warps: int, **speaks: object) -> Entry[TileLaunch]:
    return Entry(**speaks, launch=replace(PLAIN, num_warps=warps))


def test_the_most_specific_entry_counts():
    entries = (
        of(2, arch="sm90", dims=(128, 128), page=16),
        of(3, arch="sm90", dims=(128, 128)),
        of(4, arch="sm90", width="narrow"),
        of(5, arch="sm", dims=(128, 128), page=16),
        of(6, dims=(576, 512), least_rows=64),
        of(7, dims=(576, 512)),
    )
    launches = Launches(own_tiles=entries)
    found = [
        launches.tiles(shape, arch, page).num_warps
        for shape, arch, page in (
            (GQA, "sm90", 16),
            (GQA, "sm90", 1),
            (GQA, "sm86", 16),
            (MLA, "sm90", 16),
        )
    ]
    assert found == [2, 3, 5, 6]
    # What no own entry speaks of is looked up in the tables.
    assert launches.tiles(GQA, "sm86", 1) == Launches().tiles(GQA, "sm86", 1)


def test_of_two_entries_that_say_as_much_the_later_counts():
    launches = Launches(own_tiles=(of(2, arch="sm90"), of(3, arch="sm90")))
    assert launches.tiles(GQA, "sm90").num_warps == 3


def test_an_entry_may_name_a_kernel_which_only_who_can_launch_it_is_given():
    special = Entry(arch="sm90", dims=(128, 128), launch=replace(PLAIN, kernel="hopper"))
    launches = Launches(own_tiles=(special,))
    assert launches.tiles(GQA, "sm90").kernel == "portable"
    assert launches.tiles(GQA, "sm90", kernels=("portable", "hopper")) == special.launch
    assert launches.tiles(GQA, "sm80", kernels=("portable", "hopper")).kernel == "portable"


@pytest.mark.parametrize(("queries", "rows"), [(1, 16), (4, 16), (5, 32), (16, 64), (64, 64)])
def test_rows_of_a_share_are_those_that_there_are(queries, rows):
    launch = Launches().shares(GQA, queries, "sm90")
    assert launch.block_m == rows


def test_widths_and_dims():
    assert (width_of(GQA), width_of(MLA)) == ("narrow", "latent")
    assert (dims_of(GQA), dims_of(MLA)) == ((128, 128), (576, 512))
