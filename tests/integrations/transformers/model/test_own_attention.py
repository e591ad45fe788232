"""Models that compute attention in their own code, led through AttentionInterface by adapters."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.core import InvalidInput, Plugins
from attnmux.core.find.cpu import probe_cpu
from attnmux.transformers import RunnerOptions, SequenceState, load_runner, open_checkpoint
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model.own_attention import ADAPTERS, adapt, has_adapter
from attnmux.transformers.model.unserved_attention import UNSERVED, check_own_attention

ROOT = Path(__file__).resolve().parents[4]
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": 97}
FALCON = {**NO_TOKENS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GPT = {**NO_TOKENS, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
MAKERS = {
    "bloom": lambda: transformers.BloomConfig(**NO_TOKENS, hidden_size=48, n_layer=3, n_head=6),
    "codegen": lambda: transformers.CodeGenConfig(**GPT, rotary_dim=8),
    "falcon-7b": lambda: transformers.FalconConfig(**FALCON, multi_query=True),
    "falcon-rw": lambda: transformers.FalconConfig(
        **FALCON, multi_query=False, alibi=True, parallel_attn=False, bias=True
    ),
    "falcon-40b": lambda: transformers.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    "gpt-j": lambda: transformers.GPTJConfig(**GPT, rotary_dim=8),
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        **NO_TOKENS,
        hidden_size=48,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=5,
        max_position_embeddings=128,
    ),
    "gpt-neox-japanese": lambda: transformers.GPTNeoXJapaneseConfig(
        **NO_TOKENS, hidden_size=48, num_hidden_layers=3, num_attention_heads=4
    ),
    "mpt": lambda: transformers.MptConfig(
        **NO_TOKENS, d_model=48, n_layers=3, n_heads=6, attn_config={"clip_qkv": 1.5}
    ),
}
BERT = {**NO_TOKENS, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT |= {"is_decoder": True, "intermediate_size": 48, "max_position_embeddings": 128}
BART = {**NO_TOKENS, "d_model": 48, "decoder_layers": 3, "decoder_attention_heads": 4}
BART |= {"decoder_ffn_dim": 48, "max_position_embeddings": 128}
MAKERS |= {
    "big-bird": lambda: transformers.BigBirdConfig(**BERT, attention_type="original_full"),
    "doge": lambda: transformers.DogeConfig(
        **{**BERT, "is_decoder": False}, num_key_value_heads=2, head_dim=8, keep_window_size=64
    ),
    "git": lambda: transformers.GitConfig(**BERT),
    "megatron-bert": lambda: transformers.MegatronBertConfig(**BERT),
    "mvp": lambda: transformers.MvpConfig(**BART),
    "openai-gpt": lambda: transformers.OpenAIGPTConfig(**GPT),
    "rembert": lambda: transformers.RemBertConfig(
        **BERT, input_embedding_size=16, output_embedding_size=24
    ),
    "roformer": lambda: transformers.RoFormerConfig(**BERT, rotary_value=False),
    "roformer-turns-v": lambda: transformers.RoFormerConfig(**BERT, rotary_value=True),
    "trocr": lambda: transformers.TrOCRConfig(**BART),
    "xglm": lambda: transformers.XGLMConfig(
        **NO_TOKENS, d_model=48, num_layers=3, attention_heads=4, ffn_dim=48
    ),
    "xlm": lambda: transformers.XLMConfig(
        **{"vocab_size": 98, "emb_dim": 48, "n_layers": 3, "n_heads": 4},
        **{"causal": True, "pad_index": 97, "max_position_embeddings": 128},
    ),
}
ALIBI = {"bloom", "falcon-rw", "mpt"}
KV_HEADS = {"bloom": 6, "doge": 2, "mpt": 6, "falcon-7b": 1, "falcon-40b": 2}
PROMPT_LENS = (13, 1, 33)
NUM_DECODED = 4


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.turns(10)
def test_logits_are_those_of_eager_attention(tmp_path, name, page_size):
    torch.manual_seed(0)
    with quiet_transformers(progress=False):
        # transformers' eager Falcon adds its biases twice: with the mask, and before it scales
        how = "sdpa" if name == "falcon-rw" else "eager"
        model = AutoModelForCausalLM.from_config(MAKERS[name](), attn_implementation=how).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        model.save_pretrained(tmp_path)
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_native"]
    options = RunnerOptions(
        max_batch_size=3, max_context_len=64, max_total_tokens=192, page_size=page_size, debug=True
    )
    runner = load_runner(open_checkpoint(tmp_path), probe_cpu(), offers, options)
    request = runner.decision.request
    assert request.alibi == (name in ALIBI)
    assert request.num_kv_heads == KV_HEADS.get(name, 4)
    assert request.sliding_window == (4 if name == "gpt-neo" else None)
    sequences = [torch.randint(97, (n + NUM_DECODED,)).tolist() for n in PROMPT_LENS]
    with torch.inference_mode():
        theirs = [model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences]
    states = [
        SequenceState(token_ids=ids[:n]) for ids, n in zip(sequences, PROMPT_LENS, strict=True)
    ]
    runner.extend([states[0], states[2]], [7, 20])
    ours = runner.extend(states)
    for step in range(NUM_DECODED + 1):
        wanted = [each[n - 1 + step] for each, n in zip(theirs, PROMPT_LENS, strict=True)]
        spread = float(torch.stack(wanted).std())
        torch.testing.assert_close(ours, torch.stack(wanted), atol=2e-4 * spread, rtol=0)
        if step < NUM_DECODED:
            for state, ids in zip(states, sequences, strict=True):
                state.token_ids.append(ids[len(state.token_ids)])
            ours = runner.decode(states)


def test_a_model_around_a_decoder_of_transformers_is_served(tmp_path):
    """DeepSeek-VL's own class does not say that its Llama calls the interface."""
    torch.manual_seed(0)
    text = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 97}
    text |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    tower = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    tower |= {"intermediate_size": 16, "image_size": 32, "patch_size": 16}
    config = transformers.DeepseekVLConfig(text_config=text, vision_config=tower)
    model = transformers.DeepseekVLForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    options = RunnerOptions(max_batch_size=3, max_context_len=64, max_total_tokens=192)
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_native"]
    runner = load_runner(open_checkpoint(tmp_path), probe_cpu(), offers, options)
    sequences = [torch.randint(97, (n,)).tolist() for n in PROMPT_LENS]
    ours = runner.extend([SequenceState(token_ids=ids) for ids in sequences])
    with torch.inference_mode():
        theirs = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in sequences]
    torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-4, rtol=0)


