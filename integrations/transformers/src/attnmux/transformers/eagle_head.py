"""EAGLE heads: one decoder layer that drafts from a target model's hidden states.

A head (EAGLE, arXiv:2401.15077) joins the embedding of each token with the target's last hidden
state of the token before it. Its own output takes that state's place in later drafts.
Embeddings and output embeddings are the target's. Files are those of EAGLE 1 and 2: `fc.weight`
[width, 2 * width], perhaps `fc.bias`, and `layers.N.*` as in a Llama without norms at its ends.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnmux.core import InvalidInput
from attnmux.transformers.attention import SERVED
from attnmux.transformers.checkpoint import quiet_transformers
from attnmux.transformers.encoder_decoder import PackedDecoder

WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"
FILES = f"the files of an EAGLE 1 or 2 head: config.json, and {WEIGHTS} or {PICKLED}"
SHARED = ("embed_tokens.weight", "lm_head.weight")
EAGLE3 = ("midlayer.", "d2t", "t2d")


class EagleHead(LlamaForCausalLM):
    """A head as a model of the engine. `features`: [T, width], the states that its tokens join."""

    def __init__(self, config: LlamaConfig, *, bias: bool) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        # The target's states are normed already, and so are those that the head imitates
        self.model.layers[0].input_layernorm = nn.Identity()
        self.model.norm = nn.Identity()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **given: Any,  # noqa: ANN401  # as transformers calls its models
    ) -> CausalLMOutputWithPast:
        """Without features, zeros take their place: how the layers of the head are recorded."""
        output: CausalLMOutputWithPast = super().forward(
            inputs_embeds=self.join(input_ids, None if features is None else features.unsqueeze(0)),
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            **given,
        )
        return output

    def join(self, input_ids: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        """[B, T, width]: what the layer reads of tokens [B, T] and the states before them."""
        embeds = self.model.embed_tokens(input_ids)
        before = torch.zeros_like(embeds) if features is None else features.to(embeds.dtype)
        joined: torch.Tensor = self.fc(torch.cat([embeds, before], dim=-1))
        return joined


def is_head(folder: str | Path) -> bool:
    """Whether a folder holds an EAGLE head rather than a model."""
    path = Path(folder).expanduser()
    if (path / WEIGHTS).is_file():
        with _explained(path), safe_open(path / WEIGHTS, framework="pt") as file:
            names = list(file.keys())
    elif (path / PICKLED).is_file():
        names = list(_tensors(path))
    else:
        return False
    return any(name.removeprefix("model.").startswith(("fc.", *EAGLE3)) for name in names)


def load_head(folder: str | Path, target: PreTrainedModel | PackedDecoder) -> EagleHead:
    """A head in the target's dtype, on its device.

    Raises InvalidInput for files of something else, for EAGLE 3, for a target with an encoder, and
    for a head of another width or vocabulary than the target's.
    """
    if isinstance(target, PackedDecoder):
        got = "a head for an encoder-decoder model"
        raise InvalidInput("draft", got=got, expected="a decoder-only model")
    path, config = Path(folder).expanduser(), target.config.get_text_config(decoder=True)
    tensors = _tensors(path)
    if any(name.startswith(EAGLE3) for name in tensors):
        got = f"{path}, of EAGLE 3, which reads several layers of the target"
        raise InvalidInput("draft", got=got, expected="an EAGLE 1 or 2 head")
    with quiet_transformers(progress=False):
        own = LlamaConfig.from_pretrained(path)
    for name in ("hidden_size", "vocab_size"):
        if getattr(own, name) != getattr(config, name):
            got = f"a head of {name} {getattr(own, name)}"
            expected = f"{getattr(config, name)}, as the target has"
            raise InvalidInput("draft", got=got, expected=expected)
    own._attn_implementation = SERVED
    own.attention_bias = any(name.endswith("q_proj.bias") for name in tensors)
    if own.attention_bias:  # Qwen2's heads have none here, and Llama's module always has it
        for name in [name for name in tensors if name.endswith("o_proj.weight")]:
            rows = tensors[name].new_zeros(len(tensors[name]))
            tensors.setdefault(name.replace("weight", "bias"), rows)
    head = EagleHead(own, bias="fc.bias" in tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in SHARED}
    named = {name if name.startswith("fc.") else f"model.{name}": kept[name] for name in kept}
    wanted = {
        name
        for name in head.state_dict()
        if not name.removeprefix("model.").startswith(("embed_tokens.", "lm_head."))
    }
    wrong = wanted ^ named.keys()
    shapes = head.state_dict()
    wrong |= {name for name in wanted & named.keys() if named[name].shape != shapes[name].shape}
    if wrong:
        got = f"{path}, where {', '.join(sorted(wrong)[:3])} is missing, unknown or of other shape"
        raise InvalidInput("draft", got=got, expected=FILES)
    head.load_state_dict(named, strict=False)
    nn.Module.to(head, device=target.device, dtype=target.dtype).eval()
    head.model.embed_tokens = target.get_input_embeddings()
    head.lm_head = target.get_output_embeddings()
    return head


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, by names without the prefix "model."."""
    with _explained(path):
        if (path / WEIGHTS).is_file():
            found = load_file(path / WEIGHTS)
        else:
            # Files of old versions of torch cannot be mapped
            file, mmap = path / PICKLED, is_zipfile(path / PICKLED)
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise InvalidInput for files that cannot be read."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise InvalidInput("draft", got=f"{path}: {error}", expected=FILES) from error
