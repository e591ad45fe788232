"""Write the recall checkpoint with wider heads, which answers as the shipped one does.

    python tools/widen_recall.py DIR [--head-dim 128]
    python tools/widen_recall.py DIR --latent CHECKPOINT

Kernels are built for some dims each; with this, those for wider heads can be asked for a text too.
Rotary position embeddings turn dims i and i + D/2 of a head of D dims together, at the rate
`theta ** (-2 i / D)`. In heads of n times as many dims, dims n i and n i + n D/2 turn at that rate:
there the weights go, and zeros between. The softmax divides logits by the root of the dim, so that
Q is multiplied by the root of n. V and the output's projection have no order to keep.

`--latent` widens what `train_recall.py --latent` wrote to the dims of DeepSeek-V3 with 16 heads:
zeros follow the dims of the latent, of a head's K and V and the heads themselves. The norm of the
latent divides by the mean over all its dims, so that its weights shrink by the root of the share
that is not zero. Rotary dims stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from attnmux.transformers import recall

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LATENT = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def widen(folder: Path, head_dim: int) -> None:
    """Write the checkpoint with heads of `head_dim` dims to `folder`, which is made.

    Raises ValueError where that is no multiple of the shipped checkpoint's.
    """
    config = json.loads((recall.PATH / CONFIG).read_text())
    narrow = config["head_dim"]
    if head_dim < narrow or head_dim % narrow:
        raise ValueError(f"head_dim: expected a multiple of {narrow}, got {head_dim}")
    factor = head_dim // narrow
    weights = load_file(recall.PATH / WEIGHTS)
    for name, tensor in weights.items():
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            scale = math.sqrt(factor) if part == "q_proj" else 1.0
            weights[name] = spread(tensor * scale, narrow, factor)
        elif part == "o_proj":
            weights[name] = spread(tensor.t(), narrow, factor).t().contiguous()
    write(folder, recall.PATH, {**config, "head_dim": head_dim}, weights)


def spread(rows: torch.Tensor, head_dim: int, factor: int) -> torch.Tensor:
    """Rows [heads * head_dim, …] of a projection as [heads * head_dim * factor, …]: each stands at
    `factor` times its place in its head, and zeros between."""
    heads, rest = rows.shape[0] // head_dim, rows.shape[1:]
    wide = rows.new_zeros(heads, head_dim * factor, *rest)
    wide[:, ::factor] = rows.reshape(heads, head_dim, *rest)
    return wide.flatten(0, 1)


def widen_latent(folder: Path, source: Path) -> None:
    """Write the latent checkpoint in `source` with the dims in `LATENT` to `folder`, which is made.

    Raises ValueError where its dims are larger.
    """
    config = json.loads((source / CONFIG).read_text())
    narrow = {name: config[name] for name in LATENT}
    if larger := {name: dim for name, dim in narrow.items() if dim > LATENT[name]}:
        raise ValueError(f"expected at most {LATENT}, got {larger}")
    rope, heads = config["qk_rope_head_dim"], narrow["num_attention_heads"]
    nope, rank = narrow["qk_nope_head_dim"], narrow["kv_lora_rank"]
    wide_nope, wide_rank = LATENT["qk_nope_head_dim"], LATENT["kv_lora_rank"]
    weights = load_file(source / WEIGHTS)
    for name, tensor in weights.items():
        part = name.split(".")[-2]
        if part == "q_proj":
            q = tensor * math.sqrt((wide_nope + rope) / (nope + rope))
            weights[name] = of_heads(q, heads, [(nope, wide_nope), (rope, rope)])
        elif part == "kv_b_proj":
            v = (narrow["v_head_dim"], LATENT["v_head_dim"])
            rows = of_heads(tensor, heads, [(nope, wide_nope), v])
            weights[name] = pad(rows, (0, wide_rank - rank))
        elif part == "kv_a_proj_with_mqa":
            weights[name] = parts(tensor, [(rank, wide_rank), (rope, rope)])
        elif part == "kv_a_layernorm":
            weights[name] = pad(tensor * math.sqrt(rank / wide_rank), (0, wide_rank - rank))
        elif part == "o_proj":
            v = (narrow["v_head_dim"], LATENT["v_head_dim"])
            weights[name] = of_heads(tensor.t(), heads, [v]).t().contiguous()
    wider = {**LATENT, "qk_head_dim": wide_nope + rope, "head_dim": rope}
    write(folder, source, {**config, **wider}, weights)


def of_heads(rows: torch.Tensor, heads: int, dims: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Rows [heads * sum of old dims, …] with every head's parts of new dims, and heads of zeros."""
    wide = torch.stack([parts(each, dims) for each in rows.chunk(heads)])
    more = LATENT["num_attention_heads"] - heads
    return torch.cat([wide, wide.new_zeros(more, *wide.shape[1:])]).flatten(0, 1)


def parts(rows: torch.Tensor, dims: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Rows [sum of old dims, …] with zeros after each part; dims: (old, new) of each."""
    split = torch.split(rows, [old for old, _ in dims])
    return torch.cat(
        [pad(part, (0, 0, 0, new - old)) for part, (old, new) in zip(split, dims, strict=True)]
    )


def write(
    folder: Path, source: Path, config: Mapping[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--latent", type=Path, metavar="CHECKPOINT", help="widen this one instead")
    args = parser.parse_args()
    try:
        if args.latent is None:
            widen(args.folder, args.head_dim)
        else:
            widen_latent(args.folder, args.latent)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
