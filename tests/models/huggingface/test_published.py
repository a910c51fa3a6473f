"""The keys of well-known published models: their config.json is read, or refused for the right reason."""

import pytest

from configs.knobs import flatten
from configs.load import UserError
from models.huggingface.families import FAMILIES
from tests.models.huggingface.folders import model_of

BOTH = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.46.0",
        "bos_token_id": 1, "eos_token_id": [2, 3]}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False}


def sizes(width: int, layers: int, heads: int, kv: int | None, hidden: int, vocab: int, context: int, act: str = "silu") -> dict:
    found = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
             "intermediate_size": hidden, "vocab_size": vocab, "max_position_embeddings": context, "hidden_act": act}
    return {key: value for key, value in found.items() if value is not None}


PUBLISHED: dict[str, tuple[dict, dict]] = {
    "GPT-2": ({
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "n_ctx": 1024,
        "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5, "n_special": 0, "vocab_size": 50257,
        "predict_special_tokens": True, "summary_type": "cls_index", "task_specific_params": {"text-generation": {"do_sample": True}}},
        {"mlp.width": 3072, "norm.kind": "layer", "tied": True, "context": 1024, "learned_positions": True}),
    "Llama 3.1 8B": ({
        "model_type": "llama", **sizes(4096, 32, 32, 8, 14336, 128256, 131072), "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": LLAMA3, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "tie_word_embeddings": False},
        {"rope.theta": 5e5, "rope.scaling.kind": "llama3", "rope.scaling.original": 8192, "norm.eps": 1e-5, "tied": False}),
    "Mistral 7B": ({
        "model_type": "mistral", **sizes(4096, 32, 32, 8, 14336, 32000, 32768), "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False}, {"attention.window": 4096, "attention.kv_heads": 8}),
    "Mistral 7B v0.3": ({
        "model_type": "mistral", **sizes(4096, 32, 32, 8, 14336, 32768, 32768), "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "sliding_window": None, "tie_word_embeddings": False}, {"attention.window": None, "rope.theta": 1e6}),
    "Mixtral 8x7B": ({
        "model_type": "mixtral", **sizes(4096, 32, 32, 8, 14336, 32000, 32768), "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02,
        "sliding_window": None},
        {"moe.experts": 8, "moe.top_k": 2, "moe.normalise": True, "tied": False}),
    "Qwen2.5 7B": ({
        "model_type": "qwen2", **sizes(3584, 28, 28, 4, 18944, 152064, 131072), "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_mrope": False,
        "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False},
        {"attention.bias": ("q", "k", "v"), "attention.window": None}),
    "Qwen3 8B": ({
        "model_type": "qwen3", **sizes(4096, 36, 32, 8, 12288, 151936, 40960), "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128,
        "attention_bias": False, "max_window_layers": 36, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False}, {"attention.head_width": 128, "attention.qk_norm.kind": "head"}),
    "Qwen3 30B-A3B": ({
        "model_type": "qwen3_moe", **sizes(2048, 48, 32, 4, 6144, 151936, 40960), "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128,
        "attention_bias": False, "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "rope_scaling": None, "router_aux_loss_coef": 0.001,
        "output_router_logits": False, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False},
        {"moe.experts": 128, "moe.width": 768, "mlp.width": 6144, "attention.head_width": 128}),
    "OLMo 2 7B": ({
        "model_type": "olmo2", **sizes(4096, 32, 32, 32, 11008, 100352, 4096), "rms_norm_eps": 1e-6, "rope_theta": 500000,
        "attention_bias": False, "rope_scaling": None, "tie_word_embeddings": False},
        {"norm.placement": "reordered", "attention.qk_norm.kind": "whole"}),
    "OLMoE 1B-7B": ({
        "model_type": "olmoe", **sizes(2048, 16, 16, 16, 1024, 50304, 4096), "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "clip_qkv": None,
        "attention_bias": False, "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8, "rope_scaling": None,
        "router_aux_loss_coef": 0.01, "output_router_logits": False, "tie_word_embeddings": False},
        {"moe.experts": 64, "moe.normalise": False, "attention.qk_norm.kind": "whole"}),
    "Gemma 2 2B": ({
        "model_type": "gemma2", **sizes(2304, 26, 8, 4, 9216, 256000, 8192, "gelu_pytorch_tanh"), "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "sliding_window": 4096, "attention_bias": False, "cache_implementation": "hybrid"},
        {"tied": True, "softcap": 30.0, "attention.softcap": 50.0, "embedding_scale": 48.0, "pattern": ("attention.window=4096",
                                                                                                     "attention.window=None")}),
    "Gemma 3 1B": ({
        "model_type": "gemma3_text", **sizes(1152, 26, 4, 1, 6912, 262144, 32768, None), "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "head_dim": 256,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 512,
        "sliding_window_pattern": 6, "attention_bias": False, "cache_implementation": "hybrid"}, {"attention.qk_norm.norm.scale": "1+w"}),
    "Phi-3 mini 4k": ({
        "model_type": "phi3", **sizes(3072, 32, 32, 32, 8192, 32064, 4096), "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": None, "original_max_position_embeddings": 4096, "sliding_window": 2047, "attention_bias": False,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "tie_word_embeddings": False}, {"attention.window": 2047}),
    "Phi-4 mini": ({
        "model_type": "phi3", **sizes(3072, 32, 24, 8, 8192, 200064, 131072), "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48}, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096, "sliding_window": 262144, "attention_bias": False, "mlp_bias": False,
        "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "tie_word_embeddings": True},
        {"rope.fraction": 0.75, "rope.scaling.factor": 32.0, "rope.scaling.original": 4096}),
    "gpt-oss 20B": ({
        "model_type": "gpt_oss", **sizes(2880, 24, 64, 8, 2880, 201088, 131072), "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": YARN, "head_dim": 64, "attention_bias": True, "experts_per_token": 4, "num_experts_per_tok": 4,
        "num_local_experts": 32, "initial_context_length": 4096, "sliding_window": 128, "swiglu_limit": 7.0, "output_router_logits": False,
        "router_aux_loss_coef": 0.9, "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False},
        {"attention.sinks": True, "mlp.limit": 7.0, "rope.scaling.truncate": False}),
    "MiniMax-M2": ({
        "model_type": "minimax_m2", **sizes(3072, 62, 48, 8, 1536, 200064, 196608), "rms_norm_eps": 1e-6, "rope_theta": 5000000,
        "head_dim": 128, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8, "attn_type_list": [1] * 62,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
        "qk_norm_type": "per_layer", "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_mtp_modules": 3,
        "use_mtp": True, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "sliding_window": None,
        "router_jitter_noise": 0.0, "router_aux_loss_coef": 0.001, "output_router_logits": False, "tie_word_embeddings": False},
        {"rope.fraction": 0.5, "moe.router": "sigmoid", "attention.qk_norm.kind": "whole"}),
}
"""By model: its keys, and some of the knobs that they mean."""

QUANTIZED = {"gpt-oss 20B": "mxfp4", "MiniMax-M2": "fp8"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    """Every key is understood, and the model is the one that was published."""
    keys, knobs = PUBLISHED[name]
    found = flatten(model_of(BOTH | keys))
    assert {knob: found[knob] for knob in knobs} == knobs


def test_published_models_of_nearly_every_family_are_here():
    """All families but OLMo 1, which was published in a format of its own first."""
    assert FAMILIES.keys() - {keys["model_type"] for keys, _ in PUBLISHED.values()} == {"olmo"}


def test_gemma_3_has_five_local_layers_to_one_global():
    """Layers 5, 11, 17 and 23 see everything at base 1e6; the others a window of 512 at base 1e4."""
    layers = model_of(BOTH | PUBLISHED["Gemma 3 1B"][0]).layers
    assert [i for i, layer in enumerate(layers) if layer.attention.window is None] == [5, 11, 17, 23]
    assert {(layer.attention.window, layer.rope.theta) for layer in layers} == {(512, 1e4), (None, 1e6)}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_refused_by_their_method(name):
    """The published gpt-oss and MiniMax-M2 are quantized: the message says so, and how."""
    with pytest.raises(UserError, match=QUANTIZED[name]):
        model_of(PUBLISHED[name][0] | {"quantization_config": {"quant_method": QUANTIZED[name]}})
