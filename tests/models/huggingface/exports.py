"""Models of ours that a family can hold, and with random values."""

from configs.knobs import replace
from configs.model import Model
from models.transformer import Transformer
from tests.models import reference

LLAMA = {"width": 32, "depth": 3, "vocab": 48, "attention.heads": 4, "attention.kv_heads": 2, "mlp.width": 24, "mlp.kind": "silu",
         "mlp.gated": True, "rope.theta": 500.0, "norm.eps": 3e-3, "attention.qk_norm.norm.eps": 3e-3}
HEAD, WHOLE = {"attention.qk_norm.kind": "head"}, {"attention.qk_norm.kind": "whole"}
MIXTURE = {"moe.experts": 4, "moe.top_k": 2}
GEMMA = {"norm.placement": "sandwich", "norm.scale": "1+w", "embedding_scale": 32**0.5, "mlp.kind": "gelu_tanh"}
GEMMA_QK = HEAD | {"attention.qk_norm.norm.scale": "1+w"}
YARN = {"rope.scaling.kind": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original": 16, "rope.scaling.beta_fast": 4.0}
GPT_OSS = MIXTURE | YARN | {"attention.sinks": True, "mlp.bias": True, "mlp.kind": "gelu_quick", "mlp.up_offset": 1.0, "mlp.limit": 1.0,
                            "moe.bias": True}
BY_HAND = {"norm.placement": "none", "norm.attention_slots": ("in",), "norm.mlp_slots": ("in",), "norm.final": True}
BIASES = ("q", "k", "v", "out")

EXPRESSED: dict[str, tuple[dict, str]] = {
    "llama": ({}, "llama"),
    "llama, untied": ({"tied": False}, "llama"),
    "llama, placement by hand": (BY_HAND, "llama"),
    "llama, the same change in each layer": ({"pattern": ("mlp.width=40 rope.theta=100.0",)}, "llama"),
    "llama, another activation": ({"mlp.kind": "relu2"}, "llama"),
    "llama, dynamic": ({"rope.scaling.kind": "dynamic", "rope.scaling.factor": 2.0, "rope.scaling.original": 16}, "llama"),
    "mistral": ({"attention.window": 6}, "mistral"),
    "mistral, heads that do not divide the width": ({"attention.heads": 5, "attention.kv_heads": 1, "attention.head_width": 8}, "mistral"),
    "mixtral": (MIXTURE, "mixtral"),
    "mixtral, the width of experts": (MIXTURE | {"moe.width": 16}, "mixtral"),
    "mixtral, as it was trained": (MIXTURE | {"moe.balance": 0.01, "moe.jitter": 0.1, "moe.dispatch": "dense"}, "mixtral"),
    "qwen2": ({"attention.bias": ("q", "k", "v")}, "qwen2"),
    "qwen2, windows": ({"attention.bias": ("q", "k", "v"), "overrides": ("1-2: attention.window=6",)}, "qwen2"),
    "qwen3": (HEAD, "qwen3"),
    "qwen3, windows": (HEAD | {"pattern": ("attention.window=6", "")}, "qwen3"),
    "qwen3_moe": (HEAD | MIXTURE | {"moe.width": 16, "moe.normalise": False}, "qwen3_moe"),
    "qwen3_moe, a dense first layer and windows": (
        HEAD | MIXTURE | {"attention.window": 6, "overrides": ("0: moe.experts=None mlp.width=40",), "moe.width": 16}, "qwen3_moe"),
    "olmo": ({"norm.kind": "layer", "norm.scale": None, "norm.eps": 1e-5, "attention.clip": 1.0}, "olmo"),
    "olmo2": (WHOLE | {"norm.placement": "reordered"}, "olmo2"),
    "olmoe": (WHOLE | MIXTURE | {"moe.normalise": False}, "olmoe"),
    "gemma2": (GEMMA | {"attention.softcap": 2.0, "softcap": 3.0, "attention.window": 6}, "gemma2"),
    "gemma2, no windows, no caps": (GEMMA | {"attention.scale": 20**-0.5}, "gemma2"),
    "gemma3_text": (GEMMA | GEMMA_QK | {"pattern": ("attention.window=6 rope.theta=100.0", "")}, "gemma3_text"),
    "gemma3_text, windows alone": (GEMMA | GEMMA_QK | {"attention.window": 6}, "gemma3_text"),
    "phi3": ({"rope.fraction": 0.5, "attention.window": 6}, "phi3"),
    "gpt_oss": (GPT_OSS | {"pattern": ("attention.window=6", "")}, "gpt_oss"),
    "gpt_oss, no windows": (GPT_OSS | {"attention.bias": BIASES}, "gpt_oss"),
    "minimax_m2": (WHOLE | MIXTURE | {"moe.router": "sigmoid", "moe.selection_bias": True, "rope.fraction": 0.5}, "minimax_m2"),
    "gpt2": ({"norm.kind": "layer", "norm.bias": True, "attention.bias": BIASES, "attention.kv_heads": None, "mlp.bias": True,
              "mlp.kind": "gelu_tanh", "mlp.gated": False, "learned_positions": True, "context": 32, "rope.theta": None}, "gpt2"),
}
"""By name: changes to LLAMA, and the family as which the model is written."""


def of_llama(changes: dict) -> Model:
    return replace(Model(), LLAMA | changes)


def built(case: str) -> tuple[Model, Transformer]:
    """A model and a transformer that holds random values in float32."""
    model = of_llama(EXPRESSED[case][0])
    return model, reference.build(model, "float32")[0]