def test_a_module_that_imports_everything_from_transformers_is_no_xlm(monkeypatch):
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(module, "XLMModel", transformers.XLMModel, raising=False)
    check_own_attention(module.LlamaForCausalLM, transformers.LlamaConfig())


def test_every_adapter_s_class_exists():
    known = [
        *transformers.MODEL_FOR_CAUSAL_LM_MAPPING.values(),
        *transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.values(),
        *transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING.values(),
    ]
    files = {one.__module__ for one in known if isinstance(one, type) and has_adapter(one)}
    beside = {name for file in files for name in vars(importlib.import_module(file))}
    assert beside.issuperset(ADAPTERS)
    assert not has_adapter(transformers.LlamaForCausalLM)


def test_every_class_that_we_know_by_name_exists(monkeypatch):
    """In the installed release; `nox -s engines` asks all supported ones."""
    monkeypatch.syspath_prepend(ROOT)
    classes = importlib.import_module("tools.installs.classes")
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    assert not classes.missing(transformers.__version__, [file.read_text() for file in files])


def test_a_function_that_transformers_renamed_is_an_error(monkeypatch):
    model = AutoModelForCausalLM.from_config(MAKERS["gpt-neo"]())
    monkeypatch.delattr(type(model.transformer.h[0].attn.attention), "_attn")
    with pytest.raises(InvalidInput, match=r"GPTNeoSelfAttention\._attn"):
        adapt(model)


UNSERVABLE = {
    "cpmant": (lambda: transformers.CpmAntConfig(), "each token sees later ones"),
    "prophetnet": (
        lambda: transformers.ProphetNetConfig(is_decoder=True, is_encoder_decoder=False),
        "a bias by distance that depends on the query",
    ),
    "reformer": (
        lambda: transformers.ReformerConfig(is_decoder=True),
        "hashed to a query's bucket",
    ),
    "xlm": (lambda: transformers.XLMConfig(), "each token sees later ones.*causal=False"),
    "xlnet": (lambda: transformers.XLNetConfig(d_model=32, n_head=2), "each token sees later ones"),
}


@pytest.mark.parametrize("name", UNSERVABLE)
def test_others_are_refused_with_the_reason(tmp_path, name):
    config, words = UNSERVABLE[name]
    config().save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.transformers("5.23")  # earlier ones lack some of these
def test_every_class_with_a_reason_exists():
    mappings = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    files = {one.__module__ for mapping in mappings for one in mapping.values()}
    beside = {name for file in files for name in vars(importlib.import_module(file))}
    assert beside.issuperset(UNSERVED)


def test_a_padding_token_in_a_text_of_xlm_counts(tmp_path):
    """transformers takes it for the end of the text, unless it gets a mask."""
    config = MAKERS["xlm"]()
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    options = RunnerOptions(max_batch_size=3, max_context_len=64, max_total_tokens=192)
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_native"]
    runner = load_runner(open_checkpoint(tmp_path), probe_cpu(), offers, options)
    ids = [5, config.pad_index, 7, 9]
    ours = runner.extend([SequenceState(token_ids=ids)])
    given = torch.tensor([ids])
    with torch.inference_mode():
        theirs = model(input_ids=given, attention_mask=torch.ones_like(given)).logits[:, -1]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
