"""What users of SGLang meet: errors, versions, the choice of phases, and plugins of vendors."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("attnmux.sglang")

import attnmux.transformers.recall as recall
from attnmux.core import PluginError
from attnmux.core.engine_interfaces import Interface, missing
from attnmux.sglang import INTERFACES, SglangInterfaceWarning, interfaces, plugin

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


def test_fp8_caches_give_right_answers(run: Callable[..., Any]) -> None:
    asked, answers = _asked(8)
    (got,), log = run(RECALL, "attnmux", [asked], kv_cache_dtype="fp8_e4m3")
    assert [bytes(each.token_ids).decode() for each in got] == answers
    assert "native (cpu) serves extend and decode" in log  # native or torch_native


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
    refused = "ValueError: --attention-backend attnmux: .*'fa3'.* pip install attnmux-nvidia"
    with pytest.raises(Exception, match=refused):  # EngineFailed, of a conftest without a name
        run(RECALL, "attnmux", [_asked(1)[0]])


def test_an_sglang_without_an_interface_is_not_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gap = Interface("sglang.srt.runtime_context", "get_nothing")
    monkeypatch.setattr(plugin, "REGISTRATION", (gap,))
    said = r"in sglang \S+, which lacks sglang\S+:get_nothing: pip install 'sglang>=0\.5\.22'"
    with pytest.warns(SglangInterfaceWarning, match=said):
        plugin.register()
    with pytest.raises(PluginError, match=said):
        interfaces.require((gap,))


def test_the_installed_sglang_has_every_interface() -> None:
    assert missing(INTERFACES) == []
