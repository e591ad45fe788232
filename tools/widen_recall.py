"""Write the recall checkpoint with wider heads, which answers as the shipped one does.

    python tools/widen_recall.py DIR [--head-dim 128]

Kernels are built for some head dims each; with this, those for wider heads can be asked for a text
too. Rotary position embeddings turn dims i and i + D/2 of a head of D dims together, at the rate
`theta ** (-2 i / D)`. In heads of n times as many dims, dims n i and n i + n D/2 turn at that rate:
there the weights go, and zeros between. The softmax divides logits by the root of the dim, so that
Q is multiplied by the root of n. V and the output's projection have no order to keep.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from attnmux.transformers import recall

CONFIG, WEIGHTS = "config.json", "model.safetensors"


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
    folder.mkdir(parents=True, exist_ok=True)
    for path in recall.PATH.glob("*.json"):
        shutil.copy(path, folder)
    (folder / CONFIG).write_text(json.dumps({**config, "head_dim": head_dim}, indent=2))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def spread(rows: torch.Tensor, head_dim: int, factor: int) -> torch.Tensor:
    """Rows [heads * head_dim, …] of a projection as [heads * head_dim * factor, …]: each stands at
    `factor` times its place in its head, and zeros between."""
    heads, rest = rows.shape[0] // head_dim, rows.shape[1:]
    wide = rows.new_zeros(heads, head_dim * factor, *rest)
    wide[:, ::factor] = rows.reshape(heads, head_dim, *rest)
    return wide.flatten(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    try:
        widen(args.folder, args.head_dim)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
