"""vLLM with attnmux gives the text that it gives with its own backend, token for token."""

from __future__ import annotations

import gc
import importlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")
distributed = pytest.importorskip("vllm.distributed")
recall = pytest.importorskip("attnmux.transformers.recall")
core = pytest.importorskip("attnmux.core")
chooser = pytest.importorskip("attnmux.core.engines.chooser")
configs = pytest.importorskip("attnmux.configs")
launch = pytest.importorskip("attnmux.vllm.launch")

# vLLM and its dependencies warn of themselves
pytestmark = pytest.mark.filterwarnings("ignore")

GIB = 2**30
CHUNKED = {"max_num_batched_tokens": 48}
"""Prompts are longer: they are read in chunks, next to others that decode."""


@contextmanager
def started(model: Path, backend: str | None, **engine: Any) -> Iterator[Any]:
    """An engine, which ends with the block."""
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": GIB // 8,
        **engine,
    }
    llm = vllm.LLM(str(model), attention_backend=backend, seed=0, **arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        distributed.cleanup_dist_env_and_memory()
        gc.collect()


def answered(llm: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """The greedy tokens of prompts."""
    sampling = vllm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    sampling.detokenize = not llm.model_config.skip_tokenizer_init
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(asked, sampling, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def texts(
    model: Path, backend: str | None, prompts: Sequence[Any], *, rounds: int = 1, **engine: Any
) -> list[list[int]]:
    """The greedy tokens of prompts, asked `rounds` times; the engine keeps their prefixes."""
    with started(model, backend, **engine) as llm:
        return [text for _ in range(rounds) for text in answered(llm, prompts)]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "family", ["gqa", "windows", "sinks", "soft_cap", "alibi", "mla", "mixed_windows"]
)
def test_families(family, checkpoint, prompts):
    model = checkpoint(family)
    own = texts(model, "CPU_MLA" if family == "mla" else "CPU_ATTN", prompts)
    ours = texts(model, "ATTNMUX", prompts, rounds=2, **CHUNKED)
    assert ours == own + own
    assert len({tuple(text) for text in own}) == len(prompts)


def test_a_window_of_one(checkpoint, prompts):
    """Texts depend on the last token of a prompt alone."""
    model = checkpoint("window_of_one")
    own = texts(model, "CPU_ATTN", prompts)
    assert texts(model, "ATTNMUX", prompts, **CHUNKED) == own
    assert len({tuple(text) for text in own}) > len(prompts) / 2


def test_attention_chunks(checkpoint, prompts):
    """vLLM cuts requests at the ends of chunks, which are whole pages."""
    model, pages = checkpoint("chunks"), {"block_size": 32}
    own = texts(model, "CPU_ATTN", prompts, **pages)
    assert texts(model, "ATTNMUX", prompts, rounds=2, **CHUNKED, **pages) == own + own


@pytest.fixture(scope="module")
def recalled() -> list[tuple[list[int], str]]:
    """Prompts of the shipped checkpoint, as its bytes, and the right answers."""
    rng = random.Random(0)
    drawn = [recall.make_prompt(rng, 40 + 9 * i) for i in range(16)]
    return [(list(prompt.encode()), answer) for prompt, answer in drawn]


def answers(tokens: Sequence[Sequence[int]]) -> list[str]:
    """The text before the end of each sequence."""
    return [bytes(text[: text.index(END)]).decode() for text in tokens]


END = 256


@pytest.mark.turns(4, suite="serving")
@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        ("ATTNMUX", {"block_size": 16}),
        ("ATTNMUX", {"kv_cache_dtype": "fp8"}),
        ("ATTNMUX", {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}),
        ("CUSTOM", {"enforce_eager": False, "dtype": "bfloat16"}),
    ],
    ids=["pages-of-16", "fp8", "fp8-but-for-a-layer", "compiled"],
)
def test_the_shipped_checkpoint(backend, engine, recalled):
    prompts, right = zip(*recalled, strict=True)
    found = texts(recall.PATH, backend, prompts, max_model_len=512, rounds=2, **CHUNKED | engine)
    assert answers(found) == list(right) * 2


@pytest.fixture(scope="module")
def plain(checkpoint, prompts) -> list[list[int]]:
    """The text of a cache in the model's dtype."""
    return texts(checkpoint("mixed_windows"), "ATTNMUX", prompts)


