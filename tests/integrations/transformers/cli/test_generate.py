"""`attnmux generate`, as a person calls it."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
import transformers
from click import Option, UsageError
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from attnmux.core.cli.verbs import verbs
from attnmux.core.find.cpu import probe_cpu
from attnmux.transformers import recall
from attnmux.transformers.cli import command as cli
from attnmux.transformers.cli import prompts as cli_prompts
from attnmux.transformers.cli import run as cli_run
from attnmux.transformers.cli.groups import GROUPS
from attnmux.transformers.engine.engine import PREFILL_TOKENS

USUAL = "native" if "cxx_compiler" in probe_cpu().features else "torch_native"
"""The backend of a CPU for which nothing is configured."""
ASK = ["k417, x90 ?k", "--max-new-tokens", "8"]
COPY_WITHOUT_CODE = shutil.ignore_patterns("*.py", "__*")


def attnmux(*args, stdin=None):
    return CliRunner().invoke(verbs, ["generate", *map(str, args)], input=stdin)


@pytest.fixture
def copy(tmp_path):
    """A copy of the shipped checkpoint, to be damaged."""
    return shutil.copytree(recall.PATH, tmp_path / "model", ignore=COPY_WITHOUT_CODE)


def refused(result, *words, code=2):
    """One clear message on stderr, nothing on stdout, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    return True


def test_the_verb_is_advertised():
    (point,) = [
        point for point in entry_points(group="attnmux.commands") if point.name == "generate"
    ]
    assert point.load() is cli.generate


def test_the_option_has_the_engine_s_default():
    (option,) = [each for each in cli.generate.params if each.name == "prefill_tokens"]
    assert option.default == PREFILL_TOKENS


def test_help_has_every_option_once_in_a_group():
    common = {"no_stream", "as_json", "no_plugins", "debug"}
    options = {str(each.name) for each in cli.generate.params if isinstance(each, Option)}
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(options - common)
    text = attnmux("--help").output
    headings = [f"{group}:" for group in GROUPS]
    assert [line for line in text.splitlines() if line in headings] == headings
    assert text.count("\n  --draft-tokens ") == 1


@pytest.mark.parametrize(
    "args", [["--help"], ["--no-such-option"], ["--prompts", "no-such-file"]], ids=" ".join
)
def test_help_and_mistakes_do_not_wait_for_torch(args):
    code = """if True:
        import sys
        from attnmux.core.cli.verbs import verbs
        try:
            verbs(["generate", *sys.argv[1:]])
        finally:
            print("imported:", {"torch", "transformers"} & set(sys.modules))
    """
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert result.stdout.endswith("imported: set()\n"), result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_text_goes_to_stdout_and_the_rest_to_stderr():
    result = attnmux(*ASK)
    assert result.exit_code == 0, result.output
    assert result.stdout == "417\n"
    decision, speed = result.stderr.splitlines()
    assert decision.startswith(f"{USUAL} (cpu) serves extend and decode")
    assert speed.startswith("prefill: 12 tokens, ")
    assert speed.count(f"tokens/s, {USUAL} (cpu)") == 2


def test_no_prompt_asks_the_shipped_model_a_question():
    result = attnmux()
    prompt, answer = recall.make_prompt(random.Random(0), cli_prompts.SAMPLE_BYTES)
    assert result.exit_code == 0
    assert result.stdout == f"{answer}\n"
    assert prompt in result.stderr


@pytest.mark.parametrize("extra", [[], ["--no-stream"]])
def test_several_prompts_are_answered_in_order(extra):
    result = attnmux("k417, x90 ?k", "k417, x90 ?x", *extra)
    assert result.stdout == "==> prompt 1 <==\n417\n==> prompt 2 <==\n90\n"


def test_a_prompt_from_stdin():
    assert attnmux("-", stdin="k417, x90 ?x\n").stdout == "90\n"
    assert refused(attnmux("-", stdin=""), "empty prompt")


