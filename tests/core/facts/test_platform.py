from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmux.core import InvalidInput, Platform
from attnmux.core.facts.vendors import PRODUCTS, VENDORS


@pytest.mark.parametrize(
    ("text", "arch", "version", "device_type", "runtime"),
    [
        ("nvidia:sm90,cuda=12.4", "sm90", (9, 0), "cuda", "cuda 12.4"),
        ("nvidia:sm90a", "sm90a", (9, 0), "cuda", ""),
        ("nvidia:sm103,cuda=13.0", "sm103", (10, 3), "cuda", "cuda 13.0"),
        ("nvidia:sm121", "sm121", (12, 1), "cuda", ""),
        ("nvidia:sm70", "sm70", (7, 0), "cuda", ""),
        ("amd:gfx942,rocm=6.4", "gfx942", (9, 4, 2), "cuda", "rocm 6.4"),
        ("amd:gfx90a", "gfx90a", (9, 0, 10), "cuda", ""),
        ("amd:gfx1100", "gfx1100", (11, 0, 0), "cuda", ""),
        ("intel:xe2,oneapi=2025.1", "xe2", (2,), "xpu", "oneapi 2025.1"),
        ("ascend:910b,cann=8.0", "910b", (), "npu", "cann 8.0"),
        ("ascend:910_93", "910_93", (), "npu", ""),
        ("cpu:x86_64", "x86_64", (), "cpu", ""),
        ("NVIDIA:SM90,CUDA=12.4", "sm90", (9, 0), "cuda", "cuda 12.4"),
        ("cpu:amd64", "x86_64", (), "cpu", ""),
        ("cpu:ARM64", "aarch64", (), "cpu", ""),
        ("acme:v3,device=privateuseone,runtime=acme 1.2", "v3", (), "privateuseone", "acme 1.2"),
        ("acme:Mark_II,device=acme,version=2.10", "Mark_II", (2, 10), "acme", ""),
    ],
)
def test_parse(text, arch, version, device_type, runtime) -> None:
    platform = Platform.parse(text)
    assert (platform.arch, platform.version) == (arch, version)
    assert (platform.device_type, platform.runtime) == (device_type, runtime)


@pytest.mark.parametrize(
    ("vendor", "archs"),
    [
        (
            "nvidia",
            "sm70 sm72 sm75 sm80 sm86 sm87 sm88 sm89 sm90 sm100 sm101 sm103 sm110 sm120 sm121",
        ),
        (
            "amd",
            "gfx900 gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1151 gfx1200 gfx1201",
        ),
        ("intel", "xe xe2 xe3"),
    ],
)
def test_later_architectures_have_larger_versions(vendor, archs) -> None:
    found = [Platform.parse(f"{vendor}:{arch}") for arch in archs.split()]
    versions = [platform.version for platform in found]
    assert versions == sorted(set(versions))
    assert " ".join(platform.arch for platform in found) == archs
    assert all(Platform.parse(str(platform)) == platform for platform in found)


@pytest.mark.parametrize(
    "text",
    [
        "nvidia:sm90a",
        "nvidia:sm100f",
        "intel:xe_hpc",
        "intel:xe_hpg",
        "intel:xe2_hpg",
        "ascend:310p",
        "ascend:910a",
        "ascend:910b",
        "ascend:910c",
        "ascend:910_93",
        "ascend:950",
        "cpu:x86_64",
        "cpu:aarch64",
    ],
)
def test_other_names_of_the_field(text) -> None:
    assert str(Platform.parse(text)) == text
    assert Platform.parse(text.upper()) == Platform.parse(text)


def test_with_amx_and_without() -> None:
    with_amx = Platform.parse("cpu:x86_64,features=avx512_bf16+amx")
    without = Platform.parse("cpu:x86_64,features=avx512_bf16")
    assert with_amx.features - without.features == {"amx"}
    assert str(with_amx) == "cpu:x86_64,features=amx+avx512_bf16"


def test_parse_reads_every_key() -> None:
    platform = Platform.parse(
        "cpu:x86_64, features=amx + avx512_bf16+cxx_compiler,count=2,memory=1.5TB"
    )
    assert platform.features == {"amx", "avx512_bf16", "cxx_compiler"}
    assert (platform.count, platform.memory_bytes) == (2, 1_500_000_000_000)
    assert Platform.parse("nvidia:sm90,memory=80GiB").memory_bytes == 80 * 1024**3