@pytest.mark.turns(over="skip")
@pytest.mark.parametrize("skip", [["0", "1", "2", "3"], ["sliding_window", "1", "3"]])
def test_layers_that_vllm_skips_are_not_quantised(checkpoint, prompts, plain, skip):
    """All of them here, so that the text is that of a cache in the model's dtype."""
    model, quantised = checkpoint("mixed_windows"), {"kv_cache_dtype": "fp8"}
    assert texts(model, "ATTNMUX", prompts, **quantised, kv_cache_dtype_skip_layers=skip) == plain
    some = texts(model, "ATTNMUX", prompts, **quantised, kv_cache_dtype_skip_layers=skip[:1])
    assert some != plain


@pytest.mark.turns(4, suite="serving")
def test_workers_in_processes_of_their_own(recalled, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prompts, right = zip(*recalled[:4], strict=True)
    assert answers(texts(recall.PATH, "ATTNMUX", prompts, max_model_len=512)) == list(right)


def test_a_vendors_plugin(recalled, monkeypatch):
    """With no line about vLLM, and none about the vendor in attnmux-vllm."""
    monkeypatch.setenv("ACME_SIMULATOR", "m2")
    monkeypatch.setenv("ATTNMUX_BACKEND", "acme_paged")
    prompts, right = zip(*recalled, strict=True)
    found = texts(
        recall.PATH, "ATTNMUX", prompts, max_model_len=512, dtype="bfloat16", block_size=64
    )
    assert answers(found) == list(right)


@pytest.mark.parametrize(
    ("backend", "page_size", "graphs"),
    [("torch_native", 48, "NEVER"), ("acme_paged", 64, "UNIFORM_SINGLE_TOKEN_DECODE")],
)
def test_what_vllm_asks_of_loaded_layers(backend, page_size, graphs, monkeypatch):
    """vLLM for CPUs asks for neither. Its own page size is 48 here, which Acme's kernels lack."""
    monkeypatch.setenv("ACME_SIMULATOR", "m2")
    monkeypatch.setenv("ATTNMUX_BACKEND", backend)
    module = importlib.import_module("attnmux.vllm.backend")
    with started(recall.PATH, "ATTNMUX", dtype="bfloat16", block_size=64) as llm:
        config = llm.llm_engine.vllm_config
        with importlib.import_module("vllm.config").set_current_vllm_config(config):
            assert module.AttnmuxBackend.get_preferred_block_size(48) == page_size
        layer = module._layers(config)[0]
        spec = layer.get_kv_cache_spec(config)
        assert module.AttnmuxMetadataBuilder.get_cudagraph_support(config, spec).name == graphs


def test_the_solvers_reasons_reach_the_user(checkpoint, monkeypatch):
    monkeypatch.setenv("ATTNMUX_BACKEND", "acme_paged")
    with pytest.raises(ValueError, match="is not valid for this configuration") as caught:
        texts(checkpoint("gqa"), "ATTNMUX", [], block_size=48)
    assert "acme_paged (acme)" in str(caught.value)
    assert "vendor: needs acme, this is cpu" in str(caught.value)


def test_without_attnmux_the_engine_keeps_its_own(checkpoint, prompts):
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    assert registry.AttentionBackendEnum["CPU_ATTN"].get_class().get_name() == "CPU_ATTN"
    assert texts(checkpoint("gqa"), None, prompts[:2]) == texts(
        checkpoint("gqa"), "CPU_ATTN", prompts[:2]
    )


def test_an_engine_whose_backend_does_not_fit_ends_at_its_start(checkpoint, monkeypatch):
    """vLLM says nothing of logit caps before it builds the layers."""
    monkeypatch.setenv("ACME_SIMULATOR", "m2")
    monkeypatch.setenv("ATTNMUX_BACKEND", "acme_paged")
    with pytest.raises(
        ValueError, match="--attention-backend ATTNMUX: acme_paged cannot"
    ) as caught:
        texts(checkpoint("wide_soft_cap"), "ATTNMUX", [], block_size=64, dtype="bfloat16")
    assert "logit_cap" in str(caught.value)


def test_a_second_engine_is_refused_at_its_start(checkpoint, prompts, monkeypatch):
    """vLLM asks once a process for layers that look alike to it."""
    assert texts(checkpoint("gqa"), "ATTNMUX", prompts[:1])
    monkeypatch.setenv("ATTNMUX_BACKEND", "acme_paged")
    with pytest.raises(ValueError, match="vendor: needs acme, this is cpu"):
        texts(checkpoint("gqa"), "ATTNMUX", [])


@pytest.fixture
def decided(monkeypatch) -> list[Any]:
    """The requests that are solved, in their order."""
    requests: list[Any] = []
    decide = chooser.Chooser.decide

    def noted(self: Any, request: Any, *failed: Any) -> Any:
        requests.append(request)
        return decide(self, request, *failed)

    monkeypatch.setattr(chooser.Chooser, "decide", noted)
    return requests


def test_requests_choose_nothing(checkpoint, prompts, decided):
    with started(checkpoint("mixed_windows"), "ATTNMUX") as llm:
        assert decided
        decided.clear()
        answered(llm, prompts[:2])
        assert not decided


def test_batch_invariance_is_asked_of_backends(checkpoint, decided, monkeypatch):
    """Without vLLM's own part, which replaces torch's operations for the whole process."""
    own = pytest.importorskip("vllm.model_executor.determinism.batch_invariant")
    monkeypatch.setattr(own, "init_batch_invariance", lambda: None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with started(checkpoint("gqa"), "ATTNMUX"):
        pass
    assert len(decided) > 1
    assert all(request.deterministic for request in decided)


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", ["windows", "sinks", "soft_cap", "alibi", "mla"])
def test_select_asks_what_the_backend_asks(family, checkpoint, decided):
    model = checkpoint(family)
    with started(model, "ATTNMUX"):
        pass
    platform = chooser.Chooser.here("cpu").platform
    request = launch.ask(configs.request_from_model(model, dtype="float32"), platform)
    page_size = next(each.page_size for each in reversed(decided) if each.kind == request.kind)
    request = request.replace(kv_dtype="float32", page_size=page_size)
    assert without_origins(request) in map(without_origins, decided)


def without_origins(request: Any) -> dict[str, Any]:
    return {name: value for name, value in request.to_dict().items() if name != "origins"}


def test_sinks_that_are_updated_in_place(checkpoint, prompts):
    """As by a trainer that sends its weights."""

    def update(model):
        for name, values in model.named_parameters():
            if name.endswith("sinks"):
                values.data.fill_(6.0)

    engine = {"dtype": "bfloat16", "enable_prefix_caching": False}
    with started(checkpoint("sinks"), "ATTNMUX", **engine) as llm:
        before = answered(llm, prompts)
        llm.apply_model(update)
        after = answered(llm, prompts)
    with started(checkpoint("sinks"), "ATTNMUX", **engine) as llm:
        llm.apply_model(update)
        assert answered(llm, prompts) == after
    assert sum(one != other for one, other in zip(before, after, strict=True)) > 5


def drafts(llm: Any) -> tuple[int, int]:
    """How many tokens were drafted, and how many of them accepted."""
    counted = {each.name: each for each in llm.get_metrics()}
    names = (f"vllm:spec_decode_num_{what}_tokens" for what in ("draft", "accepted"))
    drafted, accepted = (counted[name].value for name in names)
    return drafted, accepted


def test_drafts_from_the_prompt(recalled):
    """The answers are in the prompts."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = {"speculative_config": speculation, "disable_log_stats": False, "max_model_len": 512}
    prompts, right = zip(*recalled, strict=True)
    with started(recall.PATH, "ATTNMUX", **engine) as llm:
        assert answers(answered(llm, prompts)) == list(right)
        drafted, accepted = drafts(llm)
    assert drafted >= accepted > len(prompts)


def test_drafts_of_a_model(checkpoint, prompts):
    """The draft model is the model itself, so that its drafts are right."""
    model = checkpoint("gqa")
    speculation = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    own = texts(model, "CPU_ATTN", prompts)
    engine = {"speculative_config": speculation, "disable_log_stats": False}
    with started(model, "ATTNMUX", **engine) as llm:
        assert answered(llm, prompts) == own
        drafted, accepted = drafts(llm)
    assert accepted > 0.9 * drafted > 0
