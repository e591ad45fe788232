"""The files of EAGLE heads, with the names that their authors and SGLang use.

EAGLE 1 and 2: `fc.weight` [width, 2 * width], perhaps `fc.bias`, and `layers.0.*` as in a Llama
without norms at its ends. EAGLE 3: `fc.weight` [width, layers * the target's width]; `midlayer.*`
as in a Llama, with a `hidden_norm` and with queries, keys and values of 2 * width; `norm`;
`lm_head` of the head's own vocabulary; and `d2t`: added to an id of that vocabulary, it gives the
target's.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from attnmux.core import InvalidInput
from attnmux.transformers.load.checkpoint import at_home, quiet_transformers
from attnmux.transformers.load.quantised import check_method, check_scales
from attnmux.transformers.model.attention import SERVED
from attnmux.transformers.model.eagle_head import Eagle3Head, EagleHead
from attnmux.transformers.model.packed_decoder import PackedDecoder

WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"
FILES = f"the files of an EAGLE head: config.json, and {WEIGHTS} or {PICKLED}"
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""The target's, in EAGLE 1 and 2."""
EAGLE3 = ("midlayer.", "d2t", "t2d")
LAYERS = "eagle_aux_hidden_state_layer_ids"
FEWEST_LAYERS = 7
"""The fewest layers of a target with which the three default ones differ."""


def is_head(folder: str | Path) -> bool:
    """Whether a folder holds an EAGLE head rather than a model."""
    return any(name.startswith(("fc.", *EAGLE3)) for name in _names(at_home(folder)))


def head_folder(source: str, *, progress: bool = False) -> Path | None:
    """The folder of an EAGLE head; None for a model, and for other files.

    source: a folder, or an id on the hub, from where the files of a head are downloaded. progress:
    whether to show that. Raises InvalidInput for files that cannot be read.
    """
    path = at_home(source)
    if path.exists() or path.is_absolute() or source.startswith((".", "~")):
        return path if is_head(path) else None
    with quiet_transformers(progress=progress):
        try:
            config = json.loads(Path(hf_hub_download(source, "config.json")).read_text())
        except (OSError, ValueError):  # `open_checkpoint` tells what is wrong with it
            return None
        # A head has one layer; the weights of other models can wait
        if config.get("num_hidden_layers") != 1:
            return None
        for name in (WEIGHTS, PICKLED):
            with suppress(EntryNotFoundError):
                path = Path(hf_hub_download(source, name)).parent
                return path if is_head(path) else None
    return None


