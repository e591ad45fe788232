"""`attnmux select`: what it answers, in which form, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.core import Decision, Platform, Plugins
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.core.facts.verdicts import Verdict
from attnmux.core.find.devices import Detection, UnservedDevice

pytest.importorskip("attnmux.cpu.plugin", reason="the answers below are those of attnmux-cpu")

MODELS = Path(__file__).parents[1] / "data"
HERE = "cpu:x86_64,features=avx2"


@pytest.fixture
def call():
    def invoke(*args: str):
        return CliRunner().invoke(verbs, ["select", *args], prog_name="attnmux")

    return invoke


def answer(result) -> dict:
    return json.loads(result.stdout)


def test_json_form(call) -> None:
    result = call("--platform", HERE, "--request", "dtype=bf16,spec_topk=4", "--json")
    assert result.exit_code == 0
    data = answer(result)
    assert set(data) == {
        "platform",
        "request",
        "page_size",
        "kv_dtype",
        "hash",
        "phases",
        "decode_sizes",
        "parts",
        "others",
        "coercions",
        "notes",
        "candidates",
        "proof",
        "warnings",
    }
    assert (data["page_size"], data["kv_dtype"]) == (1, "bfloat16")
    assert list(data["phases"]) == ["extend", "decode", "verify", "draft"]
    assert data["phases"]["decode"]["backend"] == "torch_native"
    assert data["phases"]["decode"]["plugin"] == "cpu"
    assert data["platform"]["features"] == ["avx2"]
    for candidate in data["candidates"]:
        assert set(candidate) == {field.name for field in fields(Verdict)}
    del data["warnings"]
    assert Decision.from_json(json.dumps(data)).hash == data["hash"]


def test_nothing_fits(call) -> None:
    result = call("--platform", HERE, "--request", "kind=nsa,deterministic=true", "--json")
    assert result.exit_code == 3
    data = answer(result)
    assert (data["phases"], data["hash"], data["page_size"]) == ({}, None, None)
    assert {candidate["verdict"] for candidate in data["candidates"]} == {"rejected"}
    reasons = [reason for c in data["candidates"] for reason in c["reasons"]]
    keys = {"code", "axis", "wanted", "offered", "hint", "by"}
    assert all(set(reason) == keys for reason in reasons)
    assert "DETERMINISTIC" in {reason["code"] for reason in reasons}
    assert "torch_native (cpu) for extend, decode: deterministic: not served" in result.stderr
    assert "Traceback" not in result.output


def test_nothing_fits_without_json(call) -> None:
    result = call("--platform", HERE, "--request", "kind=mla,kv_dtype=fp4_e2m1")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "kv_dtype=bfloat16" in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--platform", "nvida:sm90"], "did you mean 'nvidia'"),
        (["--platform", "nvidia:gfx942"], "an architecture of nvidia"),
        (["--request", "page=16"], "FIELD=VALUE"),
        (["--request", "dtype=int3"], "dtype: expected one of"),
        (["--model", "/no/such/model"], "/no/such/model: no such file"),
        (["--model", str(MODELS)], "which has no config.json"),
        (["--model", str(MODELS / "qwen2.5-7b"), "--tp", "8"], "a divisor of the model's 28 heads"),
        (["--tp", "4"], "--model, whose heads it divides"),
        (["--tp", "0"], "--tp"),
        (["--backend", "torch_nativ"], "did you mean 'torch_native'"),
        (["--backend", "flashinfre"], "did you mean 'flashinfer'"),
        (["--set", "torch_native"], "BACKEND.OPTION=VALUE"),
        (["--set", "torch_native.x=1"], "it has none"),
        (["--set", "nothing_like_it.x=1"], "unknown attention backend"),
        (["--speculative-attention-mode", "both"], "both"),
        (["--bakend", "x"], "--bakend"),
        (["extra"], "extra"),
    ],
)
def test_bad_input(call, args, said) -> None:
    result = call("--platform", HERE, *args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_a_table_for_people(call) -> None:
    result = call("--platform", HERE, "--request", "page_size=16")
    assert result.exit_code == 0
    assert result.stdout.startswith("torch_native (cpu) serves extend and decode, rank 50")
    (row,) = [line for line in result.stdout.splitlines() if "chosen: " in line]
    assert row.endswith("chosen: the only one that fits")


def test_a_model_on_another_machine(call) -> None:
    result = call("--platform", HERE, "--model", str(MODELS / "deepseek-v3"), "--tp", "8", "--json")
    data = answer(result)
    assert (data["request"]["kind"], data["request"]["num_q_heads"]) == ("mla", 16)
    assert data["request"]["origins"]["kv_lora_rank"] == "model"


def test_an_unknown_model_is_refused_unless_assumed(call, tmp_path) -> None:
    values = {"model_type": "mystery", "num_attention_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16"}))
    args = ["--platform", HERE, "--model", str(tmp_path), "--json"]
    said = "unknown model type mystery: read as causal MHA"
    result = call(*args)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"{said} only with --assume" in result.stderr
    result = call(*args, "--assume")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["warnings"] == [said]


def test_a_checkpoint_in_float32_gets_a_hint(call, tmp_path) -> None:
    values = {"model_type": "llama", "num_attention_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**values, "dtype": "float32"}))
    args = ["--platform", "nvidia:sm90,cuda=13.0", "--model", str(tmp_path), "--json"]
    (hint,) = json.loads(call(*args).stdout)["warnings"]
    assert "the checkpoint is in float32" in hint
    assert "with dtype=bfloat16, fa3 serves it" in hint
    named = call(*args, "--request", "dtype=float32")
    assert json.loads(named.stdout)["warnings"] == []


def test_layers_that_no_backend_serves_are_said(call, tmp_path) -> None:
    values = {"model_type": "llama", "layer_types": [*["mamba"] * 3, "full_attention"] * 12}
    values |= {"num_attention_heads": 16, "head_dim": 256}
    values |= {"num_key_value_heads": 2, "num_hidden_layers": 48, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    args = ["--platform", HERE, "--model", str(tmp_path)]
    result = call(*args, "--json")
    assert result.exit_code == 3
    data = json.loads(result.stdout)
    assert data["request"]["linear_layers"] == {"mamba": 36}
    assert data["phases"]["decode"]["backend"]
    said = "no backend serves these layers of the model: 36 of mamba"
    assert said in result.stderr
    result = call(*args, "--explain")
    assert (result.exit_code, said in result.stderr) == (3, True)
    assert "mamba 36" in result.stdout
    assert "no backend serves 36 mamba layers" in " ".join(result.stdout.split())


def test_layers_with_keys_of_blocks_are_named(call, tmp_path) -> None:
    values = {"model_type": "deepseek_v4", "num_hidden_layers": 5, "dtype": "bfloat16"}
    values |= {"compress_ratios": [0, 4, 128, 4, 128, 0]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    args = ["--platform", HERE, "--model", str(tmp_path)]
    data = answer(call(*args, "--json"))
    counted = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 2}
    assert data["request"]["compressed_layers"] == counted
    assert Decision.from_json(json.dumps(data)).hash == data["hash"]
    said = " ".join(call(*args).stdout.split())
    assert "serves the keys of blocks in 2 compressed_sparse_attention and 2 heavily_" in said


def test_linear_layers_have_backends_of_their_own(call, tmp_path) -> None:
    values = {"model_type": "qwen3_next", "num_attention_heads": 16, "head_dim": 256}
    values |= {"num_key_value_heads": 2, "num_hidden_layers": 48, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    args = ["--platform", HERE, "--model", str(tmp_path)]
    data = answer(call(*args, "--json"))
    served = {
        phase: choice["backend"] for phase, choice in data["parts"]["linear_layers"]["gdn"].items()
    }
    assert served == {"extend": "torch_linear", "decode": "torch_linear"}
    assert Decision.from_json(json.dumps(data)).hash == data["hash"]
    result = call(*args, "--explain")
    assert result.exit_code == 0
    assert "torch_linear (cpu) serves 36 gdn layers" in " ".join(result.stdout.split())
    result = call(*args, "--linear-backend", "torch_native")
    assert (result.exit_code, "torch_native" in result.stderr) == (3, True)


def test_linear_layers_verify_chains_of_drafts(call) -> None:
    fields = "linear_layers=gdn:3,linear_head_dim=128,dtype=bf16,spec_draft_tokens=4,spec_topk="
    data = answer(call("--platform", HERE, "--request", f"{fields}1", "--json"))
    assert data["parts"]["linear_layers"]["gdn"]["verify"]["backend"] == "torch_linear"
    result = call("--platform", HERE, "--request", f"{fields}4", "--json")
    assert result.exit_code == 3
    assert "3 of gdn (with draft trees" in result.stderr
    own = "kind=gdn,head_dim=128,dtype=bf16,spec_topk=1,spec_draft_tokens=4"
    data = answer(call("--platform", HERE, "--request", own, "--json"))
    assert data["request"]["phases"] == ["extend", "decode", "verify"]
    assert data["phases"]["verify"]["backend"] == "torch_linear"


def test_a_max_error_that_no_card_promises_is_refused(call) -> None:
    asked = "num_q_heads=8,num_kv_heads=8,head_dim=64,dtype=bf16"
    result = call("--platform", HERE, "--request", f"{asked},max_error=2", "--json")
    assert result.exit_code == 3
    reasons = [r for v in json.loads(result.stdout)["candidates"] for r in v["reasons"]]
    assert "MAX_ERROR" in {reason["code"] for reason in reasons}


def test_the_request_overrules_the_model(call) -> None:
    args = ["--model", str(MODELS / "llama-3.1-8b"), "--request", "dtype=fp16"]
    data = answer(call("--platform", HERE, *args, "--json"))
    assert (data["request"]["dtype"], data["kv_dtype"]) == ("float16", "float16")
    assert data["request"]["origins"]["dtype"] == "user"


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_speculation(call, mode) -> None:
    flag = ["--speculative-attention-mode", mode]
    data = answer(call("--platform", HERE, "--request", "spec_topk=2", *flag, "--json"))
    assert data["request"]["speculative_attention_mode"] == mode


def test_a_library_counts_as_there_unless_told_otherwise(call) -> None:
    result = call("--platform", HERE, "--without", "Torch", "--json")
    assert result.exit_code == 3
    found = {each["backend"]: each["reasons"] for each in answer(result)["candidates"]}
    (reason,) = found["torch_native"]
    assert reason["code"] == "LIBRARY"
    assert reason["hint"] == "pip install 'attnmux-cpu[torch]'"


def test_leaving_out_what_no_backend_requires_is_said(call) -> None:
    result = call("--platform", HERE, "--without", "Torch_", "--without", "TORCH", "--json")
    (warning,) = answer(result)["warnings"]
    assert warning.startswith("--without Torch_: no backend requires it")
    assert result.exit_code == 3


def test_coercion_needs_leave(call) -> None:
    args = ["--platform", HERE, "--request", "graph=true", "--json"]
    assert call(*args).exit_code == 3
    data = answer(call(*args, "--allow-coercion"))
    (change,) = data["coercions"]
    assert set(change) == {"field", "old", "new", "because", "origin"}
    assert (change["field"], change["origin"]) == ("graph", "user")


def test_the_file_and_the_environment_name_backends(call, tmp_path, monkeypatch) -> None:
    (tmp_path / "attnmux.toml").write_text('backend = "torch_nativ"\n')
    assert "did you mean 'torch_native'" in call("--platform", HERE).stderr
    monkeypatch.setenv("ATTNMUX_BACKEND", "torch_native")
    assert call("--platform", HERE).exit_code == 0


def test_without_the_plugin_of_the_machine_s_vendor_the_answer_says_so(call, monkeypatch) -> None:
    """A last resort for a machine that has better is no answer about that machine."""
    args = ("--platform", "nvidia:sm90,cuda=12.8", "--json")
    monkeypatch.setenv("ATTNMUX_ALLOW_PLUGINS", "cpu")
    data = answer(call(*args))
    assert {choice["plugin"] for choice in data["phases"].values()} == {"cpu"}
    (warning,) = data["warnings"]
    assert warning.startswith("attnmux-nvidia, which serves nvidia, is ")
    assert warning in call(*args).stderr
    assert answer(call("--platform", HERE, "--json"))["warnings"] == []
    other = call("--platform", "acme:m1,device=cpu,runtime=acmert 1", "--json")
    (warning_of_doubt,) = answer(other)["warnings"]
    assert warning_of_doubt.startswith(
        "cpu/torch_native was chosen, but it has never run on acme:m1, "
    )
    on_a_machine(monkeypatch, platforms=(SM90, CPU))
    assert answer(call("--json"))["warnings"] == []
    refused = answer(call("--json", "--request", "kind=mla,kv_dtype=fp4_e2m1"))
    assert refused["warnings"] == [warning]


def test_no_plugins(call, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_NO_PLUGINS", "true")
    result = call("--platform", HERE)
    assert result.exit_code == 3
    assert "no plugin offers one" in result.stderr
    assert "no plugin is loaded: no_plugins (ATTNMUX_NO_PLUGINS) admits none" in result.stderr
    monkeypatch.delenv("ATTNMUX_NO_PLUGINS")
    result = call("--platform", HERE, "--no-plugins")
    assert result.exit_code == 3
    assert "no plugin is loaded: no_plugins (--no-plugins) admits none" in result.stderr
    assert "pip install attnmux-cpu" in result.stderr
    for platform, distribution in (("nvidia:sm90", "nvidia"), ("acme:m1,device=acme", "cpu")):
        result = call("--platform", platform, "--no-plugins")
        assert f"(pip install attnmux-{distribution}, unless it is installed" in result.stderr


def test_an_allow_list_that_nothing_is_in(call, tmp_path) -> None:
    (tmp_path / "attnmux.toml").write_text('allow_plugins = ["cpuu"]\n')
    result = call("--platform", HERE)
    assert result.exit_code == 3
    assert f"allow_plugins ({tmp_path / 'attnmux.toml'}) admits none" in result.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            'deny_plugins = ["nvidai"]',
            "no plugin comes from 'nvidai', did you mean 'nvidia'?",
        ),
        ('allow_plugins = ["cpu", "attnmux-acme"]', "no plugin comes from 'attnmux-acme'"),
        ('deny_plugins = ["Attnmux_NVIDIA"]', None),
        ('allow_plugins = ["cpu"]', None),
    ],
)
def test_lists_with_unknown_plugins(call, tmp_path, setting, said) -> None:
    (tmp_path / "attnmux.toml").write_text(setting + "\n")
    stderr = call("--platform", HERE).stderr
    assert ("no plugin comes from" in stderr) is (said is not None)
    assert said is None or said in stderr


SM90 = Platform.parse("nvidia:sm90,cuda=12.8", is_here=True)
CPU = Platform.parse("cpu:x86_64", is_here=True)


def on_a_machine(monkeypatch, **given) -> None:
    detection = Detection(**given)

    def detect(plugins: Plugins) -> Detection:
        return detection

    monkeypatch.setattr(shared.Plugins, "detect", detect)


def test_a_device_without_its_plugin_is_said_loudly(call, monkeypatch) -> None:
    device = UnservedDevice(
        vendor="nvidia",
        evidence="/dev/nvidia0",
        distribution="attnmux-nvidia",
        problem="attnmux-nvidia is not installed",
        fix="pip install attnmux-nvidia",
    )
    on_a_machine(monkeypatch, platforms=(CPU,), unserved=(device,))
    result = call("--json")
    assert result.exit_code == 0
    assert "pip install attnmux-nvidia" in result.stderr
    assert any("pip install attnmux-nvidia" in text for text in answer(result)["warnings"])


def test_two_kinds_of_accelerator(call, monkeypatch) -> None:
    other = Platform.parse("amd:gfx942,rocm=6.4")
    on_a_machine(monkeypatch, platforms=(other, SM90, CPU))
    result = call("--json")
    assert result.exit_code == 2
    assert "amd:gfx942 and nvidia:sm90" in result.stderr
    data = answer(call("--platform", "nvidia", "--json"))
    assert data["platform"]["arch"] == "sm90"
    monkeypatch.setenv("ATTNMUX_PLATFORM", "cpu")
    assert answer(call("--json"))["platform"]["vendor"] == "cpu"


def test_this_machine(call) -> None:
    pytest.importorskip("torch")
    data = answer(call("--platform", "cpu", "--json"))
    assert data["platform"]["core_count"] >= 1
    assert data["phases"]["decode"]["version"]


ENGINE = """
from attnmux.core import InvalidInput

