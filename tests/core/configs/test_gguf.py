"""Which GGUF file a path names, and who reads it."""

from __future__ import annotations

import pytest

from attnmux.configs import gguf_file, request_from_model
from attnmux.core import InvalidInput

POINTS = "[attnmux.configs]\ngguf = made_up_reader:config_of\n"
READER = """
def config_of(file):
    return {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3,
            "hidden_size": 48, "dtype": "float32", "num_hidden_layers": int(file.stem)}
"""


@pytest.fixture
def files(tmp_path):
    def make(*names):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).touch()
        return folder

    return make


def test_a_file_or_the_only_one_of_a_folder(files) -> None:
    folder = files("4.gguf", "README.md")
    assert gguf_file(folder) == gguf_file(folder / "4.gguf") == folder / "4.gguf"
    assert gguf_file(folder / "README.md") is gguf_file(folder / "5.gguf") is None
    files("5.GGUF.txt", "config.json")
    assert gguf_file(folder) is None
    assert gguf_file(folder / "4.gguf") == folder / "4.gguf"


def test_one_of_several_must_be_named(files) -> None:
    with pytest.raises(InvalidInput, match=r"2 GGUF files \(4\.gguf, 5\.gguf\)"):
        request_from_model(files("4.gguf", "5.gguf"))


def test_what_is_read_is_a_config_json(files, tmp_path, monkeypatch) -> None:
    folder = files("4.gguf")
    monkeypatch.setattr("attnmux.configs.gguf_files.READER", ("none", "gguf"))
    with pytest.raises(InvalidInput, match=r"pip install 'attnmux-transformers\[gguf\]'"):
        request_from_model(folder)
    monkeypatch.undo()
    info = tmp_path / "path" / "made_up-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    (info / "entry_points.txt").write_text(POINTS)
    (info.parent / "made_up_reader.py").write_text(READER)
    monkeypatch.syspath_prepend(str(info.parent))
    for path in (folder, folder / "4.gguf"):
        request = request_from_model(path, tp=3)
        heads = request.num_q_heads, request.num_kv_heads, request.head_dim
        assert (*heads, request.dtype) == (2, 1, 8, "float32")