def test_prompts_that_are_not_utf8(monkeypatch):
    assert refused(attnmux("-", stdin=b"caf\xe9 k417 ?k"), "stdin", "UTF-8")
    assert refused(attnmux("caf\udce9 k417 ?k"), "prompt 1", "UTF-8")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="closed"):
        cli_prompts.read_prompts(["-"], None, model=None, seed=0)


STEM = "the key is k417, and others are x90, b52, zz, lorem ipsum "


def test_prompts_from_a_file(tmp_path):
    """One a line, after those of the command line; blank lines do not count."""
    file = tmp_path / "prompts"
    file.write_text(f"{STEM}?k\r\n\n{STEM}?x\n{STEM}?b\n")
    result = attnmux("k52 ?k", "--prompts", file, "--max-running", 2)
    answers = [line for line in result.stdout.splitlines() if "==>" not in line]
    assert answers == ["52", "417", "90", "52"]
    closing = result.stderr.splitlines()[-1]
    common = len(STEM) + 1
    assert f"prefixes: {2 * common} of {6 + 3 * (common + 1)} prompt tokens reused" in closing


def test_prompts_with_parameters_of_their_own(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "k417, x90 ?k"},
        {"prompt": "k417, x90 ?k", "max_new_tokens": 1},
        {"prompt": [*b"k417, x90 ?x"]},
        {"prompt": "hm", "temperature": 5, "top_p": 0.9, "seed": 3, "max_new_tokens": 4},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    answer = json.loads(attnmux("--prompts", file, "--json", "--page-size", 4).stdout)
    assert [one["text"] for one in answer["results"][:3]] == ["417", "4", "90"]
    assert answer["results"][2]["prompt"] == [*b"k417, x90 ?x"]
    assert 1 <= len(answer["results"][3]["token_ids"]) <= 4
    assert answer["prefix_cache"]["prompt_tokens"] == 3 * 12 + 2
    assert answer["retractions"] == 0
    assert answer["graph_batch_sizes"] == []


def test_prompts_from_stdin():
    assert attnmux("--prompts", "-", stdin="b52 ?b\nc31 ?c").stdout.splitlines()[1::2] == [
        "52",
        "31",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("\n \n", ["empty"]),
        ('{"prompt": "x"}\nplain', ["line 2", "plain", "JSON"]),
        ('{"prompt": "x"}\n{"text": "y"}', ["line 2", "prompt"]),
        ('{"prompt": "x", "max_tokens": 3}', ["line 1", "max_tokens", "max_new_tokens"]),
        ('{"prompt": "x", "max_new_tokens": "3"}', ["line 1, max_new_tokens", "int"]),
        ('{"prompt": "x", "max_new_tokens": 0}', ["line 1, max_new_tokens", "at least 1"]),
        ('{"prompt": "x", "seed": true}', ["line 1, seed", "True"]),
        ('\n{"prompt": "x", "top_p": 2}', ["line 2, top_p", "at most 1"]),
        ('{"prompt": "x"\n{"prompt": "y"}', ["line 1", "JSON"]),
        ("[" * 100_000 + '\n{"prompt": "y"}', ["line 1", "JSON"]),
        (
            '{"prompt": "x", "temperature": 1' + "0" * 400 + "}",
            ["line 1, temperature", "0 or more"],
        ),
        ('{"prompt": "x", "temperature": NaN}', ["line 1, temperature", "0 or more"]),
        ('{"prompt": 5}', ["line 1, prompt", "str or list"]),
        ('{"prompt": ["a"]}', ["line 1, prompt", "token ids"]),
        ('{"prompt": [1, 999]}', ["prompt 1", "999"]),
    ],
)
def test_bad_prompt_files(tmp_path, text, words):
    file = tmp_path / "prompts"
    file.write_text(text)
    assert refused(attnmux("--prompts", file), *words)


def test_a_file_of_json_lines_is_known_by_its_name(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"')
    assert refused(attnmux("--prompts", file), "line 1", "JSON")


def test_a_mark_at_the_beginning_of_a_file_is_no_prompt(tmp_path):
    file = tmp_path / "prompts"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "k417, x90 ?k", "max_new_tokens": 2}')
    assert attnmux("--prompts", file).stdout == "41\n"


