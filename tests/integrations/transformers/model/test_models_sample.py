"""A sample of the architectures that `python -m tools.models` runs on attnmux."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import Plugins
from attnmux.core.find.cpu import probe_cpu
from attnmux.cpu.spans import Visibility
from attnmux.cpu.torch_native import TorchNativeBackend

ROOT = Path(__file__).resolve().parents[4]
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
def trial(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        trial = importlib.import_module("tools.models.trial")
        patch.setattr(trial, "build", built_once(trial.build, tmp_path_factory.mktemp("models")))
        yield trial


def built_once(build, kept):
    """As `build`. A checkpoint that another test has built is copied."""
    references = {}

    def built(architecture, recipe, folder):
        if (architecture, recipe) not in references:
            references[architecture, recipe] = build(architecture, recipe, folder)
            shutil.copytree(folder, kept / f"{architecture.name}-{recipe.dtype}")
        else:
            saved = kept / f"{architecture.name}-{recipe.dtype}"
            shutil.copytree(saved, folder, dirs_exist_ok=True)
        return references[architecture, recipe]

    return built


@pytest.fixture(scope="module")
def offers():
    names = ("torch_native", "torch_linear")
    return [offer for offer in Plugins.load().offers() if offer.card.name in names]


LATER = {
    "DeepseekV4Config": "5.23",
    "EncoderDecoderModel": "5.23",
    "Qwen4ExpTextConfig": "5.23",
    "SpeechEncoderDecoderModel": "5.23",
}
"""The first transformers that makes these models as the trial asks."""


def named(names):
    marks = {name: [pytest.mark.transformers(release)] for name, release in LATER.items()}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@pytest.mark.parametrize("name", named(SAMPLE))
@pytest.mark.turns(12)
def test_an_architecture_says_what_it_says_eagerly(trial, offers, name):
    page_sizes = (1,) if SAMPLE.index(name) % 2 else (16,)
    outcome = trial.try_architecture(
        name, trial.Recipe(), probe_cpu(), offers, page_sizes=page_sizes
    )
    assert outcome.status == "served", outcome.reason


SIXTEEN_BITS = (
    "DeepseekV3Config",
    "DeepseekV4Config",
    "Gemma3TextConfig",
    "GlmMoeDsaConfig",
    "GptOssConfig",
    "KimiLinearConfig",
    "LlamaConfig",
    "MiniMaxM3VLTextConfig",
    "Qwen4ExpTextConfig",
    "T5ForConditionalGeneration",
)


@pytest.mark.parametrize("name", named(SIXTEEN_BITS))
@pytest.mark.turns(8)
def test_in_16_bits_an_architecture_differs_no_more_than_rounding_does(trial, offers, name):
    outcome = trial.try_architecture(
        name, trial.Recipe(dtype="bfloat16"), probe_cpu(), offers, page_sizes=(16,)
    )
    assert outcome.status == "served", outcome.reason
    assert outcome.worst > 1e-3, "it ran in more than 16 bits"
    assert outcome.of_bound < 0.8


def shifted(runner):
    """Decode steps at positions that are off by one."""

    def shift(module, args, given):
        if given["input_ids"].shape[-1] <= 2:
            given = {**given, "position_ids": given["position_ids"] + 1}
        return args, given

    runner.model.register_forward_pre_hook(shift, with_kwargs=True)
    return runner


def hide_a_key(patch):
    """Let `torch_native` see one key less than it should, in a range and among picked keys."""
    see, places = Visibility.__init__, TorchNativeBackend._places

    def see_less(self, **given):
        see(self, **given)
        some = self.end - self.first > 1
        object.__setattr__(self, "first", torch.where(some, self.first + 1, self.first))

    def fewer_places(self, *args, **given):
        found = places(self, *args, **given).clone()
        found[found[:, 1] >= 0, 0] = -1
        return found

    patch.setattr(Visibility, "__init__", see_less)
    patch.setattr(TorchNativeBackend, "_places", fewer_places)


@pytest.mark.parametrize("name", named(["DeepseekV4Config", "GlmMoeDsaConfig", "GptOssConfig"]))
@pytest.mark.parametrize("fault", ["position", "key"])
@pytest.mark.turns(2)
def test_in_16_bits_a_fault_is_found(trial, offers, monkeypatch, name, fault):
    """A wrong position, or a key too few: also in models that pick experts and keys."""
    make = trial.make_runner

    def faulty(*args):
        if fault == "key":
            hide_a_key(monkeypatch)
            return make(*args)
        return shifted(make(*args))

    monkeypatch.setattr(trial, "make_runner", faulty)
    outcome = trial.try_architecture(
        name, trial.Recipe(dtype="bfloat16"), probe_cpu(), offers, page_sizes=(16,)
    )
    assert outcome.status == "wrong", outcome
    assert "differ by" in outcome.reason


def test_a_run_that_takes_too_long_says_where_it_was(trial):
    assert trial
    children = importlib.import_module("tools.models.children")
    stages = children.Stages(2.0, lambda text: None)
    stages.read(children.Stage("page size 1: loading"))
    stages.read(children.Stack("load.py:9 load"))
    assert stages.left() > 0
    said = stages.too_long()
    assert said.startswith("not done in 2 s: starting 0 s, page size 1: loading 0 s, in load.py:9")


def test_a_model_that_says_something_else_is_wrong(trial, offers, monkeypatch):
    make = trial.make_runner

    def spoilt(*args):
        runner = make(*args)
        with torch.no_grad():
            runner.model.get_output_embeddings().weight[7] += 0.01
        return runner

    monkeypatch.setattr(trial, "make_runner", spoilt)
    outcome = trial.try_architecture(
        "LlamaConfig", trial.Recipe(), probe_cpu(), offers, page_sizes=(1,)
    )
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
