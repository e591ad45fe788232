"""SGLang's engine in a child process for each run.

SGLang ends the process that started an engine whose scheduler fails, so that a test needs one of
its own. Children are forked from this process, which has imported SGLang and its models once.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attnmux.core import Decision
from attnmux.core.cli.verbs import verbs

ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "chunked_prefill_size": 32,
    "mem_fraction_static": 0.2,
    "log_level": "info",
    "random_seed": 0,
}
ENVIRONMENT = {"SGLANG_PLATFORM": "plain_cpu", "OMP_NUM_THREADS": "1"}
"""The platform is the one in `plain_cpu/`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request's result."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    """Prompt tokens that an earlier request left in the cache."""


Asked = tuple[Sequence[Sequence[int]], Sequence[int]]
"""Prompts, and how many tokens each generates."""
Weights = dict[str, Any]
"""Tensors by name, which replace the model's in place."""
Run = Callable[..., tuple[list[list[Answer]], str]]


class EngineFailed(Exception):
    """The engine ended; the text is its log."""


def _child(
    connection: Connection, log: Path, rounds: Sequence[Asked | Weights], given: Any
) -> None:
    os.setpgrp()
    # pytest has put objects of its own in place of both streams
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    import sglang  # noqa: PLC0415  # known here, and the parent may lack it

    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: set_start_method("fork", force=True)
    engine = sglang.Engine(**given)
    for asked in rounds:
        if isinstance(asked, dict):
            engine.begin_weight_update()
            done, why = engine.update_weights_from_tensor(named_tensors=list(asked.items()))
            engine.end_weight_update()
            if not done:
                raise EngineFailed(why)
            continue
        prompts, lengths = asked
        results = engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
                for length in lengths
            ],
        )
        connection.send(
            [(result["output_ids"], result["meta_info"]["cached_tokens"]) for result in results]
        )
    engine.shutdown()


@pytest.fixture(scope="session")
def select() -> Callable[[Path], tuple[list[str], str]]:
    """`select(folder)`: the words of the line of `attnmux select --engine sglang` for a model in
    float32 on this machine, and the decision's summary."""

    def answer(folder: Path) -> tuple[list[str], str]:
        args = ["select", "--model", str(folder), "--engine", "sglang", "--json"]
        result = CliRunner().invoke(verbs, [*args, "--request", "dtype=float32"])
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        launch = data["launch"]
        for name in ("launch", "install", "proof", "warnings"):
            del data[name]
        return shlex.split(launch), Decision.from_json(json.dumps(data)).summary()

    return answer


@pytest.fixture(scope="session")
def imported() -> None:
    """What an engine and its scheduler import, which takes longer than to serve a few prompts."""
    pytest.importorskip("sglang")
    pytest.importorskip("sglang_plain_cpu")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in ("entrypoints.engine", "models.registry"):
            importlib.import_module(f"sglang.srt.{name}")


@pytest.fixture
def run(imported: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run(folder, backend, rounds, **arguments)` serves the rounds one after the other and returns
    the answers of each, and the engine's log. Weights in place of a round are updated there.
    Raises EngineFailed."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def serve(
        folder: Path, backend: str, rounds: Sequence[Asked | Weights], **arguments: Any
    ) -> tuple[list[list[Answer]], str]:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        log = tmp_path / f"{backend}-{len(list(tmp_path.glob('*.log')))}.log"
        given = {
            "model_path": str(folder),
            "attention_backend": backend,
            **ARGUMENTS,
            **arguments,
        }
        child = multiprocessing.get_context("fork").Process(
            target=_child, args=(theirs, log, rounds, given)
        )
        child.start()
        theirs.close()
        answers = []
        try:
            for asked in rounds:
                if isinstance(asked, dict):
                    continue
                if not ours.poll(240):
                    raise EngineFailed(f"no answer within 240 s\n{log.read_text()}")
                answers.append(
                    [Answer(token_ids=tuple(ids), cached_tokens=n) for ids, n in ours.recv()]
                )
        except EOFError:
            raise EngineFailed(log.read_text()) from None
        finally:
            child.join(20)
            child.kill()
        return answers, log.read_text()

    return serve
