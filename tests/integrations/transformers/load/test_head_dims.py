"""The shipped checkpoint with wider heads, for kernels of other dims."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from attnmux.core.cli.verbs import verbs
from attnmux.transformers import recall

TOOL = Path(__file__).resolve().parents[4] / "tools" / "widen_recall.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("widen_recall", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("head_dim", [128, 256])
def test_wider_heads_answer_alike(tool, tmp_path, head_dim):
    tool.widen(tmp_path / "wide", head_dim)
    rng = random.Random(head_dim)
    cases = [recall.make_prompt(rng, 200) for _ in range(4)]
    prompts = tmp_path / "prompts"
    prompts.write_text("".join(f"{prompt}\n" for prompt, _ in cases))
    asked = ["generate", "--model", str(tmp_path / "wide"), "--prompts", str(prompts)]
    result = CliRunner().invoke(verbs, [*asked, "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output
    texts = [line for line in result.stdout.splitlines() if line and not line.startswith("==>")]
    assert texts == [answer for _, answer in cases]


def test_dims_stand_where_their_pairs_turn_alike(tool):
    wide = tool.spread(torch.arange(1.0, 9.0).view(8, 1), 4, 2).view(2, 4, 2)
    assert wide[..., 0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert not wide[..., 1].any()


def test_heads_are_widened_by_whole_factors(tool, tmp_path):
    with pytest.raises(ValueError, match=r"multiple of 64, got 96"):
        tool.widen(tmp_path / "wide", 96)
    assert not (tmp_path / "wide").exists()
