"""Prompts split over ranks: every rank's tokens have the reference's answer, its pool all keys."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from attnmux.core import (
    ForwardMode,
    GraphUnsupported,
    InvalidInput,
    MHATokenToKVPool,
    UpProjection,
    torch_dtype,
)
from attnmux.core.plugin import KernelLibrary
from attnmux.cpu.native import NativeBackend
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.distributed import (
    PrefillParallelBackend,
    RankFailed,
    RankGroup,
    RanksDiffer,
    split_context,
    zigzag_step,
)
from attnmux.distributed.kv_rows import KVRows
from attnmux.distributed.split_parts import ChunkRows
from attnmux.emulators.ranks import end_ranks, run_ranks
from attnmux.parts import part_attention
from attnmux.testing import Case, decode, extend, fake_platform, make_setup, prepare_step
from attnmux.testing.reference import attention
from attnmux.testing.run.comparison import (
    LSE_TOLERANCE,
    Disagreement,
    Tolerance,
    compare,
    output_tolerance,
)
from attnmux.testing.setup.placement import buffers, put
from attnmux.testing.setup.prepared import kv_rows

SMALL = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
LATENT = {
    **{"kind": "mla", "num_q_heads": 3, "num_kv_heads": 1, "head_dim": 12, "v_head_dim": 4},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 8},
}


EIGHT_BITS = {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 0.25)}


class Telling(TorchNativeBackend):
    """Meets the other ranks in its first attention call."""

    meet: Callable[[], object] | None = None

    def forward_extend(self, call, batch):
        if Telling.meet is not None:
            Telling.meet()
            Telling.meet = None
        return super().forward_extend(call, batch)


def fa3(context):
    from attnmux.nvidia.fa3.backend import FA3Backend  # noqa: PLC0415  # for few tests
    from attnmux.nvidia.fa3.layers import FA3Kernels  # noqa: PLC0415  # as above

    kernels = KernelLibrary.imported(FA3Kernels, "attnmux.emulators.nvidia.sgl_flash_attn")
    return FA3Backend(context, {"num_splits": 0}, kernels)


def flashinfer(context):
    from attnmux.nvidia.flashinfer.backend import FlashInferBackend  # noqa: PLC0415  # as above
    from attnmux.nvidia.flashinfer.planning import FlashInferKernels  # noqa: PLC0415  # as above

    kernels = KernelLibrary.imported(FlashInferKernels, "attnmux.emulators.nvidia.flashinfer")
    return FlashInferBackend(context, {}, kernels)


def triton(context):
    from attnmux.triton.attention.backend import TritonBackend  # noqa: PLC0415  # as above

    return TritonBackend(context, {}, compute_units=4)


BACKENDS = {
    **{"torch_native": TorchNativeBackend, "native": NativeBackend, "telling": Telling},
    **{"fa3": fa3, "flashinfer": flashinfer, "triton": triton},
}


def case_of(step, **changes) -> Case:
    given = {"dtype": "float32", "max_context_len": max(1, *step.lens), **SMALL, **changes}
    return Case(name="split", steps=(step,), **given)


def drawn(draw: random.Random, **changes) -> Case:
    """A case with a few requests of 1 to 300 new tokens, some after a prefix."""
    sizes = [draw.choice((draw.randint(1, 9), draw.randint(1, 300))) for _ in range(3)]
    count = draw.randint(1, 3)
    prefixes = [draw.choice((0, draw.randint(1, 60))) for _ in range(count)]
    step = extend(*zip(prefixes, sizes[:count], strict=True))
    return case_of(step, page_size=draw.choice((1, 16)), host_lens=draw.random() < 0.5, **changes)


class World:
    """A step on one rank, with the reference's answer to the whole of it."""

    def __init__(
        self, group, case, seed, *, backends=("torch_native",), lanes=2, debug=False, **options
    ) -> None:
        self.case = case
        setup = make_setup(case, fake_platform(), "cpu", seed=seed)
        setup = self.setup = replace(setup, context=replace(setup.context, debug=debug))
        self.whole = prepare_step(setup, case.steps[0], host_lens=case.host_lens)
        if group.rank:
            self._move_pages()
        made = BACKENDS[backends[group.rank % len(backends)]]
        self.backend = PrefillParallelBackend(
            inner=made(setup.context),
            parts=[made(split_context(setup.context)) for _ in range(lanes)],
            group=group,
            **options,
        )
        if case.steps[0].mode is not ForwardMode.DECODE:
            self.step = zigzag_step(self.whole.batch, rank=group.rank, size=group.size)
        rows = case.num_q_heads * (case.head_dim - (case.qk_rope_head_dim or 0) + case.v_head_dim)
        rank = case.kv_lora_rank or 1
        self.weight = weight = setup.random(rows, rank) / rank**0.5
        self.projection = UpProjection.of(
            weight, num_heads=case.num_q_heads, v_head_dim=case.v_head_dim
        )
        shape = self.whole.batch.num_tokens, case.num_q_heads, case.head_dim
        self.latent_q = [setup.random(*shape) for _ in self.whole.inputs]
        self.before = self.pool_bytes()

    def _move_pages(self) -> None:
        """To the other end of the pool: each rank has slots of its own."""
        context, page = self.setup.context, self.case.page_size
        pages = context.token_to_kv_pool.num_slots // page
        order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(pages - 1, 0, -1)])
        slots = (order.unsqueeze(1) * page + torch.arange(page)).flatten()
        for layer in context.layers:
            for buffer in buffers(self.setup, layer.layer_id):
                rows = buffer.view(torch.uint8)
                rows.copy_(rows[slots])
        table, batch = context.req_to_token_pool.req_to_token, self.whole.batch
        table.copy_(slots[table.long()])
        batch = replace(batch, out_cache_loc=slots[batch.out_cache_loc])
        self.whole = replace(self.whole, batch=batch)

    def pool_bytes(self) -> list[torch.Tensor]:
        """The pool without the reserved page."""
        page = self.case.page_size
        return [
            each[page:].clone().view(torch.uint8)
            for layer in self.setup.context.layers
            for each in buffers(self.setup, layer.layer_id)
        ]

    def run(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """(out, LSE) of each layer; MLA by `forward_latent`, without LSE."""
        self.backend.init_forward_metadata(self.step)
        return [self.call(number) for number in range(len(self.whole.inputs))]

    def call(self, number, **more) -> tuple[torch.Tensor, torch.Tensor | None]:
        given, step, rows = self.whole.inputs[number], self.step, self.step.rows
        if self.case.latent:
            q, k, k_rope = self.latent_q[number][rows], given.k[rows], given.k_rope[rows]
            return self.backend.forward_latent(
                q, k, k_rope, given.layer, step, self.projection
            ), None
        q, lse = given.q[rows], torch.full((len(rows), self.case.num_q_heads), torch.nan)
        out = self.backend.forward(
            q, given.k[rows], given.v[rows], given.layer, step, lse=lse, **more
        )
        return out, lse

    def expected(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(out, LSE) of the whole step in float64, from a pool of its own, which is left full."""
        setup, batch = self.setup, self.whole.batch
        answers = []
        for given, latent_q in zip(self.whole.inputs, self.latent_q, strict=True):
            slots, rows = kv_rows(setup, given, batch)
            for buffer, new in zip(buffers(setup, given.layer.layer_id), rows, strict=True):
                put(buffer, slots, new)
            q, q_rope = given.q, given.q_rope
            exact = UpProjection.of(
                self.weight.double(),
                num_heads=self.projection.num_heads,
                v_head_dim=self.projection.v_head_dim,
            )
            if self.case.latent:
                q, q_rope = exact.absorbed_queries(latent_q.double())
            table = setup.context.req_to_token_pool.req_to_token
            pool = setup.context.token_to_kv_pool
            out, lse = attention(q, given.layer, batch, table, pool, q_rope=q_rope)
            answers.append((exact.outputs(out) if self.case.latent else out, lse))
        return answers

    def check(self) -> None:
        """Raises Disagreement where an answer or the pool differs from the reference's."""
        found, ours = self.run(), self.pool_bytes()
        for buffer, before in zip(self._views(), self.before, strict=True):
            buffer.view(torch.uint8).copy_(before)
        dtype = torch_dtype(self.case.dtype)
        kv_dtype = torch_dtype(self.case.kv_dtype or self.case.dtype)
        tolerance = output_tolerance(dtype, kv_dtype, fp8_products=False)
        if self.case.latent:  # expanded K and V are rounded too
            tolerance = Tolerance(atol=3 * tolerance.atol, rtol=3 * tolerance.rtol)
        for (out, lse), (exact, exact_lse) in zip(found, self.expected(), strict=True):
            compare("out", out, exact[self.step.rows], tolerance)
            if lse is not None:
                compare("LSE", lse, exact_lse[self.step.rows], LSE_TOLERANCE[dtype])
        for mine, theirs in zip(ours, self.pool_bytes(), strict=True):
            assert torch.equal(mine, theirs), "the pool holds other K and V"

    def _views(self) -> list[torch.Tensor]:
        page = self.case.page_size
        return [
            each[page:]
            for layer in self.setup.context.layers
            for each in buffers(self.setup, layer.layer_id)
        ]


def check_worlds(group: RankGroup, worlds) -> None:
    for case, seed, options in worlds:
        try:
            World(group, case, seed, **options).check()
        except Exception as error:
            raise AssertionError(f"{case}, seed {seed}, {options}") from error


def worlds_of(draw: random.Random, *changes) -> list[tuple[Case, int, dict[str, object]]]:
    """One world for each change, on options that are drawn."""
    return [
        (
            drawn(draw, **change),
            draw.getrandbits(31),
            {
                "chunks_at_once": draw.choice((1, 2, 4)),
                "chunk_bytes": draw.choice((1 << 29, 1 << 29, 37 * 4 * 64)),
                "lanes": draw.choice((1, 3)),
                "overlap": draw.random() < 0.7,
                "backends": draw.choice((["torch_native"], ["native"], ["torch_native", "native"])),
            },
        )
        for change in changes
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.turns(3, suite="ranks")
def test_every_rank_has_the_answer_and_all_keys(tmp_path: Path, size: int) -> None:
    draw = random.Random(secrets.randbits(64))
    worlds = worlds_of(
        draw,
        *[{}] * 4,
        {"dtype": "bfloat16"},
        {"dtype": "float16", "v_head_dim": 32},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1, "logit_cap": 3.0},
        {"sinks": True},
        {"sinks": True, "dtype": "bfloat16"},
        {"scaling": 0.4, "strided_kv": True},
        EIGHT_BITS,
        {**EIGHT_BITS, "dtype": "bfloat16", "kv_dtype": "fp8_e5m2"},
        LATENT,
        {**LATENT, "logit_cap": 4.0},
        {**LATENT, "dtype": "bfloat16"},
        {**LATENT, **EIGHT_BITS},
        {"windows": (None, 7, 40)},
        {"attention_chunk": 24, "sinks": True},
    )
    run_ranks(check_worlds, size, tmp_path, worlds)


STEPS = {
    "fewer tokens than chunks": extend((0, 1), (5, 2), (0, 3)),
    "nothing new": extend((5, 0), (0, 7), (0, 0)),
    "mixed": extend((40, 1), (3, 30), mode=ForwardMode.MIXED),
    "padding and rows of no request": extend((3, 9), (8, 40), padding=2, trailing=3),
    "one token": extend((0, 1)),
}


OTHERS = (LATENT, {"windows": (None, 3)}, {"host_lens": True, "sinks": True})


def check_steps(group: RankGroup) -> None:
    for (name, step), other in zip(STEPS.items(), cycle(OTHERS), strict=False):
        for changes in ({}, other):
            world = World(group, case_of(step, **changes), 7, chunks_at_once=1)
            try:
                check_padded(world) if step.padding else world.check()
            except Exception as error:
                raise AssertionError(f"{name}, {changes}") from error


def check_padded(world: World) -> None:
    """Padding requests see left-overs, so that only real tokens are compared."""
    found = world.run()
    rows = world.step.rows
    real = rows < world.whole.num_real_tokens
    for (out, _), (exact, _) in zip(found, world.expected(), strict=True):
        assert bool(out.isfinite().all())
        expected = exact[rows]
        torch.testing.assert_close(out[real].double(), expected[real], rtol=1e-4, atol=1e-4)


def check_others(group: RankGroup) -> None:
    check_steps(group)
    check_own_keys(group)
    check_absorbed(group)
    check_nan(group)
    check_decode(group)
    check_debug(group)
    check_refusals(group)


def check_own_keys(group: RankGroup) -> None:
    """Without saving, the step's new tokens are all keys, and the pool stays as it was."""
    world = World(group, case_of(extend((6, 30), (0, 5))), 1)
    world.backend.init_forward_metadata(world.step)
    out, _ = world.call(0, save_kv_cache=False)
    given, batch = world.whole.inputs[0], world.whole.batch
    context = world.setup.context
    exact, _ = attention(
        given.q,
        given.layer,
        batch,
        context.req_to_token_pool.req_to_token,
        context.token_to_kv_pool,
        k=given.k,
        v=given.v,
    )
    compare("out", out, exact[world.step.rows], Tolerance(atol=2e-5, rtol=1e-4))
    assert all(map(torch.equal, world.before, world.pool_bytes()))


def check_absorbed(group: RankGroup) -> None:
    """MLA that is called absorbed reads the keys of all ranks in the pool."""
    world = World(group, case_of(extend((6, 31), (0, 5)), **LATENT), 8)
    context, step, rows = world.setup.context, world.step, world.step.rows
    world.backend.init_forward_metadata(step)
    found = [
        world.backend.forward(
            *(each.q[rows], each.k[rows], None, each.layer, step),
            q_rope=each.q_rope[rows],
            k_rope=each.k_rope[rows],
        )
        for each in world.whole.inputs
    ]
    world.expected()
    table, pool = context.req_to_token_pool.req_to_token, context.token_to_kv_pool
    for out, each in zip(found, world.whole.inputs, strict=True):
        exact, _ = attention(each.q, each.layer, world.whole.batch, table, pool, q_rope=each.q_rope)
        compare("out", out, exact[rows], Tolerance(atol=2e-5, rtol=1e-4))


def check_nan(group: RankGroup) -> None:
    """NaN of a request stays in it."""
    world = World(group, case_of(extend((6, 31), (4, 25)), sinks=True), 9)
    world.whole.with_nan(0)
    rows = world.step.rows
    others = rows >= world.whole.rows_of(1).start
    for (out, _), (exact, _) in zip(world.run(), world.expected(), strict=True):
        assert bool(out[~others].isnan().all())
        compare("out", out[others], exact[rows[others]], Tolerance(atol=2e-5, rtol=1e-4))


def check_decode(group: RankGroup) -> None:
    """Steps of other kinds need no other rank."""
    world = World(group, case_of(decode(5, 40)), 3)
    batch = world.whole.batch
    assert world.backend.select(ForwardMode.DECODE) is world.backend.inner
    world.backend.init_forward_metadata(batch)
    for given, (exact, _) in zip(world.whole.inputs, world.expected(), strict=True):
        out = world.backend.forward(given.q, given.k, given.v, given.layer, batch)
        compare("out", out, exact, Tolerance(atol=2e-5, rtol=1e-4))


def check_debug(group: RankGroup) -> None:
    world = World(group, case_of(extend((6, 30), (0, 5))), 4, debug=True)
    world.check()
    other = World(group, case_of(extend((6, 30 + group.rank), (0, 5))), 4, debug=True)
    with pytest.raises(RanksDiffer, match="lengths of chunks: expected the same on every rank"):
        other.backend.init_forward_metadata(other.step)


def check_refusals(group: RankGroup) -> None:
    world = World(group, case_of(extend((6, 30)), windows=(None, 4)), 5)
    backend, step, given = world.backend, world.step, world.whole.inputs[0]
    backend.init_forward_metadata(step)
    with pytest.raises(InvalidInput, match="in a split step the other ranks wait for them"):
        backend.forward(given.q[step.rows], None, None, given.layer, step)
    with pytest.raises(InvalidInput, match="expected True: layer 3 reads K and V of other ranks"):
        world.call(1, save_kv_cache=False)
    other = zigzag_step(world.whole.batch, rank=group.rank, size=group.size)
    with pytest.raises(InvalidInput, match="the step that init_forward_metadata prepared last"):
        backend.forward(given.q[step.rows], None, None, given.layer, other)
    other = zigzag_step(world.whole.batch, rank=group.rank, size=group.size + 1)
    with pytest.raises(InvalidInput, match="as in the group, got the part of rank"):
        backend.init_forward_metadata(other)
    with pytest.raises(GraphUnsupported, match="cannot be captured"):
        backend.init_forward_metadata_out_graph(step, in_capture=True)
    check_construction(group)


def check_construction(group: RankGroup) -> None:
    context = make_setup(case_of(extend((0, 4)), windows=(None, 4)), fake_platform(), "cpu").context
    inner, part = TorchNativeBackend(context), TorchNativeBackend(split_context(context))
    other = make_setup(case_of(extend((0, 4))), fake_platform(), "cpu").context
    for parts, options, match in (
        ([], {}, "backends of a part context, got none"),
        ([inner], {}, "backends of a part context"),
        ([part, TorchNativeBackend(split_context(other))], {}, "backends of a part context"),
        ([part], {"chunk_bytes": 0}, "chunk_bytes"),
        ([part], {"chunks_at_once": 0}, "chunks_at_once"),
    ):
        with pytest.raises(InvalidInput, match=match):
            PrefillParallelBackend(inner=inner, parts=parts, group=group, **options)
    packed = MHATokenToKVPool(
        **{"size": 16, "page_size": 1, "dtype": torch_dtype("fp4"), "layer_ids": [0]},
        **{"num_kv_heads": 2, "head_dim": 16, "device": "cpu"},
    )
    four_bits = TorchNativeBackend(replace(context, token_to_kv_pool=packed))
    with pytest.raises(InvalidInput, match="no 4-bit floats for prompts that ranks split"):
        PrefillParallelBackend(inner=four_bits, parts=[part], group=group)
    world = World(group, case_of(extend((0, 4)), windows=(None, 4)), 1)
    narrow = replace(world.setup.context, max_batch_size=1)
    backend = PrefillParallelBackend(
        inner=TorchNativeBackend(narrow),
        parts=[TorchNativeBackend(split_context(narrow))],
        group=group,
    )
    backend.init_forward_metadata(world.step)
    world.backend = backend
    with pytest.raises(InvalidInput, match="at most 1 pieces, the context's max_batch_size"):
        world.call(1)


@pytest.mark.parametrize("size", [2, 3])
def test_other_steps_and_refusals(tmp_path: Path, size: int) -> None:
    run_ranks(check_others, size, tmp_path)


def check_adapters(group: RankGroup) -> None:
    from attnmux.emulators.triton_interpreter import interpreted  # noqa: PLC0415  # as above

    wide = {"dtype": "bfloat16", "head_dim": 128, "v_head_dim": 128, "page_size": 16}
    wide["host_lens"] = True
    for name in ("fa3", "flashinfer"):
        case = case_of(extend((20, 61), (0, 130)), **wide)
        World(group, case, 1, backends=[name], chunks_at_once=1).check()
    with interpreted():
        case = case_of(extend((4, 21), (0, 9)), dtype="float32")
        World(group, case, 1, backends=["triton"]).check()


def test_adapters_of_kernel_libraries(tmp_path: Path) -> None:
    """Emulated: their arguments fit parts of a step."""
    run_ranks(check_adapters, 2, tmp_path)


def attend_before_others_begin(group: RankGroup, overlap: bool) -> str:
    """Rank 1 begins its layer only when rank 0 attends."""
    if group.rank:
        group.exchange("begins now")
    else:
        Telling.meet = lambda: group.exchange("attends")
    world = World(group, case_of(extend((0, 40))), 6, backends=["telling"], overlap=overlap)
    try:
        world.check()
    except RankFailed:
        return "failed"
    return "overlapped"


def test_attention_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    found = run_ranks(attend_before_others_begin, 2, tmp_path, True, seconds=10.0)
    assert found == ["overlapped"] * 2


def test_without_overlap_it_does(tmp_path: Path) -> None:
    ends = end_ranks(attend_before_others_begin, 2, tmp_path, False, seconds=2.0)
    assert ends[0].value == "failed", ends[0].error


def without_a_chunk(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    backend._parts.parts = tuple(
        part
        for part in backend._parts.parts
        if not isinstance(part.keys, ChunkRows) or part.keys.chunks != 1
    )


def with_a_part_twice(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    backend._parts.parts += backend._parts.parts[-1:]


def without_the_prefix(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    backend._parts.parts = tuple(
        part for part in backend._parts.parts if not isinstance(part.keys, torch.Tensor)
    )


def without_causality(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    backend._parts.layers = {
        number: (replace(own, is_causal=False), cross)
        for number, (own, cross) in backend._parts.layers.items()
    }


def with_equal_weights(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    def merge(out, lse, part, part_lse) -> None:
        out.add_(part).div_(2)
        torch.logaddexp(lse, part_lse, out=lse)

    patch.setattr(part_attention, "merge_into", merge)


def without_sinks(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(part_attention, "add_sinks", lambda out, lse, sinks: None)


def without_writing(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVRows, "write", lambda self, rows, slots: None)


def without_scales(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    def values(self, stored, dtype):
        return tuple(part.to(dtype) for part in stored)

    patch.setattr(KVRows, "values", values)


def without_rounding(backend: PrefillParallelBackend, patch: pytest.MonkeyPatch) -> None:
    """The own chunks are read as they came, not as the pool stores them."""
    given = []
    of, split, values = KVRows.of, KVRows.split, KVRows.values

    def noting_of(self, k, second):
        rows = of(self, k, second)
        given[:] = [rows, (k, second)]
        return rows

    def unrounded_split(self, rows):
        return given[1] if given and rows is given[0] else split(self, rows)

    def unrounded_values(self, stored, dtype):
        return stored if given and stored is given[1] else values(self, stored, dtype)

    patch.setattr(KVRows, "of", noting_of)
    patch.setattr(KVRows, "split", unrounded_split)
    patch.setattr(KVRows, "values", unrounded_values)


MUTANTS = {
    each.__name__: each
    for each in (
        without_a_chunk,
        with_a_part_twice,
        without_the_prefix,
        without_causality,
        with_equal_weights,
        without_sinks,
        without_writing,
        without_scales,
        without_rounding,
    )
}


class Broken(World):
    """A world whose backend has a fault once its step is prepared."""

    def __init__(self, group, case, seed, fault, patch) -> None:
        super().__init__(group, case, seed, chunks_at_once=1)
        prepare = self.backend.init_forward_metadata

        def prepare_wrongly(step) -> None:
            prepare(step)
            fault(self.backend, patch)

        self.backend.init_forward_metadata = prepare_wrongly


def find_faults(group: RankGroup, seed: int) -> list[str]:
    """The faults that this rank notices."""
    found = []
    case = case_of(extend((9, 31), (4, 12)), sinks=True, **EIGHT_BITS)
    for name, fault in {"none": lambda backend, patch: None, **MUTANTS}.items():
        with pytest.MonkeyPatch.context() as patch:
            try:
                Broken(group, case, seed, fault, patch).check()
            except (Disagreement, AssertionError):
                found.append(name)
    return found


def test_faults_are_noticed(tmp_path: Path) -> None:
    found = run_ranks(find_faults, 2, tmp_path, secrets.randbits(31))
    assert {name for each in found for name in each} == set(MUTANTS)
