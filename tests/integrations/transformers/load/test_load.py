"""What loading a checkpoint says of what it leaves out, and what becomes of a failing backend."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from datetime import datetime, timezone

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnmux.core import ForwardMode, InvalidInput, NoBackend, Offer, Policy, TunedLaunch
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import ANY, BackendCard, Clause, Prior, one_of
from attnmux.core.verbs import Device
from attnmux.transformers import RunnerOptions, SequenceState, load_runner, open_checkpoint
from attnmux.transformers.load.checkpoint import explained
from attnmux.transformers.model.attention import SERVED

CLAUSE = Clause(
    vendor=ANY,
    phase=one_of("extend", "decode"),
    kind=one_of("mha", "mla"),
    **dict.fromkeys(
        ("dtype", "kv_dtype", "page_size", "head_dim", "v_head_dim", "kv_lora_rank"), ANY
    ),
    qk_rope_head_dim=ANY,
)


def offer(name, factory, rank, clause=CLAUSE):
    card = BackendCard(
        name=name,
        summary="for a test",
        factory=factory,
        clauses=(clause,),
        priors=(Prior(rank=rank, source="made up"),),
    )
    return Offer(card=card, plugin="some", distribution="attnmux-some", version="1.0")


GOOD = offer("good", "attnmux.cpu.torch_native:TorchNativeBackend", 90)
BROKEN = offer("broken", "attnmux.cpu.nothing_of_the_kind:Backend", 10)


def load(folder, *offers, **changes):
    warned = []
    given = {"max_batch_size": 2, "max_context_len": 64, "max_total_tokens": 128, **changes}
    runner = load_runner(
        open_checkpoint(folder), probe_cpu(), offers, RunnerOptions(**given), warn=warned.append
    )
    return runner, warned


def test_tensors_that_the_model_does_not_read_are_named(tiny, tmp_path):
    folder = tiny("llama")[1]
    assert not load(folder, GOOD)[1]
    more = shutil.copytree(folder, tmp_path / "more")
    tensors = load_file(more / "model.safetensors")
    for index in range(5):
        tensors[f"adapter.{index}.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, more / "model.safetensors", metadata={"format": "pt"})
    (warning,) = load(more, GOOD)[1]
    assert "adapter.0.weight, adapter.1.weight, adapter.2.weight and 2 more" in warning
    assert str(more) in warning
    with pytest.warns(UserWarning, match=r"adapter\.0\.weight"):
        load_runner(
            open_checkpoint(more),
            probe_cpu(),
            [GOOD],
            RunnerOptions(max_batch_size=2, max_context_len=64, max_total_tokens=128),
        )


def test_the_backend_is_built_with_the_tuned_launches(tiny):
    tuned = TunedLaunch(
        backend="some/good",
        device=Device.of(probe_cpu()),
        versions={},
        subject={"page": 1},
        values={"warps": 4},
        median_us=1.0,
        date=datetime(2026, 5, 1, tzinfo=timezone.utc),
    )
    runner, _ = load(tiny("llama")[1], GOOD, launches=(tuned,))
    assert runner.backend.context.launches == (tuned,)


def test_the_backend_that_verifies_is_either_phase_s(tiny):
    folder = tiny("llama")[1]
    phases = one_of("extend", "decode", "verify")
    clause = replace(CLAUSE, phase=phases, spec_topk=ANY, spec_draft_tokens=ANY)
    offers = [offer(name, GOOD.card.factory, 80, clause) for name in ("good", "other")]
    policy = Policy(prefill_backend="good", decode_backend="other")
    for mode, serves in ((None, "good"), ("prefill", "good"), ("decode", "other")):
        given = {"draft_tokens": 4, "policy": policy, "speculative_attention_mode": mode}
        runner, _ = load(folder, *offers, **given)
        assert runner.decision.phases["verify"].backend == serves
        hybrid = runner.backend
        expected = hybrid.decode if mode == "decode" else hybrid.prefill
        assert hybrid.select(ForwardMode.TARGET_VERIFY) is expected
        assert hybrid.select(ForwardMode.DRAFT_EXTEND) is expected
    with pytest.raises(InvalidInput, match=r"speculative_attention_mode.*one of prefill, decode"):
        load(folder, *offers, draft_tokens=4, speculative_attention_mode="both")
    with pytest.raises(InvalidInput, match=r"draft_tokens with it"):
        load(folder, *offers, speculative_attention_mode="decode")


@pytest.mark.parametrize(
    ("names", "scales"),
    [
        (("k_scale", "v_scale"), (0.5, 0.25)),
        (("k_proj.k_scale", "v_proj.v_scale"), (0.5, 0.25)),
        (("k_proj.output_scale", "v_proj.output_scale"), (0.5, 0.25)),
        (("kv_scale",), (0.5, 0.5)),
    ],
)
def test_the_checkpoint_s_kv_dtype_and_scales_are_used(tiny, tmp_path, names, scales):
    """By the names of compressed-tensors, ModelOpt, Quark and older files."""
    folder = scaled(
        tiny, tmp_path, {n: torch.tensor([s]) for n, s in zip(names, (0.5, 0.25), strict=False)}
    )
    said = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    runner, warnings = load(folder, GOOD)
    assert not warnings
    assert runner.decision.kv_dtype == "fp8_e4m3"
    assert runner.decision.request.origins["kv_dtype"] == "model"
    first, second, _ = runner.context.layers
    assert (first.k_scale, first.v_scale) == scales
    assert second.k_scale is None
    exact, _ = load(folder, GOOD, kv_dtype="float32")
    stored, unscaled = (keys_of_three(each) for each in (runner, exact))
    assert unscaled.abs().max() > 0
    torch.testing.assert_close(stored * scales[0], unscaled, atol=0.01, rtol=0.07)


@pytest.mark.parametrize("mla", ["absorbed", "expanded"])
def test_a_latent_is_stored_by_the_scale_of_k(tiny, tmp_path, mla):
    folder = scaled(tiny, tmp_path, {"k_scale": torch.tensor(0.125)}, "deepseek-v3")
    stored, unscaled = (
        load(folder, GOOD, mla=mla, kv_dtype=dtype)[0] for dtype in ("fp8_e4m3", "float32")
    )
    first, second, *_ = stored.context.layers
    assert first.kind == ("mla" if mla == "absorbed" else "mha")
    assert (first.k_scale, second.k_scale) == (0.125, None)
    ours, exact = keys_of_three(stored) * 0.125, keys_of_three(unscaled)
    torch.testing.assert_close(ours, exact, atol=0.01, rtol=0.07)


def keys_of_three(runner):
    """The first layer's keys of three tokens, as the pool has them."""
    runner.extend([SequenceState(token_ids=[1, 2, 3])])
    return runner.context.token_to_kv_pool.get_key_buffer(0).float()


