"""The support matrix of SGLang's manual: every cell is what our card says, or a listed deviation.

`page_native` is compared as a set of sizes; all others ask whether any clause serves it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnmux.core import NoBackend, Platform, Plugins, Policy, Request, solve
from attnmux.core.cards.conditions import Emulated
from attnmux.core.plugin import ANY, BackendCard, Clause

FOLDER = Path(__file__).parent / "golden"
MATRIX = json.loads((FOLDER / "support-matrix.json").read_text(encoding="utf-8"))
DEVIATIONS = json.loads((FOLDER / "support-deviations.json").read_text(encoding="utf-8"))
CARDS: dict[str, BackendCard] = {o.card.name: o.card for o in Plugins.load().offers()}
SIZES = (1, 2, 16, 32, 48, 64, 96, 128, 256)
FEATURES = {
    "fp8_kv": ("kv_dtype", "fp8_e4m3"),
    "fp4_kv": ("kv_dtype", "fp4_e2m1"),
    "topk1": ("spec_topk", 1),
    "sliding_window": ("sliding_window", 127),
    "multimodal": ("phase", "encoder"),
}
MACHINES = ("nvidia:sm90", "nvidia:sm100", "ascend:910b")
DEEPSEEK = Request.parse(
    "kind=mla,dtype=bf16,num_q_heads=16,num_kv_heads=1,head_dim=192,v_head_dim=128,"
    "kv_lora_rank=512,qk_rope_head_dim=64,chunked_prefix=true"
)
OWN_KINDS = {"dual_chunk_flash_attn": "dual_chunk"}
"""Backends whose attention is a kind of its own here, and one of MHA in the manual."""
CELLS = [
    (kind, backend, column)
    for kind in ("mha", "mla")
    for backend, columns in MATRIX[kind].items()
    for column in columns
]


def clauses_of(kind: str, backend: str) -> list[Clause]:
    """The verdicts of the cards of that name on requests of this kind."""
    asked = OWN_KINDS.get(backend, kind)
    meant = [c for c in CARDS.values() if backend in (c.name, *c.aliases)]
    clauses = [clause for c in meant for clause in c.clauses if clause.kind.admits(asked)]
    assert clauses
    return clauses


def native_pages(clauses: list[Clause]) -> str:
    conditions = [clause.page_size for clause in clauses]
    if any(condition is ANY for condition in conditions):
        return "any"
    emulating = [condition for condition in conditions if isinstance(condition, Emulated)]
    if emulating:
        return "emulated"
    sizes = [size for size in SIZES if any(condition.admits(size) for condition in conditions)]
    return ",".join(map(str, sizes))


def trees(clauses: list[Clause]) -> bool | str:
    """Whether drafts may branch: anywhere, at page 1 alone, or not at all."""
    taking = [clause for clause in clauses if clause.spec_topk.admits(4)]
    if not taking:
        return False
    return True if any(clause.page_size.admits(64) for clause in taking) else "page_size=1 only"


def expands_prompts(backend: str, machine: str) -> bool:
    """Whether a decision with the backend has another one for prompts with expanded heads."""
    policy = Policy(backend=backend)
    try:
        decision = solve(DEEPSEEK, Platform.parse(machine), Plugins.load().offers(), policy)
    except NoBackend:
        return False
    return decision.answer("expanded_prompts", "prompts", "extend") is not None


def said(kind: str, backend: str, column: str) -> bool | str:
    clauses = clauses_of(kind, backend)
    if column == "page_native":
        return native_pages(clauses)
    if column == "topk_gt1":
        return trees(clauses)
    if column == "chunked_prefix_cache":
        return any(expands_prompts(backend, machine) for machine in MACHINES)
    field, value = FEATURES[column]
    return any(getattr(clause, field).admits(value) for clause in clauses)


@pytest.mark.parametrize(("kind", "backend", "column"), CELLS)
def test_a_cell_is_as_in_the_manual_or_listed(kind, backend, column) -> None:
    got, manual = said(kind, backend, column), MATRIX[kind][backend][column]
    listed = DEVIATIONS.get(f"{kind}/{backend}/{column}")
    if listed is None:
        assert got == manual
    else:
        assert got == listed["ours"]
        assert got != manual
        assert listed["because"]


def test_nothing_is_listed_that_is_no_cell() -> None:
    assert set(DEVIATIONS) <= {"/".join(cell) for cell in CELLS}
