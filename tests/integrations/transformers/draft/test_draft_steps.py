"""Draft steps that are prepared together: the reference's answers, step by step."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from attnmux.core import (
    ForwardBatch,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    GraphUnsupported,
    InvalidInput,
    ModelInput,
    Platform,
)
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import KernelLibrary
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.layers import FA3Kernels
from attnmux.testing import (
    Case,
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    make_setup,
)
from attnmux.transformers.draft.steps import MultiStepDraftBackend

pytest.importorskip("triton")

from attnmux.emulators import triton_interpreter
from attnmux.triton.attention.backend import TritonBackend

FA3 = KernelLibrary.imported(FA3Kernels, "attnmux.emulators.nvidia.sgl_flash_attn")
HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
NUM = 3
"""Steps."""
PREFIXES = (9, 16, 1)

BACKENDS = {
    "torch_native": (probe_cpu(), "float32", TorchNativeBackend),
    "triton": (probe_cpu(), "float32", lambda context: TritonBackend(context, {}, compute_units=4)),
    "fa3": (HOPPER, "bfloat16", lambda context: FA3Backend(context, {"num_splits": 0}, FA3)),
    "fake": (probe_cpu(), "float32", GraphFakeBackend),
}
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}


class Branches:
    """Random K and V, and branches that share the whole pages of a request's prefix."""

    def __init__(self, name, page_size, topk, seed, prefixes=PREFIXES, latent=False):
        platform, dtype, self.make = BACKENDS[name]
        self.lens = torch.tensor([each for each in prefixes for _ in range(topk)])
        totals = [int(each) + NUM for each in self.lens]
        shape = {"kind": "mla", "num_kv_heads": 1, "head_dim": 48, "kv_lora_rank": 32}
        case = Case(
            name="drafts",
            steps=(decode(*totals),),
            dtype=dtype,
            page_size=page_size,
            windows=(None,) if latent else (None, 5),
            **({**shape, "qk_rope_head_dim": 16} if latent else {}),
        )
        # Two setups of the same numbers: one for the reference alone
        self.ours, self.reference = (make_setup(case, platform, "cpu", seed=seed) for _ in "ab")
        self.rng = torch.Generator().manual_seed(seed)
        pool = self.ours.context.token_to_kv_pool
        for layer_id in pool.layer_ids:
            buffers = [each.context.token_to_kv_pool for each in (self.ours, self.reference)]
            for mine, theirs in zip(
                *(each.get_kv_buffer(layer_id) for each in buffers), strict=True
            ):
                mine.copy_(torch.randn(mine.shape, generator=self.rng))
                theirs.copy_(mine)
        self._fill_tables(page_size, topk, pool.num_slots // page_size)

    def _fill_tables(self, page_size, topk, num_pages):
        fresh = (torch.randperm(num_pages - 1, generator=self.rng) + 1).tolist()
        table = self.ours.context.req_to_token_pool.req_to_token
        order, shared = torch.arange(page_size), []
        for row, length in enumerate(self.lens.tolist()):
            whole, needed = length // page_size, -(-(length + NUM) // page_size)
            if row % topk == 0:
                shared = [fresh.pop() for _ in range(whole)]
            pages = [*shared, *(fresh.pop() for _ in range(needed - whole))]
            slots = (torch.tensor(pages)[:, None] * page_size + order).flatten()
            table[row + 1, : length + NUM] = slots[: length + NUM].int()
        self.reference.context.req_to_token_pool.req_to_token.copy_(table)

    @property
    def batch(self):
        rows, order = torch.arange(1, len(self.lens) + 1), torch.arange(NUM)
        positions = self.lens.unsqueeze(1) + order
        table = self.ours.context.req_to_token_pool.req_to_token
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            req_pool_indices=rows,
            seq_lens=(self.lens + 1).int(),
            out_cache_loc=table[rows.unsqueeze(1), positions].long().flatten(),
            positions=positions.flatten(),
            seq_lens_cpu=(self.lens + 1).int(),
            seq_lens_sum=int(self.lens.sum()) + len(rows),
        )

    def inputs(self, layer):
        """Q, Q's rotary part, K, its rotary part and V, [R * NUM, heads, dim]."""

        def draw(heads, width):
            values = torch.randn(len(self.lens) * NUM, heads, width, generator=self.rng)
            return values.to(self.ours.context.token_to_kv_pool.dtype)

        rope = layer.qk_rope_head_dim
        given = {"q": draw(layer.tp_q_head_num, layer.query_dim)}
        given["k"] = draw(layer.tp_k_head_num, layer.qk_head_dim - rope)
        if rope:
            given["q_rope"] = draw(layer.tp_q_head_num, rope)
            given["k_rope"] = draw(1, rope)
        else:
            given["v"] = draw(layer.tp_v_head_num, layer.v_head_dim)
        return given


