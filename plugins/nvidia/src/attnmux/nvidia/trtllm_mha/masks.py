"""What XQA lets the draft tokens of a request see of each other."""

from __future__ import annotations

import torch


def chain_mask(batch_size: int, drafts: int, device: torch.device) -> torch.Tensor:
    """[B, d, 2 * ceil(d / 32)] uint16: bit j of row i says that token i sees token j <= i.

    Rows are whole words of 32 bits (xqa.py, `mask`). The kernel reads every request's.
    """
    words = -(-drafts // 32) * 2
    rows = [
        [((2 << token) - 1) >> (16 * word) & 0xFFFF for word in range(words)]
        for token in range(drafts)
    ]
    # Few operations know unsigned words.
    bits = torch.tensor(rows, dtype=torch.int32).to(torch.int16).to(device)
    return bits.expand(batch_size, -1, -1).contiguous().view(torch.uint16)
