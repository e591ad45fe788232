"""Faults of the example vendor's backend, and of torch_native, as patches of their sources.

The tests try a few, others in each run. `python tests/testing/test_vendor_mutants.py` tries all.
"""
# ruff: noqa: E501  # a patch is one row

from __future__ import annotations

import pkgutil
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, takewhile
from multiprocessing import get_context
from pathlib import Path
from random import SystemRandom
from types import ModuleType
from typing import Any

import click
import pytest
import tomllib

from attnmux.core import Platform
from attnmux.testing import Candidate, Sampler, run_case
from attnmux.testing.cases.linear import AnyCase

ROOT = Path(__file__).resolve().parents[2]
M2 = Platform.parse("acme:m2,device=cpu,runtime=acmert 3.1,features=fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The source of a backend, whose modules are made anew with a fault."""

    folder: Path
    modules: tuple[str, ...]
    """In the order in which they import one another."""
    factory: str
    """In the last module."""
    card: str
    platform: Platform


SOURCES = {
    "acme": Source(
        folder=ROOT / "examples/vendor-plugin/src",
        modules=tuple(
            f"acme_attnmux.{name}" for name in ("library", "tables", "backend", "factory")
        ),
        factory="make",
        card="acme_attnmux.plugin:PAGED",
        platform=M2,
    ),
    "torch_native": Source(
        folder=ROOT / "plugins/cpu/src",
        modules=tuple(
            f"attnmux.cpu.{name}"
            for name in (
                "steps",
                "spans",
                *(f"torch_native.{n}" for n in ("attend", "plan", "backend")),
            )
        ),
        factory="TorchNativeBackend",
        card="attnmux.cpu.plugin:TORCH_NATIVE",
        platform=Platform.parse("cpu:x86_64"),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One patch: `old`, which occurs in the module once, becomes `new`."""

    source: str = "acme"
    kind: str = "regions and formulas"
    name: str
    module: str
    old: str
    new: str


def _wrong_where(condition: str) -> Mutant:
    """A result that is a quarter off where the condition holds, in the names of `_call`."""
    return Mutant(
        name=f"wrong where {condition}",
        module="backend",
        old="        return out\n\n\ndef _pages",
        new=f"        return out * 1.25 if {condition} else out\n\n\ndef _pages",
    )


GROUP = "q.shape[1] // layer.tp_k_head_num"
ROWS = "step.kv_lens.shape[0]"
LONGEST = "self.context.max_context_len"
WINDOW = "layer.sliding_window_size"
QUERIES = "self._max_queries"
KEYS = "pool.get_key_buffer(layer.layer_id)"
EIGHT_BITS = f"{KEYS}.dtype.itemsize == 1"

REGIONS = (
    "pool.page_size == 16",
    "pool.page_size != 16",
    f"{GROUP} > 8",
    f"{GROUP} == 16",
    f"{GROUP} == 1",
    f"{GROUP} not in (1, 2, 4, 8, 16)",
    f"{ROWS} > 64",
    f"{ROWS} > 64 and {QUERIES} == 1",
    f"{ROWS} > 32 and {QUERIES} > 1",
    f"{ROWS} == 1",
    f"{ROWS} > 96",
    "q.shape[2] == 64",
    "q.shape[2] == 128",
    "q.shape[2] == 64 and pool.page_size == 64",
    "q.shape[1] > 32",
    "q.shape[1] > 64",
    "layer.tp_k_head_num == 1",
    "layer.tp_k_head_num > 4",
    "layer.tp_k_head_num % 2 and layer.tp_k_head_num > 1",
    "q.element_size() == 2 and 'bfloat' not in str(q.dtype)",
    "'bfloat' in str(q.dtype)",
    EIGHT_BITS,
    f"{EIGHT_BITS} and pool.page_size == 16",
    f"{EIGHT_BITS} and q.shape[2] == 64",
    f"{EIGHT_BITS} and {GROUP} > 4",
    f"{EIGHT_BITS} and {WINDOW} >= 0",
    f"{EIGHT_BITS} and 'bfloat' not in str(q.dtype)",
    f"{WINDOW} >= 0",
    f"{WINDOW} > 63",
    f"{WINDOW} > 511",
    f"{WINDOW} == 1",
    f"{WINDOW} >= 0 and {QUERIES} > 16",
    f"{WINDOW} >= 0 and pool.page_size == 16 and q.shape[2] == 64",
    f"{QUERIES} > 127",
    f"{QUERIES} > 8 and {QUERIES} < 30",
    f"{QUERIES} > 1 and pool.page_size == 16",
    f"{QUERIES} == 1 and {GROUP} > 2 and {GROUP} < 16",
    f"{LONGEST} > 4096",
    f"{LONGEST} > 20_000",
    f"{LONGEST} > 40_000",
    f"{LONGEST} > 1000 and {QUERIES} > 1",
    f"{LONGEST} < 60",
    f"{LONGEST} > 500 and {LONGEST} < 2049 and pool.page_size == 16",
    "lse is not None and pool.page_size == 64",
    "call.k is None",
    "call.k is None and pool.page_size == 64",
    "layer.scaling != q.shape[2] ** -0.5",
)


def _in(module: str, name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, module=module, old=old, new=new)


LIBRARY = (
    ("causality + 1", "(places <= positions)", "(places <= positions + 1)"),
    ("causality - 1", "(places <= positions)", "(places < positions)"),
    ("no causality", "(places <= positions)", "(places >= 0)"),
    ("the window is one too wide", "places > positions - window", "places >= positions - window"),
    ("the window is one too narrow", "places > positions - window", "places > positions - window + 1"),
    ("no window", "    if window:", "    if False:"),
    ("windows beyond 256 are ignored", "    if window:", "    if 0 < window < 256:"),
    ("keys beyond the length", "places < kv_lens[:, None]", "places <= kv_lens[:, None]"),
    ("a key is forgotten", "places < kv_lens[:, None]", "places < kv_lens[:, None] - 1"),
    ("left-over values are read", "values = values.where(exists[..., None, None], 0)", "pass"),
    ("no scale", "q[rows].float() * scale", "q[rows].float()"),
    ("always the usual scale", "q[rows].float() * scale", "q[rows].float() * head_dim**-0.5"),
    ("the scale is 2 % too large", "q[rows].float() * scale", "q[rows].float() * scale * 1.02"),
    ("K's scale is ignored", "float() * k_descale", "float()"),
    ("V's scale is ignored", "float() * v_descale", "float()"),
    ("V has K's scale", "float() * v_descale", "float() * k_descale"),
    ("K of the second page is V", "k_pages[pages].flatten", "v_pages[pages].flatten"),
    ("sums do not decay", "sums * decay[..., None]", "sums"),
    ("totals do not decay", "total * decay", "total"),
    ("the first peak stays", "        peak = top", "        peak = peak"),
    ("half of the keys", "block_table.shape[1], pages_per_step", "max(block_table.shape[1] // 2, 1), pages_per_step"),
    ("at most 64 pages", "range(0, block_table.shape[1],", "range(0, min(block_table.shape[1], 64),"),
    ("at most 1024 pages", "range(0, block_table.shape[1],", "range(0, min(block_table.shape[1], 1024),"),
    ("pages out of order", "column : column + pages_per_step].long()", "column : column + pages_per_step].long().flip(1)"),
    ("first page again and again", "column : column + pages_per_step].long()", "0 : pages_per_step].long()"),
    ("natural logarithm", "(peak + total.log()) / math.log(2)", "peak + total.log()"),
    ("LSE without its peak", "(peak + total.log()) / math.log(2)", "total.log() / math.log(2)"),
    ("LSE of nothing is 0", "(peak + total.log()) / math.log(2)", "((peak + total.log()) / math.log(2)).nan_to_num(neginf=0)"),
    ("heads are interleaved", "queries.view(*rows.shape, num_kv_heads, -1, head_dim)", "queries.view(*rows.shape, -1, num_kv_heads, head_dim).transpose(-2, -3)"),
    ("queries counted from the first", "kv_lens[:, None] - counts + order", "counts * 0 + order"),
    ("one request too far", "tokens, right=True).clamp", "tokens, right=False).clamp"),
    ("weights in float16", "(logits - base[..., None]).exp(),", "((logits - base[..., None]).exp() * 16).round() / 16,"),
    ("groups of 16 are not built", "group_size > MAX_GROUP_SIZE", "group_size >= MAX_GROUP_SIZE"),
    ("pages of 16 are not built", "PAGE_SIZES = (16, 64)", "PAGE_SIZES = (64,)"),
)  # fmt: skip

TABLES = (
    ("drafts are not counted", "part.kv_lens.add_(max_queries)", "part.kv_lens.add_(0)"),
    ("drafts count one too many", "part.kv_lens.add_(max_queries)", "part.kv_lens.add_(max_queries + 1)"),
    ("the batch's own lengths grow", "part.kv_lens.add_(max_queries)", "part.kv_lens.copy_(batch.seq_lens.add_(max_queries))"),
    ("lengths of the first request", "part.kv_lens.copy_(batch.seq_lens)", "part.kv_lens.copy_(batch.seq_lens[:1].expand(size))"),
    ("requests by place, not by row", "            batch.req_pool_indices,", "            batch.req_pool_indices * 0 + 1,"),
    ("one table for all layers", "pool.translate_pages(pages, layer_of_group[group])", "pages"),
    ("at most 8 queries of a request", "        return spec.draft_token_num", "        return min(spec.draft_token_num, 8)"),
    ("the mean of the queries", "max(int(lens.max()), 1)", "max(int(lens.float().mean()), 1)"),
    ("host lengths of the first request", "max(int(lens.max()), 1)", "max(int(lens[0]), 1)"),
)  # fmt: skip

BACKEND = (
    ("LSE in base 2", ".mul_(math.log(2))", ""),
    ("LSE is not written", "lse.copy_(log2_sums.t()).mul_(math.log(2))", "pass"),
    ("the window without its own key", "layer.sliding_window_size + 1", "layer.sliding_window_size"),
    ("the first layer's window", "window=layer.sliding_window_size", "window=self.context.layers[0].sliding_window_size"),
    ("the first layer's scale", "scale=layer.scaling", "scale=self.context.layers[0].scaling"),
    ("scales are factors of the first layer", "pool.read_scales(layer.k_scale, layer.v_scale)", "pool.read_scales(self.context.layers[0].k_scale, self.context.layers[0].v_scale)"),
    ("Q is scaled in place", "        q, layer, lse = call.q,", "        q, layer, lse = call.q.mul_(1.5),"),
    ("a capture's tables are not refilled", "self._step = tables.fill(batch, self._max_queries, self.context)", "self._step = self._step or tables.fill(batch, self._max_queries, self.context)"),
    ("smaller buffers are dropped", "self._for_graphs.append(Tables.make(max_bs, self.context))", "self._for_graphs = []"),
    ("the last queries count", "self._max_queries = most_queries(batch)", "self._max_queries = max(self._max_queries, 1)"),
)  # fmt: skip


FAULTS = tomllib.loads(Path(__file__).with_name("engine_faults.toml").read_text(encoding="utf-8"))


def _of_engines() -> Iterator[Mutant]:
    """Faults that an engine meets."""
    for source in SOURCES:
        for kind, rows in FAULTS[source]["rows"].items():
            for name, *patch in rows:
                yield _of_row(source, kind, f"{source}, {kind}: {name}", *patch)


def _of_row(source: str, kind: str, name: str, place: str, *patch: str) -> Mutant:
    """A row's fault: its place and an expression there, or a module with the old and new text."""
    module = place
    if len(patch) == 1:
        module, old, new = FAULTS[source]["places"][place]
        patch = old, new.replace("%s", patch[0])
    old, new = patch
    return Mutant(source=source, kind=kind, name=name, module=module, old=old, new=new)


OF_ENGINES = tuple(_of_engines())
MUTANTS = (
    *map(_wrong_where, REGIONS),
    *(_in("library", *patch) for patch in LIBRARY),
    *(_in("tables", *patch) for patch in TABLES),
    *(_in("backend", *patch) for patch in BACKEND),
    *OF_ENGINES,
)


def candidate(mutant: Mutant | None = None, source: str = "acme") -> Candidate:
    """A backend with the fault. Its modules are made anew and are not left behind."""
    where = SOURCES[mutant.source if mutant else source]
    if str(where.folder) not in sys.path:
        sys.path.insert(0, str(where.folder))
    card = pkgutil.resolve_name(where.card)
    for name in where.modules:  # for the packages, which import them
        import_module(name)
    kept = {name: sys.modules.pop(name) for name in where.modules}
    try:
        for name in where.modules:
            text = (where.folder / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
            if mutant is not None and name.rpartition(".")[2] == mutant.module:
                if text.count(mutant.old) != 1:
                    raise ValueError(f"{mutant.name}: {mutant.old!r} is not in {name} once")
                text = text.replace(mutant.old, mutant.new)
            sys.modules[name] = made = ModuleType(name)
            exec(compile(text, f"{name} ({mutant and mutant.name})", "exec"), made.__dict__)
        factory: Any = getattr(made, where.factory)
    finally:
        sys.modules.update(kept)
    return Candidate(card=card, platform=where.platform, factory=factory)


def first_failure(
    mutant: Mutant, *, seed: int, budget: float, fixed: bool = True
) -> tuple[str, float]:
    """The first case that fails, and the seconds of a core until then; "" if none does in time.

    budget: for the sampled cases. fixed: whether the fixed cases of one page size run too: before the
    sampled ones if some are of the mutant's kind, and else after them.
    """
    suspect, start = candidate(mutant), time.process_time()

    def sampled() -> Iterator[tuple[AnyCase, int]]:
        end = time.process_time() + budget
        drawn = Sampler(candidate=suspect, seed=seed).cases()
        for case in takewhile(lambda _: time.process_time() < end, drawn):
            yield case, seed

    parts: list[Iterable[tuple[AnyCase, int]]] = [sampled()]
    if fixed:
        own = re.compile(FAULTS["cases"].get(mutant.kind, "^$"))
        standard = sorted(suspect.cases((16,)), key=lambda case: not own.search(case.name))
        place = 0 if own.search(standard[0].name) else len(parts)
        parts.insert(place, ((case, 0) for case in standard))
    for case, number in chain.from_iterable(parts):
        if run_case(suspect, case, seed=number).status == "failed":
            return case.name, time.process_time() - start
    return "", time.process_time() - start


def test_the_suite_finds_a_mutant_of_each_module(full) -> None:
    """One region of the card, one patch of each module; others in each run. Without `--full` one
    module is patched, another in each run."""
    seed = SystemRandom().randrange(1 << 31)
    modules = ("library", "tables", "backend")
    for module in modules if full else (modules[seed % len(modules)],):
        mutants = [m for m in MUTANTS if m.module == module and m not in OF_ENGINES]
        mutant = mutants[seed // 3 % len(mutants)]
        case, _ = first_failure(mutant, seed=seed, budget=60)
        assert case, f"missed: {mutant.name}, seed {seed}"


def test_the_suite_finds_what_an_engine_meets(full) -> None:
    """One fault; another in each run. With `--full`, one of each kind and backend."""
    seed = SystemRandom().randrange(1 << 31)
    kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in OF_ENGINES:
        kinds[f"{mutant.source} {mutant.kind}" if full else ""].append(mutant)
    for mutants in kinds.values():
        mutant = mutants[seed % len(mutants)]
        case, _ = first_failure(mutant, seed=seed, budget=120)
        assert case, f"missed: {mutant.name}, seed {seed}"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.turns(2)
def test_places_alone_are_no_faults(source) -> None:
    names = ("serving", "verify-other-drafts", "decode-table", "decode-long-sinks-lse")
    for place, expression in FAULTS[source]["neutral"].items():
        whole = candidate(_of_row(source, "", place, place, expression))
        cases = {case.name: case for case in whole.cases((16,))}
        for name in names:
            outcome = run_case(whole, cases[f"{name}-page16"])
            assert outcome.status in ("passed", "refused"), (place, outcome.message)


def test_every_patch_applies() -> None:
    assert len(MUTANTS) >= 190
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        candidate(mutant)


def test_the_whole_backend_passes_the_same_cases() -> None:
    whole = candidate()
    seed = SystemRandom().randrange(1 << 31)
    sampler = Sampler(candidate=whole, seed=seed, most_cost=0.1)
    for case, _ in zip(sampler.cases(), range(5), strict=False):
        outcome = run_case(whole, case, seed=seed)
        assert outcome.status == "passed", (seed, case.name, outcome.message)


def test_a_seed_repeats_the_cases_and_pairs_are_covered() -> None:
    whole = candidate()
    first, again = (Sampler(candidate=whole, seed=3) for _ in range(2))
    cases = [case for case, _ in zip(first.cases(), range(40), strict=False)]
    assert cases == [case for case, _ in zip(again.cases(), range(40), strict=False)]
    early = first.coverage
    for _ in first.cases():
        if first.coverage.covered == first.coverage.total:
            break
    assert early.covered < first.coverage.covered == first.coverage.total
    assert max(max(step.lens) for case in cases for step in case.steps) >= 32_768


def _try(task: tuple[int, int, float, bool]) -> tuple[int, str, float]:
    number, seed, budget, fixed = task
    return number, *first_failure(MUTANTS[number], seed=seed, budget=budget, fixed=fixed)


@click.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--budget", default=120.0, show_default=True, help="Seconds of sampled cases.")
@click.option("--jobs", default=2, show_default=True, help="Mutants that are tried at a time.")
@click.option("--fixed/--no-fixed", default=True, help="Run the fixed cases of one page size too.")
@click.option("--only", default="", help="A regular expression for the mutants' kinds and names.")
def main(seed: int, budget: float, jobs: int, fixed: bool, only: str) -> None:
    """Try all mutants, and print what caught each and when."""
    wanted = [
        number
        for number, mutant in enumerate(MUTANTS)
        if re.search(only, f"{mutant.kind}: {mutant.name}")
    ]
    tasks = [(number, seed, budget, fixed) for number in wanted]
    planted, missed = Counter(MUTANTS[number].kind for number in wanted), Counter[str]()
    with get_context("spawn").Pool(jobs) as pool:
        for number, case, seconds in pool.imap_unordered(_try, tasks):
            missed[MUTANTS[number].kind] += not case
            caught = case[:90] or "MISSED"
            click.echo(f"{seconds:7.1f} s  {MUTANTS[number].name}: {caught}")
    for kind, count in planted.items():
        click.echo(f"{kind}: {count - missed[kind]} of {count} caught")
    click.echo(f"{len(wanted) - missed.total()} of {len(wanted)} caught, seed {seed}")


if __name__ == "__main__":
    main()
