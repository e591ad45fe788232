"""Ask backends for text through `attnmux generate`, with and without graphs, at several page sizes.

    python tools/prove_text.py DIR fa3 flashinfer [--device cuda] [--page-size 1] [--at-once 8]
    python tools/prove_text.py DIR fa3_mla flashmla --latent [CHECKPOINT]
    python tools/prove_text.py DIR fa3 --draft ngram --draft DIR/recall-64 --topk 1 --topk 4

The checkpoint that ships has heads of 64 dims and is written to `DIR` with 128 too; its answers are
known. `--latent` asks a small DeepSeek model of random weights instead, with the dims that MLA's
kernels are built for; what `torch_native` says without graphs is held to be right there. Random
weights leave near ties, which may fall otherwise in another order of sums: tokens are counted until
the first that differs; `--dtype float32` leaves hardly any. `--latent CHECKPOINT` asks a model that
`widen_recall.py --latent` wrote, whose answers are known. Where nothing serves a combination it is
no row. With `--draft`, rows say how many drafts a step accepted.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config

from attnmux.transformers.recall import PATH, make_prompt

MAIN = "from attnmux.core.cli import main; main()"
NOTHING_FITS = 3
WIDEN = Path(__file__).with_name("widen_recall.py")
HEAD_DIMS = (64, 128)
GRAPHS = ("--graph", "--no-graph")
LATENT_TOKENS = 16
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One run of `attnmux generate`."""

    model: Path
    backend: str
    page_size: int
    graph: str
    drafts: tuple[str, ...] = ()
    """Options of the command."""

    def run(self, prompts: Path, device: str, more: Sequence[str]) -> dict[str, Any] | str | None:
        """What it said; a text where it failed; None where nothing fits."""
        command = [sys.executable, "-c", MAIN, "generate", "--json", self.graph]
        command += ["--prompts", str(prompts), "--model", str(self.model), "--device", device]
        command += ["--backend", self.backend, "--page-size", str(self.page_size)]
        command += [*self.drafts, *more]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == NOTHING_FITS:
            return None
        if done.returncode:
            return " ".join(done.stderr.split())[-600:]
        return dict(json.loads(done.stdout))


def write_prompts(path: Path, count: int, answers: bool) -> list[str]:
    """Recall prompts of 40 to 1500 bytes; their answers."""
    rng = random.Random("proof")
    cases = [make_prompt(rng, length) for length in rng.choices(range(40, 1501), k=count)]
    given = [
        {"prompt": prompt, **({} if answers else {"max_new_tokens": LATENT_TOKENS})}
        for prompt, _ in cases
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in given))
    return [answer for _, answer in cases]


def write_latent(folder: Path) -> None:
    """A DeepSeek model of random weights, far enough from zero that attention matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**DEEPSEEK))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(PATH).save_pretrained(folder)


def until_they_differ(said: Sequence[int], wanted: Sequence[int]) -> int:
    same = [a == b for a, b in zip(said, wanted, strict=False)]
    return same.index(False) if False in same else len(same)


def verdict(said: Mapping[str, Any], wanted: Sequence[Any]) -> str:
    """How much of what was wanted came. wanted: texts, or token ids."""
    results = said["results"]
    if isinstance(wanted[0], str):
        right = sum(each["text"] == text for each, text in zip(results, wanted, strict=True))
        return f"{right} of {len(wanted)} right"
    same = [
        until_they_differ(each["token_ids"], ids) for each, ids in zip(results, wanted, strict=True)
    ]
    whole = sum(map(LATENT_TOKENS.__eq__, same))
    return f"{whole} of {len(wanted)} the same, {sum(same)} of {LATENT_TOKENS * len(same)} tokens"


def row(asked: Asked, said: Mapping[str, Any] | str, wanted: Sequence[Any]) -> str:
    """A line of a table."""
    cells = [asked.model.name, asked.backend, str(asked.page_size), asked.graph.strip("-")]
    cells += [" ".join(Path(each).name for each in asked.drafts)] if asked.drafts else []
    if isinstance(said, str):
        return f"| {' | '.join([*cells, said])} |"
    chosen = [each["backend"] for each in said["decision"]["phases"].values()]
    cells += [", ".join(chosen), f"{len(said['graph_batch_sizes'])} graphs", verdict(said, wanted)]
    cells += [f"{said['drafts']['accepted_per_step']:.2f} a step"] if asked.drafts else []
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where checkpoints go")
    parser.add_argument("backends", nargs="+", metavar="BACKEND")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--page-size", dest="page_sizes", type=int, action="append")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument(
        "--latent", nargs="?", type=Path, const=Path(), help="a DeepSeek model instead"
    )
    parser.add_argument("--dtype", help="of the models; default: the checkpoint's")
    parser.add_argument("--at-once", type=int, default=8, help="processes")
    parser.add_argument("--head-dim", dest="head_dims", type=int, action="append")
    parser.add_argument("--draft", dest="drafts", action="append", help="ngram, or a model")
    parser.add_argument("--topk", dest="topks", type=int, action="append")
    parser.add_argument("--graphs", choices=[each.strip("-") for each in GRAPHS], action="append")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    prompts = args.folder / "prompts.jsonl"
    random_weights = args.latent == Path()
    wanted: list[Any] = write_prompts(prompts, args.prompts, not random_weights)
    more = [] if args.dtype is None else ["--dtype", args.dtype]
    if args.latent is not None:
        models, more = [args.latent], [*more, "--mla", "absorbed"]
    if random_weights:
        models = [args.folder / "latent"]
        write_latent(models[0])
        first = Asked(model=models[0], backend="torch_native", page_size=1, graph="--no-graph")
        said = first.run(prompts, args.device, more)
        if not isinstance(said, dict):
            raise SystemExit(f"torch_native: {said}")
        wanted = [each["token_ids"] for each in said["results"]]
    elif args.latent is None:
        head_dims = args.head_dims or HEAD_DIMS
        models = [args.folder / f"recall-{head_dim}" for head_dim in head_dims]
        for model, head_dim in zip(models, head_dims, strict=True):
            subprocess.run([sys.executable, WIDEN, model, "--head-dim", str(head_dim)], check=True)
    drafts: list[tuple[str, ...]] = [
        ("--draft", draft, "--topk", str(topk), "--steps", "3")
        for draft, topk in product(args.drafts or (), args.topks or (1,))
    ]
    pages = args.page_sizes or (1, 16, 64, 128)
    graphs = [f"--{each}" for each in args.graphs] if args.graphs else GRAPHS
    of_all = product(models, args.backends, pages, graphs, drafts or [()])
    runs = [Asked(model=m, backend=b, page_size=p, graph=g, drafts=d) for m, b, p, g, d in of_all]
    with ThreadPoolExecutor(args.at_once) as pool:
        answers = pool.map(lambda asked: asked.run(prompts, args.device, more), runs)
    for asked, said in zip(runs, answers, strict=True):
        if said is not None:
            print(row(asked, said, wanted), flush=True)


if __name__ == "__main__":
    main()