@pytest.mark.parametrize(
    "text",
    [
        "nvidia:sm90,cuda=12.4",
        "amd:gfx90a,count=8,memory=192GB",
        "acme:v1,device=cpu,runtime=a 1",
        "Acme:V1,device=acme,version=3.0.1,runtime=AcmeRT 1,features=FP8+sparse,count=2",
    ],
)
def test_parse_reads_str(text) -> None:
    platform = Platform.parse(text)
    assert Platform.parse(str(platform)) == platform


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nvidia", "VENDOR:ARCH"),
        (":sm90", "VENDOR:ARCH"),
        ("", "VENDOR:ARCH"),
        ("nvida:sm90", "did you mean 'nvidia'"),
        ("acme:v1", "device=TYPE"),
        ("nvidia:gfx942", "an architecture of nvidia"),
        ("nvidia:h100", "such as sm80, sm90 or sm100"),
        ("amd:gfx9010", "such as gfx90a"),
        ("nvidia:sm90,version=9.0", "one of cuda, features"),
        ("acme:v1,device=cpu,version=new", "a version such as 12.4"),
        ("acme:v1,device=cpu,cuda=12", "one of device, version, runtime, features"),
        ("nvidia:sm90,rocm=6", "one of cuda, features"),
        ("nvidia:sm90,cuda=new", "a version such as 12.4"),
        ("nvidia:sm90,cuda", "VENDOR:ARCH"),
        ("nvidia:sm90,cuda=", "VENDOR:ARCH"),
        ("nvidia:sm90,cuda=12.4,cuda=12.5", "each key once"),
        ("nvidia:sm90,count=0", "positive"),
        ("nvidia:sm90,memory=lots", "141GB"),
        ("nvidia:sm90,memory=3XB", "141GB"),
        ("cpu:x86_64,runtime=3", "one of features, count, memory"),
        ("nvidia:sm٩0", "an architecture of nvidia"),
        ("nvidia:sm90,cuda=١٢", "a version such as 12.4"),
    ],
)
def test_parse_refuses(text, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        Platform.parse(text)
    assert said in str(caught.value)


VALUES = st.text("aB1.+ \t²٣GB=", max_size=6)
KEYS = st.sampled_from(["version", "runtime", "cuda", "features", "count", "memory", "nope"])


@given(
    head=st.sampled_from(["acme:V1,device=x", "Acme:v1,device=x", "nvidia:sm90", "NVIDIA:SM90A"]),
    pairs=st.lists(st.tuples(KEYS, VALUES), max_size=3),
)
def test_whatever_is_written_is_read_and_written_back_or_refused(head, pairs) -> None:
    text = ",".join([head, *(f"{key}={value}" for key, value in pairs)])
    try:
        platform = Platform.parse(text)
    except InvalidInput:
        return
    assert Platform.parse(str(platform)) == platform
    assert Platform.from_dict(platform.to_dict()) == platform


def test_a_dict_and_a_pickle_give_it_back() -> None:
    platform = Platform.parse("nvidia:sm90,cuda=12.4,features=a+b,memory=141GB")
    assert Platform.from_dict(platform.to_dict()) == platform
    assert pickle.loads(pickle.dumps(platform)) == platform
    with pytest.raises(InvalidInput, match="'nope'"):
        Platform.from_dict({**platform.to_dict(), "nope": 1})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vendor": ...}, "platform, vendor: expected a name, got nothing"),
        ({"version": "9.0"}, "platform, version: expected a list, got '9.0'"),
        ({"version": None}, "platform, version: expected a list, got None"),
        ({"features": "amx"}, "platform, features: expected a list, got 'amx'"),
        ({"version": ["9", "0"]}, "version: expected whole numbers, in a tuple, got ('9', '0')"),
        ({"features": [1]}, "features: expected texts, in a frozenset, got frozenset({1})"),
    ],
)
def test_a_dict_that_was_edited_is_refused(changes, said) -> None:
    data = {**Platform.parse("nvidia:sm90").to_dict(), **changes}
    with pytest.raises(InvalidInput, match=re.escape(said)):
        Platform.from_dict({key: value for key, value in data.items() if value is not ...})


@pytest.mark.parametrize("row", VENDORS.values(), ids=VENDORS)
def test_every_example_can_be_asked_for(row) -> None:
    archs = row.examples.replace(" or ", ", ").split(", ")
    assert [Platform.parse(f"{row.name}:{arch}").arch for arch in archs] == archs


def test_the_table_names_each_vendor_once() -> None:
    assert all(name == row.name for name, row in VENDORS.items())
    assert len({row.distribution for row in VENDORS.values()}) == len(VENDORS)


@pytest.mark.parametrize(
    "given",
    [
        {"features": ["amx"]},
        {"version": "9.0"},
        {"arch": None},
        {"arch": ""},
        {"count": "8"},
        {"count": True},
        {"count": 0},
        {"memory_bytes": -1},
        {"version": ("9", "0")},
        {"memory_bytes": 1.5e9},
    ],
)
def test_facts_of_other_types_are_refused(given) -> None:
    with pytest.raises(InvalidInput, match=f"platform, {next(iter(given))}: expected"):
        Platform(**{"vendor": "acme", "device_type": "cpu", "arch": "v1", **given})


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_stands_for_its_architecture(product) -> None:
    row, arch, name = PRODUCTS[product]
    found = Platform.parse(f"{product.upper()},count=8")
    assert (found.vendor, found.arch, found.name, found.count) == (row.name, arch, name, 8)
    assert Platform.parse(str(found)) == replace(found, name="")


def test_a_product_that_is_not_known_gets_a_guess() -> None:
    with pytest.raises(InvalidInput, match="expected rtx4090, or PRODUCT or VENDOR:ARCH"):
        Platform.parse("rtx4091")
