"""What users of SGLang meet: errors, versions, the choice of phases, and plugins of vendors."""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("attnmux.sglang")

import attnmux.transformers.recall as recall
from attnmux.core import AttnmuxError, Decision, Interface, Platform, Request
from attnmux.core.engines.engine_interfaces import missing
from attnmux.sglang import INTERFACES, SglangInterfaceWarning, asking, interfaces, plugin

RECALL = Path(recall.__file__).parent


def _asked(count: int) -> tuple[tuple[list[list[int]], list[int]], list[str]]:
    rng = random.Random(2)
    pairs = [recall.make_prompt(rng, 120) for _ in range(count)]
    prompts = [list(prompt.encode()) for prompt, _ in pairs]
    return (prompts, [len(answer) for _, answer in pairs]), [answer for _, answer in pairs]


def test_a_vendors_plugin_serves_the_engine(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("acme_attnmux")
    monkeypatch.setenv("ACME_SIMULATOR", "m1")
    monkeypatch.setenv("ATTNMUX_PLATFORM", "acme")
    asked, answers = _asked(8)
    (got,), log = run(RECALL, "attnmux", [asked], page_size=16, dtype="bfloat16")
    assert [bytes(each.token_ids).decode() for each in got] == answers
    assert "acme_paged" in log


def test_a_page_size_that_the_backend_lacks_ends_the_start_with_one_that_it_has(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("acme_attnmux")
    monkeypatch.setenv("ACME_SIMULATOR", "m1")
    monkeypatch.setenv("ATTNMUX_PLATFORM", "acme")
    monkeypatch.setenv("ATTNMUX_BACKEND", "acme_paged")
    refused = "ValueError: --attention-backend attnmux: page_size: expected --page-size 64: .*got 1"
    with pytest.raises(Exception, match=refused):  # EngineFailed, of a conftest without a name
        run(RECALL, "attnmux", [_asked(1)[0]], page_size=1, dtype="bfloat16")


def test_fp8_caches_give_right_answers(run: Callable[..., Any]) -> None:
    asked, answers = _asked(8)
    (got,), log = run(RECALL, "attnmux", [asked], kv_cache_dtype="fp8_e4m3")
    assert [bytes(each.token_ids).decode() for each in got] == answers
    assert "native (cpu) serves extend and decode" in log  # native or torch_native


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("prefill", "decode"), [("attnmux", "torch_native"), ("torch_native", "attnmux")]
)
def test_a_phase_of_its_own(prefill: str, decode: str, run: Callable[..., Any]) -> None:
    asked, answers = _asked(4)
    flags = {"prefill_attention_backend": prefill, "decode_attention_backend": decode}
    (got,), _ = run(RECALL, "attnmux", [asked], **flags)
    assert [bytes(each.token_ids).decode() for each in got] == answers


def test_the_solvers_reasons_are_the_engines_error(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNMUX_BACKEND", "fa3")
    # On lines of their own where attnmux-nvidia is installed
    refused = "(?s)ValueError: --attention-backend attnmux: .*fa3.*(pip install|vendor: needs)"
    with pytest.raises(Exception, match=refused):  # EngineFailed, of a conftest without a name
        run(RECALL, "attnmux", [_asked(1)[0]])


def test_the_line_of_the_verb_starts_the_engine(
    run: Callable[..., Any], select: Callable[..., Any]
) -> None:
    words, summary = select(RECALL)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags.pop("--model-path") == str(RECALL)
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
    given["page_size"] = int(given["page_size"])
    backend = given.pop("attention_backend")
    _, log = run(RECALL, backend, [_asked(1)[0]], **given)
    assert f"attention: {summary}" in log


@pytest.mark.parametrize(
    "fields",
    [
        "dtype=float16,kv_dtype=fp8_e5m2,page_size=16,deterministic=true,two_batches=true",
        "dtype=bf16,spec_topk=4,spec_draft_tokens=8,speculative_attention_mode=decode",
        "dtype=bf16,phases=decode",
    ],
)
def test_sglang_knows_every_word_of_a_line(fields: str, imported: None) -> None:
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    server_args = importlib.import_module("sglang.srt.server_args")
    # As `register` does in every process of SGLang
    choices.add_attention_backend_choices([asking.NAME])
    platform = Platform.parse("nvidia:sm90,cuda=13.0")
    request = asking.ask(Request.parse(fields), platform)
    made = Decision(
        platform=platform,
        request=request,
        page_size=64,
        kv_dtype=request.kv_dtype or str(request.dtype),
        phases={},
    )
    eager = replace(made, request=request.replace(graph=False))
    for decision in (made, eager):
        words = asking.launch(decision, "MODEL", tp=2)
        parser = argparse.ArgumentParser()
        server_args.ServerArgs.add_cli_args(parser)
        given = parser.parse_args(words[3:])
        assert (given.model_path, given.page_size, given.tp_size) == ("MODEL", 64, 2)


def test_a_window_of_one_token_ends_the_start(run: Callable[..., Any], tmp_path: Path) -> None:
    texts = importlib.import_module("transformers")
    config = texts.Gemma3TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=1,
        layer_types=["sliding_attention", "full_attention"],
    )
    texts.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    refused = "ValueError: --attention-backend attnmux: sliding_window: expected 2 tokens or more"
    with pytest.raises(Exception, match=refused):  # as above
        run(tmp_path / "model", "attnmux", [_asked(1)[0]])


def test_an_sglang_without_an_interface_is_not_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gap = Interface("sglang.srt.runtime_context", "get_nothing")
    monkeypatch.setattr(plugin, "REGISTRATION", (gap,))
    said = r"in sglang \S+, which lacks sglang\S+:get_nothing: install sglang 0\.5\.22"
    with pytest.warns(SglangInterfaceWarning, match=said):
        plugin.register()
    with pytest.raises(AttnmuxError, match=said):
        interfaces.INTEGRATION.require((gap,))


def test_the_installed_sglang_has_every_interface() -> None:
    assert missing(INTERFACES) == []
