from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core import LayerSpec

pytest.importorskip("triton")

from attnmux.triton.launches.config_tables import SHARES, TILES, ConfigTables
from attnmux.triton.launches.configs import (
    PORTABLE,
    ConfigEntry,
    ConfigQuery,
    ShareConfig,
    TileConfig,
)
from attnmux.triton.launches.shapes import Shape

LAYER = LayerSpec(
    layer_id=0,
    tp_q_head_num=32,
    tp_k_head_num=8,
    tp_v_head_num=8,
    qk_head_dim=128,
    v_head_dim=128,
    scaling=1.0,
)
GQA = Shape.of(LAYER)
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


def query(
    shape: Shape, arch: str, queries: int = 1, page: int = 1, kernels: tuple[str, ...] = (PORTABLE,)
) -> ConfigQuery:
    return ConfigQuery.of(shape, queries, arch, page, kernels, key_bits=16)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "xe2", "unheard-of"])
def test_configs_for_any_gpu(arch):
    tables = ConfigTables()
    gqa, mla = query(GQA, arch), query(MLA, arch)
    common = {"num_warps": 4, "num_stages": 2}
    assert tables.tiles(gqa) == TileConfig(block_m=64, block_n=64, **common)
    assert tables.tiles(mla) == TileConfig(block_m=32, block_n=16, **common)
    assert tables.shares(gqa) == ShareConfig(
        block_m=16, block_n=64, programs_per_unit=2, least_share=2, merged_rows=32, **common
    )
    assert tables.shares(mla) == ShareConfig(
        block_m=16, block_n=16, programs_per_unit=1, least_share=4, merged_rows=16, **common
    )


def test_gfx12_has_launches_of_its_own():
    """Its warps have 32 threads; gfx9 and gfx11 take those for any GPU."""
    tables = ConfigTables()
    for shape in (GQA, MLA):
        any_gpu, gfx9, gfx11, gfx12 = (
            (tables.tiles(query(shape, arch)), tables.shares(query(shape, arch)))
            for arch in ("unheard-of", "gfx942", "gfx1100", "gfx1201")
        )
        assert any_gpu == gfx9 == gfx11
        assert all(config.num_warps == 8 for config in gfx12)


@pytest.mark.parametrize(
    ("dims", "arch", "smaller"),
    [
        *(((256, 256), arch, True) for arch in ("sm75", "sm86", "sm89", "sm120", "sm121")),
        *(((256, 256), arch, False) for arch in ("sm87", "sm90", "sm100", "sm103")),
        *(((448, 256), arch, True) for arch in ("sm75", "sm80", "sm86", "sm100", "sm120")),
        *(((192, 128), arch, False) for arch in ("sm80", "sm86", "sm100")),
        *(((224, 128), arch, True) for arch in ("sm75", "sm86", "sm120")),
    ],
)
def test_tiles_are_smaller_where_shared_memory_is(dims, arch, smaller):
    """Than those of SM80 for heads of 256, or of as many columns as their width allows."""
    shape = Shape.of(replace(LAYER, qk_head_dim=dims[0], v_head_dim=dims[1]))
    usual = ConfigTables().tiles(
        replace(query(shape, "sm80"), columns=512 if shape.width == "wide" else 256)
    )
    tiles = ConfigTables().tiles(query(shape, arch))
    assert (tiles.block_m * tiles.block_n < usual.block_m * usual.block_n) is smaller


@pytest.mark.parametrize("width", ["narrow", "wide", "latent"])
def test_every_width_has_an_entry_for_any_gpu(width):
    for table in (TILES, SHARES):
        assert any(
            (entry.arch, entry.width, entry.dims, entry.page) == ("", width, None, None)
            for entry in table
        )


PLAIN = TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)


def of(warps: int, **fields: object) -> ConfigEntry[TileConfig]:
    return ConfigEntry(**fields, config=replace(PLAIN, num_warps=warps))


def test_the_most_specific_entry_counts():
    entries = (
        of(2, arch="sm90", dims=(128, 128), page=16),
        of(3, arch="sm90", dims=(128, 128)),
        of(4, arch="sm90", width="narrow"),
        of(5, arch="sm", dims=(128, 128), page=16),
        of(6, dims=(576, 512), least_rows=64),
        of(7, dims=(576, 512)),
    )
    tables = ConfigTables(own_tiles=entries)
    found = [
        tables.tiles(query(shape, arch, page=page)).num_warps
        for shape, arch, page in (
            (GQA, "sm90", 16),
            (GQA, "sm90", 1),
            (GQA, "sm86", 16),
            (MLA, "sm90", 16),
        )
    ]
    assert found == [2, 3, 5, 6]
    # The tables serve what no own entry fits.
    assert tables.tiles(query(GQA, "sm86")) == ConfigTables().tiles(query(GQA, "sm86"))


def test_of_two_entries_that_are_as_specific_the_later_wins():
    tables = ConfigTables(own_tiles=(of(2, arch="sm90"), of(3, arch="sm90")))
    assert tables.tiles(query(GQA, "sm90")).num_warps == 3


def test_an_entry_counts_only_where_its_kernel_serves():
    special = ConfigEntry(arch="sm90", dims=(128, 128), config=replace(PLAIN, kernel="hopper"))
    tables, both = ConfigTables(own_tiles=(special,)), ("portable", "hopper")
    assert tables.tiles(query(GQA, "sm90")).kernel == "portable"
    assert tables.tiles(query(GQA, "sm90", kernels=both)) == special.config
    assert tables.tiles(query(GQA, "sm80", kernels=both)).kernel == "portable"


@pytest.mark.parametrize(("queries", "rows"), [(1, 16), (4, 16), (5, 32), (16, 64), (64, 64)])
def test_a_share_has_no_more_rows_than_a_request(queries, rows):
    assert ConfigTables().shares(query(GQA, "sm90", queries)).block_m == rows


def test_widths_and_dims():
    assert (GQA.width, MLA.width) == ("narrow", "latent")
    assert (GQA.dims, MLA.dims) == ((128, 128), (576, 512))
