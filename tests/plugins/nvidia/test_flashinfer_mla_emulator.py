"""The emulator of flashinfer's MLA wrapper: arguments, conventions, and what it gets wrong."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnmux.core.graph.devices import GraphStep
from attnmux.emulators.nvidia.flashinfer import BatchMLAPagedAttentionWrapper as Emulated
from attnmux.testing.recording import RecordingGraphs

RECORDED = json.loads((Path(__file__).parent / "data/flashinfer-mla-0.6.13.json").read_text())
NAMES = sorted(RECORDED["signatures"])
WORKSPACE_BYTES = 18 << 20


def parameters(function: Callable[..., Any]) -> list[list[str | None]]:
    """Name, kind and default of each, as recorded."""
    return [
        [found.name, found.kind.name, None if found.default is found.empty else repr(found.default)]
        for found in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_emulated_signature(name) -> None:
    assert parameters(getattr(Emulated, name.split(".")[1])) == RECORDED["signatures"][name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_installed_signature(name) -> None:
    """Whatever is installed takes what the adapter passes: the recorded arguments, in order."""
    pytest.importorskip("flashinfer")
    library = importlib.import_module("flashinfer.mla")
    owner, method = name.split(".")
    installed = parameters(getattr(getattr(library, owner), method))
    recorded = RECORDED["signatures"][name]
    assert [each for each in installed if each in recorded] == recorded


class Setup:
    """Requests with random rows, in pages that are no neighbours."""

    def __init__(
        self, *lens: tuple[int, int], heads: int = 16, page: int = 4, causal: bool = True
    ) -> None:
        """lens: keys and rows of each request."""
        generator = torch.Generator().manual_seed(5)
        self.kv_lens, self.q_lens = torch.tensor(lens, dtype=torch.int32).unbind(1)
        self.heads, self.page, self.causal, self.scale = heads, page, causal, 0.1
        counts = (self.kv_lens + page - 1) // page
        self.kv_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        self.qo_indptr = torch.nn.functional.pad(self.q_lens.cumsum(0), (1, 0)).int()
        pages, rows = int(self.kv_indptr[-1]), int(self.qo_indptr[-1])
        self.indices = torch.randperm(pages + 3, generator=generator)[:pages].int()

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        self.cache = random(pages + 3, page, 576)
        self.q, self.q_pe = random(rows, heads, 512), random(rows, heads, 64)
        self.wrapper = Emulated(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8))

    def plan(self, **others: Any) -> None:
        given: dict[str, Any] = {
            "qo_indptr": self.qo_indptr,
            "kv_indptr": self.kv_indptr,
            "kv_indices": self.indices,
            "kv_len_arr": self.kv_lens,
            "num_heads": self.heads,
            "head_dim_ckv": 512,
            "head_dim_kpe": 64,
            "page_size": self.page,
            "causal": self.causal,
            "sm_scale": self.scale,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        }
        self.wrapper.plan(**{**given, **others})

    def run(self, **others: Any) -> Any:
        return self.wrapper.run(
            self.q, self.q_pe, self.cache[..., :512], self.cache[..., 512:], **others
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row by row, output and natural LSE."""
        outs, lses = [], []
        for request, (kv_len, q_len) in enumerate(zip(self.kv_lens, self.q_lens, strict=True)):
            pages = self.indices[self.kv_indptr[request] : self.kv_indptr[request + 1]]
            keys = self.cache[pages.long()].flatten(0, 1).double()
            for place in range(int(q_len)):
                row = int(self.qo_indptr[request]) + place
                seen = int(kv_len - q_len) + place + 1 if self.causal else int(kv_len)
                query = torch.cat([self.q[row], self.q_pe[row]], dim=-1).double()
                logits = query @ keys[:seen].T * self.scale
                outs.append(logits.softmax(-1) @ keys[:seen, :512])
                lses.append(logits.logsumexp(-1))
        return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [1, 4, 5])
