"""Imports of torch and transformers that leave out what `generate` does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from threading import Event

import pytest
import torch

from attnmux.transformers.cli import importing
from attnmux.transformers.cli.importing import UNUSED, Packages, quick_imports, wake

SCRIPT = """
import json, sys
from threading import Event
sys.path.insert(0, sys.argv[1])
from importlib import metadata
from attnmux.transformers.cli.importing import quick_imports
assert "torch" not in sys.modules
ask, has_torch = metadata.packages_distributions, Event()
with quick_imports(has_torch):
    import attnmux.transformers.cli.run
import transformers.models.llama.modeling_llama
seen = [name for name in ("sklearn", "scipy") if name in sys.modules]
assert has_torch.is_set()
assert metadata.packages_distributions is ask
import scipy, sklearn
from transformers.utils import is_scipy_available
print(json.dumps([seen, is_scipy_available(), scipy.__file__]))
"""


def test_transformers_imports_no_package_that_is_not_used(tmp_path: Path) -> None:
    for name in UNUSED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, capture_output=True, text=True
    )
    seen, has_scipy, place = json.loads(found.stdout)
    assert (seen, has_scipy) == ([], True)
    assert Path(place).parent.parent == tmp_path


def test_the_list_of_packages_is_made_once_it_is_needed() -> None:
    real, calls = metadata.packages_distributions(), []
    packages = Packages(lambda: calls.append(1) or real)  # type: ignore[func-returns-value]
    assert packages["torch"] == ["torch"]
    assert packages.get("attnmux.nothing") is None
    assert len(calls) == 1
    assert packages["PIL"] == real["PIL"]
    assert dict(packages).keys() == real.keys()
    assert len(calls) == 1


def test_no_device_waits_for_a_torch_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: str) -> None:
        raise ImportError("torch is broken")

    monkeypatch.setattr(importing, "import_module", broken)
    has_torch = Event()
    with pytest.raises(ImportError, match="broken"), quick_imports(has_torch):
        pass
    assert has_torch.is_set()


def test_a_device_is_woken_once_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device: made.append(device))
    has_torch = Event()
    has_torch.set()
    for device in ("cpu", "meta"):
        wake(has_torch, device)
    assert made == ["meta"]
