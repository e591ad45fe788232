"""SGLang 0.5.23's own defaults, as its chooser gave them, against ours: docs/parity.md lists
every cell that differs, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from attnmux.core import Offer, Platform, Plugins, Policy, Request, solve
from attnmux.core.find.graphs import with_graphs

FOLDER = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
GOLDEN = json.loads((FOLDER / "sglang-0.5.23-defaults.json").read_text(encoding="utf-8"))
FLASHINFER = frozenset({"flashinfer-python"})

MACHINES: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "sm80+fi": (("nvidia:sm80,cuda=12.8",), frozenset()),
    "sm80-nofi": (("nvidia:sm80,cuda=12.8",), FLASHINFER),
    "sm90+fi": (("nvidia:sm90,cuda=12.8",), frozenset()),
    "sm90,cuda<12.3+fi": (("nvidia:sm90,cuda=12.2",), frozenset()),
    "sm100/103+fi": (("nvidia:sm100,cuda=13.0", "nvidia:sm103,cuda=13.0"), frozenset()),
    "sm110+fi": (("nvidia:sm110,cuda=13.0",), frozenset()),
    "sm120/121+fi": (("nvidia:sm120,cuda=13.0", "nvidia:sm121,cuda=13.0"), frozenset()),
    "hip": (("amd:gfx942", "amd:gfx950"), frozenset()),
    "mps": (("apple:m3,device=mps",), frozenset()),
    "xpu": (("intel:xe2",), frozenset()),
    "musa": (("mthreads:mp_31,device=musa",), frozenset()),
    "cpu(arg unset)": (("cpu:x86_64,features=avx2", "cpu:aarch64"), frozenset()),
    "oot": (("acme:one,device=acme",), frozenset()),
}
"""The machines that a row of SGLang's table stands for, and the libraries that they lack."""
MHA = "dtype=bf16,num_q_heads=32,num_kv_heads=8,head_dim=128"
SPECULATING = "phases=extend+decode+verify+draft,spec_draft_tokens=4"
MLA = (
    "kind=mla,dtype=bf16,num_kv_heads=1,head_dim=192,v_head_dim=128,kv_lora_rank=512,"
    "qk_rope_head_dim=64"
)
REQUESTS: dict[str, str] = {
    "MHA": MHA,
    "MHA EAGLE topk=None": f"{MHA},{SPECULATING}",
    "MHA EAGLE topk=1 page=None": f"{MHA},spec_topk=1",
    "MHA topk=1 page=64": f"{MHA},spec_topk=1,page_size=64",
    "MHA topk=4": f"{MHA},spec_topk=4",
    "MHA DFLASH topk=None": f"{MHA},{SPECULATING}",
    "MHA page=64 no spec": f"{MHA},page_size=64",
    "MHA sinks": f"{MHA},sinks=true",
    "MHA asym K/V": "dtype=bf16,num_q_heads=32,num_kv_heads=8,head_dim=192,v_head_dim=128",
    "MHA sinks topk=4": f"{MHA},sinks=true,spec_topk=4",
    "Whisper": "dtype=bf16,num_q_heads=20,num_kv_heads=20,head_dim=64,cross_attention=true",
    # The heads of one rank: what SGLang calls KV heads before it absorbs.
    "MLA": f"{MLA},num_q_heads=8",
    "MLA topk=4": f"{MLA},num_q_heads=8,spec_topk=4",
    "MLA kvh=16": f"{MLA},num_q_heads=16",
    "MLA kvh=128": f"{MLA},num_q_heads=128",
}


@pytest.fixture(scope="module")
def offers() -> tuple[Offer, ...]:
    return Plugins.load().offers()


def decided(offers: tuple[Offer, ...], machine: str, column: str) -> str:
    """The backend, as "extend + decode" where the phases differ."""
    platforms, without = MACHINES[machine]
    policy = Policy(without=without)
    request = Request.parse(REQUESTS[column])
    found = [solve(request, Platform.parse(text), offers, policy) for text in platforms]
    names = [
        " + ".join(dict.fromkeys(one.phases[phase].backend for phase in ("extend", "decode")))
        for one in found
    ]
    assert len(set(names)) == 1, f"{names} on {platforms}"
    return names[0]


def same(offers: tuple[Offer, ...], ours: str, theirs: str) -> bool:
    """Whether our card answers to their name, which for two cards of MLA is an alias."""
    return any(theirs in (o.card.name, *o.card.aliases) for o in offers if o.card.name == ours)


def listed() -> Iterator[tuple[str, str, str, str, str]]:
    """(machine, request, SGLang's, ours, why) for each cell that docs/parity.md lists."""
    defaults = PAGE.read_text(encoding="utf-8").partition("## Other differences")[0]
    for line in defaults.splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if not line.startswith("| `"):
            continue
        machines, columns, theirs, ours, because = parts
        words = (machines.replace("`", "").split("; "), columns.replace("`", "").split("; "))
        for machine, column in product(*words):
            yield machine, column, theirs.strip("`"), ours.strip("`"), because


def test_the_table_is_whole() -> None:
    assert set(MACHINES) == set(GOLDEN["rows"])
    assert set(REQUESTS) == set(GOLDEN["columns"])
    assert (len(MACHINES), len(REQUESTS)) == (13, 15)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_default_is_sglangs_or_listed(offers, machine) -> None:
    known = {(m, c): (theirs, ours) for m, c, theirs, ours, _ in listed()}
    wrong = []
    for column in REQUESTS:
        theirs, ours = GOLDEN["rows"][machine][column], decided(offers, machine, column)
        said = known.get((machine, column))
        if said != (None if same(offers, ours, theirs) else (theirs, ours)):
            wrong.append((column, theirs, ours, said))
    assert not wrong


def test_a_cell_is_listed_once_and_with_a_reason() -> None:
    cells = [(machine, column) for machine, column, *_ in listed()]
    assert len(cells) == len(set(cells))
    assert set(cells) <= set(product(MACHINES, REQUESTS))
    assert all(because for *_, because in listed())


FURTHER = {
    "8-bit KV, MHA": f"{MHA},kv_dtype=fp8_e4m3",
    "8-bit KV, MLA": f"{MLA},num_q_heads=16,kv_dtype=fp8_e4m3",
    "deterministic, MHA": f"{MHA},deterministic=true",
    "deterministic, MLA": f"{MLA},num_q_heads=16,deterministic=true",
}
"""As engines ask, with graphs where the device has them."""


def test_the_page_has_8_bit_kv_and_determinism(offers) -> None:
    """The columns of the second table, whose rows begin with a platform."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("| platform |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[head:]]
    columns = cells[0][1:]
    assert columns == list(FURTHER)
    rows = {row[0]: row[1:] for row in cells[2 : cells.index([""])]}
    assert len(rows) == 8
    for machine, told in rows.items():
        assert told == [further(offers, machine, column) for column in columns], machine


def further(offers: tuple[Offer, ...], machine: str, column: str) -> str:
    """The backend, as "extend + decode" where they differ, and whether decode runs eagerly."""
    platform = Platform.parse(machine)
    request = with_graphs(Request.parse(FURTHER[column]), platform)
    one = solve(request, platform, offers)
    names = dict.fromkeys(one.phases[phase].backend for phase in ("extend", "decode"))
    return " + ".join(names) + (" (eager)" if request.graph and not one.request.graph else "")
