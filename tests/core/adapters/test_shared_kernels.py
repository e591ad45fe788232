"""Kernels that a plugin offers to the backends of others."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnmux.core import Platform
from attnmux.core.plugin import shared_kernel, with_shared_kernels
from attnmux.testing import Case, decode, make_setup
from attnmux.testing.fakes.backend import FakeBackend

WRITER = """
class Writer:
    def __init__(self, pool):
        self.pool, self.written = pool, []

    def write(self, layer, loc, first, second, *, is_latent):
        self.written.append((layer.layer_id, loc.tolist(), is_latent))

def make(context):
    return Writer(context.token_to_kv_pool)
"""
PLUGIN = """
from attnmux.core.plugin import hookimpl

@hookimpl
def attnmux_cards():
    return []
"""


@pytest.fixture
def context():
    case = Case(name="a step", steps=(decode(9, 2),))
    return make_setup(case, Platform.parse("nvidia:sm90,cuda=13.0"), "cpu").context


@pytest.fixture
def install(tmp_path, monkeypatch, fresh_plugins):
    """Installs a plugin that offers `kv_writer` for the CPU."""
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(tmp_path), *sys.path[1:]])
    monkeypatch.setattr("attnmux.core.Settings.cache_folder", lambda *_: tmp_path / "cache")

    def install(source: str, name: str = "acme", kernel: str = "kv_writer.cpu") -> Path:
        info = tmp_path / f"{name}_kernels-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}-kernels\nVersion: 1.0\n")
        entries = f"[attnmux]\n{name} = {name}_plugin\n"
        entries += f"[attnmux.kernels]\n{kernel} = {name}_kernels:make\n"
        (info / "entry_points.txt").write_text(entries)
        (tmp_path / f"{name}_plugin.py").write_text(PLUGIN)
        (tmp_path / f"{name}_kernels.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"{name}_kernels", raising=False)
        return info

    return install


def test_none_is_offered(context) -> None:
    assert shared_kernel("kv_writer", context) is None
    assert with_shared_kernels(context).kv_writer is None


def test_an_offered_one_is_used(context, install) -> None:
    install(WRITER)
    writer = with_shared_kernels(context).kv_writer
    assert writer.pool is context.token_to_kv_pool


def test_a_context_keeps_its_own(context, install) -> None:
    install(WRITER)
    first = with_shared_kernels(context)
    assert with_shared_kernels(first) is first


def test_another_device_s_is_left_alone(context, install) -> None:
    install("raise AssertionError", kernel="kv_writer.cuda")
    assert shared_kernel("kv_writer", context) is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ATTNMUX_DENY_PLUGINS", "acme-kernels"),
        ("ATTNMUX_ALLOW_PLUGINS", "attnmux-cpu"),
        ("ATTNMUX_NO_PLUGINS", "1"),
    ],
)
def test_a_plugin_that_is_left_out_offers_nothing(
    context, install, monkeypatch, variable, value
) -> None:
    install("raise AssertionError")
    monkeypatch.setenv(variable, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shared_kernel("kv_writer", context) is None


def test_a_missing_compiler_offers_nothing(context, install) -> None:
    install("import no_such_compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shared_kernel("kv_writer", context) is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('cut off')", "OSError: cut off"),
        ("def make(context):\n    raise RuntimeError('ptxas not found')", "ptxas not found"),
        ("make = None", "not callable"),
    ],
)
def test_a_kernel_that_fails_is_a_warning(context, install, source, said) -> None:
    install(source)
    with pytest.warns(UserWarning, match=f"kv_writer.cpu is not used.*{said}"):
        assert shared_kernel("kv_writer", context) is None


def test_two_offers_of_one_kernel(context, install) -> None:
    install(WRITER)
    install(WRITER, name="rocket")
    with pytest.warns(UserWarning, match="acme-kernels and rocket-kernels both offer it"):
        assert shared_kernel("kv_writer", context) is None


def test_backends_write_by_it(context, install) -> None:
    install(WRITER)
    backend = FakeBackend(with_shared_kernels(context))
    layer, pool = context.layers[0], context.token_to_kv_pool
    k, v = (torch.ones(2, *each.shape[1:]) for each in pool.get_kv_buffer(layer.layer_id))
    batch = SimpleNamespace(out_cache_loc=torch.tensor([3, 4]))
    backend.save_kv(k, v, layer, batch)
    assert backend.context.kv_writer.written == [(layer.layer_id, [3, 4], False)]
    assert not pool.get_key_buffer(layer.layer_id).any()