def hidden_layers(folder: str | Path, target: PreTrainedConfig) -> tuple[int, ...]:
    """`RunnerOptions.hidden_layers` for the target of a head: none for EAGLE 1 and 2.

    The head's config.json names them: in `eagle_config` the layers whose outputs are read, as in
    SGLang, or at the top level the layers whose inputs are read, as in vLLM. Without, they are the
    layers before layers 2, n / 2 and n - 3 of n, as of the heads of EAGLE's authors.
    Raises InvalidInput for files of something else, and for layers that the target lacks.
    """
    path = at_home(folder)
    if not any(name.startswith(EAGLE3) for name in _names(path)):
        return ()
    config, num = _config(path), target.get_text_config(decoder=True).num_hidden_layers
    told = (getattr(config, "eagle_config", None) or {}).get(LAYERS)
    inputs = getattr(config, LAYERS, None) if told is None else [number + 1 for number in told]
    if inputs is None:
        if num < FEWEST_LAYERS:
            expected = f"{LAYERS} in the eagle_config of its config.json, for so few layers"
            raise InvalidInput("draft", got=f"{path}, for {num} layers", expected=expected)
        inputs = [2, num // 2, num - 3]
    outputs = tuple(sorted({int(number) - 1 for number in inputs}))
    if not outputs or outputs[0] < 0 or outputs[-1] >= num:
        expected = f"layers of the target: 0 to {num - 1}"
        raise InvalidInput("draft", got=f"{path}, which reads layers {outputs}", expected=expected)
    return outputs


def load_head(folder: str | Path, target: PreTrainedModel | PackedDecoder) -> EagleHead:
    """A head in the target's dtype, on its device.

    Raises InvalidInput for files of something else, for quantised weights, for a target with an
    encoder, and for a head of another width or vocabulary than the target's.
    """
    if isinstance(target, PackedDecoder):
        got = "a head for an encoder-decoder model"
        raise InvalidInput("draft", got=got, expected="a decoder-only model")
    path, config = at_home(folder), target.config.get_text_config(decoder=True)
    tensors, own = _tensors(path), _config(path)
    check_method(str(path), own)
    check_scales(str(path), {name: str(tensor.dtype) for name, tensor in tensors.items()})
    width = getattr(own, "target_hidden_size", None) or own.hidden_size
    for name, stated in (("hidden_size", width), ("vocab_size", own.vocab_size)):
        if stated != getattr(config, name):
            got = f"a head of {name} {stated}"
            expected = f"{getattr(config, name)}, as the target has"
            raise InvalidInput("draft", got=got, expected=expected)
    own._attn_implementation = SERVED
    own.attention_bias = any(name.endswith("q_proj.bias") for name in tensors)
    own.tie_word_embeddings = False
    if own.attention_bias:  # Qwen2's heads have none here, and Llama's module always has it
        for name in [name for name in tensors if name.endswith("o_proj.weight")]:
            rows = tensors[name].new_zeros(len(tensors[name]))
            tensors.setdefault(name.replace("weight", "bias"), rows)
    make = _eagle_3 if any(name.startswith(EAGLE3) for name in tensors) else _eagle_2
    return make(path, own, tensors, target)


def _eagle_2(
    path: Path, own: LlamaConfig, tensors: Mapping[str, torch.Tensor], target: PreTrainedModel
) -> EagleHead:
    head = EagleHead(own, bias="fc.bias" in tensors)
    head.model.embed_tokens = head.lm_head = nn.Identity()
    named = {
        name if name.startswith("fc.") else f"model.{name}": tensor
        for name, tensor in tensors.items()
        if name not in SHARED
    }
    _fill(head, named, path, target)
    head.model.embed_tokens = target.get_input_embeddings()
    head.lm_head = target.get_output_embeddings()
    return head


def _eagle_3(
    path: Path, own: LlamaConfig, tensors: Mapping[str, torch.Tensor], target: PreTrainedModel
) -> EagleHead:
    config = target.config.get_text_config(decoder=True)
    width = len(hidden_layers(path, target.config)) * config.hidden_size
    token_ids = None if "d2t" not in tensors else _token_ids(path, own, tensors["d2t"])
    head = Eagle3Head(own, bias="fc.bias" in tensors, target_width=width, token_ids=token_ids)
    left_out = ["d2t", "t2d"]
    if own.hidden_size == config.hidden_size:
        head.model.embed_tokens = nn.Identity()
        left_out.append("embed_tokens.weight")
        if "lm_head.weight" not in tensors and token_ids is None:
            head.lm_head[1] = nn.Identity()
    renamed = {"norm.weight": "lm_head.0.weight", "lm_head.weight": "lm_head.1.weight"}
    named = {
        renamed.get(name, name.replace("midlayer.", "layers.0.")): tensor
        for name, tensor in tensors.items()
        if name not in left_out
    }
    own_names = ("fc.", "lm_head.")
    named = {n if n.startswith(own_names) else f"model.{n}": named[n] for n in named}
    _fill(head, named, path, target)
    if isinstance(head.model.embed_tokens, nn.Identity):
        head.model.embed_tokens = target.get_input_embeddings()
    if isinstance(head.lm_head[1], nn.Identity):
        head.lm_head[1] = target.get_output_embeddings()
    return head


def _token_ids(path: Path, own: LlamaConfig, offsets: torch.Tensor) -> torch.Tensor:
    """The target's ids of the head's tokens. Raises InvalidInput for others than it has."""
    ids = torch.arange(len(offsets)) + offsets.long()
    if not bool(((ids >= 0) & (ids < own.vocab_size)).all()):
        got = f"{path}, whose d2t leads to tokens {int(ids.min())} to {int(ids.max())}"
        raise InvalidInput("draft", got=got, expected=f"tokens below {own.vocab_size}")
    return ids


def _fill(
    head: EagleHead, named: Mapping[str, torch.Tensor], path: Path, target: PreTrainedModel
) -> None:
    """Give a head its weights, in the target's dtype, on its device. Raises InvalidInput for other
    weights than it has."""
    shapes = {name: weight.shape for name, weight in head.state_dict().items()}
    wrong = shapes.keys() ^ named.keys()
    wrong |= {name for name in shapes.keys() & named if named[name].shape != shapes[name]}
    if wrong:
        got = (
            f"{path}, where {', '.join(sorted(wrong)[:3])} is missing, unknown or of another shape"
        )
        raise InvalidInput("draft", got=got, expected=FILES)
    head.load_state_dict(named)
    nn.Module.to(head, device=target.device, dtype=target.dtype).eval()


def _config(path: Path) -> LlamaConfig:
    """config.json of a head. Raises InvalidInput for one of another layout."""
    with _explained(path), quiet_transformers(progress=False):
        config: LlamaConfig = LlamaConfig.from_pretrained(path)
    if hasattr(config, "speculators_model_type"):
        got = f"{path}, in the layout of the library speculators"
        raise InvalidInput("draft", got=got, expected=FILES)
    return config


def _names(path: Path) -> list[str]:
    """The names of the tensors in a folder, without the prefix "model."; none without files."""
    if (path / WEIGHTS).is_file():
        with _explained(path), safe_open(path / WEIGHTS, framework="pt") as file:
            return [name.removeprefix("model.") for name in file.keys()]  # noqa: SIM118  # no mapping
    return list(_tensors(path)) if (path / PICKLED).is_file() else []


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, by names without the prefix "model."."""
    with _explained(path):
        if (path / WEIGHTS).is_file():
            tensors = load_file(path / WEIGHTS)
        else:
            # Files of old versions of torch cannot be mapped
            file, mmap = path / PICKLED, is_zipfile(path / PICKLED)
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise InvalidInput for files that cannot be read."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise InvalidInput("draft", got=f"{path}: {error}", expected=FILES) from error
