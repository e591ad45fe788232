from __future__ import annotations

import pytest

from attnmux.core.layer import LayerSpec
from attnmux.triton.launch import (
    SHARES,
    TILES,
    ShareLaunch,
    TileLaunch,
    share_launch,
    tile_launch,
    width_of,
)
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
    assert tile_launch(GQA, arch) == TileLaunch(block_m=64, block_n=64, num_warps=4, num_stages=2)
    assert share_launch(GQA, 1, arch) == ShareLaunch(
        block_m=16,
        block_n=64,
        num_warps=4,
        num_stages=2,
        programs_per_unit=2,
        least_share=2,
        parts=8,
    )


def test_an_architecture_is_served_by_the_entry_that_says_most_of_its_name():
    assert tile_launch(MLA, "sm90") == TILES["sm90", "latent"]
    assert tile_launch(MLA, "sm89") == TILES["sm", "latent"]
    assert tile_launch(MLA, "gfx942") == TILES["", "latent"]


@pytest.mark.parametrize("width", ["narrow", "wide", "latent"])
def test_there_is_an_entry_for_whatever_comes(width):
    assert ("", width) in TILES
    assert ("", width) in SHARES


@pytest.mark.parametrize(("queries", "rows"), [(1, 16), (4, 16), (5, 32), (16, 64), (64, 64)])
def test_rows_of_a_share_are_those_that_there_are(queries, rows):
    launch = share_launch(GQA, queries, "sm90")
    assert launch.block_m == rows
    assert launch.parts * rows <= 8 * 16


def test_widths():
    assert (width_of(GQA), width_of(MLA)) == ("narrow", "latent")
