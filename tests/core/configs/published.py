"""The config.json of published models, as far as attention reads it, and what it asks for.

A row: the model, the request in short, and the file's values. In short, "mha 32/8x128" is the kind,
the query and KV heads and the head dim, ":128" the V dim, "w" the keys that a window shows before
a query, "24*(…)" a group of other layers, and "gdn:36" the number of other layers of a kind.
"refused: …" is a part of the reason.
"""
# ruff: noqa: E501  # a line a model

BF, FP = {"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}
S, F = "sliding_attention", "full_attention"


def h(model_type, hidden, heads, kv=None, dim=None, **more):
    """Most models' words."""
    given = {"model_type": model_type, "hidden_size": hidden, "num_attention_heads": heads}
    given |= {} if kv is None else {"num_key_value_heads": kv}
    return given | ({} if dim is None else {"head_dim": dim}) | more


def mla(model_type, heads, **more):
    given = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return {"model_type": model_type, "num_attention_heads": heads, **given, **more}


def v(hidden, heads, **more):
    return {"hidden_size": hidden, "num_attention_heads": heads, **more}


def gpt(model_type, embd, heads, **more):
    return {"model_type": model_type, "n_embd": embd, "n_head": heads, **more}


NO_WINDOW = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}

# fmt: off
ROWS = [
    # Plain decoders
    ("meta-llama/Llama-2-7b-hf", "mha 32/32x128 float16", h("llama", 4096, 32, 32, **FP)),
    ("meta-llama/Llama-3.1-70B", "mha 64/8x128 bfloat16", h("llama", 8192, 64, 8, **BF)),
    ("meta-llama/Llama-3.2-1B", "mha 32/8x64 bfloat16", h("llama", 2048, 32, 8, 64, **BF)),
    ("01-ai/Yi-34B", "mha 56/8x128", h("llama", 7168, 56, 8)),
    ("HuggingFaceTB/SmolLM2-1.7B", "mha 32/32x64", h("llama", 2048, 32, 32)),
    ("HuggingFaceTB/SmolLM3-3B", "mha 16/4x128", h("smollm3", 2048, 16, 4)),
    ("mistralai/Mistral-Nemo-Base-2407", "mha 32/8x128", h("mistral", 5120, 32, 8, 128, sliding_window=None)),
    ("mistralai/Mixtral-8x7B-v0.1", "mha 32/8x128", h("mixtral", 4096, 32, 8, sliding_window=None)),
    ("Qwen/Qwen-7B", "mha 32/32x128", h("qwen", 4096, 32, kv_channels=128)),
    ("Qwen/Qwen1.5-MoE-A2.7B", "mha 16/16x128", h("qwen2_moe", 2048, 16, 16, **NO_WINDOW | {"max_window_layers": 21})),
    ("Qwen/Qwen2.5-0.5B", "mha 14/2x64", h("qwen2", 896, 14, 2, **NO_WINDOW)),
    ("Qwen/Qwen2.5-72B", "mha 64/8x128", h("qwen2", 8192, 64, 8, **NO_WINDOW)),
    ("Qwen/Qwen3-8B", "mha 32/8x128", h("qwen3", 4096, 32, 8, 128, use_sliding_window=False, sliding_window=None)),
    ("Qwen/Qwen3-30B-A3B", "mha 32/4x128", h("qwen3_moe", 2048, 32, 4, 128, use_sliding_window=False, sliding_window=None)),
    ("Qwen/Qwen3-235B-A22B", "mha 64/4x128", h("qwen3_moe", 4096, 64, 4, 128, use_sliding_window=False, sliding_window=None)),
    ("google/gemma-2b", "mha 8/1x256", h("gemma", 2048, 8, 1, 256)),
    ("google/gemma-7b", "mha 16/16x256", h("gemma", 3072, 16, 16, 256)),
    ("microsoft/phi-2", "mha 32/32x80", h("phi", 2560, 32, 32)),
    ("microsoft/phi-4", "mha 40/10x128", h("phi3", 5120, 40, 10, sliding_window=None)),
    ("deepseek-ai/deepseek-moe-16b-base", "mha 16/16x128", h("deepseek", 2048, 16, 16)),
    ("zai-org/chatglm3-6b", "mha 32/2x128 float16", h("chatglm", 4096, 32, kv_channels=128, multi_query_attention=True, multi_query_group_num=2, num_layers=28, **FP)),
    ("zai-org/glm-4-9b-chat", "mha 32/2x128 bfloat16", h("chatglm", 4096, 32, kv_channels=128, multi_query_attention=True, multi_query_group_num=2, num_layers=40, **BF)),
    ("zai-org/GLM-4-9B-0414", "mha 32/2x128", h("glm4", 4096, 32, 2, 128)),
    ("zai-org/GLM-4.5-Air", "mha 96/8x128", h("glm4_moe", 4096, 96, 8, 128)),
    ("baichuan-inc/Baichuan2-7B-Base", "mha 32/32x128", h("baichuan", 4096, 32)),
    ("databricks/dbrx-base", "mha 48/8x128", {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}}),
    ("tiiuae/falcon-7b", "mha 71/1x64", h("falcon", 4544, 71, multi_query=True, alibi=False, new_decoder_architecture=False)),
    ("tiiuae/falcon-40b", "mha 128/8x64", h("falcon", 8192, 128, num_kv_heads=8, multi_query=True, alibi=False, new_decoder_architecture=True)),
    ("openai-community/gpt2", "mha 12/12x64", gpt("gpt2", 768, 12)),
    ("EleutherAI/gpt-j-6b", "mha 16/16x256", gpt("gptj", 4096, 16)),
    ("Salesforce/codegen-2B-mono", "mha 32/32x80", gpt("codegen", 2560, 32)),
    ("EleutherAI/gpt-neox-20b", "mha 64/64x96", h("gpt_neox", 6144, 64)),
    ("bigcode/starcoder", "mha 48/1x128", gpt("gpt_bigcode", 6144, 48, multi_query=True)),
    ("facebook/opt-6.7b", "mha 32/32x128 float16", h("opt", 4096, 32, **FP)),
    ("facebook/xglm-7.5B", "mha 32/32x128", {"model_type": "xglm", "d_model": 4096, "attention_heads": 32, "num_layers": 32}),
    ("internlm/internlm2-7b", "mha 32/8x128", h("internlm2", 4096, 32, 8)),
    ("CohereLabs/c4ai-command-r-v01", "mha 64/64x128", h("cohere", 8192, 64, 64)),
    ("allenai/OLMo-2-1124-7B", "mha 32/32x128", h("olmo2", 4096, 32, 32)),
    ("stabilityai/stablelm-2-1_6b", "mha 32/32x64", h("stablelm", 2048, 32, 32)),
    ("openbmb/MiniCPM-2B-sft-bf16", "mha 36/36x64", h("minicpm", 2304, 36, 36)),
    ("ibm-granite/granite-3.1-8b-base", "mha 32/8x128", h("granite", 4096, 32, 8)),
    ("XiaomiMiMo/MiMo-7B-Base", "mha 32/8x128", h("mimo", 4096, 32, 8, 128)),
    ("LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct", "mha 32/8x128", h("exaone", 4096, 32, 8, 128, num_layers=32)),
    ("ByteDance-Seed/Seed-OSS-36B-Instruct", "mha 80/8x128", h("seed_oss", 5120, 80, 8, 128)),
    ("baidu/ERNIE-4.5-0.3B-PT", "mha 16/2x128", h("ernie4_5", 1024, 16, 2, 128)),
    ("tencent/Hunyuan-A13B-Instruct", "mha 32/8x128", h("hunyuan_v1_moe", 4096, 32, 8, 128)),
    ("Snowflake/snowflake-arctic-base", "mha 56/8x128", h("arctic", 7168, 56, 8)),
    ("xai-org/grok-2", "mha 64/8x128 cap30.0", h("git", 8192, 64, 8, 128, attn_logit_softcapping=30.0)),
    ("swiss-ai/Apertus-8B-2509", "mha 32/8x128", h("apertus", 4096, 32, 8)),
    ("nvidia/Minitron-4B-Base", "mha 24/8x128", h("nemotron", 3072, 24, 8, 128)),
    ("adept/persimmon-8b-base", "mha 64/64x64", h("persimmon", 4096, 64)),
    ("MiniMaxAI/MiniMax-M2", "mha 48/8x128", h("minimax_m2", 3072, 48, 8, 128, attn_type_list=[1] * 62)),
    ("inclusionAI/Ling-mini-2.0", "mha 16/4x128", h("bailing_moe_v2", 2048, 16, 4, 128)),
    # ALiBi
    ("baichuan-inc/Baichuan2-13B-Base", "mha 40/40x128 alibi", h("baichuan", 5120, 40)),
    ("mosaicml/mpt-7b", "mha 32/32x128 alibi", {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "attn_config": {"alibi": True, "attn_type": "multihead_attention"}}),
    ("mosaicml/mpt-30b", "mha 64/64x112 alibi", {"model_type": "mpt", "d_model": 7168, "n_heads": 64, "n_layers": 48, "attn_config": {"alibi": True, "attn_type": "multihead_attention"}}),
    ("replit/replit-code-v1-3b", "mha 32/1x80 alibi", {"model_type": "mpt", "d_model": 2560, "n_heads": 32, "n_layers": 32, "attn_config": {"alibi": True, "attn_type": "multiquery_attention"}}),
    ("replit/replit-code-v1_5-3b", "mha 24/8x128 alibi", {"model_type": "mpt", "d_model": 3072, "n_heads": 24, "n_layers": 32, "attn_config": {"alibi": True, "attn_type": "grouped_query_attention", "kv_n_heads": 8}}),
    ("tiiuae/falcon-rw-1b", "mha 32/32x64 alibi", h("falcon", 2048, 32, multi_query=False, alibi=True)),
    ("bigscience/bloom-7b1", "mha 32/32x128 float16 alibi", {"model_type": "bloom", "n_head": 32, "n_embed": 4096, "n_layer": 30, **FP}),
    ("inceptionai/jais-13b", "mha 40/40x128 alibi", gpt("jais", 5120, 40, position_embedding_type="alibi")),
    ("cerebras/btlm-3b-8k-base", "mha 32/32x80 alibi", gpt("btlm", 2560, 32, position_embedding_type="alibi")),
    # Windows, chunks, sinks and caps
    ("mistralai/Ministral-8B-Instruct-2410", "mha 32/8x128 w32767", h("mistral", 4096, 32, 8, 128, sliding_window=32768)),
    ("microsoft/Phi-3-mini-4k-instruct", "mha 32/32x96 w2046", h("phi3", 3072, 32, 32, sliding_window=2047)),
    ("microsoft/Phi-3-mini-128k-instruct", "mha 32/32x96 w262143", h("phi3", 3072, 32, 32, sliding_window=262144)),
    ("microsoft/Phi-3.5-MoE-instruct", "mha 32/8x128 w131071", h("phimoe", 4096, 32, 8, sliding_window=131072)),
    ("microsoft/Phi-4-mini-instruct", "mha 24/8x128 w262143", h("phi3", 3072, 24, 8, sliding_window=262144)),
    ("google/gemma-2-27b", "mha 32/16x128 w4095 cap50.0", h("gemma2", 4608, 32, 16, 128, sliding_window=4096, attn_logit_softcapping=50.0, num_hidden_layers=46)),
    ("EleutherAI/gpt-neo-2.7B", "mha 20/20x128 w255", {"model_type": "gpt_neo", "hidden_size": 2560, "num_heads": 20, "num_layers": 32, "attention_types": [[["global", "local"], 16]], "window_size": 256}),
    ("bigcode/starcoder2-15b", "mha 48/4x128 w4095", h("starcoder2", 6144, 48, 4, sliding_window=4096)),
    ("CohereLabs/c4ai-command-r7b-12-2024", "mha 32/8x128 w4095", h("cohere2", 4096, 32, 8, 128, sliding_window=4096, sliding_window_pattern=4, num_hidden_layers=32)),
    ("allenai/Olmo-3-1025-7B", "mha 32/32x128 w4095", h("olmo3", 4096, 32, 32, sliding_window=4096, layer_types=[S, S, S, F] * 8)),
    ("LGAI-EXAONE/EXAONE-4.0-32B", "mha 40/8x128 w4095", h("exaone4", 5120, 40, 8, 128, sliding_window=4096, layer_types=[S, S, S, F] * 16)),
    ("openai/gpt-oss-120b", "mha 64/8x64 w127 sinks", h("gpt_oss", 2880, 64, 8, 64, sliding_window=128, layer_types=[S, F] * 18)),
    ("XiaomiMiMo/MiMo-V2-Flash", "mha 64/4x192:128 39*(64/8x192:128 w127 sinks)", h("mimo_v2_flash", 4096, 64, 4, 192, v_head_dim=128, sliding_window=128, swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128, hybrid_layer_pattern=[0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7], num_hidden_layers=48)),
    # Latents
    ("deepseek-ai/DeepSeek-V2", "mla 128/1x192:128 latent512+64", mla("deepseek_v2", 128)),
    ("deepseek-ai/DeepSeek-R1", "mla 128/1x192:128 latent512+64 bfloat16", mla("deepseek_v3", 128, **BF)),
    ("moonshotai/Kimi-K2-Instruct", "mla 64/1x192:128 latent512+64", mla("kimi_k2", 64)),
    ("zai-org/GLM-4.7-Flash", "mla 20/1x256:256 latent512+64", mla("glm4_moe_lite", 20, qk_nope_head_dim=192, v_head_dim=256)),
    ("openbmb/MiniCPM3-4B", "mla 40/1x96:64 latent256+32", h("minicpm3", 2560, 40, 40, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32)),
    ("deepseek-ai/DeepSeek-V3.2", "nsa 128/1x192:128 latent512+64 top2048", mla("deepseek_v32", 128, index_topk=2048, index_n_heads=64, index_head_dim=128)),
    ("zai-org/GLM-5", "nsa 64/1x256:256 latent512+64 top2048", mla("glm_moe_dsa", 64, qk_nope_head_dim=192, v_head_dim=256, index_topk=2048)),
    # Layers without softmax attention
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "mha 16/2x256 gdn:36", h("qwen3_next", 2048, 16, 2, 256, num_hidden_layers=48, full_attention_interval=4, linear_key_head_dim=128, linear_value_head_dim=128)),
    ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "mla 32/1x192:128 latent512+64 kda:20", mla("kimi_linear", 32, num_hidden_layers=27, linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4})),
    ("tiiuae/Falcon-H1-7B-Base", "mha 12/2x128 mamba2:44", h("falcon_h1", 3072, 12, 2, 128, num_hidden_layers=44, mamba_d_state=256, mamba_d_head=64)),
    ("ai21labs/Jamba-v0.1", "mha 32/8x128 mamba1:28", h("jamba", 4096, 32, 8, num_hidden_layers=32, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16)),
    ("ibm-granite/granite-4.0-h-small", "mha 32/8x128 mamba2:36", h("granitemoehybrid", 4096, 32, 8, layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 4] * 4, mamba_d_state=128, mamba_d_head=64)),
    ("ibm-ai-platform/Bamba-9B", "mha 32/8x128 mamba2:29", h("bamba", 4096, 32, 8, num_hidden_layers=32, attn_layer_indices=[9, 18, 27], mamba_d_state=128, mamba_d_head=64)),
    ("nvidia/Nemotron-H-8B-Base-8K", "mha 32/8x128 mamba2:24", h("nemotron_h", 4096, 32, 8, hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", ssm_state_size=128, mamba_head_dim=64)),
    ("LiquidAI/LFM2-1.2B", "mha 32/8x64 conv:10", h("lfm2", 2048, 32, 8, num_hidden_layers=16, full_attn_idxs=[2, 5, 8, 10, 12, 14])),
    ("MiniMaxAI/MiniMax-Text-01", "mha 64/8x128 lightning:70", h("minimax_text_01", 6144, 64, 8, 128, attn_type_list=[*[0] * 7, 1] * 10)),
    ("inclusionAI/Ring-mini-linear-2.0", "mha 16/4x128 lightning:16", h("bailing_moe_linear", 2048, 16, 4, 128, num_hidden_layers=20, layer_group_size=5)),
    ("pfnet/plamo-2-8b", "mha 32/4x128 w2047 mamba2:16", h("plamo2", 4096, 32, 4, num_hidden_layers=32, hidden_size_per_head=128, mamba_step=2, mamba_enabled=True, attention_window_size=2048)),
    ("google/recurrentgemma-2b", "mha 10/1x256 w2047 mamba1:18", h("recurrent_gemma", 2560, 10, 1, 256, num_hidden_layers=26, attention_window_size=2048, block_types=["recurrent", "recurrent", "attention"])),
    # Images and sound
    ("meta-llama/Llama-3.2-11B-Vision", "mha 32/8x128 cross image80", {"model_type": "mllama", "text_config": h("mllama_text_model", 4096, 32, 8, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38]), "vision_config": {"hidden_size": 1280, "attention_heads": 16}}),
    ("meta-llama/Llama-4-Maverick-17B-128E", "mha 40/8x128 chunk8192 image88", {"model_type": "llama4", "text_config": h("llama4_text", 5120, 40, 8, 128, attention_chunk_size=8192, num_hidden_layers=48), "vision_config": v(1408, 16)}),
    ("mistralai/Mistral-Small-3.1-24B-Base-2503", "mha 32/8x128 image64", {"model_type": "mistral3", "text_config": h("mistral", 5120, 32, 8, 128, sliding_window=None), "vision_config": v(1024, 16, head_dim=64)}),
    ("Qwen/Qwen2.5-VL-7B-Instruct", "mha 28/4x128 image80", h("qwen2_5_vl", 3584, 28, 4, vision_config={"hidden_size": 1280, "num_heads": 16}, **NO_WINDOW)),
    ("Qwen/Qwen2-VL-7B-Instruct", "mha 28/4x128 image80", h("qwen2_vl", 3584, 28, 4, vision_config={"embed_dim": 1280, "hidden_size": 3584, "num_heads": 16}, **NO_WINDOW)),
    ("Qwen/Qwen3-VL-8B-Instruct", "mha 32/8x128 image72", {"model_type": "qwen3_vl", "text_config": h("qwen3_vl_text", 4096, 32, 8, 128), "vision_config": {"hidden_size": 1152, "num_heads": 16}}),
    ("Qwen/Qwen2.5-Omni-7B", "mha 28/4x128 image80", {"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen2_5_omni_thinker", "text_config": h("qwen2_5_omni_text", 3584, 28, 4, **NO_WINDOW), "vision_config": {"embed_dim": 1280, "num_heads": 16}}}),
    ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "mha 32/4x128 image72", {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": h("qwen3_omni_moe_text", 2048, 32, 4, 128), "vision_config": {"hidden_size": 1152, "num_heads": 16}}}),
    ("google/gemma-3-27b-it", "mha 32/16x128 w1023 image72", {"model_type": "gemma3", "text_config": h("gemma3_text", 5376, 32, 16, 128, sliding_window=1024, num_hidden_layers=62), "vision_config": v(1152, 16)}),
    ("google/gemma-3n-E4B-it", "mha 8/2x256 w511 image", {"model_type": "gemma3n", "text_config": h("gemma3n_text", 2048, 8, 2, 256, sliding_window=512, layer_types=[S, S, S, S, F] * 7), "vision_config": {"model_type": "gemma3n_vision"}}),
    ("microsoft/Phi-4-multimodal-instruct", "mha 24/8x128 w262143", h("phi4mm", 3072, 24, 8, sliding_window=262144)),
    ("deepseek-ai/deepseek-vl2-tiny", "mha 10/10x128 image", {"model_type": "deepseek_vl_v2", "language_config": h("deepseek_v2", 1280, 10, 10, kv_lora_rank=None, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0, use_mla=False), "vision_config": {"layers": 27, "width": 1152}}),
    ("moonshotai/Kimi-VL-A3B-Instruct", "mla 16/1x192:128 latent512+64 image72", {"model_type": "kimi_vl", "text_config": mla("deepseek_v3", 16), "vision_config": v(1152, 16)}),
    ("OpenGVLab/InternVL2-8B", "mha 32/8x128 image64", {"model_type": "internvl_chat", "llm_config": h("internlm2", 4096, 32, 8), "vision_config": v(1024, 16)}),
    ("openbmb/MiniCPM-V-2_6", "mha 28/4x128 image72", h("minicpmv", 3584, 28, 4, vision_config=v(1152, 16), use_sliding_window=False, sliding_window=131072)),
    ("llava-hf/llava-1.5-7b-hf", "mha 32/32x128 image64", {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": v(1024, 16)}),
    ("google/paligemma-3b-pt-224", "mha 8/1x256 image72", {"model_type": "paligemma", "text_config": h("gemma", 2048, 8, 1), "vision_config": v(1152, 16)}),
    ("stepfun-ai/step3", "mha 64/1x256 image112", {"model_type": "step3_vl", "text_config": h("step3_text", 7168, 64, dim=256, num_attention_groups=1), "vision_config": v(1792, 16)}),
    ("google/flan-t5-xl", "mha 32/32x64 relative cross", {"model_type": "t5", "num_heads": 32, "d_model": 2048, "d_kv": 64, "is_encoder_decoder": True}),
    ("facebook/bart-large-cnn", "mha 16/16x64 cross", {"model_type": "bart", "d_model": 1024, "decoder_attention_heads": 16, "is_encoder_decoder": True}),
    ("facebook/m2m100_418M", "mha 16/16x64 cross", {"model_type": "m2m_100", "d_model": 1024, "decoder_attention_heads": 16, "is_encoder_decoder": True}),
    # Encoders
    ("google-bert/bert-base-uncased", "mha 12/12x64 encoder64", h("bert", 768, 12)),
    ("BAAI/bge-m3", "mha 16/16x64 encoder64", h("xlm-roberta", 1024, 16)),
    ("Alibaba-NLP/gte-base-en-v1.5", "mha 12/12x64 encoder64", h("new", 768, 12)),
    ("Alibaba-NLP/gte-Qwen2-7B-instruct", "mha 28/4x128 encoder128", h("qwen2", 3584, 28, 4, is_causal=False, **NO_WINDOW)),
    ("EuroBERT/EuroBERT-210m", "mha 12/12x64 encoder64", h("eurobert", 768, 12, 12)),
    ("nomic-ai/nomic-embed-text-v1.5", "mha 12/12x64 encoder64", gpt("nomic_bert", 768, 12)),
    ("facebook/dinov3-vits16-pretrain-lvd1689m", "mha 6/6x64 encoder64", h("dinov3_vit", 384, 6)),
    ("facebook/wav2vec2-base", "mha 12/12x64 encoder64", h("wav2vec2", 768, 12)),
    ("google/siglip-so400m-patch14-384", "mha 16/16x72 encoder72", {"model_type": "siglip", "text_config": h("siglip_text_model", 1152, 16), "vision_config": v(1152, 16)}),
    # What no request expresses
    ("microsoft/Phi-3-small-8k-instruct", "refused: blocks of keys", h("phi3small", 4096, 32, 8)),
    ("microsoft/Phi-4-mini-flash-reasoning", "refused: differences of two softmaxes", h("phi4flash", 2560, 40, 20)),
    ("google/embeddinggemma-300m", "refused: windows in both directions", h("gemma3_text", 768, 3, 1, 256, use_bidirectional_attention=True, sliding_window=512, num_hidden_layers=24)),
    ("answerdotai/ModernBERT-base", "refused: windows in both directions", h("modernbert", 768, 12)),
    ("allenai/longformer-base-4096", "refused: windows in both directions and tokens", h("longformer", 768, 12)),
    ("microsoft/deberta-v3-base", "refused: relative position biases", h("deberta-v2", 768, 12)),
    ("state-spaces/mamba-2.8b-hf", "refused: 64 mamba1 layers and no attention", {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64}),
    ("xlnet/xlnet-base-cased", "refused: tokens that see later ones", {"model_type": "xlnet", "d_model": 768, "n_head": 12}),
]
# fmt: on