def ask(request, platform):
    if request.alibi:
        raise InvalidInput("alibi", got=True, expected="none in acme")
    return request.replace(origin="model", strided_kv=True, graph=True)

def launch(decision, model, *, tp, kv_dtype_skip):
    return ["acme-serve", model, "--page", decision.page_size, "--ranks", tp]

def install(decision, plugins):
    return ["acme", *plugins]
"""
BAD = """
from acme_engine import ask

def install(decision, plugins):
    raise RuntimeError("no such flag")
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An installed integration of the engines "acme" and "bad"."""
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(tmp_path), *sys.path[1:]])
    info = tmp_path / "attnmux_acme_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: attnmux-acme-engine\nVersion: 1.0\n")
    points = "acme = acme_engine\nbad = bad_engine\n"
    (info / "entry_points.txt").write_text(f"[attnmux.engines]\n{points}")
    (tmp_path / "acme_engine.py").write_text(ENGINE)
    (tmp_path / "bad_engine.py").write_text(BAD)


def test_an_engines_request_is_solved_and_its_lines_are_printed(call, engine) -> None:
    here = ("--platform", HERE, "--request", "dtype=bf16,page_size=16", "--engine", "acme")
    result = call(*here)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()[-2:]
    assert lines == [
        "pip install acme 'attnmux-cpu[torch]'",
        "acme-serve MODEL --page 16 --ranks 1",
    ]
    data = answer(call(*here, "--json"))
    assert [data["install"], data["launch"]] == lines
    # As the integration asks
    assert data["request"]["strided_kv"] is True
    shutil.copytree(MODELS / "gemma-3-1b-it", "my model")
    result = call("--platform", HERE, "--model", "my model", "--engine", "acme", "--tp", "2")
    assert "acme-serve 'my model' --page 1 --ranks 2" in result.stdout


@pytest.mark.parametrize(
    ("args", "variables"),
    [
        (["--decode-backend", "torch_native"], "ATTNMUX_DECODE_BACKEND=torch_native"),
        (["--set", "triton.num_kv_splits=8"], "ATTNMUX_OPTIONS=triton.num_kv_splits=8"),
        (["--allow-coercion"], "ATTNMUX_ALLOW_COERCION=true"),
        (["--no-measurements"], "ATTNMUX_NO_MEASUREMENTS=true"),
        # What it overrules would count again in the server
        (
            ["--backend", "torch_native"],
            "ATTNMUX_BACKEND=torch_native ATTNMUX_DECODE_BACKEND=''",
        ),
    ],
)
def test_settings_of_the_command_line_are_variables_of_the_launch(
    call, engine, monkeypatch, args, variables
) -> None:
    if "ATTNMUX_BACKEND" in variables:
        monkeypatch.setenv("ATTNMUX_DECODE_BACKEND", "flex_attention")
    result = call("--platform", HERE, *args, "--engine", "acme")
    assert result.exit_code == 0, result.output
    line = result.stdout.splitlines()[-1]
    assert line == f"{variables} acme-serve MODEL --page 1 --ranks 1"
    for pair in variables.split():
        name, _, value = pair.partition("=")
        monkeypatch.setenv(name, value.strip("'"))
    again = answer(call("--platform", HERE, "--engine", "acme", "--json"))
    assert (
        again["hash"]
        == answer(call("--platform", HERE, *args, "--engine", "acme", "--json"))["hash"]
    )


@pytest.mark.parametrize(
    ("args", "said", "code"),
    [
        (["--request", "alibi=true"], "attnmux in acme: alibi: expected none in acme", 3),
        (["--without", "triton"], "attnmux in acme: --without: expected none with --engine", 3),
        (
            ["--model", str(MODELS / "llama-3.1-8b"), "--request", "sliding_window=100"],
            "sliding_window: expected none with --engine",
            2,
        ),
    ],
)
def test_what_an_engine_cannot_follow_is_refused(call, engine, args, said, code) -> None:
    result = call("--platform", HERE, *args, "--engine", "acme", "--json")
    assert result.exit_code == code, result.output
    assert said in " ".join(result.stderr.split())
    if code == 3:
        assert (answer(result)["hash"], "launch" in answer(result)) == (None, False)


def test_an_engine_without_an_integration_is_refused(call, engine, monkeypatch) -> None:
    result = call("--platform", HERE, "--engine", "other")
    assert result.exit_code == 2
    assert "expected one of acme, bad" in result.stderr
    # Anybody may own that name
    assert "pip install" not in result.stderr
    monkeypatch.setenv("ATTNMUX_DENY_PLUGINS", "attnmux-vllm")
    result = call("--platform", HERE, "--engine", "vllm")
    assert "(pip install attnmux-vllm adds vllm), got vllm" in result.stderr
    monkeypatch.delenv("ATTNMUX_DENY_PLUGINS")
    result = call("--platform", HERE, "--engine", "bad")
    assert result.exit_code == 1
    assert "bad_engine of attnmux-acme-engine failed: RuntimeError: no such flag" in result.stderr
    assert call("--platform", HERE, "--platform", HERE, "--engine", "acme").exit_code == 2


def test_lists_hold_for_integrations_too(call, engine, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_DENY_PLUGINS", "attnmux-acme-engine")
    assert call("--platform", HERE, "--engine", "acme").exit_code == 2


GEMMA4 = {
    **{"model_type": "gemma4_text", "dtype": "bfloat16", "sliding_window": 512},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 512},
}


def test_a_model_whose_layers_differ(call, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4))
    given = ("--model", str(tmp_path), "--platform", HERE)
    data = answer(call(*given, "--json"))
    (other,) = data["others"]
    assert (other["request"]["head_dim"], other["request"]["sliding_window"]) == (512, None)
    assert other["phases"]["decode"]["backend"] == "torch_native"
    assert (other["page_size"], other["kv_dtype"]) == (data["page_size"], data["kv_dtype"])
    said = call(*given).stdout
    assert "for 1 layer with 8/4 heads of 512: torch_native" in " ".join(said.split())
    assert "1 layer with 8/4 heads of 512:" in said.splitlines()
    explained = answer(call(*given, "--explain", "--json"))["explanation"]
    assert [each["layers"] for each in explained["others"]] == ["1 layer with 8/4 heads of 512"]
    table = call(*given, "--platform", "nvidia:sm90").stdout
    assert "1 layer with 8/4 heads of 512: torch_native" in " ".join(table.split())


def test_layers_that_keep_the_model_s_dtype(call) -> None:
    model = str(MODELS / "gemma-3-1b-it")
    given = ("--model", model, "--platform", HERE, "--request", "kv_dtype=fp8_e4m3")
    skip = ("--kv-dtype-skip", "5,sliding_window")
    data = answer(call(*given, *skip, "--json"))
    (other,) = data["others"]
    assert (data["kv_dtype"], other["kv_dtype"]) == ("fp8_e4m3", "bfloat16")
    assert data["request"]["other_layers"][0]["layers"] == 23
    assert other["page_size"] == data["page_size"]
    said = call(*given, *skip).stdout
    assert "for 23 layers with 4/1 heads of 256 and a window of 511, KV in bfloat16" in " ".join(
        said.split()
    )
    values = answer(call(*given, *skip, "--explain", "--json"))["explanation"]["values"]
    assert {
        "name": "kv_dtype_skip",
        "value": "5,sliding_window",
        "origin": "user",
        "source": "command line",
    } in values
    wide = answer(call(*given[:5], "dtype=fp16,kv_dtype=fp8_e4m3", *skip, "--json"))
    assert wide["others"][0]["kv_dtype"] == "float16"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--kv-dtype-skip", "0"], "--kv-dtype-skip: expected --model, whose layers it names"),
        (["--kv-dtype-skip", "0", "--model", "llama-3.1-8b"], "expected a kv_dtype with it"),
        (["--kv-dtype-skip", "0", "--model", "deepseek-v3"], "got mla layers"),
        (["--kv-dtype-skip", "32", "--model", "llama-3.1-8b"], "from 0 to 31, or full_attention"),
    ],
)
def test_layers_that_cannot_be_skipped(call, args, said) -> None:
    given = [str(MODELS / arg) if (MODELS / arg).is_dir() else arg for arg in args]
    if "a kv_dtype with it" not in said:
        given += ["--request", "kv_dtype=fp8_e4m3"]
    result = call("--platform", HERE, *given)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


def test_a_group_of_layers_that_nobody_serves(call, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4, "global_head_dim": 100_000}))
    given = ("--model", str(tmp_path), "--platform", "nvidia:sm90", "--backend", "flashinfer")
    result = call(*given)
    assert result.exit_code == 3
    assert "1 layer with 8/4 heads of 100000: flashinfer cannot serve" in result.stderr
