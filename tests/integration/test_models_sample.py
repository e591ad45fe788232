"""A sample of the architectures that `python -m tools.models` runs on attnmux."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import load_plugins
from attnmux.core.choosing.machine.cpu import probe_cpu

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = (
    "BartConfig",
    "BlenderbotForConditionalGeneration",
    "BigBirdPegasusConfig",
    "BioGptConfig",
    "BloomConfig",
    "Cohere2Config",
    "DeepseekV32Config",
    "DeepseekV4Config",
    "DiffLlamaConfig",
    "EncoderDecoderModel",
    "Emu3Config",
    "Exaone4Config",
    "FalconConfig",
    "FalconMambaConfig",
    "Gemma4TextConfig",
    "Gemma4UnifiedConfig",
    "GlmConfig",
    "GlmMoeDsaConfig",
    "GraniteConfig",
    "JetMoeConfig",
    "Mamba2Config",
    "MarianConfig",
    "MiMoV2FlashConfig",
    "MiniCPM3Config",
    "MiniMaxConfig",
    "MiniMaxM3VLTextConfig",
    "ModernBertDecoderConfig",
    "MoonshineForConditionalGeneration",
    "NanoChatConfig",
    "NllbMoeForConditionalGeneration",
    "OPTConfig",
    "Olmo2Config",
    "PersimmonConfig",
    "Phi3Config",
    "Qwen4ExpTextConfig",
    "RecurrentGemmaConfig",
    "RobertaConfig",
    "PLBartForConditionalGeneration",
    "Pop2PianoForConditionalGeneration",
    "SeedOssConfig",
    "SpeechEncoderDecoderModel",
    "SmolLM3Config",
    "Speech2TextForConditionalGeneration",
    "StableLmConfig",
    "T5Gemma2ForConditionalGeneration",
    "ZambaConfig",
    "ZayaConfig",
    "xLSTMConfig",
)

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' models warn of themselves


@pytest.fixture(scope="module")
def trial():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("tools.models.trial")


@pytest.fixture(scope="module")
def offers():
    names = ("torch_native", "torch_linear")
    return [offer for offer in load_plugins().offers() if offer.card.name in names]


@pytest.mark.parametrize("index", range(len(SAMPLE)), ids=lambda index: SAMPLE[index])
@pytest.mark.share(2)
def test_an_architecture_says_what_it_says_eagerly(trial, offers, index):
    page_sizes = (1,) if index % 2 else (16,)
    name = SAMPLE[index]
    outcome = trial.try_architecture(name, 0, probe_cpu(), offers, page_sizes=page_sizes)
    assert outcome.status == "served", outcome.reason


def test_a_model_that_says_something_else_is_wrong(trial, offers, monkeypatch):
    make = trial.make_runner

    def spoilt(*args):
        runner = make(*args)
        with torch.no_grad():
            runner.model.get_output_embeddings().weight[7] += 0.01
        return runner

    monkeypatch.setattr(trial, "make_runner", spoilt)
    outcome = trial.try_architecture("LlamaConfig", 0, probe_cpu(), offers, page_sizes=(1,))
    assert outcome.status == "wrong"
    assert "differ by" in outcome.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--jobs", "0"], "0 is not in the range"),
        (["--timeout", "nan"], "not a finite number"),
        (["--timeout", "-1"], "-1.0 is not in the range"),
        (["--shard", "0/2"], "I from 1 to N, got '0/2'"),
        (["--shard", "3/2"], "got '3/2'"),
        (["--shard", "x"], "got 'x'"),
        (["--shard", "2/2"], "--shard 2/2 has no architecture"),
        (["--json", "no/such/folder/a.json"], "in a folder that exists"),
        (["--platform", "no"], "platform: expected one of"),
        (["--backend", "tritn"], "backend: expected one of"),
        (["LlamaConfg"], "did you mean LlamaConfig"),
    ],
)
def test_a_run_of_nothing_is_refused(trial, monkeypatch, given, said):
    """A run that tries no model would pass."""
    assert trial
    command = importlib.import_module("tools.models.__main__")
    monkeypatch.setattr(command, "all_names", lambda context: ["LlamaConfig"])
    monkeypatch.setattr(command, "run_all", lambda *args, **given: pytest.fail("ran"))
    result = CliRunner().invoke(command.main, given)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.replace("│", " ").split())