def test_a_prompt_file_that_is_not_utf8(tmp_path):
    (tmp_path / "prompts").write_bytes(b"caf\xe9")
    assert refused(attnmux("--prompts", tmp_path / "prompts"), "prompts", "UTF-8")


def test_little_memory_makes_prompts_wait(tmp_path):
    """A pool for two of the five: the answers are the same."""
    file = tmp_path / "prompts"
    questions = [f"k{100 + index}, x90 " + "," * 40 + " ?k" for index in range(5)]
    file.write_text("\n".join(questions))
    args = ["--prompts", file, "--max-new-tokens", 40, "--no-stream", "--prefill-tokens", 16]
    token_bytes = 2 * 2 * 64 * 2 * 4
    result = attnmux(*args, "--memory", token_bytes * 200, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [one["text"] for one in answer["results"]] == [str(100 + index) for index in range(5)]
    assert answer["kv_pool_tokens"] == 199


def test_json_is_one_object():
    result = attnmux("k417, x90 ?k", "b52 ?b", "--json", "--page-size", 16)
    answer = json.loads(result.stdout)
    assert [one["prompt"] for one in answer["results"]] == ["k417, x90 ?k", "b52 ?b"]
    assert [one["text"] for one in answer["results"]] == ["417", "52"]
    assert answer["results"][0]["token_ids"] == [*b"417", 256]
    assert [one["finish_reason"] for one in answer["results"]] == ["stop", "stop"]
    assert answer["timings"]["prefill_tokens"] == 18
    assert answer["timings"]["decode_tokens_per_second"] > 0
    assert answer["decision"]["page_size"] == 16
    assert answer["decision"]["phases"]["decode"] == {"backend": USUAL, "plugin": "cpu"}
    assert len(answer["decision"]["hash"]) == 64
    assert answer["warnings"] == []


def test_a_seed_makes_sampling_repeat():
    args = ["x", "--max-new-tokens", "20", "--temperature", "5", "--seed"]
    first, again, other = (attnmux(*args, seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_a_model_by_path(copy):
    assert attnmux(*ASK, "--model", copy).stdout == "417\n"


def test_dtype_and_backends_by_name():
    result = attnmux(
        *ASK, "--dtype", "fp32", "--prefill-backend", "cpu/torch_native", "--device", "cpu"
    )
    assert result.stdout == "417\n"
    assert "KV in float32" in result.stderr


def test_layers_that_keep_the_model_s_dtype():
    given = ("--dtype", "fp32", "--kv-dtype", "fp8_e4m3", "--kv-dtype-skip", "0")
    result = attnmux(*ASK, *given)
    assert result.stdout == "417\n"
    assert "of 1 layer with 4/2 heads of 64, KV in float32" in result.stderr
    assert "bytes in pools of 2 shapes or KV dtypes" in result.stderr
    (other,) = json.loads(attnmux(*ASK, *given, "--json").stdout)["decision"]["others"]
    assert (other["layers"], other["kv_dtype"]) == (1, "float32")


@pytest.mark.parametrize(
    ("args", "words", "code"),
    [
        (["x", "--model", "/no/such/folder"], ["no such folder"], 2),
        (["x", "--model", ""], ["empty name", "hub"], 2),
        (["x", "--backend", "torch_nativ"], ["unknown attention backend", "torch_native"], 2),
        (["x", "--backend", "fa3"], ["fa3", "vendor: needs nvidia, this is cpu"], 3),
        (["x", "--kv-dtype", "fp4", "--backend", "native"], ["kv_dtype", "native"], 3),
        (["x", "--kv-dtype", "int3"], ["kv_dtype", "int3"], 2),
        (["x", "--kv-dtype-skip", "0"], ["kv_dtype_skip", "a kv_dtype with it"], 2),
        (["x", "--kv-dtype", "fp16", "--kv-dtype-skip", "9"], ["kv_dtype_skip", "got '9'"], 2),
        (["x", "--dtype", "int8"], ["dtype", "int8"], 2),
        (["x", "--dtype", "fp4_e2m1"], ["dtype", "fp4_e2m1", "torch_native"], 3),
        (["x", "--context", "4096"], ["--context", "2048"], 2),
        (["xxxxx", "--context", "4"], ["prompt 1", "5 tokens", "context of 4"], 2),
        ([""], ["prompt 1", "empty prompt"], 2),
        (["x", "--temperature", "-1"], ["temperature"], 2),
        (["x", "--top-p", "0"], ["top_p"], 2),
        (["x", "--canary", "nan"], ["--canary", "nan is not a finite number"], 2),
        (["x", "--max-new-tokens", "0"], ["--max-new-tokens"], 2),
        (["x", "--page-size", "0"], ["--page-size"], 2),
        (["x", "--memory", "much"], ["memory", "'much'", "2GB"], 2),
        (["x", "--memory", "0%"], ["memory", "above 0%"], 2),
        (["x", "--memory", "1KB"], ["KV pool", "more memory"], 1),
        (["k417 ?k", "--memory", "100KB"], ["prompt 1", "fewer new tokens"], 1),
        (["x", "--max-running", "0"], ["--max-running"], 2),
        (["x", "--graph"], ["graph", "torch_native"], 3),
        (["-", "--prompts", "-"], ["only once"], 2),
        (["--prompts", "/no/such/file"], ["--prompts", "/no/such/file", "No such file"], 2),
        (["x", "--device", "nonsense"], ["--device", "nonsense"], 2),
        (["x", "--chat"], ["chat template"], 2),
        (["--model", "somewhere/else"], ["Give a PROMPT"], 2),
        (["x", "--linear-backend", "torch_lineer"], ["did you mean 'torch_linear'"], 2),
    ],
)
def test_bad_input(args, words, code):
    assert refused(attnmux(*args), *words, code=code)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--linear-backend", "torch_linear"], ["--linear-backend", "linear layers"]),
        (["--kept-states", "2"], ["--kept-states", "linear layers"]),
        (["--mm-backend", "native"], ["--mm-backend", "no image", "--image"]),
    ],
)
def test_options_of_parts_that_a_model_lacks_are_refused_before_it_is_loaded(
    monkeypatch, args, words
):
    monkeypatch.setattr(cli_run, "load_runner", lambda *_, **__: pytest.fail("loaded"))
    assert refused(attnmux("x", *args), *words)


@pytest.mark.parametrize("args", [["--linear-backend", "torch_linear"], ["--kept-states", "2"]])
def test_a_model_whose_config_says_nothing_is_asked_for_its_layers(monkeypatch, args):
    monkeypatch.setattr(cli_run, "stated_request", lambda *_, **__: None)
    assert refused(attnmux("x", *args), args[0], "linear layers")


def test_a_folder_without_a_config(tmp_path):
    assert refused(attnmux("x", "--model", tmp_path), "no config.json")


def test_a_broken_config(copy):
    (copy / "config.json").write_text("{")
    assert refused(attnmux("x", "--model", copy), "JSON")
    (copy / "config.json").write_text('{"model_type": "nobody-knows"}')
    assert refused(attnmux("x", "--model", copy), "nobody-knows")
    (copy / "config.json").write_text('{"model_type": "vit"}')
    assert refused(attnmux("x", "--model", copy), "generates text")
    (copy / "config.json").write_text('{"model_type": "rwkv"}')
    assert refused(attnmux("x", "--model", copy), "recurrent state")
    (copy / "config.json").write_text('{"model_type": "mamba"}')
    assert refused(attnmux("x", "--model", copy), "--context", "no limit")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": "four"}, ["num_attention_heads", "four"]),
        ({"num_attention_heads": 0}, ["ZeroDivisionError"]),
        ({"hidden_size": 130}, ["hidden size", "130"]),
        ({"num_hidden_layers": 0}, ["at least one layer"]),
        ({"dtype": "nonsense"}, ["nonsense"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["optimum"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_config_of_wrong_values(copy, changes, words):
    """Each is found by another library and raised in words of its own; ours name the model."""
    config = json.loads((copy / "config.json").read_text())
    config.pop("head_dim")
    (copy / "config.json").write_text(json.dumps(config | changes))
    assert refused(attnmux("x", "--model", copy), "expected", *words)


def test_a_config_that_is_no_object(copy):
    (copy / "config.json").write_text("null")
    assert refused(attnmux("x", "--model", copy), "model", str(copy))


def test_weights_of_the_old_format_that_are_damaged(copy):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_text("x")
    assert refused(attnmux("x", "--model", copy), "model", str(copy))


def test_code_in_a_checkpoint_is_not_run(copy):
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("raise SystemExit('was run')")
    words = "whose code is in the checkpoint", "attnmux runs no code of a checkpoint"
    assert refused(attnmux("x", "--model", copy), *words)


def test_an_adapter_beside_a_full_model(copy):
    """With peft installed, transformers would load the adapter's base model instead."""
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "another/model"}')
    assert refused(attnmux("x", "--model", copy), "merge the adapter into its base")


@pytest.mark.filterwarnings("default")
def test_a_checkpoint_with_missing_tensors(copy):
    """transformers would fill them with random numbers and go on."""
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    shape = tensors.pop(name).shape
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert refused(attnmux("x", "--model", copy), name)
    tensors[name] = torch.zeros(shape[0] - 1, shape[1])
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert refused(attnmux("x", "--model", copy), name, "shape")


def test_a_kv_pool_that_no_machine_holds(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**10}))
    result = attnmux("x", "--model", copy, "--max-new-tokens", 10**10)
    assert refused(result, "KV pool", "bytes", "--max-new-tokens", code=1)


def test_weights_that_are_cut_off_or_absent(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    assert refused(attnmux("x", "--model", copy), "SafetensorError")
    weights.unlink()
    assert refused(attnmux("x", "--model", copy), "model.safetensors")


def test_no_tokenizer(copy):
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert refused(attnmux("x", "--model", copy), "tokenizer", "token ids")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refused(attnmux("x", "--model", "nobody/nothing"), "nobody/nothing", "hub")


def test_a_denied_plugin_leaves_no_backend(monkeypatch):
    monkeypatch.setenv("ATTNMUX_DENY_PLUGINS", "cpu")
    assert refused(attnmux("x"), "no attention backend", code=3)


def test_debug_shows_the_traceback():
    result = attnmux("x", "--context", "4096", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_libraries_are_left_as_talkative_as_they_were():
    before = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    attnmux(*ASK)
    assert transformers.logging.get_verbosity() == before
    assert transformers.logging.is_progress_bar_enabled() == bars


def test_an_interrupt_ends_cleanly():
    # A shell's background jobs, and so all that they start, ignore interrupts.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = f"{heard}; from attnmux.core.cli import main; main()"
    process = subprocess.Popen(
        # One after another, so that much is left to do when the first has begun.
        [sys.executable, "-c", command, "generate", *["x"] * 500, "--max-running", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # `communicate` leaves out what a buffer has read ahead
    )
    assert process.stdout is not None
    begun = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert begun
    assert (begun + rest).endswith(b"\n")
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


TREES = ["--topk", 3, "--steps", 3, "--draft-tokens", 8]


@pytest.mark.parametrize(
    "draft",
    [
        ["ngram"],
        ["ngram", "--topk", 3],
        [recall.PATH, "--steps", 3],
        [recall.PATH, *TREES],
        [recall.PATH, *TREES, "--page-size", 16],
    ],
)
def test_drafts_leave_the_text_alone(draft):
    ask = ["--prompts", "-", "--max-new-tokens", 12, "--dtype", "float32", "--json"]
    lines = "k417, x90 k417, x90 ?k\nx90 x90 x9 ?x\n"
    plain, drafted = (
        json.loads(attnmux(*ask, *more, stdin=lines).stdout) for more in ([], ["--draft", *draft])
    )
    assert [one["text"] for one in drafted["results"]] == [one["text"] for one in plain["results"]]
    assert plain["drafts"]["requests"] == 0
    assert drafted["drafts"]["accepted_tokens"] > 0
    assert drafted["drafts"]["accepted_per_step"] > 0


def test_drafts_of_another_vocabulary_or_shape_are_refused(copy):
    trees = ["--topk", 2, "--steps", 2, "--draft-tokens", 8]
    assert refused(attnmux(*ASK, "--draft", copy, *trees), "--draft-tokens", "at most 7", "got 8")
    chains = ["--steps", 3, "--draft-tokens", 8]
    assert refused(attnmux(*ASK, "--draft", copy, *chains), "--draft-tokens", "at most 4")
    assert refused(attnmux(*ASK, "--draft-tokens", 1), "--draft-tokens")
    file = copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    result = attnmux(*ASK, "--draft", copy)
    assert "the vocabulary of" in result.stderr
    assert result.exit_code == 2


SPLIT = ["--prefill-backend", "torch_native", "--decode-backend", USUAL]


@pytest.mark.parametrize(("mode", "verifies"), [("prefill", "torch_native"), ("decode", USUAL)])
@pytest.mark.parametrize(
    "draft",
    [["ngram"], ["eagle", "--steps", 3], [recall.PATH, *TREES, "--draft-backend", "torch_native"]],
    ids=["ngram", "head", "model"],
)
def test_the_backend_of_either_phase_verifies(draft, mode, verifies):
    ask = ["--prompts", "-", "--max-new-tokens", 12, "--dtype", "float32", "--json"]
    lines = "k417, x90 k417, x90 ?k\nx90 x90 x9 ?x\n"
    plain = json.loads(attnmux(*ask, stdin=lines).stdout)
    given = ["--draft", *draft, *SPLIT, "--speculative-attention-mode", mode]
    result = attnmux(*ask, *given, stdin=lines)
    said = json.loads(result.stdout)
    assert [one["text"] for one in said["results"]] == [one["text"] for one in plain["results"]]
    assert said["drafts"]["accepted_tokens"] > 0
    phases = said["decision"]["phases"]
    served = {phase: phases[phase]["backend"] for phase in phases}
    assert served == {"extend": "torch_native", "decode": USUAL, "verify": verifies}
    assert f"verified by {verifies} (cpu)" in result.stderr
    if draft[0] == "ngram":
        assert said["drafts"]["decision"] is None
        return
    drafted = "torch_native" if "--draft-backend" in draft else USUAL
    by_phase = said["drafts"]["decision"]["phases"].values()
    assert {each["backend"] for each in by_phase} == {drafted}
    assert f"drafted by {drafted} (cpu)" in result.stderr
    assert "\ndrafts: " in result.stderr


def test_options_of_drafts_that_nothing_uses_are_refused():
    mode = ["--speculative-attention-mode", "decode"]
    assert refused(attnmux(*ASK, *mode), "--speculative-attention-mode", "--draft", "got decode")
    assert refused(attnmux(*ASK, *mode[:1], "both"), "--speculative-attention-mode", "both")
    for name, value in (("--draft-tokens", 4), ("--topk", 2), ("--steps", 3)):
        assert refused(attnmux(*ASK, name, value), name, "--draft", f"got {value}")
    named = ["--draft-backend", "native"]
    assert refused(attnmux(*ASK, *named), "--draft-backend", "got native")
    assert refused(attnmux(*ASK, "--draft", "ngram", *named), "--draft-backend", "got native")
    unknown = ["--draft", "eagle", "--draft-backend", "nativ"]
    assert refused(attnmux(*ASK, *unknown), "unknown attention backend 'nativ'")


def test_a_denied_backend_does_not_draft(monkeypatch):
    monkeypatch.setenv("ATTNMUX_DENY_BACKENDS", USUAL)
    said = json.loads(attnmux(*ASK, "--draft", "eagle", "--json").stdout)
    phases = said["drafts"]["decision"]["phases"].values()
    assert USUAL not in {each["backend"] for each in phases}
