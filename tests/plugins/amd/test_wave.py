"""The adapter on Wave's templates in plain torch; with wave-lang, the templates are compiled."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch

from attnmux.amd.cards.wave import WAVE
from attnmux.amd.wave import make
from attnmux.amd.wave_kernels import MODULES, Heads, WaveKernels, WaveLang
from attnmux.core import InvalidInput, Platform
from attnmux.core.plugin import KernelLibrary
from attnmux.emulators.amd.wave import KERNELS, LANG, AttentionShape, DecodeShape, wave_compile
from attnmux.testing import AttentionBackendTests, decode, extend
from attnmux.testing.adapters.tests import (
    AdapterTests,
    AdapterWorld,
    assert_passes,
    check_layers_outside_the_pool,
    outputs,
    recorded,
)

WORLD = AdapterWorld(library=make, kernels=KERNELS, platform=Platform.parse("amd:gfx942"))
CANDIDATE = WORLD.candidate(WAVE)
HEADS = Heads(
    target="gfx942",
    num_q_heads=28,
    num_kv_heads=4,
    head_dim=128,
    v_head_dim=128,
    dtype=torch.bfloat16,
    scaling=0.1,
    logit_cap=0.0,
)


class TestWaveEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 16)


class TestWaveAdapter(AdapterTests):
    adapter = WORLD
    step = decode(9, 4)


@pytest.mark.parametrize("splits", [1, 3, 32])
def test_keys_are_split_as_the_option_says(splits) -> None:
    factory = partial(WORLD.backend, options={"num_kv_splits": splits})
    candidate = replace(CANDIDATE, factory=lambda context, _: factory(context))
    assert_passes(candidate, decode(1, 9, 70))


def test_no_splits_are_refused() -> None:
    with pytest.raises(InvalidInput, match="num_kv_splits"):
        WORLD.prepared(decode(3), options={"num_kv_splits": 0})


def test_the_call_s_own_keys_are_all_keys() -> None:
    check_layers_outside_the_pool(WORLD, extend((0, 5), (0, 4)))


def test_layers_of_the_same_heads_share_their_kernels() -> None:
    kernels, calls = recorded(KERNELS)
    WORLD.prepared(decode(3), kernels=kernels, windows=(None,) * 3)
    assert [call.name for call in calls] == ["decode", "extend"]


def test_the_pool_is_read_where_it_lies() -> None:
    backend, made = WORLD.prepared(extend((7, 3), (0, 2)))
    layer = backend.context.layers[0].layer_id
    k, v = backend.context.token_to_kv_pool.get_kv_buffer(layer)
    assert [rows.data_ptr() for rows in backend._layers[layer].kv] == [k.data_ptr(), v.data_ptr()]
    assert len(outputs(backend, made)) == len(made.inputs)


@pytest.mark.parametrize("settings", [{"windows": (3,)}, {"sinks": True}, {"attention_chunk": 4}])
def test_layers_that_no_template_serves_are_refused(settings) -> None:
    with pytest.raises(InvalidInput, match=r"layer \d"):
        WORLD.prepared(decode(9), **settings)


def test_another_device_s_matrix_units_are_refused() -> None:
    with pytest.raises(ValueError, match="gfx90a"):
        KERNELS.extend(replace(HEADS, target="gfx90a"), 4096)


@pytest.fixture
def wave_lang() -> None:
    if importlib.util.find_spec("wave_lang") is None or importlib.util.find_spec("iree") is None:
        pytest.skip("needs wave-lang")


@pytest.mark.usefixtures("wave_lang")
def test_the_emulated_templates_have_the_library_s_parameters() -> None:
    from wave_lang.kernel.wave.templates import (  # noqa: PLC0415  # where it is installed
        attention_common,
        extend_attention,
        paged_decode_attention,
    )

    for ours, theirs in (
        (
            LANG.get_paged_decode_attention_kernels,
            paged_decode_attention.get_paged_decode_attention_kernels,
        ),
        (LANG.get_extend_attention_kernel, extend_attention.get_extend_attention_kernel),
    ):
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        )
    assert DecodeShape._fields == paged_decode_attention.paged_decode_attention_shape._fields
    fields = AttentionShape.__dataclass_fields__.keys()
    assert fields <= attention_common.AttentionShape.__dataclass_fields__.keys()


@pytest.mark.usefixtures("wave_lang")
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_the_library_s_templates_compile(target) -> None:
    """Without HIP, nothing can be loaded: the option that loads it is left out."""
    lang = KernelLibrary.imported(WaveLang, *(f"wave_lang.kernel.wave.{name}" for name in MODULES))
    options = lang.WaveCompileOptions
    without = replace(lang, WaveCompileOptions=lambda wave_runtime, **some: options(**some))
    kernels = WaveKernels.of(without)
    heads = replace(HEADS, target=target)
    assert all(map(callable, (*kernels.decode(heads, 8), kernels.extend(heads, 4096))))


def test_a_template_compiled_without_its_symbols_is_an_error() -> None:
    shape = DecodeShape(2, 1, 16, 16, 1, 1)
    attend, *_ = LANG.get_paged_decode_attention_kernels(
        shape, (LANG.MMAType.F32_16x16x16_F16,) * 2, 8
    )
    with pytest.raises(ValueError, match="dynamic symbols"):
        wave_compile(LANG.WaveCompileOptions(subs={}, wave_runtime=True), attend)
