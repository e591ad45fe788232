"""What a shell completes."""

from __future__ import annotations

import pytest
from click.shell_completion import BashComplete

from attnmux.core.cli.verbs import verbs


@pytest.mark.parametrize(
    ("words", "begun", "completed"),
    [
        (["select", "--backend"], "torch_n", {"torch_native"}),
        (["select", "--explain"], "fa3", {"fa3", "fa3_mla"}),
        (["select", "--platform"], "h10", {"h100"}),
        (["select", "--engine"], "v", {"vllm"}),
        (["explain"], "PAGE", {"PAGE_SIZE"}),
    ],
)
def test_names_are_completed(words: list[str], begun: str, completed: set[str]) -> None:
    pytest.importorskip("attnmux.nvidia.plugin")
    found = BashComplete(verbs, {}, "attnmux", "_ATTNMUX_COMPLETE").get_completions(words, begun)
    assert {item.value for item in found} == completed


def test_a_configuration_that_cannot_be_read_completes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTNMUX_CONFIG", "/no/such/file.toml")
    complete = BashComplete(verbs, {}, "attnmux", "_ATTNMUX_COMPLETE")
    assert complete.get_completions(["select", "--backend"], "") == []
