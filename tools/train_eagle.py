"""Train an EAGLE head of the recall checkpoint, and write it in its authors' layout.

    python -m tools.train_eagle --out DIR [--steps N] [--learning-rate X] [--seed N] [--tokens N]
    python -m tools.train_eagle --out DIR --layers 0 1 2

The first is of EAGLE 1 and 2; the second of EAGLE 3, which reads the outputs of these layers.

Rows are those of `train_recall.py`. The loss is taken on the target's own choice of the answers'
tokens, and for EAGLE 1 and 2 on its hidden states there. A second pass reads the head's own output
in place of some of the target's states, as later drafts do. The files hold bfloat16.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, smooth_l1_loss
from transformers import LlamaForCausalLM

from attnmux.transformers.load.eagle_files import LAYERS, SHARED, WEIGHTS
from attnmux.transformers.model.eagle_head import Eagle3Head, EagleHead
from attnmux.transformers.recall import PATH
from tools.train_recall import Sampler

LEVELS = (64, 128, 256, 512, 1024)
OWN_SHARE = 0.3
"""Share of the tokens that read the head's own output in the second pass."""
REPORT = 100


def make_head(target: Any, layers: Sequence[int]) -> EagleHead:  # noqa: ANN401  # transformers' methods are not annotated
    config = type(target.config).from_dict({**target.config.to_dict(), "num_hidden_layers": 1})
    config._attn_implementation = "sdpa"
    if layers:
        width = len(layers) * config.hidden_size
        head: EagleHead = Eagle3Head(config, bias=False, target_width=width, token_ids=None)
    else:
        head = EagleHead(config, bias=False)
        head.lm_head = target.lm_head
    head.model.embed_tokens = target.model.embed_tokens
    return head


def states_of(target: Any, tokens: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:  # noqa: ANN401  # as above
    """[B, T, …]: what the target keeps for a head."""
    output = target.model(tokens, use_cache=False, output_hidden_states=True)
    if not layers:
        states: torch.Tensor = output.last_hidden_state
        return states
    return torch.cat([output.hidden_states[number + 1] for number in layers], dim=-1)


def losses(
    target: Any,  # noqa: ANN401  # as above
    head: EagleHead,
    sample: Sampler,
    length: int,
    num_tokens: int,
    layers: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of so many tokens, and the share of answers' tokens that the first pass guesses."""
    batch = sample(max(1, num_tokens // (2 * length)), length)
    with torch.no_grad():
        states = states_of(target, batch.tokens, layers)
        said = target(batch.tokens, use_cache=False).logits.argmax(-1)
    wanted = torch.zeros_like(batch.tokens, dtype=torch.bool)
    rows = torch.arange(len(said))[:, None, None].expand_as(batch.positions)
    asked = batch.targets >= 0
    wanted[rows[asked], batch.positions[asked]] = True
    # The head's item i has token i + 1 and state i, and guesses what the target says after i + 1
    wanted, said, after = wanted[:, 1:], said[:, 1:], states[:, 1:]
    features = head.from_target(states[:, :-1])
    total, share = torch.zeros(()), torch.zeros(())
    for number in range(2):
        out = head.model(
            inputs_embeds=head.join(batch.tokens[:, 1:], features), use_cache=False
        ).last_hidden_state
        logits = head.lm_head(out[wanted])
        total = total + cross_entropy(logits, said[wanted])
        if not layers:
            total = total + smooth_l1_loss(out[wanted], after[wanted])
        if not number:
            share = (logits.argmax(-1) == said[wanted]).float().mean()
            own = torch.rand(features.shape[:2]) < OWN_SHARE
            own[:, 0] = False
            features = torch.where(own.unsqueeze(-1), out.roll(1, dims=1).detach(), features)
    return total, share


def train(
    steps: int,
    learning_rate: float,
    seed: int,
    device: str,
    num_tokens: int,
    layers: Sequence[int],
) -> EagleHead:
    torch.manual_seed(seed)
    target: Any = LlamaForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    target.to(device).eval()
    target.requires_grad_(False)
    head = make_head(target, layers)
    torch.nn.Module.to(head, device)
    weights = [each for each in head.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50, (steps - step) / (0.4 * steps))
    )
    sample, levels, began = Sampler(seed, device), random.Random(seed), time.monotonic()
    for step in range(steps):
        highest = min(len(LEVELS), 1 + step * 2 * len(LEVELS) // steps)
        with torch.device(device):
            loss, share = losses(
                target, head, sample, LEVELS[levels.randrange(highest)], num_tokens, layers
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % REPORT == 0:
            seconds = time.monotonic() - began
            print(f"step {step + 1} {seconds:.0f}s loss {loss:.3f} right {share:.3f}", flush=True)
    return head


EAGLE3_NAMES = {
    "layers.0.": "midlayer.",
    "lm_head.0.": "norm.",
    "lm_head.1.": "lm_head.",
}


def export(head: EagleHead, folder: Path, layers: Sequence[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.removeprefix("model."): tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
        if name.removeprefix("model.") not in SHARED
    }
    config = head.config.to_diff_dict()
    if layers:
        for ours, theirs in EAGLE3_NAMES.items():
            tensors = {name.replace(ours, theirs): tensors[name] for name in tensors}
        size = config["draft_vocab_size"] = head.config.vocab_size
        config["eagle_config"] = {LAYERS: list(layers)}
        tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(size, dtype=torch.bool)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1_200)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=65_536, help="of a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, nargs="+", default=[], help="of the target: EAGLE 3")
    args = parser.parse_args()
    head = train(args.steps, args.learning_rate, args.seed, args.device, args.tokens, args.layers)
    export(head, args.out, args.layers)


if __name__ == "__main__":
    main()
