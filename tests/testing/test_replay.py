"""A failed step is kept, and runs again on any backend."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from attnmux.core import BackendContext, ForwardBatch, ForwardMode, InvalidInput
from attnmux.core.cli.verbs import verbs
from attnmux.testing import (
    Case,
    FailureKeeper,
    FakeBackend,
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
from attnmux.testing.canary.failures import FACTS, TENSORS
from attnmux.testing.run.execution import call_layer


class Broken(FakeBackend):
    """Fails in the second layer, or while a step is prepared."""

    in_metadata = False

    def __init__(self, context: BackendContext, *_: object) -> None:
        super().__init__(context)
        self.calls = 0

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        if self.in_metadata:
            raise RuntimeError("no plan")
        super().init_forward_metadata_out_graph(batch, in_capture)

    def _forward(self, *args: object) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("illegal memory access")
        return super()._forward(*args)


CASES = {
    "decode": {"steps": (decode(5, 17, 9),), "page_size": 4},
    "extend": {"steps": (extend((6, 3), (0, 5)),), "page_size": 1, "sinks": True},
    "alibi": {"steps": (extend((6, 3), (0, 5)),), "page_size": 1, "alibi": True},
    "relative": {"steps": (extend((6, 3), (0, 5)),), "page_size": 1, "relative_reach": 4},
    "verify": {"steps": (verify(3, 8, 5),), "spec_topk": 2},
    "e4m3": {"steps": (decode(5, 17),), "kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 2.0)},
    "window pool": {"steps": (decode(5, 40),), "windows": (None, 6), "window_pool": True},
    "mla": {
        "steps": (decode(5, 17),),
        "kind": "mla",
        "num_kv_heads": 1,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
    },
    "own keys": {"steps": (extend((0, 5), (0, 3)),), "save_kv_cache": False},
}


def fail(folder: Path, name: str = "decode", backend: type[Broken] = Broken, **keeper: object):
    """Run a case until its planted failure. Returns the error."""
    given = {"head_dim": 32, "v_head_dim": 32, "page_size": 4, "max_context_len": 64, "lse": True}
    case = Case(name=name, **{"windows": (None, None), **given, **CASES[name]})
    setup = make_setup(case, fake_platform(), "cpu")
    step = prepare_step(setup, case.steps[0])
    kept = FailureKeeper(backend(setup.context), folder, **keeper)

    def run() -> None:
        kept.init_forward_metadata(step.batch)
        for index, layer in enumerate(step.inputs):
            call_layer(setup, kept, layer, step.batch, step.num_request_tokens, index)

    with pytest.raises(RuntimeError) as raised:
        run()
    return raised.value


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(verbs, ["replay", *map(str, arguments)])


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_kept_step_runs_again(tmp_path: Path, name: str, tensors: bool) -> None:
    fail(tmp_path, name, tensors=tensors)
    kept = load_failure(only(tmp_path))
    assert kept.has_values is tensors
    done = run_again(kept, find_candidate("torch_native", device="cpu"))
    assert done.error == ""


def test_the_error_goes_on_and_names_the_folder(tmp_path: Path) -> None:
    said: list[str] = []
    error = fail(tmp_path, on_kept=said.append)
    assert str(error) == "illegal memory access"
    assert str(only(tmp_path)) in said[0]
    if sys.version_info >= (3, 11):
        assert error.__notes__ == said
    assert stat.S_IMODE(only(tmp_path).stat().st_mode) == 0o700


def test_values_are_kept_only_if_asked_for(tmp_path: Path) -> None:
    fail(tmp_path)
    names = torch.load(only(tmp_path) / TENSORS, weights_only=True)
    assert "req_to_token" in names
    assert not [name for name in names if name.startswith(("call.", "kv."))]
    facts = json.loads((only(tmp_path) / FACTS).read_text())
    assert facts["error"]["type"] == "RuntimeError"
    assert facts["call"]["tensors"]["q"]["shape"] == [3, 8, 32]


def test_disk_use_is_bounded(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(3):
        fail(tmp_path, limit=2, on_kept=said.append)
    assert len(list(tmp_path.iterdir())) == 2
    assert "holds 2 failures already" in said[2]


def test_large_values_are_left_out(tmp_path: Path) -> None:
    fail(tmp_path, tensors=True, max_bytes=100)
    kept = load_failure(only(tmp_path))
    assert not kept.has_values
    assert "above the limit of 100" in kept.facts["left_out"]


def test_a_folder_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    error = fail(tmp_path / "file", on_kept=said.append)
    assert str(error) == "illegal memory access"
    assert "could not be kept" in said[0]


class BrokenPlan(Broken):
    in_metadata = True


def test_a_failure_while_the_step_is_prepared(tmp_path: Path) -> None:
    fail(tmp_path, backend=BrokenPlan)
    result = replay(only(tmp_path), "--backend", "torch_native")
    assert result.exit_code == 0, result.output
    assert "RuntimeError: no plan" in result.stdout


def test_the_verb_prints_the_comparison(tmp_path: Path) -> None:
    fail(tmp_path, tensors=True)
    result = replay(only(tmp_path), "--backend", "torch_native")
    assert result.exit_code == 0, result.output
    assert "kept: RuntimeError: illegal memory access" in result.stdout
    assert "DECODE of 3 requests, layer 3" in result.stdout
    assert "torch_native, the kept values: agrees with the reference" in result.stdout
    answer = json.loads(replay(only(tmp_path), "--backend", "torch_native", "--json").stdout)
    assert answer["values_kept"] is True
    assert answer["error"] == ""


def test_a_difference_and_an_error_exit_with_1(tmp_path: Path, monkeypatch) -> None:
    fail(tmp_path)
    native = "attnmux.cpu.torch_native:TorchNativeBackend.forward_decode"
    target = native.replace(":", ".")
    monkeypatch.setattr(target, lambda self, call, batch: torch.ones_like(call.q))
    result = replay(only(tmp_path), "--backend", "torch_native")
    assert result.exit_code == 1
    assert "differs from the reference: output:" in result.stdout

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("again")

    monkeypatch.setattr(target, fails)
    result = replay(only(tmp_path), "--backend", "torch_native")
    assert result.exit_code == 1
    assert "raises RuntimeError: again" in result.stdout


def test_other_folders_are_refused(tmp_path: Path) -> None:
    fail(tmp_path)
    result = replay(only(tmp_path))
    assert result.exit_code == 2
    assert "--backend" in result.stderr
    assert replay(tmp_path, "--backend", "torch_native").exit_code == 2
    (only(tmp_path) / TENSORS).write_bytes(b"not tensors")
    with pytest.raises(InvalidInput, match="FOLDER"):
        load_failure(only(tmp_path))


def test_each_phase_stays_wrapped(tmp_path: Path) -> None:
    setup = make_setup(Case(name="a", steps=(decode(4),)), fake_platform(), "cpu")
    keeper = FailureKeeper(FakeBackend(setup.context), tmp_path)
    assert keeper.select(ForwardMode.DECODE) is keeper
