"""Hold a backend to `deterministic`: a request has the same bits in every schedule.

    python tools/prove_determinism.py triton [--schedules 1000] [--seed 1]
    TRITON_INTERPRET=1 python tools/prove_determinism.py triton --platform nvidia:sm90 --tiny

One request has fixed Q, K and V: a prompt and some decoded tokens. A schedule draws everything
else: where the prompt is cut, at multiples of the key block; which other requests share each step,
how long they are and in what order; where its pages lie and how many tokens they hold; and whether
a decode step runs eagerly or from a device graph. Every output of the request is compared bit by
bit with the first schedule's, in which it is alone and its prompt is whole.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    KVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    Platform,
    ReqToTokenPool,
    Request,
    Workspace,
    torch_dtype,
)
from attnmux.testing import find_candidate
from attnmux.testing.bench.timing import Run, graphs_of, in_graph

KEY_BLOCK = 128
"""A multiple of every kernel's block of keys. Chunks of a prompt end at multiples of it."""
PAGES = (1, 16, 64)
MATES = 7
SIZES = (1, 2, 4, 8)
"""Requests of the decode steps that are captured."""

_LLAMA: dict[str, Any] = {
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}
_LATENT: dict[str, Any] = {
    **{"kind": "mla", "num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"},
}
SHAPES = {
    "32/8 heads of 128": Request(**_LLAMA),
    "32/8 heads of 128, fp8 KV": Request(**_LLAMA, kv_dtype="fp8_e4m3"),
    "28/4 heads of 128": Request(**{**_LLAMA, "num_q_heads": 28, "num_kv_heads": 4}),
    "64/8 heads of 64, window and sinks": Request(
        **{**_LLAMA, "num_q_heads": 64, "head_dim": 64}, sliding_window=127, sinks=True
    ),
    "8/4 heads of 256, cap": Request(
        **{**_LLAMA, "num_q_heads": 8, "num_kv_heads": 4, "head_dim": 256}, logit_cap=50.0
    ),
    "MLA of 16 heads": Request(**_LATENT, num_q_heads=16),
    "MLA of 128 heads": Request(**_LATENT, num_q_heads=128),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Tokens of the request, and the most of another one."""

    prompt: int = 2500
    decoded: int = 4
    mate: int = 3000

    @property
    def total(self) -> int:
        return self.prompt + self.decoded


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """Q, K and V of the request, or noise for the others: [T, heads, dim] each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    q_rope: torch.Tensor | None
    k_rope: torch.Tensor | None

    def at(self, rows: torch.Tensor) -> Tokens:
        def taken(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part[rows]

        return Tokens(
            q=self.q[rows],
            k=self.k[rows],
            v=taken(self.v),
            q_rope=taken(self.q_rope),
            k_rope=taken(self.k_rope),
        )

    def copy_(self, other: Tokens) -> None:
        for name in self.__slots__:
            if (mine := getattr(self, name)) is not None:
                mine.copy_(getattr(other, name))


def draw_tokens(request: Request, count: int, device: torch.device, seed: int) -> Tokens:
    generator = torch.Generator(device).manual_seed(seed)
    heads, kv = request.num_q_heads or 0, request.num_kv_heads or 0

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(count, *shape, device=device, generator=generator)
        return drawn.to(torch_dtype(request.dtype or ""))

    if request.latent:
        rank, rope = request.kv_lora_rank or 0, request.qk_rope_head_dim or 0
        q, q_rope, k, k_rope = (
            normal(heads, rank),
            normal(heads, rope),
            normal(1, rank),
            normal(1, rope),
        )
        return Tokens(q=q, k=k, v=None, q_rope=q_rope, k_rope=k_rope)
    dim = request.head_dim or 0
    return Tokens(
        q=normal(heads, dim), k=normal(kv, dim), v=normal(kv, dim), q_rope=None, k_rope=None
    )


def layer_of(request: Request, device: torch.device) -> LayerSpec:
    rank, rope = request.kv_lora_rank or 0, request.qk_rope_head_dim or 0
    dim, heads = request.head_dim or 0, request.num_q_heads or 0
    window = request.sliding_window
    generator = torch.Generator(device).manual_seed(0)
    return LayerSpec(
        layer_id=0,
        kind="mla" if request.latent else "mha",
        tp_q_head_num=heads,
        tp_k_head_num=request.num_kv_heads or 0,
        tp_v_head_num=request.num_kv_heads or 0,
        qk_head_dim=rank + rope if request.latent else dim,
        v_head_dim=rank if request.latent else dim,
        scaling=dim**-0.5,
        logit_cap=request.logit_cap or 0.0,
        sliding_window_size=-1 if window is None else window,
        sinks=torch.randn(heads, device=device, generator=generator) if request.sinks else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class World:
    """A backend over a pool with one page size, and its captured decode steps."""

    request: Request
    layer: LayerSpec
    pool: KVPool
    table: ReqToTokenPool
    backend: AttentionBackend
    sizes: Sizes
    mine: Tokens
    noise: Tokens
    graphs: dict[int, tuple[Tokens, ForwardBatch, torch.Tensor, Run]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, asked: Request, platform: Platform, device: torch.device, sizes: Sizes
    ) -> World:
        requests = MATES + 1
        layer, longest = layer_of(asked, device), max(sizes.total, sizes.mate) + 1
        page = asked.page_size or 1
        pool = _pool(asked, requests * -(-longest // page) * page, device)
        table = ReqToTokenPool(requests, longest, device)
        table.alloc(requests)
        context = BackendContext(
            request=asked,
            platform=platform,
            device=device,
            layers=(layer,),
            req_to_token_pool=table,
            token_to_kv_pool=pool,
            workspace=Workspace(device),
            max_batch_size=requests,
            max_context_len=longest,
        )
        found = cls(
            request=asked,
            layer=layer,
            pool=pool,
            table=table,
            backend=find_candidate(name, platforms=(platform,)).build(context),
            sizes=sizes,
            mine=draw_tokens(asked, sizes.total, device, 1),
            noise=draw_tokens(asked, sizes.mate, device, 2),
        )
        found._capture(device)
        return found

    def _capture(self, device: torch.device) -> None:
        if (graphs := graphs_of(device)) is None:
            return
        with torch.inference_mode(False):
            self.backend.init_cuda_graph_state(SIZES[-1], SIZES[-1])
            for size in SIZES:
                tokens = self.noise.at(torch.arange(size, device=device))
                batch = self._batch([(row, 0, 1) for row in range(1, size + 1)], decode=True)
                out = self._out(size)
                self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
                run = in_graph(partial(self._whole, tokens, batch, out), graphs)
                self.graphs[size] = tokens, batch, out, run

    def _whole(self, tokens: Tokens, batch: ForwardBatch, out: torch.Tensor) -> None:
        self.backend.init_forward_metadata_in_graph(batch)
        self._forward(tokens, batch, out)

    def _forward(self, tokens: Tokens, batch: ForwardBatch, out: torch.Tensor) -> None:
        self.backend.forward(
            tokens.q,
            tokens.k,
            tokens.v,
            self.layer,
            batch,
            q_rope=tokens.q_rope,
            k_rope=tokens.k_rope,
            out=out,
        )

    def _out(self, count: int) -> torch.Tensor:
        shape = (count, self.layer.tp_q_head_num, self.layer.v_head_dim)
        return torch.empty(shape, dtype=self.mine.q.dtype, device=self.mine.q.device)

    def scatter(self, rng: random.Random) -> None:
        """Give every request random pages."""
        page, table = self.pool.page_size, self.table.req_to_token
        width = self.table.max_context_len
        each = -(-width // page)
        pages = list(range(1, 1 + each * (MATES + 1)))
        rng.shuffle(pages)
        firsts = torch.tensor(pages, dtype=torch.int32).view(MATES + 1, each, 1) * page
        slots = (firsts + torch.arange(page, dtype=torch.int32)).flatten(1)[:, :width]
        table[1:].copy_(slots)

    def step(
        self, spans: Sequence[tuple[int, int, int]], mine: int, *, decode: bool, graph: bool
    ) -> torch.Tensor:
        """The request's outputs. spans: (row, cached tokens, new ones); `mine` is its place."""
        batch, count = self._batch(spans, decode=decode), sum(span[2] for span in spans)
        rows = torch.cat([torch.arange(cached, cached + new) for _, cached, new in spans])
        own = torch.cat(
            [torch.full((new,), place == mine) for place, (_, _, new) in enumerate(spans)]
        )
        rows, own = rows.to(self.mine.q.device), own.to(self.mine.q.device)
        tokens = self.noise.at(rows % len(self.noise.q))
        for name in Tokens.__slots__:
            if (each := getattr(tokens, name)) is not None:
                each[own] = getattr(self.mine, name)[rows[own]]
        if graph and (found := self.graphs.get(len(spans))) is not None:
            held, fixed, out, run = found
            held.copy_(tokens)
            for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
                getattr(fixed, name).copy_(getattr(batch, name))
            now = replace(fixed, seq_lens_cpu=batch.seq_lens_cpu, seq_lens_sum=batch.seq_lens_sum)
            self.backend.init_forward_metadata_out_graph(now)
            run()
        else:
            out = self._out(count)
            self.backend.init_forward_metadata(batch)
            self._forward(tokens, batch, out)
        return out[own].clone()

    def _batch(self, spans: Sequence[tuple[int, int, int]], *, decode: bool) -> ForwardBatch:
        device = self.mine.q.device
        rows, cached, new = (
            torch.tensor(each, dtype=torch.int32) for each in zip(*spans, strict=True)
        )
        lens, on = cached + new, rows.to(device).long()
        places = [torch.arange(before, before + more) for _, before, more in spans]
        table = self.table.req_to_token
        slots = [
            table[row, place.to(device)] for (row, _, _), place in zip(spans, places, strict=True)
        ]
        extends = {
            "extend_seq_lens": new.to(device),
            "extend_seq_lens_cpu": new,
            "extend_prefix_lens": cached.to(device),
            "extend_prefix_lens_cpu": cached,
            "extend_num_tokens": int(new.sum()),
        }
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(spans),
            req_pool_indices=on,
            seq_lens=lens.to(device),
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=torch.cat(slots).long(),
            positions=torch.cat(places).to(device),
            **({} if decode else extends),  # type: ignore[arg-type]  # fields by name
        )


def _pool(request: Request, size: int, device: torch.device) -> KVPool:
    page, dtype = request.page_size or 1, torch_dtype(request.kv_dtype or "")
    if request.latent:
        rank, rope = request.kv_lora_rank or 0, request.qk_rope_head_dim or 0
        return MLATokenToKVPool(
            size=size, page_size=page, dtype=dtype, layer_ids=[0], device=device,
            kv_lora_rank=rank, qk_rope_head_dim=rope,
        )  # fmt: skip
    return MHATokenToKVPool(
        size=size, page_size=page, dtype=dtype, layer_ids=[0], device=device,
        num_kv_heads=request.num_kv_heads or 0, head_dim=request.head_dim or 0,
    )  # fmt: skip


def schedule(world: World, rng: random.Random | None) -> torch.Tensor:
    """[tokens, Hq, Dv] of the request by a random schedule; without `rng` alone and whole."""
    sizes, outs = world.sizes, []
    world.scatter(rng or random.Random(0))
    row, done = 1 if rng is None else rng.randint(1, MATES + 1), 0
    while done < sizes.total:
        decode = done >= sizes.prompt
        new = 1 if decode else sizes.prompt - done
        if rng is not None and not decode:
            cuts = [cut for cut in range(KEY_BLOCK, sizes.prompt, KEY_BLOCK) if cut > done]
            new = rng.choice([*cuts, sizes.prompt]) - done
        spans = [(row, done, new)]
        if rng is not None:
            spans += list(_mates(world, rng, row, decode=decode))
            rng.shuffle(spans)
        graph = rng is not None and rng.random() < 0.5
        place = next(index for index, span in enumerate(spans) if span[0] == row)
        outs.append(world.step(spans, place, decode=decode, graph=graph and decode))
        done += new
    return torch.cat(outs)


def _mates(
    world: World, rng: random.Random, row: int, *, decode: bool
) -> Iterator[tuple[int, int, int]]:
    count = rng.choice([size - 1 for size in SIZES]) if decode else rng.randint(0, MATES)
    for other in rng.sample([each for each in range(1, MATES + 2) if each != row], count):
        new = 1 if decode else rng.randint(1, world.sizes.mate // 2)
        yield other, rng.randint(0, world.sizes.mate - new), new


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("backend")
    parser.add_argument("--schedules", type=int, default=1000, help="of all shapes together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--platform", default="", help="as an interpreter on a CPU is to see it")
    parser.add_argument("--tiny", action="store_true", help="few tokens")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capability = (
        "" if given.platform else "nvidia:sm{}{}".format(*torch.cuda.get_device_capability())
    )
    platform = Platform.parse(given.platform or capability)
    sizes = Sizes(prompt=300, decoded=2, mate=200) if given.tiny else Sizes()
    shapes = {name: asked for name, asked in SHAPES.items() if given.only in name}
    differing = 0
    for number, (name, asked) in enumerate(shapes.items()):
        rng = random.Random(given.seed + number)
        decided = asked.replace(
            deterministic=True, graph=True, kv_dtype=asked.kv_dtype or asked.dtype
        )
        if device.type == "cpu":  # the interpreter multiplies no bfloat16
            wide = "fp8_e5m2" if asked.kv_dtype else "float16"
            decided = decided.replace(dtype="float16", kv_dtype=wide)
        worlds = [
            World.of(given.backend, decided.replace(page_size=page), platform, device, sizes)
            for page in PAGES
        ]
        expected = schedule(worlds[0], None)
        count = given.schedules // len(shapes) + (number < given.schedules % len(shapes))
        found = [torch.equal(schedule(rng.choice(worlds), rng), expected) for _ in range(count)]
        differing += found.count(False)
        print(f"{name}: {found.count(True)} of {count} schedules have the same bits", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    with torch.no_grad():
        raise SystemExit(main())
