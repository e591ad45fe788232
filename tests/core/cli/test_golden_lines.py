"""The line of each engine for twenty models on four machines, or why there is none.

`python tests/core/cli/test_golden_lines.py` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.core.cli.verbs import verbs

DATA = Path(__file__).parents[1] / "data"
GOLDEN = Path(__file__).parent / "golden"
ENGINES = ("sglang", "vllm")
PLATFORMS = (
    "nvidia:sm90,cuda=13.0",
    "nvidia:sm100,cuda=13.0",
    "amd:gfx942",
    "cpu:x86_64,features=avx2",
)
FOLDERS = (
    *("llama-3.1-8b", "llama-4-scout", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2-exp"),
    *("gpt-oss-20b", "gemma-2-9b-it", "gemma-3-1b-it", "gemma-3-4b-it", "mistral-7b-v0.1"),
    *("mistral-7b-v0.3", "qwen2.5-7b", "qwen2.5-14b-1m", "qwen3-0.6b", "whisper-large-v3"),
)
CONFIGS = {
    "qwen3-next-80b": {
        **{"model_type": "qwen3_next", "dtype": "bfloat16", "hidden_size": 2048},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
        **{"num_hidden_layers": 48, "full_attention_interval": 4},
        **{"layer_types": [*["linear_attention"] * 3, "full_attention"] * 12},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    },
    "bert-base": {"model_type": "bert", "num_attention_heads": 12, "hidden_size": 768},
    "t5-base": {"model_type": "t5", "num_heads": 12, "d_kv": 64, "is_encoder_decoder": True},
    "bloom-7b1": {
        **{"model_type": "bloom", "n_head": 32, "hidden_size": 4096},
        **{"torch_dtype": "float16"},
    },
    "mpt-7b": {
        **{"model_type": "mpt", "n_heads": 32, "d_model": 4096, "torch_dtype": "bfloat16"},
        **{"attn_config": {"alibi": True}},
    },
}


def lines_of(engine: str, folder: Path) -> dict[str, dict[str, str]]:
    """By platform and model. folder: where the configurations may be written."""
    models = {name: DATA / name for name in FOLDERS}
    for name, config in CONFIGS.items():
        models[name] = folder / name
        models[name].mkdir()
        (models[name] / "config.json").write_text(json.dumps(config))
    return {
        platform: {name: _line(engine, path, platform) for name, path in models.items()}
        for platform in PLATFORMS
    }


def _line(engine: str, model: Path, platform: str) -> str:
    args = ["select", "--model", str(model), "--platform", platform, "--engine", engine]
    result = CliRunner().invoke(verbs, args, prog_name="attnmux")
    if result.exit_code == 0:
        install, launch = result.stdout.splitlines()[-2:]
        decided = result.stdout.splitlines()[0].partition(", rank")[0]
        return f"{decided}: {launch.replace(str(model), 'MODEL')} # {install}"
    said = [line for line in result.stderr.splitlines() if "warning" not in line]
    return f"{result.exit_code}: {said[0].removeprefix('attnmux: ').replace(str(model), 'MODEL')}"


@pytest.mark.parametrize("engine", ENGINES)
def test_lines(engine: str, tmp_path: Path) -> None:
    for vendor in ("amd", "cpu", "intel", "nvidia", "triton"):
        pytest.importorskip(f"attnmux.{vendor}.plugin", reason="the lines name its backends")
    pytest.importorskip(f"attnmux.{engine}.asking")
    expected = json.loads((GOLDEN / f"lines-{engine}.json").read_text(encoding="utf-8"))
    assert lines_of(engine, tmp_path) == expected


if __name__ == "__main__":
    import tempfile

    GOLDEN.mkdir(exist_ok=True)
    for engine in ENGINES:
        with tempfile.TemporaryDirectory() as temporary:
            written = json.dumps(lines_of(engine, Path(temporary)), indent=1)
        (GOLDEN / f"lines-{engine}.json").write_text(written + "\n", encoding="utf-8")