def attended(backend, batch, layer, given):
    return backend.forward(
        given["q"],
        given["k"],
        given.get("v"),
        layer,
        batch,
        q_rope=given.get("q_rope"),
        k_rope=given.get("k_rope"),
    )


def of_step(given, number):
    """The tokens of one step, of those of all steps by row."""
    return {name: each.unflatten(0, (-1, NUM))[:, number] for name, each in given.items()}


def expected(branches, inputs):
    """Of each step by the reference, prepared on its own. [layers][R * NUM, heads, dim]"""
    backend, batch = FakeBackend(branches.reference.context), branches.batch
    answers = [[] for _ in inputs]
    for number in range(NUM):
        lens = batch.seq_lens + number
        step = replace(
            batch,
            seq_lens=lens,
            out_cache_loc=batch.out_cache_loc.view(-1, NUM)[:, number],
            positions=batch.positions.view(-1, NUM)[:, number],
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
        )
        backend.init_forward_metadata(step)
        for place, (layer, given) in enumerate(inputs):
            answers[place].append(attended(backend, step, layer, of_step(given, number)))
    return [torch.stack(each, dim=1).flatten(0, 1) for each in answers]


def steps_of(backend, inputs):
    """The same by the steps that `backend` has prepared."""
    answers = [[] for _ in inputs]
    for number, step in enumerate(backend.steps):
        for place, (layer, given) in enumerate(inputs):
            answers[place].append(attended(backend, step, layer, of_step(given, number)))
    return [torch.stack(each, dim=1).flatten(0, 1) for each in answers]


def assert_alike(ours, reference, dtype):
    limit = TOLERANCE[dtype]
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, theirs, atol=limit, rtol=limit)


@pytest.fixture(autouse=True)
def interpreted():
    """The kernels run in Triton's interpreter."""
    with triton_interpreter.interpreted():
        yield


@pytest.fixture
def seed(record_property) -> int:
    """Fresh at each run; the report of a failure has it."""
    drawn = random.randrange(1 << 30)
    record_property("seed", drawn)
    return drawn


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", BACKENDS)
def test_steps_have_the_references_answers(name, page_size, topk, seed) -> None:
    prefixes = PREFIXES[:2] if name == "triton" else PREFIXES
    branches = Branches(name, page_size, topk, seed, prefixes)
    inputs = [(layer, branches.inputs(layer)) for layer in branches.ours.context.layers]
    backend = MultiStepDraftBackend(branches.ours.context, branches.make, NUM)
    backend.init_forward_metadata(branches.batch)
    assert_alike(steps_of(backend, inputs), expected(branches, inputs), BACKENDS[name][1])


@pytest.mark.parametrize("page_size", [1, 16])
def test_latent_steps_have_the_references_answers(page_size, seed) -> None:
    branches = Branches("torch_native", page_size, 2, seed, latent=True)
    inputs = [(layer, branches.inputs(layer)) for layer in branches.ours.context.layers]
    backend = MultiStepDraftBackend(branches.ours.context, branches.make, NUM)
    backend.init_forward_metadata(branches.batch)
    assert_alike(steps_of(backend, inputs), expected(branches, inputs), "float32")


