"""A compiled model's decode step of one request, with and without what is around its products.

    python -m benchmarks.one_request [--rounds 5] [--blocks 8,256,4,4 ...] [--only steps]
                                     [--random 3b] [--length 1024] [--new 64] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.one_request --device cpu --random tiny --length 8
                                     --new 2 --forced 2 --rounds 1      small, to try the script

The first table has each product of a layer: `parts` is the product and the compiled code around it,
the other columns are one kernel with these `--blocks`: rows, columns, stages and warps. Steps
also take two with a slash between them, for products with a norm and for others; this table takes
the first. A figure is
microseconds of one product, in a graph of as many weights as exceed a cache of 256 MB. Errors are
the largest ones compared with float64, over the largest value.

The second table has whole steps of a random Llama in bfloat16: `ahead` are launched before the last
one's token is read, `calls` are the model's calls without a wait. All ways take turns. `error` is
of logits after given tokens, compared with the model in float32, over their standard deviation;
`picks` are the greedy tokens after these that are the same as without fusing, and `alike` the new
tokens of the prompt that are the same until the first that differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import json_option, rounds_option
from benchmarks.engine import (
    RANDOM,
    MetadataClock,
    Round,
    back_to_back,
    capture,
    make_prompts,
    make_random,
    run,
)
from transformers import AutoModelForCausalLM

from attnmux.core import GraphRunner, Policy
from attnmux.testing.bench import Report, device_meter, facts, interleave
from attnmux.testing.bench.timing import graphs_of, in_graph, in_turn
from attnmux.transformers import (
    ModelRunner,
    RunnerOptions,
    SequenceState,
    open_checkpoint,
    recall,
)
from attnmux.transformers.model.hidden_states import decoder_layers
from attnmux.transformers.run import product_patterns
from attnmux.transformers.run.compiled import compile_layers, undo
from attnmux.transformers.run.linears import KernelLinear, multiply_by
from attnmux.triton.functions import one_row
from attnmux.triton.functions.one_row import Around, Blocks, OneRowProducts, multiply_row

CACHE_BYTES = 256 << 20
EPS = 1e-6
USUAL = (
    *("8,256,4,4", "16,256,4,4", "16,256,4,8", "32,128,4,4", "16,128,6,4"),
    "16,256,4,4/8,256,4,4",
)
Tensor = torch.Tensor
Choice = tuple[Blocks, ...]
"""How products with a norm read weights, and how the others do. One entry serves both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A product [N, K] of a layer, and what is around it."""

    name: str
    num_out: int
    width: int
    normed: bool = False
    summed: bool = False
    gated: bool = False
    dim: int = 0
    """Columns of a head that is rotated; 0 if no head is."""
    num_rotated: int = 0

    def around(self, given: dict[str, Tensor]) -> Around:
        return Around(
            norm_weight=given["norm"] if self.normed else None,
            eps=EPS if self.normed else 0.0,
            residual=given["residual"] if self.summed else None,
            gate="silu" if self.gated else None,
            cos=given["cos"] if self.dim else None,
            sin=given["sin"] if self.dim else None,
            num_rotated=self.num_rotated,
        )

    def parts(self, x: Tensor, weight: Tensor, given: dict[str, Tensor]) -> Tensor:
        """The product and what is around it, one operation after another, as a model writes them.
        In float64 torch multiplies, else the kernel does."""
        exact = x.dtype is torch.float64
        if self.normed and exact:
            x = given["norm"] * x * (x.square().mean() + EPS).rsqrt()
        elif self.normed:
            x = product_patterns.norm(x, given["norm"], torch.tensor(EPS))
        product: Tensor = x @ weight.T if exact else OneRowProducts.op(x, weight, None)
        if self.summed:
            product = given["residual"] + product
        if self.gated:
            product = product_patterns.gated("silu", *product.chunk(2, -1))
        if self.dim:
            heads = product[..., : self.num_rotated].view(1, -1, self.dim)
            turned = product_patterns.rotated(heads, given["cos"], given["sin"])
            product = torch.cat([turned.view(1, -1), product[..., self.num_rotated :]], -1)
        return product


def products_of(shape: str) -> tuple[Product, ...]:
    _, hidden, intermediate, q_heads, kv_heads = RANDOM[shape]
    dim = hidden // q_heads
    return (
        Product(
            name="norm, qkv, rotary",
            num_out=(q_heads + 2 * kv_heads) * dim,
            width=hidden,
            normed=True,
            dim=dim,
            num_rotated=(q_heads + kv_heads) * dim,
        ),
        Product(name="output, sum", num_out=hidden, width=hidden, summed=True),
        Product(
            name="norm, gate and up, silu",
            num_out=2 * intermediate,
            width=hidden,
            normed=True,
            gated=True,
        ),
        Product(name="down, sum", num_out=hidden, width=intermediate, summed=True),
    )


@click.command(context_settings={"show_default": True})
@rounds_option(5)
@click.option("--blocks", "chosen", multiple=True, default=USUAL)
@click.option("--only", type=click.Choice(["products", "steps"]))
@click.option("--random", "shape", type=click.Choice([*RANDOM]), default="3b")
@click.option("--length", type=int, default=1024)
@click.option("--new", type=click.IntRange(min=2), default=64)
@click.option(
    "--forced", type=click.IntRange(min=1), default=32, help="Given tokens before logits."
)
@click.option("--backend", default=None)
@click.option("--device", default="cuda")
@json_option
def main(
    rounds: int,
    chosen: Sequence[str],
    only: str | None,
    shape: str,
    length: int,
    new: int,
    forced: int,
    backend: str | None,
    device: str,
    path: Path | None,
) -> None:
    """Print the products' times, then the steps'."""
    place = torch.device(device)
    blocks = {words: tuple(map(blocks_of, words.split("/"))) for words in chosen}
    if only != "steps":
        columns = {"": "", "N x K": "", "parts": ".2f", **dict.fromkeys(blocks, ".2f")}
        columns |= {"error": ".4f", "error of parts": ".4f"}
        with Report(columns, facts(place, "triton"), path) as report:
            for product in products_of(shape):
                measure(product, blocks, place, rounds, report)
    if only != "products":
        options = RunnerOptions(
            max_batch_size=1,
            max_context_len=length + new + forced,
            max_total_tokens=length + new + forced,
            window_step_tokens=max(length, 2048),
            device=device,
            graph=False,
            policy=Policy(backend=backend),
        )
        with torch.no_grad():
            tokens = Tokens(length=length, new=new, forced=forced)
            steps(make_random(shape, options), blocks, tokens, rounds, path)


def take_blocks(choice: Choice) -> None:
    """Have compiled code read weights so."""
    one_row.NORMED_BLOCKS, one_row.PLAIN_BLOCKS = choice[0], choice[min(1, len(choice) - 1)]


def blocks_of(words: str) -> Blocks:
    rows, columns, stages, warps = map(int, words.split(","))
    return Blocks(rows=rows, columns=columns, stages=stages, warps=warps)


def measure(
    product: Product, blocks: dict[str, Choice], device: torch.device, rounds: int, report: Report
) -> None:
    """Add the times of a product and of its parts."""
    shape = product.num_out, product.width
    randn = partial(torch.randn, device=device, dtype=torch.bfloat16)
    count = 2 + CACHE_BYTES // (2 * shape[0] * shape[1]) if device.type == "cuda" else 2
    weights = [randn(shape) / shape[1] ** 0.5 for _ in range(count)]
    sizes = {"norm": shape[1], "residual": shape[0], "cos": product.dim, "sin": product.dim}
    given = {name: randn(size) for name, size in sizes.items()}
    x, around = randn(1, shape[1]), product.around(given)
    sides: dict[str, Callable[[Tensor], Tensor]] = {
        name: partial(multiply_row, x, bias=None, around=around, blocks=each)
        for name, (each, *_) in blocks.items()
    }
    parts = torch.compile(product.parts, dynamic=False)
    sides["parts"] = lambda weight: parts(x, weight, given)
    exact = product.parts(
        x.double(), weights[0].double(), {name: each.double() for name, each in given.items()}
    )
    errors, meters = {}, {}
    with torch.no_grad():
        for name, side in sides.items():
            errors[name] = float((side(weights[0]) - exact).abs().max() / exact.abs().max())
            calls = in_turn([partial(side, weight) for weight in weights])
            repeats = 10 if device.type == "cuda" else 1
            meters[name] = device_meter(in_graph(calls, graphs_of(device)), device, repeats)
        times = interleave(meters, rounds, warm_up=1)
    us = {name: times.median(name) / count for name in sides}
    worst = max(errors[name] for name in blocks)
    figures = us["parts"], *(us[name] for name in blocks)
    report.add(product.name, f"{shape[0]:,} x {shape[1]:,}", *figures, worst, errors["parts"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """How many: of the prompt, new ones, and given ones after which logits are compared."""

    length: int
    new: int
    forced: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How decode steps run."""

    blocks: Choice
    fused: bool
    graphs: GraphRunner | None


