"""The emulators and the real libraries take the same arguments.

Most libraries import on their devices alone, so their signatures are read from their files.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from attnmux.emulators.nvidia import causal_conv1d, cutlass_mla, flashinfer, sgl_flash_attn
from attnmux.emulators.nvidia.fa3_operators import VllmFA3
from attnmux.emulators.nvidia.flash_attn_cute import FlashAttnCute
from attnmux.emulators.nvidia.flash_mla import flash_mla, sgl_kernel
from attnmux.emulators.nvidia.flash_mla.vllm import FlashMLAExtension, FlashMLAOperators
from attnmux.emulators.nvidia.flash_mla_sparse import FlashMLA, SglKernel
from attnmux.emulators.nvidia.flashinfer import gdn, trtllm_decode, trtllm_mla, trtllm_prefill
from attnmux.nvidia.vllm_files import load_operators

EMULATORS: dict[str, tuple[object, ...]] = {
    "flash-attn-4-4.0.0b18": (FlashAttnCute(arch=90),),
    "flashinfer-0.7.2": (flashinfer,),
    "flashinfer-gdn-0.7.2": (gdn,),
    "flashinfer-trtllm-0.7.2": (trtllm_decode, trtllm_prefill, trtllm_mla),
    "sglang-kernel-flash_attn-0.4.10": (sgl_flash_attn,),
    "sglang-kernel-flash_mla-0.4.10": (sgl_kernel, SglKernel),
    "sglang-kernel-mamba-0.4.10": (causal_conv1d,),
    "sgl-flash-mla-1.0.0": (flash_mla, FlashMLA),
    "vllm-fa3-0.33.0": (VllmFA3,),
    "vllm-flashmla-0.33.0": (FlashMLAOperators, FlashMLAExtension),
    "sglang-kernel-cutlass_mla-0.4.5": (cutlass_mla,),
    "vllm-cutlass_mla-0.33.0": (cutlass_mla.VllmOperators,),
}
VLLM_FILES = {
    "torch.ops._C": "_C_stable_libtorch",
    "torch.ops._vllm_fa3_C": "vllm_flash_attn/_vllm_fa3_C",
    "torch.ops._flashmla_C": "_flashmla_C",
    "torch.ops._flashmla_extension_C": "_flashmla_extension_C",
}
"""Where vLLM has the operators."""
DATA = Path(__file__).parent / "data"
RECORDED = {name: json.loads((DATA / f"{name}.json").read_text()) for name in EMULATORS}
FUNCTIONS = [
    (library, module, name)
    for library, record in RECORDED.items()
    for module, signatures in record["modules"].items()
    for name in signatures
]

Parameters = list[list[str | None]]


def parameters(function: Callable[..., Any]) -> Parameters:
    """Name, kind and default of each, as recorded."""
    return [
        [found.name, found.kind.name, None if found.default is found.empty else repr(found.default)]
        for found in inspect.signature(function).parameters.values()
    ]


def parsed(source: str, name: str) -> Parameters:
    """The same for a function that is not imported, without its body and types."""
    found = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    bare = ast.FunctionDef(
        name=name, args=found.args, body=[ast.Pass()], decorator_list=[], returns=None
    )
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    module = ast.fix_missing_locations(ast.Module(body=[bare], type_ignores=[]))
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(module, name, "exec"), scope)  # a signature without its body
    return parameters(scope[name])


def installed(module: str, name: str) -> Parameters:
    if module.startswith("torch.ops."):
        namespace = module.removeprefix("torch.ops.")
        operators = load_operators(namespace, name, VLLM_FILES[module])
        schema = getattr(operators, name).default._schema
        return [[each.name, "POSITIONAL_OR_KEYWORD", None] for each in schema.arguments]
    package, *rest = module.split(".")
    if package == "flashinfer":
        return parameters(attrgetter(name)(importlib.import_module(module)))
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0], *rest).with_suffix(".py")
    return parsed(file.read_text(encoding="utf-8"), name)


@pytest.mark.parametrize(("library", "module", "name"), FUNCTIONS)
def test_emulated_signature(library, module, name) -> None:
    (emulator,) = (each for each in EMULATORS[library] if hasattr(each, name.split(".")[0]))
    function = attrgetter(name)(emulator)
    assert parameters(function) == RECORDED[library]["modules"][module][name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "module", "name"), FUNCTIONS)
def test_installed_signature(library, module, name) -> None:
    """The installed library takes the recorded arguments, in order."""
    record = RECORDED[library]
    distribution, before = record["distribution"], record.get("before")
    try:
        # Two distributions share the name of a package.
        here = version(distribution)
    except PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    if before and Version(here) >= Version(before):
        pytest.skip(f"{distribution} {before} and later have it not")
    wanted = record["modules"][module][name]
    assert [each for each in installed(module, name) if each in wanted] == wanted