def in_one_graph(branches, layers, sizes):
    """A runner of all steps as one graph."""
    backend = MultiStepDraftBackend(branches.ours.context, branches.make, NUM)
    names = [name for name in branches.inputs(layers[0]) if name]
    kinds = {}
    for place, layer in enumerate(layers):
        for name, each in branches.inputs(layer).items():
            kind = ModelInput(dtype=each.dtype, trailing=tuple(each.shape[1:]))
            kinds[f"{place}.{name}"] = kind

    def forward(batch, inputs):
        given = [
            (layer, {name: inputs[f"{place}.{name}"] for name in names})
            for place, layer in enumerate(layers)
        ]
        return steps_of(backend, given)

    config = GraphConfig(batch_sizes=sizes, tokens_per_request=NUM, host_lens=True)
    runner = GraphRunner(backend, forward, config, devices=RecordingGraphs(), inputs=kinds)
    runner.capture()
    return runner


@pytest.mark.parametrize(
    ("name", "page_size", "topk"), [*product(("fa3", "fake", "triton"), (1, 16), (1, 4))]
)
@pytest.mark.turns(12)
def test_one_graph_holds_all_steps(name, page_size, topk, seed) -> None:
    """In a larger graph than the batch, after one of other lengths."""
    for prefixes, number in ((PREFIXES, 0), ((17, 2), 1)):
        branches = Branches(name, page_size, topk, seed + number, prefixes)
        layers = branches.ours.context.layers
        runner = in_one_graph(branches, layers, (topk, 3 * topk))
        for _ in range(2):
            inputs = [(layer, branches.inputs(layer)) for layer in layers]
            flat = {
                f"{place}.{name}": each
                for place, (_, given) in enumerate(inputs)
                for name, each in given.items()
            }
            ours = runner.replay(branches.batch, flat)
            assert_alike(ours, expected(branches, inputs), BACKENDS[name][1])


def test_rounds_may_have_fewer_steps(seed) -> None:
    branches = Branches("fake", 4, 2, seed)
    backend = MultiStepDraftBackend(branches.ours.context, branches.make, NUM + 2)
    backend.init_forward_metadata(branches.batch)
    assert len(backend.steps) == NUM
    assert [backend.serving(step) for step in backend.steps] == list(backend.children[:NUM])
    lens = branches.batch.seq_lens.tolist()
    assert [step.seq_lens.tolist() for step in backend.steps] == [
        [length + number for length in lens] for number in range(NUM)
    ]


def test_other_batches_are_refused(seed) -> None:
    branches = Branches("fake", 4, 2, seed)
    context, batch = branches.ours.context, branches.batch
    backend = MultiStepDraftBackend(context, branches.make, NUM - 1)
    with pytest.raises(InvalidInput, match=r"out_cache_loc: expected .* from 1 to 2, got 18"):
        backend.init_forward_metadata(batch)
    with pytest.raises(InvalidInput, match="DECODE"):
        backend.init_forward_metadata(replace(batch, forward_mode=ForwardMode.EXTEND))
    with pytest.raises(InvalidInput, match="was not prepared"):
        backend.serving(batch)
    with pytest.raises(InvalidInput, match="num_steps"):
        MultiStepDraftBackend(context, branches.make, 0)
    other = branches.reference.context
    with pytest.raises(InvalidInput, match="another context"):
        MultiStepDraftBackend(context, lambda _: branches.make(other), NUM)


def test_backends_without_graphs_say_so(seed) -> None:
    branches = Branches("torch_native", 4, 1, seed)
    backend = MultiStepDraftBackend(branches.ours.context, FakeBackend, NUM)
    with pytest.raises(GraphUnsupported):
        backend.init_cuda_graph_state(4, 4 * NUM)