def steps(
    runner: ModelRunner,
    blocks: dict[str, Choice],
    tokens: Tokens,
    rounds: int,
    path: Path | None,
) -> None:
    """Print the times of whole steps in each way."""
    kernel = kernel_of(runner)
    (ids,) = make_prompts(runner, 1, tokens.length + tokens.forced)
    prompt, forced = ids[: tokens.length], ids[tokens.length :]
    exact = exact_logits(runner, ids, tokens.forced)
    clock, checkpoint = MetadataClock(runner), open_checkpoint(recall.PATH)
    ways: dict[str, Way] = {}
    for fused in (False, True):
        undo(runner.model)
        kernel.fused = OneRowProducts.fused if fused else None
        compile_layers(runner.model)
        runner.is_compiled = True
        for name, each in (blocks if fused else {"unfused": (one_row.EAGER,)}).items():
            take_blocks(each)
            ways[name] = Way(blocks=each, fused=fused, graphs=capture(runner)[0])
    took: dict[str, list[Round]] = {name: [] for name in ways}

    def take(name: str) -> None:
        way = ways[name]
        runner.graphs = way.graphs
        take_blocks(way.blocks)
        if way.graphs is None:  # the compiled code itself runs
            torch._dynamo.reset()
            undo(runner.model)
            kernel.fused = OneRowProducts.fused if way.fused else None
            compile_layers(runner.model)

    def ahead(name: str) -> float:
        take(name)
        took[name].append(run(runner, checkpoint, [prompt], tokens.new, clock, True, False))
        return took[name][-1].step_us

    times = interleave({name: partial(ahead, name) for name in ways}, rounds, warm_up=1)
    title = (
        f"{runner.decision.summary()}\na prompt of {tokens.length} tokens, {tokens.new} new ones"
    )
    about = facts(runner.context.device, *("transformers", "attnmux-core"))
    columns = {"": "", "ahead us": ",.0f", "calls us": ",.0f", "ratio": ".3f"}
    columns |= {"error": ".4f", "picks": "", "alike": ""}
    plain: list[Any] = []
    path = None if path is None else path.with_stem(f"{path.stem}-steps")
    with Report(columns, about, path, title=title) as report:
        for name in ways:
            take(name)
            logits = forced_logits(runner, prompt, forced)
            error = float((logits.double() - exact).square().mean().sqrt() / exact.std())
            text = took[name][-1].tokens[0]
            plain = plain or [logits.argmax(-1), text]
            report.add(
                name,
                times.median(name),
                back_to_back(runner, [prompt], rounds),
                times.ratio(name, "unfused"),
                error,
                f"{int((logits.argmax(-1) == plain[0]).sum())}/{tokens.forced}",
                f"{common(text, plain[1])}/{tokens.new}",
            )


