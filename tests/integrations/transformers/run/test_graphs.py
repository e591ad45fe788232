"""Latent and cross-attention in decode steps that graphs replay."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from attnmux.core import GraphUnsupported, Offer
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import RunnerOptions, SequenceState, load_runner, open_checkpoint
from attnmux.transformers.load.checkpoint import quiet_transformers

OFFER = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def deepseek():
    # All layers dense: transformers' own loop over experts reads on the host.
    return AutoModelForCausalLM.from_config(
        transformers.DeepseekV3Config(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=40,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            first_k_dense_replace=2,
            max_position_embeddings=64,
            **NO_TOKENS,
        )
    )


def bart():
    return AutoModelForSeq2SeqLM.from_config(
        transformers.BartConfig(
            vocab_size=97,
            d_model=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=32,
            pad_token_id=1,
        )
    )


def load(model, folder):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return load_runner(
        open_checkpoint(folder),
        fake_platform(),
        [OFFER],
        RunnerOptions(max_batch_size=4, max_context_len=32, max_total_tokens=192, page_size=4),
    )


def decode(runner, steps):
    """Logits of steps in which three requests decode, then two of them."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (5, 1, 12)]
    encoders = [torch.randint(3, 97, (1, n), generator=generator) for n in (9, 14, 1)]
    has_encoder = runner.steps.max_encoder_len > 0
    states = [
        SequenceState(
            token_ids=tokens,
            encoder_states=runner.encode({"input_ids": encoder}) if has_encoder else None,
        )
        for tokens, encoder in zip(ids, encoders, strict=True)
    ]
    runner.extend(states)
    logits = []
    for step in range(steps):
        chosen = states if step < 2 else states[:2]
        for state in chosen:
            state.token_ids.append(3 + 7 * len(state.token_ids) % 90)
        logits.append(runner.decode(chosen).clone())
    runner.release(states)
    return logits


@pytest.mark.parametrize("make", [deepseek, bart])
def test_replayed_steps_give_the_logits_of_eager_ones(tmp_path, make):
    torch.manual_seed(0)
    with quiet_transformers(progress=False):
        runner = load(make(), tmp_path)
    eager = decode(runner, 4)
    runner.capture_graphs(batch_sizes=[1, 2, 4], devices=RecordingGraphs())
    replays = []
    replay = runner.graphs.replay

    def counted(batch, inputs, *, size):
        replays.append(batch.batch_size)
        return replay(batch, inputs, size=size)

    runner.graphs.replay = counted
    for ours, theirs in zip(decode(runner, 4), eager, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert replays == [3, 3, 2, 2]
    if make is bart:
        with pytest.raises(GraphUnsupported, match="no pieces of a model with an encoder"):
            runner.capture_pieces(devices=RecordingGraphs())