def test_scales_that_are_not_one_number_a_layer_are_named(tiny, tmp_path):
    folder = scaled(tiny, tmp_path, {"k_scale": torch.tensor([0.5, 0.25])})
    runner, (warning,) = load(folder, GOOD, kv_dtype="fp8_e4m3")
    assert "a scale of 1 there" in warning
    assert "model.layers.0.self_attn.k_scale" in warning
    assert runner.context.layers[0].k_scale is None


def scaled(tiny, tmp_path, scales, name="llama"):
    """A tiny model with these tensors in its first attention."""
    folder = shutil.copytree(tiny(name)[1], tmp_path / "scaled")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": value for name, value in scales.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("architecture", ["llama", "deepseek-v3"])
def test_a_backend_that_cannot_be_built_is_replaced_with_a_warning(tiny, architecture):
    folder = tiny(architecture)[1]
    runner, (warning,) = load(folder, GOOD, BROKEN)
    assert {choice.backend for choice in runner.decision.phases.values()} == {"good"}
    assert "some/broken" in warning
    assert "good" in warning
    runner.extend([SequenceState(token_ids=[1, 2, 3])])


def test_a_backend_that_was_named_is_not_replaced(tiny):
    with pytest.raises(NoBackend, match="nothing_of_the_kind"):
        load(tiny("deepseek-v3")[1], GOOD, BROKEN, policy=Policy(backend="broken"))


