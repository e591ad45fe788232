"""SGLang's engine in processes of its own, forked from this one, which has imported SGLang once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PLATFORM = "plain_cpu"
"""SGLang's name of the platform in `plain_cpu/`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request's result."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    """Prompt tokens that an earlier request left in the cache."""


Ask = Callable[..., list[Answer]]


@contextmanager
def engine(folder: Path, backend: str, **arguments: Any) -> Iterator[Ask]:
    """`ask(prompts, lengths)` of an engine with that attention backend."""
    sglang = pytest.importorskip("sglang")
    given = {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": backend,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "chunked_prefill_size": 32,
        "mem_fraction_static": 0.2,
        "log_level": "error",
        "random_seed": 0,
    }
    made = sglang.Engine(model_path=str(folder), **{**given, **arguments})

    def ask(prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Answer]:
        sampling = [
            {"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths
        ]
        results = made.generate(
            input_ids=[list(prompt) for prompt in prompts], sampling_params=sampling
        )
        return [
            Answer(
                token_ids=tuple(result["output_ids"]),
                cached_tokens=result["meta_info"]["cached_tokens"],
            )
            for result in results
        ]

    try:
        yield ask
    finally:
        made.shutdown()


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's processes are forked instead of spawned, and run on the test's platform."""
    pytest.importorskip("sglang")
    pytest.importorskip("sglang_plain_cpu")
    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_start_method = multiprocessing.set_start_method
    monkeypatch.setattr(
        multiprocessing, "set_start_method", lambda *_, **__: set_start_method("fork", force=True)
    )


@pytest.fixture
def run(fork: None) -> Callable[..., Any]:
    """`run(folder, backend, **arguments)`: see `engine`."""
    return partial(engine)
