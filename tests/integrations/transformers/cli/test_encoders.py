"""`attnmux generate` with encoder-decoder models: texts and files of sound."""

from __future__ import annotations

import json
import wave

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, PreTrainedTokenizerFast

from attnmux.core.cli.verbs import verbs
from attnmux.transformers import open_checkpoint
from attnmux.transformers.load import media
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.load.media import read_samples

START = {"decoder_start_token_id": 3}
RATE = 16_000
MELS = {"feature_size": 8, "chunk_length": 1, "sampling_rate": RATE}
NEW = 6


def tokenizer():
    """Words w0 to w92, of ids from 4 on. Sources end with </s>."""
    words = ["<s>", "<pad>", "</s>", "<start>", *(f"w{index}" for index in range(93))]
    plain = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names)


def saved(folder, kind, config, **generation):
    torch.manual_seed(0)
    with quiet_transformers(progress=False):
        model = kind.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
        model.generation_config.update(**generation)
        model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


@pytest.fixture
def bart(tmp_path, small):
    folder = tmp_path / "bart"
    config = transformers.BartConfig(
        **{**small, **START}, max_position_embeddings=48, forced_eos_token_id=None
    )
    return saved(folder, AutoModelForSeq2SeqLM, config, forced_bos_token_id=7), folder


@pytest.fixture
def whisper(tmp_path, small):
    folder = tmp_path / "whisper"
    config = transformers.WhisperConfig(
        **{**small, **START},
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=48,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = saved(folder, AutoModelForSpeechSeq2Seq, config)
    transformers.WhisperFeatureExtractor(**MELS).save_pretrained(folder)
    return model, folder


def sound(path, seconds, *, rate=RATE, channels=1, width=2):
    rng = np.random.default_rng(len(path.name))
    samples = rng.integers(-30_000, 30_000, (int(seconds * rate), channels), dtype=np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return samples.mean(axis=1).astype(np.float32) / 32768


@torch.inference_mode()
def answer(model, first, **source):
    """Greedy text of the model's own forward, without a cache."""
    ids = list(first)
    for _ in range(NEW):
        said = model(**source, decoder_input_ids=torch.tensor([ids]), use_cache=False)
        ids.append(int(said.logits[0, -1].argmax()))
        if ids[-1] == 2:
            break
    return ids[len(first) :]


def generate(folder, *given):
    options = ("--model", folder, "--max-new-tokens", NEW, "--device", "cpu")
    return CliRunner().invoke(verbs, ["generate", *map(str, (*given, *options))])


def ids(result):
    assert result.exit_code == 0, result.output
    return [one["token_ids"] for one in json.loads(result.stdout)["results"]]


def test_texts_are_answered_as_by_transformers(bart):
    model, folder = bart
    texts = ["w5 w6 w7 w8 w9 w10 w11", "w30", "w50 w51 w52"]
    encoded = [torch.tensor([tokenizer()(text)["input_ids"]]) for text in texts]
    expected = [answer(model, [3, 7], input_ids=each) for each in encoded]
    assert len({tuple(each) for each in expected}) > 1
    assert ids(generate(folder, *texts, "--json")) == expected
    assert ids(generate(folder, *texts, "--json", "--max-running", 1)) == expected
    begun = [answer(model, [3, 24, 25], input_ids=each) for each in encoded]
    assert ids(generate(folder, *texts, "--json", "--decoder-prompt", "w20 w21")) == begun
    shown = generate(folder, texts[0])
    assert shown.exit_code == 0, shown.output
    assert tokenizer().decode(expected[0], skip_special_tokens=True) in shown.stdout


def test_sound_is_answered_as_by_transformers(whisper, tmp_path):
    model, folder = whisper
    files = [tmp_path / "one.wav", tmp_path / "other.wav"]
    samples = [sound(files[0], 0.9), sound(files[1], 0.4, channels=2)]
    extract = transformers.WhisperFeatureExtractor(**MELS)
    expected = [
        answer(model, [3], **extract(each, sampling_rate=RATE, return_tensors="pt"))
        for each in samples
    ]
    assert len({tuple(each) for each in expected}) == 2
    given = [part for file in files for part in ("--audio", file)]
    assert ids(generate(folder, *given, "--json")) == expected
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"audio": str(files[1]), "max_new_tokens": 3}))
    assert ids(generate(folder, "--prompts", lines, "--json")) == [expected[1][:3]]


