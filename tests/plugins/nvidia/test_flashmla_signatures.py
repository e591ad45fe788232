"""The emulators of the MLA libraries and the real ones take the same arguments.

The real ones import on their devices alone, so theirs are read from their files.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attnmux.emulators.nvidia import cutlass_mla
from attnmux.emulators.nvidia.flash_mla import flash_mla, sgl_kernel

EMULATORS: dict[str, ModuleType] = {
    "sglang-kernel-flash_mla-0.4.5": sgl_kernel,
    "sgl-flash-mla-1.0.0": flash_mla,
    "sgl-kernel-cutlass_mla-0.3.21": cutlass_mla,
}
RECORDED = {
    name: json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text())
    for name in EMULATORS
}
FUNCTIONS = [(name, each) for name, record in RECORDED.items() for each in record["signatures"]]

Parameters = list[list[str | None]]


def parameters(function: Callable[..., Any]) -> Parameters:
    """Name, kind and default of each, as recorded."""
    return [
        [found.name, found.kind.name, None if found.default is found.empty else repr(found.default)]
        for found in inspect.signature(function).parameters.values()
    ]


def parsed(source: str, name: str) -> Parameters:
    """The same of a function that is not imported: its body is left out and its types are names."""
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
    scope: dict[str, Any] = {}
    exec(compile(module, name, "exec"), scope)  # a signature without its body
    return parameters(scope[name])


@pytest.mark.parametrize(("library", "name"), FUNCTIONS)
def test_emulated_signature(library, name) -> None:
    found = parameters(getattr(EMULATORS[library], name))
    assert found == RECORDED[library]["signatures"][name]


@pytest.mark.parametrize(("library", "name"), FUNCTIONS)
def test_installed_signature(library, name) -> None:
    """Whatever is installed takes what the adapter passes: the recorded arguments, in order."""
    recorded = RECORDED[library]
    try:
        # Two distributions share the name of a package.
        version(recorded["distribution"])
    except PackageNotFoundError:
        pytest.skip(f"{recorded['distribution']} is not installed")
    package, _, module = recorded["module"].partition(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], f"{module}.py").read_text()
    installed = parsed(source, name)
    wanted = recorded["signatures"][name]
    assert [each for each in installed if each in wanted] == wanted