def kernel_of(runner: ModelRunner) -> Any:  # noqa: ANN401  # whose `fused` is set
    """The kernel of the model's linear layers, by the interpreter where the device has none."""
    if runner.context.device.type == "cpu":
        for layer in runner.model.modules():
            if isinstance(layer, KernelLinear):
                layer.__class__ = torch.nn.Linear  # type: ignore[assignment]  # as it was
        kernel = OneRowProducts()
        for decoder, _, _ in decoder_layers(runner.model):  # the head takes the interpreter minutes
            multiply_by(kernel, decoder)
    kernels = {each.kernel for each in runner.model.modules() if isinstance(each, KernelLinear)}
    return kernels.pop()


def exact_logits(runner: ModelRunner, tokens: list[int], count: int) -> Tensor:
    """Of the model in float32 with transformers' attention, after each of the last tokens."""
    config = copy.deepcopy(runner.model.config)  # which takes the new model's attention
    with runner.context.device:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    model.load_state_dict(runner.model.state_dict())
    ids = torch.tensor([tokens], device=runner.context.device)
    logits: Tensor = model(ids, logits_to_keep=count).logits[0]
    return logits.double()


def forced_logits(runner: ModelRunner, prompt: list[int], tokens: list[int]) -> Tensor:
    """After each of the tokens, whatever the model's own would be."""
    state, rows = SequenceState(token_ids=prompt[:]), []
    runner.extend([state])
    for token in tokens:
        state.token_ids.append(token)
        rows.append(runner.decode([state]).clone())
    runner.release([state])
    return torch.cat(rows)


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens are the same before the first difference."""
    pairs = [one == other for one, other in zip(some, others, strict=True)]
    return pairs.index(False) if False in pairs else len(pairs)


if __name__ == "__main__":
    main()
