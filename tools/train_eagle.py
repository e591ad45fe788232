"""Train the EAGLE head of the recall checkpoint, and write it in the layout of EAGLE 1 and 2.

    python -m tools.train_eagle --out DIR [--steps N] [--learning-rate X] [--seed N] [--tokens N]

Rows are those of `train_recall.py`. The loss is taken on the target's own choice of the answers'
tokens, and on its hidden states there. A second pass reads the head's own output in place of
some of the target's states, as later drafts do. The files hold bfloat16.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, smooth_l1_loss
from transformers import LlamaForCausalLM

from attnmux.transformers.eagle_files import SHARED, WEIGHTS
from attnmux.transformers.eagle_head import EagleHead
from attnmux.transformers.recall import PATH
from tools.train_recall import Sampler

LEVELS = (64, 128, 256, 512, 1024)
OWN_SHARE = 0.3
"""Of the tokens that read the head's own output in the second pass."""
REPORT = 100


def make_head(target: Any) -> EagleHead:  # noqa: ANN401  # transformers' methods are not annotated
    config = type(target.config).from_dict({**target.config.to_dict(), "num_hidden_layers": 1})
    config._attn_implementation = "sdpa"
    head = EagleHead(config, bias=False)
    head.model.embed_tokens, head.lm_head = target.model.embed_tokens, target.lm_head
    return head


def losses(
    target: Any,  # noqa: ANN401  # as above
    head: EagleHead,
    sample: Sampler,
    length: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of so many tokens, and the share of answers' tokens that the first pass guesses."""
    batch = sample(max(1, num_tokens // (2 * length)), length)
    with torch.no_grad():
        states = target.model(batch.tokens, use_cache=False).last_hidden_state
        said = target.lm_head(states).argmax(-1)
    wanted = torch.zeros_like(batch.tokens, dtype=torch.bool)
    rows = torch.arange(len(said))[:, None, None].expand_as(batch.positions)
    asked = batch.targets >= 0
    wanted[rows[asked], batch.positions[asked]] = True
    # The head's item i has token i + 1 and state i, and guesses what the target says after i + 1
    wanted, said, after = wanted[:, 1:], said[:, 1:], states[:, 1:]
    features, total, share = states[:, :-1], torch.zeros(()), torch.zeros(())
    for number in range(2):
        out = head.model(
            inputs_embeds=head.join(batch.tokens[:, 1:], features), use_cache=False
        ).last_hidden_state
        logits = head.lm_head(out[wanted])
        total = total + cross_entropy(logits, said[wanted])
        total = total + smooth_l1_loss(out[wanted], after[wanted])
        if not number:
            share = (logits.argmax(-1) == said[wanted]).float().mean()
            own = torch.rand(features.shape[:2]) < OWN_SHARE
            own[:, 0] = False
            features = torch.where(own.unsqueeze(-1), out.roll(1, dims=1).detach(), features)
    return total, share


def train(steps: int, learning_rate: float, seed: int, device: str, num_tokens: int) -> EagleHead:
    torch.manual_seed(seed)
    target: Any = LlamaForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    target.to(device).eval()
    target.requires_grad_(False)
    head = make_head(target)
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
                target, head, sample, LEVELS[levels.randrange(highest)], num_tokens
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


def export(head: EagleHead, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.removeprefix("model."): tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
        if name.removeprefix("model.") not in SHARED
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = head.config.to_diff_dict()
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1_200)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=65_536, help="of a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    head = train(args.steps, args.learning_rate, args.seed, args.device, args.tokens)
    export(head, args.out)


if __name__ == "__main__":
    main()