def test_attention_over_pages(page, causal) -> None:
    setup = Setup((70, 3), (9, 9), (1, 1), page=page, causal=causal)
    setup.plan()
    out, lse = setup.run(return_lse=True, return_lse_base_on_e=True)
    expected, natural = setup.expected()
    torch.testing.assert_close(out.double(), expected, rtol=8e-3, atol=1e-6)
    torch.testing.assert_close(lse.double(), natural)


def test_lse_is_in_base_2_unless_asked_for() -> None:
    setup = Setup((70, 3))
    setup.plan()
    _, base_2 = setup.run(return_lse=True)
    _, natural = setup.run(return_lse=True, return_lse_base_on_e=True)
    torch.testing.assert_close(base_2 * math.log(2), natural)


def test_a_row_without_keys() -> None:
    setup = Setup((0, 1), (5, 1), causal=False)
    setup.plan()
    out, lse = setup.run(return_lse=True)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


def test_rows_behind_the_plan_are_left_alone() -> None:
    setup = Setup((5, 2), (9, 3))
    setup.plan(qo_indptr=torch.tensor([0, 2], dtype=torch.int32), kv_indptr=setup.kv_indptr[:2],
               kv_len_arr=setup.kv_lens[:1])  # fmt: skip
    out = torch.full_like(setup.q, 7)
    assert setup.run(out=out) is out
    assert (out[2:] == 7).all()
    torch.testing.assert_close(out[:2].double(), setup.expected()[0][:2], rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("lens", "heads", "wrong_row"),
    [
        # Tiles of 128: the first ends in token 6, which sees 65 keys.
        ([(68, 10)], 20, 6),
        # Tiles of 64, since the rows of five requests are few: the first ends within token 0.
        ([(66, 2), (5, 0), (5, 0), (5, 0), (5, 0)], 128, 0),
    ],
)
def test_causal_tiles_that_end_within_a_token_miss_its_key(lens, heads, wrong_row) -> None:
    setup = Setup(*lens, heads=heads)
    setup.plan()
    out, expected = setup.run().double(), setup.expected()[0]
    wrong = ((out - expected).abs() > 0.02).flatten(1).any(1)
    assert wrong.nonzero().flatten().tolist() == [wrong_row]


def test_an_indptr_may_begin_anywhere_and_indices_go_on_behind() -> None:
    setup = Setup((9, 2), (70, 3))
    setup.plan(
        qo_indptr=setup.qo_indptr[1:] - setup.qo_indptr[1],
        kv_indptr=setup.kv_indptr[1:],
        kv_len_arr=setup.kv_lens[1:],
        kv_indices=torch.cat([setup.indices, torch.zeros(40, dtype=torch.int32)]),
    )
    expected = setup.expected()[0][2:]
    setup.q, setup.q_pe = setup.q[2:], setup.q_pe[2:]
    torch.testing.assert_close(setup.run().double(), expected, rtol=8e-3, atol=1e-6)


def test_a_run_reads_the_workspace_and_the_indices_where_they_are() -> None:
    """Which is what a captured run does."""
    setup = Setup((9, 1), (70, 1), causal=False)
    setup.plan()
    first = setup.run()
    kept = setup.wrapper._int_workspace_buffer
    shorter = torch.tensor([9, 12], dtype=torch.int32)
    setup.plan(kv_len_arr=shorter)
    assert setup.wrapper._int_workspace_buffer is kept
    second = setup.run()
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    setup.indices.copy_(setup.indices.flip(0))
    assert not torch.equal(setup.run()[0], second[0])


