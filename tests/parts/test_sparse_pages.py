"""Decoding over chosen pages: bounds, choices, answers, graphs and refusals."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch

from attnmux.core import (
    ForwardBatch,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    InvalidInput,
    ModelInput,
    Request,
    solve,
)
from attnmux.core.plugin import KernelLibrary
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.emulators import triton_interpreter
from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.layers import FA3Kernels
from attnmux.parts.page_choice import bound_products
from attnmux.parts.sparse_pages import SparseAttnBackend, sparse_context
from attnmux.testing import (
    Candidate,
    Case,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    fake_card,
    fake_platform,
    graph_card,
    make_setup,
    run_case,
)
from attnmux.testing.cases.standard import in_graphs, standard_cases
from attnmux.triton.attention.factory import triton as make_triton
from attnmux.triton.functions.chosen_pages import make_kernels

FA3 = KernelLibrary.imported(FA3Kernels, "attnmux.emulators.nvidia.sgl_flash_attn")
PAGE = 4
CASES = [
    case
    for case in standard_cases((16,))
    if case.kind == "mha"
    and not case.spec_topk
    and case.page_size > 1
    and case.first_page == 1
    and max(len(step.lens) for step in case.steps) <= 64
    and not any(step.mode not in (ForwardMode.DECODE, ForwardMode.EXTEND) for step in case.steps)
]


def no_kernels(context):
    """Plain torch."""


@pytest.fixture(params=[no_kernels, make_kernels], ids=["plain", "kernels"])
def kernels(request):
    with triton_interpreter.interpreted():
        yield request.param


def sparse(make, context, budget, kernels=no_kernels):
    return SparseAttnBackend(
        context,
        whole=make(context),
        chosen=make(sparse_context(context, budget)),
        kernels=kernels(context),
    )


def fa3(context):
    return FA3Backend(context, {"num_splits": 0}, FA3)


def triton(context):
    return make_triton(context, {})


@pytest.fixture
def seed(record_property) -> int:
    """Fresh at each run; the report of a failure has it."""
    drawn = random.randrange(1 << 30)
    record_property("seed", drawn)
    return drawn


class Pool:
    """An engine's pages: a schedule of steps of random K and V through a backend."""

    def __init__(
        self, seed, budget=16, make=TorchNativeBackend, dtype="float32", kernels=no_kernels
    ):
        case = Case(
            name="sparse",
            steps=(decode(60, 60, 60),),
            page_size=PAGE,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=16,
            v_head_dim=16,
            dtype=dtype,
        )
        setup = make_setup(case, fake_platform(), "cpu", seed=seed)
        self.context = setup.context
        self.random = torch.Generator().manual_seed(seed)
        self.backend = sparse(make, self.context, budget, kernels)
        self.layer = self.context.layers[0]
        self.table = self.context.req_to_token_pool.req_to_token
        pages = self.context.token_to_kv_pool.num_slots // PAGE
        self.free = (torch.randperm(pages - 1, generator=self.random) + 1).tolist()
        self.pages: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}

    def draw(self, *shape):
        dtype = self.context.token_to_kv_pool.dtype
        return torch.randn(*shape, generator=self.random).to(dtype)

    def step(self, new: dict[int, int], mode=ForwardMode.DECODE):
        """Append tokens to the requests of these rows; the attention of their queries."""
        slots, positions = [], []
        before = [self.lens.get(row, 0) for row in new]
        for row, count in new.items():
            pages = self.pages.setdefault(row, [])
            for place in range(self.lens.get(row, 0), self.lens.get(row, 0) + count):
                if place // PAGE == len(pages):
                    pages.append(self.free.pop())
                slots.append(pages[place // PAGE] * PAGE + place % PAGE)
                positions.append(place)
                self.table[row, place] = slots[-1]
            self.lens[row] = self.lens.get(row, 0) + count
        lens = torch.tensor([self.lens[row] for row in new], dtype=torch.int32)
        extra = {}
        if mode.is_extend():
            added = torch.tensor(list(new.values()), dtype=torch.int32)
            cached = torch.tensor(before, dtype=torch.int32)
            extra = {
                **{"extend_seq_lens": added, "extend_seq_lens_cpu": added},
                **{"extend_prefix_lens": cached, "extend_prefix_lens_cpu": cached},
                "extend_num_tokens": len(slots),
            }
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(new),
            req_pool_indices=torch.tensor(list(new)),
            seq_lens=lens,
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=torch.tensor(slots),
            positions=torch.tensor(positions),
            **extra,
        )
        layer, count = self.layer, len(slots)
        q = self.draw(count, layer.tp_q_head_num, layer.qk_head_dim)
        k, v = (self.draw(count, layer.tp_k_head_num, layer.qk_head_dim) for _ in range(2))
        self.backend.init_forward_metadata(batch)
        return q, self.backend.forward(q, k, v, layer, batch), batch

    def release(self, row, keep=0):
        """Give back a request's pages after the first `keep`."""
        pages = self.pages[row]
        self.free += pages[keep:]
        del pages[keep:]
        self.lens[row] = keep * PAGE

    def keys(self, row):
        slots = self.table[row, : self.lens[row]].long()
        layer_id = self.layer.layer_id
        pool = self.context.token_to_kv_pool
        return [buffer[slots].double() for buffer in pool.get_kv_buffer(layer_id)]


def scheduled(seed, steps=40, **settings) -> Pool:
    """Prompts in chunks, decoding, retraction, pages shared by two requests and pages reused."""
    pool, draw = Pool(seed, **settings), random.Random(seed)
    for _ in range(steps):
        row = draw.choice((1, 2, 3))
        room = 56 - pool.lens.get(row, 0)
        if room < 16 or draw.random() < 0.15:
            if row in pool.pages:
                pool.release(row, keep=0)
            continue
        if draw.random() < 0.5 or not any(pool.lens.values()):
            pool.step({row: draw.randint(1, 15)}, ForwardMode.EXTEND)
        else:
            some = [each for each in pool.lens if 0 < pool.lens[each] < 58]
            pool.step(dict.fromkeys(some, 1)) if some else None
    return pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounds_are_those_of_the_pool_after_any_schedule(seed, dtype, kernels) -> None:
    pool = scheduled(seed, dtype=dtype, kernels=kernels)
    pool.step({1: 9} if pool.lens.get(1, 0) < 40 else {1: 1}, ForwardMode.EXTEND)
    lower, upper = pool.backend.bounds.of(pool.layer.layer_id)
    for row, pages in pool.pages.items():
        for place, page in enumerate(pages):
            keys = pool.keys(row)[0][place * PAGE : (place + 1) * PAGE]
            assert torch.equal(lower[page].double(), keys.amin(0))
            assert torch.equal(upper[page].double(), keys.amax(0))


def test_a_shared_prefix_keeps_its_bounds(seed, kernels) -> None:
    pool = Pool(seed, kernels=kernels)
    pool.step({1: 22}, ForwardMode.EXTEND)
    pool.pages[2] = pool.pages[1][:3]
    pool.lens[2] = 3 * PAGE
    pool.table[2, : 3 * PAGE] = pool.table[1, : 3 * PAGE]
    pool.step({2: 9}, ForwardMode.EXTEND)
    lower, _ = pool.backend.bounds.of(pool.layer.layer_id)
    for place, page in enumerate(pool.pages[2]):
        keys = pool.keys(2)[0][place * PAGE : (place + 1) * PAGE]
        assert torch.equal(lower[page].double(), keys.amin(0))


def test_scores_are_upper_bounds(seed) -> None:
    pool = scheduled(seed)
    row = max(pool.lens, key=pool.lens.get)
    if not pool.lens[row]:
        pool.step({row: 20}, ForwardMode.EXTEND)
    q = pool.draw(1, 4, 16)
    pages = torch.tensor([pool.pages[row]])
    lower, upper = pool.backend.bounds.of(pool.layer.layer_id)
    scores = bound_products(q, lower[pages], upper[pages])[0].double()
    products = torch.einsum("hgc,nhc->hgn", q.double().view(2, 2, 16), pool.keys(row)[0]).amax(1)
    for place in range(pages.shape[1]):
        most = products[:, place * PAGE : (place + 1) * PAGE].amax(-1)
        assert bool((scores[:, place] >= most - 1e-4).all())
    assert bool((scores.amax(-1) < 2 * 16 * 16).all())


def stated(pool, q, row, budget):
    """Attention of one query over the pages that Quest's paper names, in float64."""
    keys, values = pool.keys(row)
    length, heads = len(keys), keys.shape[1]
    count = -(-length // PAGE)
    out = []
    for head, query in enumerate(q.double()):
        kv_head = head // (len(q) // heads)
        group = range(kv_head * (len(q) // heads), (kv_head + 1) * (len(q) // heads))
        of_head = keys[:, kv_head]
        bound = []
        for page in range(count):
            some = of_head[page * PAGE : (page + 1) * PAGE]
            low, high = some.amin(0), some.amax(0)
            of_group = [
                torch.maximum(q[g].double() * low, q[g].double() * high).sum() for g in group
            ]
            always = page < 1 or page >= count - 2
            bound.append(float("inf") if always else float(max(of_group)))
        best = sorted(range(count), key=lambda page: -bound[page])[: budget // PAGE]
        seen = [at for page in sorted(best) for at in range(page * PAGE, (page + 1) * PAGE)]
        seen = torch.tensor([at for at in seen if at < length])
        weights = torch.softmax(of_head[seen] @ query * pool.layer.scaling, 0)
        out.append(weights @ values[seen, kv_head])
    return torch.stack(out)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("make", [TorchNativeBackend, fa3, triton])
def test_attention_is_that_over_the_chosen_pages(seed, make, kernels) -> None:
    name = getattr(make, "__name__", "")
    dtype = "bfloat16" if name == "fa3" else "float32"
    pool = Pool(seed, make=make, dtype=dtype, kernels=kernels)
    pool.step({1: 47, 2: 9, 3: 30}, ForwardMode.EXTEND)
    for _ in range(3):
        q, out, batch = pool.step({3: 1, 1: 1, 2: 1})
        for index, row in enumerate(batch.req_pool_indices.tolist()):
            wanted = stated(pool, q[index], row, 16)
            close = 2e-2 if dtype == "bfloat16" else 1e-4
            torch.testing.assert_close(out[index].double(), wanted, atol=close, rtol=close)


def test_a_replayed_graph_chooses_anew(seed, kernels) -> None:
    pool = Pool(seed, make=GraphFakeBackend, kernels=kernels)
    pool.step({1: 47, 2: 9, 3: 30}, ForwardMode.EXTEND)
    backend, layer, graphs = pool.backend, pool.layer, RecordingGraphs()
    runner = GraphRunner(
        backend,
        lambda batch, given: backend.forward(
            *(each.reshape(len(each), -1, 16) for each in given["qkv"].split((4, 2, 2), 1)),
            layer,
            batch,
        ),
        GraphConfig(batch_sizes=(2, 4), host_lens=True),
        devices=graphs,
        inputs={"qkv": ModelInput(dtype=torch.float32, trailing=(8, 16))},
    )
    runner.capture()
    for rows in ({1: 1, 3: 1}, {2: 1, 1: 1, 3: 1}, {3: 1, 2: 1}):
        q, eager, batch = pool.step(rows)
        k, v = (
            buffer[batch.out_cache_loc]
            for buffer in pool.context.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        )
        replayed = runner.replay(batch, {"qkv": torch.cat([q, k, v], 1)})
        torch.testing.assert_close(replayed, eager, atol=1e-5, rtol=1e-5)
        for index, row in enumerate(rows):
            wanted = stated(pool, q[index], row, 16)
            torch.testing.assert_close(replayed[index].double(), wanted, atol=1e-4, rtol=1e-4)


def test_the_choice_matters(seed) -> None:
    pool = Pool(seed)
    pool.step({1: 50}, ForwardMode.EXTEND)
    q, out, _ = pool.step({1: 1})
    whole = stated(pool, q[0], 1, 1000)
    assert not torch.allclose(out[0].double(), whole, atol=1e-3)


@pytest.mark.parametrize("base", [TorchNativeBackend, GraphFakeBackend])
@pytest.mark.turns(2)
def test_a_budget_of_all_pages_has_the_answers_of_dense_attention(
    base, kernels, seed, full
) -> None:
    def make(context, options=None):
        page_size = context.token_to_kv_pool.page_size
        pages = max(4, -(-context.max_context_len // page_size))
        return sparse(base, context, pages * page_size, kernels)

    card = graph_card() if base is GraphFakeBackend else fake_card()
    candidate = Candidate(card=card, platform=fake_platform(), factory=make)
    cases = [case for case in CASES if served(case)]
    assert len(cases) > 40
    if base is GraphFakeBackend:
        cases = list(in_graphs(tuple(cases)))
    if not full:  # long prompts and the interpreter are slow
        cases = [case for case in cases if not re.match("extend.*-long", case.name)]
        num = 5 if kernels is make_kernels else 20
        cases = random.Random(seed).sample(cases, num)
    for case in cases:
        outcome = run_case(candidate, case)
        assert outcome.status == "passed", (case.name, outcome.message)


def served(case) -> bool:
    request = case.request
    excluded = ("attention_chunk", "cross_attention", "alibi", "relative_bias", "custom_mask")
    excluded += ("multi_item",)
    plain = not any(getattr(request, name) for name in excluded)
    own = request.kv_dtype in (None, request.dtype) and request.sliding_window is None
    return plain and own and not request.strided_kv and "encoder" not in request.phases


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ("sparse=quest,page_size=16", "sparse_budget"),
        ("sparse_budget=64,page_size=16", "sparse"),
        ("sparse=quest,sparse_budget=64", "page_size"),
        ("sparse=quest,sparse_budget=64,page_size=1", "page_size"),
        ("sparse=quest,sparse_budget=72,page_size=16", "sparse_budget"),
        ("sparse=quest,sparse_budget=48,page_size=16", "sparse_budget"),
        ("sparse=h2o,sparse_budget=64,page_size=16", "sparse"),
        ("sparse=quest,sparse_budget=64,page_size=16,sliding_window=8", "sparse"),
        ("sparse=quest,sparse_budget=64,page_size=16,kind=mla", "sparse"),
        ("sparse=quest,sparse_budget=64,page_size=16,spec_topk=1", "sparse"),
        ("sparse=quest,sparse_budget=64,page_size=16,dtype=bf16,kv_dtype=fp8_e4m3", "sparse"),
        ("sparse=quest,sparse_budget=64,page_size=16,kv_dtype=fp8_e4m3", "sparse"),
        ("sparse=quest,sparse_budget=64,page_size=16", "dtype"),
    ],
)
def test_requests_that_exclude_each_other_are_refused(fields, argument) -> None:
    with pytest.raises(InvalidInput) as refused:
        solve(Request.parse(fields), fake_platform(), ())
    assert refused.value.argument == argument


def test_contexts_and_steps_are_refused(seed) -> None:
    pool = Pool(seed)
    window = replace(pool.layer, sliding_window_size=4)
    with pytest.raises(InvalidInput, match="sliding_window"):
        sparse_context(replace(pool.context, layers=(window,)), 16)
    _, _, batch = pool.step({1: 4}, ForwardMode.EXTEND)
    verify = replace(batch, forward_mode=ForwardMode.TARGET_VERIFY)
    with pytest.raises(InvalidInput, match="TARGET_VERIFY"):
        pool.backend.init_forward_metadata(verify)
