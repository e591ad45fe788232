"""SGLang or vLLM in a process of its own, which generates when it is asked."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, Sequence[int]], list[list[int]]]
"""Greedy tokens of each prompt, as many as asked."""
NAMES = {"sglang": "attnmux", "vllm": "ATTNMUX"}
"""The value of `attention_backend` that means attnmux."""
SECONDS = 400.0
"""Until an engine must have answered, its start included."""


class EngineFailed(Exception):
    """An engine did not start, or did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One configuration of an engine."""

    label: str
    attention: str | None
    """None for the engine's default."""
    backend: str | None = None
    """The backend that attnmux must take; None lets it choose."""
    place: int = 0
    """Its number among the sides that live at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A checkpoint, or a config whose weights the engine draws, and the room that it needs."""

    folder: Path
    random_weights: bool
    most_requests: int
    longest: int
    """Tokens of a request."""
    tokens: int
    """Tokens that the cache must hold."""
    cached_bytes: int
    """Bytes that a token takes in the cache."""
    kv_dtype: str
    """The name that the engine gives it."""
    share: float
    """The share of the device's memory that this engine may take."""
    arguments: Mapping[str, Any]
    """Arguments that override or join those made here, as the engine names them."""


class Drawn(NamedTuple):
    """Random prompts, which the child draws itself."""

    seed: int
    batch: int
    length: int

    def prompts(self, vocabulary: int) -> list[list[int]]:
        rng = random.Random(f"{self.seed} {self.length}")
        return [rng.choices(range(1, vocabulary), k=self.length) for _ in range(self.batch)]


@contextmanager
def sglang(model: Model, side: Side) -> Iterator[Generate]:
    import sglang as engines  # noqa: PLC0415  # one engine is installed

    given: dict[str, Any] = {
        "model_path": str(model.folder),
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "context_length": model.longest,
        "max_running_requests": model.most_requests,
        "cuda_graph_max_bs_decode": model.most_requests,
        "max_total_tokens": model.tokens,
        "kv_cache_dtype": model.kv_dtype,
        "port": 30000 + 500 * side.place,
        "log_level": "info",
    }
    if model.random_weights:
        given["load_format"] = "dummy"
    if side.attention:
        given["attention_backend"] = side.attention
    engine = engines.Engine(**{**given, **model.arguments})

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        params = [
            {"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths
        ]
        return [
            list(each["output_ids"])
            for each in engine.generate(input_ids=prompts, sampling_params=params)
        ]

    try:
        yield generate
    finally:
        engine.shutdown()


@contextmanager
def vllm(model: Model, side: Side) -> Iterator[Generate]:
    from vllm import LLM, SamplingParams  # noqa: PLC0415  # as above

    given: dict[str, Any] = {
        "model": str(model.folder),
        "skip_tokenizer_init": True,
        "max_num_seqs": model.most_requests,
        "max_model_len": model.longest,
        "kv_cache_memory_bytes": model.tokens * model.cached_bytes,
        "kv_cache_dtype": model.kv_dtype,
        "gpu_memory_utilization": model.share,
        "seed": 0,
    }
    if model.random_weights:
        given["load_format"] = "dummy"
    if side.attention:
        given["attention_backend"] = side.attention
    engine = LLM(**{**given, **model.arguments})

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(asked, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in answers]

    try:
        yield generate
    finally:
        engine.llm_engine.engine_core.shutdown()


ENGINES: dict[str, Callable[[Model, Side], AbstractContextManager[Generate]]] = {
    "sglang": sglang,
    "vllm": vllm,
}


class Engine:
    """An engine in a child."""

    def __init__(self, engine: str, model: Model, side: Side, vocabulary: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        # Engines start processes of their own, which a daemon may not
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, engine, model, side, vocabulary)
        )
        self._process.start()
        theirs.close()

    def wait(self) -> tuple[float, list[list[int]]]:
        """Wait for the child: until it is ready, then for each answer. Returns the seconds that it
        took, and the tokens. Raises EngineFailed."""
        try:
            if not self._pipe.poll(SECONDS):
                raise EngineFailed(f"no answer within {SECONDS:.0f} s")
            found = self._pipe.recv()
        except EOFError as error:
            raise EngineFailed("the engine ended its process: see its log above") from error
        if isinstance(found, str):
            raise EngineFailed(found)
        seconds, tokens = found
        return seconds, tokens

    def ask(self, prompts: Prompts | Drawn, new: Sequence[int]) -> tuple[float, list[list[int]]]:
        """Generate `new` tokens for each prompt. Returns as `wait` does, without those of drawn
        prompts."""
        self._pipe.send((prompts, new))
        return self.wait()

    def end(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def serve(pipe: Connection, engine: str, model: Model, side: Side, vocabulary: int) -> None:
    """Runs in the child until the parent closes the pipe."""
    if side.backend is not None:
        os.environ["ATTNMUX_BACKEND"] = side.backend
    try:
        began = time.perf_counter()
        with ENGINES[engine](model, side) as generate:
            pipe.send((time.perf_counter() - began, []))
            while True:
                try:
                    asked, new = pipe.recv()
                except EOFError:
                    return
                is_drawn = isinstance(asked, Drawn)
                prompts = asked.prompts(vocabulary) if is_drawn else asked
                began = time.perf_counter()
                tokens = generate(prompts, new)
                pipe.send((time.perf_counter() - began, [] if is_drawn else tokens))
    except Exception:
        pipe.send(traceback.format_exc())