def test_with_buffers_of_its_own_it_copies_into_them() -> None:
    setup = Setup((9, 1), (70, 1), causal=False)
    setup.plan()
    expected = setup.run()
    buffers = {
        "qo_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indices": torch.zeros(50, dtype=torch.int32),
        "kv_len_arr": torch.zeros(2, dtype=torch.int32),
    }
    workspace = setup.wrapper._float_workspace_buffer
    setup.wrapper = Emulated(workspace, use_cuda_graph=True, **buffers)
    setup.plan()
    setup.indices.zero_()
    assert torch.equal(setup.run(), expected)
    with pytest.raises(RuntimeError):
        setup.plan(kv_len_arr=torch.ones(3, dtype=torch.int32))


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"kv_data_type": torch.float8_e4m3fn}, RuntimeError, "float8"),
        ({"kv_len_arr": torch.zeros(0, dtype=torch.int32)}, RuntimeError, "floating point"),
        ({"kv_len_arr": torch.zeros(1, dtype=torch.int64)}, RuntimeError, "int32"),
        ({"qo_indptr": torch.tensor([3, 0], dtype=torch.int32)}, RuntimeError, "non-negative"),
        ({"head_dim_ckv": 256}, NotImplementedError, "512"),
    ],
)
def test_plans_that_it_refuses(given, error, says) -> None:
    with pytest.raises(error, match=says):
        Setup((9, 3)).plan(**given)


@pytest.mark.parametrize(("rows", "fits"), [(16384, True), (16500, False)])
def test_a_plan_has_room_for_so_many_tiles(rows, fits) -> None:
    """One of 128 heads for each token; none of the keys is split, for there are few."""
    setup = Setup((9, 3), heads=128, page=1)
    lens = torch.tensor([rows], dtype=torch.int32)
    bounds = torch.tensor([0, rows], dtype=torch.int32)
    given = {"kv_len_arr": lens, "qo_indptr": bounds, "kv_indptr": bounds}
    if fits:
        setup.plan(**given)
    else:
        with pytest.raises(RuntimeError, match="works"):
            setup.plan(**given)


def test_a_workspace_for_two_tiles_of_each_sm() -> None:
    setup = Setup((9, 3))
    needed = 2 * 132 * 64 * (512 * 2 + 4)
    setup.wrapper._float_workspace_buffer = torch.empty(needed, dtype=torch.uint8)
    setup.plan()
    setup.wrapper._float_workspace_buffer = torch.empty(needed - 16, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="mla_partial"):
        setup.plan()


def test_runs_that_it_refuses() -> None:
    setup = Setup((9, 3))
    with pytest.raises(AttributeError):
        setup.run()
    setup.plan()
    with pytest.raises(ValueError, match="out"):
        setup.run(out=torch.empty_like(setup.q_pe))
    with pytest.raises(ValueError, match="lse"):
        setup.run(lse=torch.empty(3, 16, dtype=torch.float64), return_lse=True)
    with pytest.raises(NotImplementedError, match="LSE"):
        setup.run(lse=torch.empty(16, 3).t(), return_lse=True)
    with pytest.raises(ValueError, match="o_scale"):
        setup.run(o_scale=1.0)
    whole, setup.q = setup.q, setup.q[:2]
    with pytest.raises(ValueError, match="rows"):
        setup.run()
    setup.q = whole.half()
    with pytest.raises(ValueError, match="float16"):
        setup.run()
    odd = torch.zeros(3, 16 * 512 + 1, dtype=torch.bfloat16)
    setup.q = odd[:, 1:].view(3, 16, 512)
    with pytest.raises(RuntimeError, match="misaligned"):
        setup.run()


def test_a_captured_launch_has_the_blocks_of_its_plan() -> None:
    """16 heads of 4 rows a request are a tile of 64; of 5 they are tiles of 128."""
    setup = Setup((20, 4), (30, 4))
    setup.plan()
    step = GraphStep(prepare=lambda: None, forward=setup.run, host_tensors=())
    graph = RecordingGraphs().capture(step)
    setup.plan(kv_len_arr=setup.kv_lens - 1)
    graph.replay()
    assert graph.outputs.isfinite().all()
    setup.plan(qo_indptr=torch.tensor([0, 3, 10], dtype=torch.int32))
    graph.replay()
    assert graph.outputs.isnan().all()