def test_a_context_within_the_first_dual_chunk_runs_without_chunks(tiny, tmp_path):
    folder = shutil.copytree(tiny("qwen3")[1], tmp_path / "chunked")
    config = json.loads((folder / "config.json").read_text())
    chunks = {"chunk_size": 8192, "local_size": 1024, "original_max_position_embeddings": 8192}
    config["dual_chunk_attention_config"] = chunks
    (folder / "config.json").write_text(json.dumps(config))
    runner, _ = load(folder, GOOD)
    assert runner.decision.request.kind == "mha"


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..\\x"]
)
def test_a_weight_index_stays_in_its_folder(tiny, run_on, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama")[1], folder)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="inside the folder"):
        run_on(folder)


def test_a_folder_has_no_revision(tiny):
    with pytest.raises(InvalidInput, match="revision"):
        open_checkpoint(tiny("llama")[1], revision="main")


def test_threads_load_in_turn(tiny, run_on):
    folders = [tiny(name)[1] for name in ("llama", "gemma3", "llama", "gpt2")]
    alone = [
        run_on(one, page_size=4).extend([SequenceState(token_ids=[1, 2, 3])]) for one in folders
    ]
    together = [None] * len(folders)

    def load(place):
        runner = run_on(folders[place], page_size=4)
        together[place] = runner.extend([SequenceState(token_ids=[1, 2, 3])])

    threads = [threading.Thread(target=load, args=(place,)) for place in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_a_model_without_our_implementation_in_its_own_table_is_refused_with_that_reason():
    """GIT looks its text layers' classes up by the implementation's name."""
    with pytest.raises(InvalidInput, match="computes attention by itself"), explained("a model"):
        {"eager": None}[SERVED]


def quantised(folder, copy, method=None, dtype=torch.float8_e4m3fn, scale="weight_scale"):
    """The checkpoint with q_proj in codes of 8 bits, as ModelOpt writes them."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        factor = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / factor).to(dtype)
        if scale:
            tensors[name.replace("weight", scale)] = factor
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    if method is not None:
        config = json.loads((copy / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, "quant_algo": "FP8"}
        (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_an_unknown_quantisation_method_is_refused_by_the_config_alone(tiny, tmp_path):
    folder = quantised(tiny("llama")[1], tmp_path / "model", "modelopt")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"quantised by 'modelopt'.*quant_method"):
        open_checkpoint(folder)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "scale", "input_scale"])
def test_float8_weights_with_scales_are_refused_before_they_are_loaded(
    tiny, tmp_path, monkeypatch, scale
):
    folder = quantised(tiny("llama")[1], tmp_path / "model", scale=scale)
    monkeypatch.setattr("torch.nn.Module.to", None)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(InvalidInput, match=f"float8 codes and a scale, .*q_proj.{scale}"):
        load(folder, GOOD)


def test_scales_of_weights_that_nothing_reads_are_refused_whatever_the_codes(tiny, tmp_path):
    """In other files than safetensors, headers do not tell the dtypes."""
    folder = quantised(tiny("llama")[1], tmp_path / "model", dtype=torch.float32)
    with pytest.raises(InvalidInput, match=r"scales that its model does not read: .*weight_scale"):
        load(folder, GOOD)


def test_float8_weights_without_scales_are_read_as_they_are(tiny, tmp_path):
    load(quantised(tiny("llama")[1], tmp_path / "model", scale=None), GOOD)
