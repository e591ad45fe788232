"""Recurrences of models that compute them in their own code, led to the mixer.

An adapter makes a module's forward: it projects as the module does, and asks the mixer for the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.mixer_calls import Recurrence, row_of

if TYPE_CHECKING:
    from attnmux.transformers.mixers import Mixer


def _lightning(mixer: Mixer) -> Callable[..., Any]:
    """MiniMax's: a head's state decays by the same factor at every token."""
    module: Any = mixer.module
    heads, dim = module.num_attention_heads, module.head_dim

    def forward(
        hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None:
            expected = "none: nothing is padded"
            raise InvalidInput(f"{mixer.name}, attention_mask", got="a mask", expected=expected)
        qkv = module.act_fn(module.qkv_proj(row_of(mixer, hidden_states)))
        q, k, v = qkv.view(-1, heads, 3 * dim).split(dim, dim=2)
        asked = Recurrence(
            kind="lightning",
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            g=-module.slope_rate.view(heads).float().expand(q.shape[0], -1),
            beta=None,
            scaling=1.0,
            qk_l2norm=False,
        )
        out = module.norm(mixer.recur(asked).flatten(1).unsqueeze(0))
        return module.out_proj(module.output_gate(hidden_states).sigmoid() * out), None

    return forward


ADAPTERS: Mapping[str, Callable[[Mixer], Callable[..., Any]]] = MappingProxyType(
    {"MiniMaxLightningAttention": _lightning}
)
"""By the class of a module."""
