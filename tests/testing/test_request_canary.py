"""The canary of another engine: one request of one layer, in one step of many."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    BackendContext,
    ForwardBatch,
    GraphConfig,
    GraphRunner,
    InvalidInput,
    KVPool,
    ModelInput,
)
from attnmux.core.cli.verbs import verbs
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.testing import (
    Case,
    FailureFolder,
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    RequestCanary,
    decode,
    extend,
    fake_platform,
    find_candidate,
    load_failure,
    make_setup,
    prepare_step,
    run_again,
    verify,
)
from attnmux.testing.canary import counts, request
from attnmux.testing.run.execution import call_layer
from attnmux.vllm.block_table import BlockTable

LOGGER = logging.getLogger("canary-test")
DENSE: dict[str, Any] = {"head_dim": 32, "v_head_dim": 32, "windows": (None, 6), "page_size": 4}
MANY = extend((0, 6), (5, 8), (2, 3))


def case(*steps: Any, **changes: Any) -> Case:
    return Case(name="case", steps=steps or (decode(5, 17, 9), MANY), **{**DENSE, **changes})


def serve(
    asked: Case,
    make: Callable[[BackendContext], AttentionBackend],
    *,
    rounds: int = 4,
    **given: Any,
) -> None:
    """Run the steps of a case as an engine does, several times over."""
    setup = make_setup(asked, fake_platform(), "cpu", seed=3)
    backend = RequestCanary(make(setup.context), **{"every": 1, "logger": LOGGER, **given})
    for _ in range(rounds):
        for each in asked.steps:
            step = prepare_step(setup, each)
            backend.init_forward_metadata(step.batch)
            for index, layer in enumerate(step.inputs):
                call_layer(setup, backend, layer, step.batch, step.num_request_tokens, index)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """The lines of a level."""
    caplog.set_level(logging.INFO, LOGGER.name)
    return lambda level: [each.message for each in caplog.records if each.levelno == level]


SERVED: dict[str, Case] = {
    "bf16": case(dtype="bfloat16", sinks=True, logit_cap=2.0),
    "alibi": case(alibi=True, windows=(None, None)),
    "e4m3": case(dtype="bfloat16", kv_dtype="fp8_e4m3", kv_scales=(0.5, 2.0)),
    "window pool": case(decode(5, 40), window_pool=True),
    "drafts": case(verify(3, 8, 5), spec_topk=2),
    "own keys": case(extend((0, 5), (0, 3)), save_kv_cache=False),
    "mla": case(kind="mla", num_kv_heads=1, kv_lora_rank=32, qk_rope_head_dim=16),
}


@pytest.mark.parametrize("make", [FakeBackend, TorchNativeBackend])
@pytest.mark.parametrize("name", SERVED)
def test_a_correct_backend_raises_no_alarm(
    name: str, make: Any, said: Callable[[int], list[str]]
) -> None:
    asked = SERVED[name]
    serve(asked, make, rounds=6)
    lines = said(logging.INFO)
    assert len(lines) == 6 * len(asked.steps)
    assert {float(re.search(r"largest error (\S+) of", each)[1]) < 1 for each in lines} == {True}
    assert len({re.search(r"layer \d+", each)[0] for each in lines}) > 1
    assert not said(logging.WARNING) + said(logging.ERROR)


def test_one_step_in_so_many_is_checked(said: Callable[[int], list[str]]) -> None:
    serve(case(), FakeBackend, rounds=20, every=10)
    steps = [int(re.search(r"step (\d+)", each)[1]) for each in said(logging.INFO)]
    assert [(each - 1) // 10 for each in steps] == [0, 1, 2, 3]
    with pytest.raises(InvalidInput, match="every"):
        serve(case(), FakeBackend, every=0)


class WrongForEight(TorchNativeBackend):
    """A layer with a window is wrong for a request with 8 queries."""

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        out = super().forward_extend(call, batch)
        if call.layer.sliding_window_size >= 0 and 8 in batch.extend_seq_lens:
            first = int(batch.extend_seq_lens.tolist().index(8)) * 6
            out[first : first + 8] *= 1.05
        return out


@pytest.mark.parametrize("values", [False, True])
def test_a_fault_is_logged_and_kept_for_replay(
    values: bool, tmp_path: Path, said: Callable[[int], list[str]]
) -> None:
    """The engine serves on. The kept step fails again on the faulty backend alone."""
    folder = FailureFolder(tmp_path, tensors=values, limit=2)
    names = {layer: f"model.{layer}" for layer in range(9)}
    serve(case(MANY), WrongForEight, rounds=24, failures=folder, names=names)
    errors, clean = said(logging.ERROR), said(logging.INFO)
    assert len(errors) + len(clean) == 24
    assert all("request 2 of 3, 8 of 8 new tokens after 5" in each for each in errors)
    assert "model." in errors[0]
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 2
    assert f"attnmux replay {kept[0]}" in "".join(errors[:2])
    native = find_candidate("torch_native", device="cpu")
    faulty = replace(native, factory=lambda context, options: WrongForEight(context))
    for path in kept:
        failure = load_failure(path)
        assert failure.has_values is values
        assert run_again(failure, native).error == ""
        assert "output" in run_again(failure, faulty).error
    result = CliRunner().invoke(verbs, ["replay", str(kept[0]), "--backend", "torch_native"])
    assert "agrees with the reference" in result.output


class NothingStored(TorchNativeBackend):
    """K and V of new tokens get lost."""

    def save_kv(self, *_: object, **__: object) -> None: ...


def test_keys_that_were_never_stored_are_found(said: Callable[[int], list[str]]) -> None:
    """The reference reads the pool, as the backend does: the outputs agree."""
    serve(case(), NothingStored, rounds=1)
    assert all(", store, " in each for each in said(logging.ERROR))
    assert len(said(logging.ERROR)) >= 2


def test_only_pages_of_the_request_are_read(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    """An engine's table of pages is read as it is: nobody asks for slots of tokens."""
    setup = make_setup(case(decode(5, 17, 9)), fake_platform(), "cpu")
    step = prepare_step(setup, decode(5, 17, 9))
    theirs = setup.context.req_to_token_pool.req_to_token
    table = BlockTable(len(theirs) - 1, theirs.shape[1] // 4, page_size=4, device="cpu")
    table.write((theirs[1:, ::4] // 4).contiguous(), theirs.shape[1])
    read: list[int] = []
    gather = KVPool.gather_rows

    def spy(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        read.extend(slots.tolist())
        return gather(buffer, slots)

    made = FakeBackend(setup.context)
    canary = RequestCanary(made, every=1, logger=LOGGER)
    canary._checks._context = replace(setup.context, req_to_token_pool=table)
    canary.init_forward_metadata(step.batch)
    row, end = canary._checks._request.row, canary._checks._request.cached + 1
    given = next(each for each in step.inputs if each.layer.layer_id == canary._checks.layer_id)
    out = made.forward(given.q, given.k, given.v, given.layer, step.batch)
    monkeypatch.setattr(KVPool, "gather_rows", staticmethod(spy))
    call = AttentionCall(given.q, given.k, given.v, given.layer)
    canary._checks.after(call, step.batch, out)
    assert len(said(logging.INFO)) == 1
    assert read
    assert set(read) <= set(theirs[row, :end].tolist())
    assert table._slots is None


def test_long_prompts_are_compared_in_runs(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(request, "PAIRS", 4 * 60 * 20)
    serve(case(extend((0, 60)), num_q_heads=8, num_kv_heads=2), FakeBackend)
    assert {re.search(r"\d+ of \d+ new", each)[0] for each in said(logging.INFO)} == {
        "16 of 60 new"
    }


def test_a_check_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("12 GiB")

    monkeypatch.setattr(request, "compare_request", fails)
    serve(case(), FakeBackend, rounds=1)
    assert said(logging.WARNING) == [
        f"canary: step {step} could not be checked: OutOfMemoryError: 12 GiB" for step in (1, 2)
    ]


class WrongInGraphs(GraphFakeBackend):
    """Wrong for long requests."""

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return super().forward_decode(call, batch) * 1.05


@pytest.mark.parametrize("make", [GraphFakeBackend, WrongInGraphs])
def test_a_replayed_step_is_rehearsed(make: Any, said: Any, tmp_path: Path) -> None:
    """Captures are not checked, and a rehearsal stores nothing."""
    asked = case(decode(5, 17, 9), windows=(None,), graph=True)
    setup = make_setup(asked, fake_platform(), "cpu")
    layer, pool = setup.context.layers[0], setup.context.token_to_kv_pool
    canary = RequestCanary(
        make(setup.context),
        every=1,
        logger=LOGGER,
        failures=FailureFolder(tmp_path, tensors=True),
    )
    shapes = {
        "q": (layer.tp_q_head_num, layer.query_dim),
        "k": (layer.tp_k_head_num, layer.qk_head_dim),
        "v": (layer.tp_v_head_num, layer.v_head_dim),
    }
    runner = GraphRunner(
        canary,
        lambda batch, given: canary.forward(given["q"], given["k"], given["v"], layer, batch),
        GraphConfig(batch_sizes=(4,)),
        devices=RecordingGraphs(),
        inputs={
            name: ModelInput(dtype=setup.random(1).dtype, trailing=shape)
            for name, shape in shapes.items()
        },
        progress=iter,
    )
    runner.capture()
    assert not said(logging.INFO) + said(logging.ERROR) + said(logging.WARNING)
    step = prepare_step(setup, decode(5, 17, 9))
    given = {name: getattr(step.inputs[0], name) for name in shapes}
    for _ in range(5):
        runner.replay(step.batch, given)
    before = pool.get_key_buffer(layer.layer_id).clone()
    canary.init_forward_metadata_out_graph(step.batch)
    now = pool.get_key_buffer(layer.layer_id)
    assert torch.equal(before.view(torch.uint8), now.view(torch.uint8))
    level = logging.ERROR if make is WrongInGraphs else logging.INFO
    assert len(said(level)) == 3  # each after a step that was drawn and replayed
    assert all("drawn queries" in each for each in said(level))
    assert not said(logging.WARNING)
    if make is WrongInGraphs:
        failure = load_failure(next(tmp_path.iterdir()))
        assert run_again(failure, find_candidate("torch_native", device="cpu")).error == ""


class Counter:
    """As prometheus_client's."""

    made: Mapping[str, Counter] = {}

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self.made[name], self.values = self, dict[str, int]()

    def labels(self, label: str) -> SimpleNamespace:
        self.values.setdefault(label, 0)
        return SimpleNamespace(inc=lambda: self.inc(label))

    def inc(self, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0) + 1


def test_checks_and_findings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "made", {})
    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Counter=Counter))
    counts.counts.cache_clear()
    serve(case(decode(5)), NothingStored, rounds=3)
    serve(case(decode(5)), FakeBackend, rounds=2)
    counts.counts.cache_clear()
    assert Counter.made["attnmux_canary_checks"].values == {"": 5}
    assert Counter.made["attnmux_canary_findings"].values == {"output": 0, "store": 6}
