"""Prompts split over ranks: every rank's tokens have the reference's answer, its pool all keys."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnmux.core import (
    InvalidInput,
    RankGroup,
    RanksDiffer,
    UpProjection,
    torch_dtype,
)
from attnmux.core.batch import ForwardMode
from attnmux.cpu.native import NativeBackend
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.distributed import (
    PrefillParallelBackend,
    prefill_parallel,
    split_context,
    split_parts,
    zigzag_step,
)
from attnmux.emulators.ranks import run_ranks
from attnmux.testing import Case, decode, extend, fake_platform, make_setup, prepare_step
from attnmux.testing.comparison import LSE_TOLERANCE, Tolerance, compare, output_tolerance
from attnmux.testing.placement import buffers, put
from attnmux.testing.prepared import kv_rows
from attnmux.testing.reference import attention

SMALL = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
LATENT = {
    **{"kind": "mla", "num_q_heads": 3, "num_kv_heads": 1, "head_dim": 12, "v_head_dim": 4},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 8},
}
BACKENDS = {"torch_native": TorchNativeBackend, "native": NativeBackend}


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

    def __init__(self, group, case, seed, backends=("torch_native",), lanes=2, **options) -> None:
        self.group, self.case = group, case
        setup = self.setup = make_setup(case, fake_platform(), "cpu", seed=seed)
        self.whole = prepare_step(setup, case.steps[0], host_lens=case.host_lens)
        made = BACKENDS[backends[group.rank % len(backends)]]
        self.backend = PrefillParallelBackend(
            inner=made(setup.context),
            parts=[made(split_context(setup.context)) for _ in range(lanes)],
            group=group,
            **options,
        )
        self.step = zigzag_step(self.whole.batch, rank=group.rank, size=group.size)
        rows = case.num_q_heads * (case.head_dim - (case.qk_rope_head_dim or 0) + case.v_head_dim)
        rank = case.kv_lora_rank or 1
        weight = setup.random(rows, rank) / rank**0.5
        self.projection = UpProjection(
            weight=weight, num_heads=case.num_q_heads, v_head_dim=case.v_head_dim
        )
        shape = self.whole.batch.num_tokens, case.num_q_heads, case.head_dim
        self.latent_q = [setup.random(*shape) for _ in self.whole.inputs]
        self.before = self.pool_bytes()

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
            weight = self.projection.weight.double()
            exact = replace(self.projection, weight=weight)
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
def test_every_rank_has_the_answer_and_all_keys(tmp_path: Path, size: int) -> None:
    draw = random.Random(secrets.randbits(64))
    eight_bits = {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 0.25)}
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
        eight_bits,
        {**eight_bits, "dtype": "bfloat16", "kv_dtype": "fp8_e5m2"},
        LATENT,
        {**LATENT, "logit_cap": 4.0},
        {**LATENT, "dtype": "bfloat16"},
        {**LATENT, **eight_bits},
        {"windows": (None, 7, 40)},
        {"attention_chunk": 24, "sinks": True},
    )
    run_ranks(check_worlds, size, tmp_path, worlds)
