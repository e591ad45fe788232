"""Models by their id on the hub. Nothing is downloaded here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from attnmux.configs import request_from_model
from attnmux.core import InvalidInput

huggingface_hub = pytest.importorskip("huggingface_hub")
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError  # noqa: E402

CONFIG = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
SCHEME = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve these files of org/model, and return what was asked for."""
    asked = []

    def serving(**files):
        def download(repo: str, name: str) -> str:
            asked.append((repo, name))
            if name not in files:
                raise EntryNotFoundError(f"404: {name}")
            file = tmp_path / name
            file.write_text(json.dumps(files[name]))
            return str(file)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        return asked

    return serving


def test_an_id_is_read_from_the_hub(hub) -> None:
    asked = hub(**{"config.json": {**CONFIG, "dtype": "bfloat16"}})
    request = request_from_model("org/model-7B.v1", tp=2)
    assert (request.num_q_heads, request.num_kv_heads, request.head_dim) == (4, 1, 64)
    assert asked == [
        ("org/model-7B.v1", "config.json"),
        ("org/model-7B.v1", "hf_quant_config.json"),
    ]


def test_modelopts_file_is_read_too(hub) -> None:
    hub(**{"config.json": {**CONFIG, "dtype": "bfloat16"}, "hf_quant_config.json": SCHEME})
    assert request_from_model("org/model").kv_dtype == "fp8_e4m3"


def test_a_folder_comes_before_the_hub(hub, monkeypatch, tmp_path) -> None:
    asked = hub()
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": "float16"}))
    monkeypatch.chdir(tmp_path)
    assert request_from_model("org/model").dtype == "float16"
    assert asked == []


@pytest.mark.parametrize("path", ["nowhere", "a/b/c", "/no/where", "../model", "org/"])
def test_a_path_is_no_id(hub, path) -> None:
    asked = hub()
    with pytest.raises(InvalidInput, match="no such file"):
        request_from_model(path)
    assert asked == []


def test_without_the_hub_the_error_says_what_was_tried(monkeypatch) -> None:
    def fail(repo: str, name: str) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(InvalidInput, match="org/model: no such file, and the hub did not give it"):
        request_from_model("org/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidInput, match="pip install huggingface_hub"):
        request_from_model(Path("org/model"))
