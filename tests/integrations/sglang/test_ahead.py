"""What begins when SGLang reads its arguments, before it loads weights. SGLang is not needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attnmux.core import Decision
from attnmux.sglang.plugin import BACKENDS, begin_ahead
from attnmux.transformers import recall


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ({"attention_backend": "attnmux"}, True),
        ({"decode_attention_backend": "attnmux"}, True),
        ({"attention_backend": "triton"}, False),
        ({"attention_backend": "attnmux", "model_path": "of-the-hub/model"}, False),
        ({"attention_backend": "attnmux", "device": "cuda:99"}, False),
    ],
)
def test_the_decided_backend_of_a_local_model_begins(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], begins: bool
) -> None:
    begun: list[Decision] = []
    monkeypatch.setattr(Decision, "begin_ahead", lambda decision, offers: begun.append(decision))
    unset = dict.fromkeys(BACKENDS)
    begin_ahead(SimpleNamespace(**{**unset, "model_path": recall.PATH, "device": "cpu", **given}))
    assert [decision.request.head_dim for decision in begun] == [64] * begins