def test_sound_may_have_more_tokens_than_the_text_has_positions(tmp_path):
    """Moonshine's config limits its decoder's positions alone."""
    folder = tmp_path / "moonshine"
    config = transformers.MoonshineConfig(
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48},
        **dict.fromkeys(["encoder_num_hidden_layers", "decoder_num_hidden_layers"], 2),
        **dict.fromkeys(["encoder_num_attention_heads", "decoder_num_attention_heads"], 4),
        max_position_embeddings=24,
        **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3},
    )
    model = saved(folder, AutoModelForSpeechSeq2Seq, config)
    extract = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, do_normalize=False)
    extract.save_pretrained(folder)
    samples = sound(tmp_path / "long.wav", 1.5)
    inputs = extract(samples, sampling_rate=RATE, return_tensors="pt")["input_values"]
    assert model.get_encoder()(inputs).last_hidden_state.shape[1] > 50
    assert open_checkpoint(folder).max_encoder_len is None
    expected = answer(model, [3], input_values=inputs)
    assert ids(generate(folder, "--audio", tmp_path / "long.wav", "--json")) == [expected]


def test_mistakes_with_sound_are_told(whisper, bart, tmp_path):
    _, folder = whisper
    names = ("rate.wav", "narrow.wav", "long.wav", "cut.wav")
    other, narrow, long, cut = (tmp_path / name for name in names)
    sound(other, 0.1, rate=8000)
    sound(narrow, 0.1, width=1)
    sound(long, 1.5)
    sound(cut, 0.1, channels=2)
    cut.write_bytes(cut.read_bytes()[:-3])
    for file, words in (
        (other, "8000 samples per second"),
        (narrow, "8 bits"),
        (long, "of 1.5 s"),
        (cut, "ends after 6397 of 6400 bytes"),
        (tmp_path / "none.wav", "No such file"),
        (folder / "config.json", "16-bit PCM"),
    ):
        result = generate(folder, "--audio", file)
        assert result.exit_code == 2, result.output
        assert words in " ".join(result.stderr.split())
    assert "--audio FILE" in generate(folder, "w5").stderr
    assert "reads no sound" in generate(bart[1], "--audio", long).stderr
    (folder / "preprocessor_config.json").unlink()
    assert "without a feature extractor" in generate(folder, "--audio", long).stderr


def test_a_sound_from_a_pipe_ends_where_its_file_does(tmp_path):
    """Its header was written before its length was known."""
    file = tmp_path / "pipe.wav"
    samples = sound(file, 0.1, channels=2)
    written = file.read_bytes()
    at = written.index(b"data") + 4
    file.write_bytes(written[:at] + b"\xff\xff\xff\xff" + written[at + 4 : -1])
    read = read_samples(str(file), RATE)
    assert read.tolist() == samples[:-1].tolist()


class Refusing:
    """A feature extractor that takes no sound."""

    sampling_rate = RATE

    def __call__(self, *args, **given):
        raise RuntimeError("choose a window size 400 that is [2, 1]")


def test_a_sound_that_an_extractor_cannot_take(whisper, tmp_path, monkeypatch):
    monkeypatch.setattr(media, "load_processor", lambda *args, **given: Refusing())
    sound(tmp_path / "a.wav", 0.1)
    result = generate(whisper[1], "--audio", tmp_path / "a.wav")
    assert result.exit_code == 2, result.output
    words = " ".join(result.stderr.split())
    assert "a sound that the Refusing takes" in words
    assert "of 1600 samples (RuntimeError: choose a window size" in words


def test_images_are_not_for_encoders(bart, whisper, tmp_path):
    for folder in (bart[1], whisper[1]):
        result = generate(folder, "w5", "--image", tmp_path / "a.png")
        assert result.exit_code == 2
        assert "given only texts and sound" in " ".join(result.stderr.split())


def test_options_of_encoders_are_not_for_decoders(tmp_path):
    for given in (("--audio", tmp_path / "a.wav"), ("abc", "--decoder-prompt", "b")):
        result = CliRunner().invoke(verbs, ["generate", *map(str, given)])
        assert result.exit_code == 2
        assert "which has only a decoder" in result.stderr


@pytest.mark.parametrize(
    "line", [{"audio": "a.wav", "prompt": "b"}, {"audio": "a.wav", "images": ["b.png"]}]
)
def test_a_line_has_sound_alone(tmp_path, line):
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line))
    result = CliRunner().invoke(verbs, ["generate", "--prompts", str(file)])
    assert result.exit_code == 2
    assert "only audio" in result.stderr


def test_drafts_for_an_encoder_decoder_model_are_refused_before_its_weights_are_read(bart):
    (bart[1] / "model.safetensors").unlink()
    result = generate(bart[1], "w5", "--draft", "ngram")
    assert result.exit_code == 2
    assert "expected a decoder-only model" in result.stderr
