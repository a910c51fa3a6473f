"""The FAMILIES table: for each architecture of the reference library its config keys and weight names, read in both directions.

A family that is new is a new row: what holds in all of its models, its keys, its tensors. Nothing in the model knows of families.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from models.huggingface.keys import COMMON, Config, Knobs, Row, choice, derived, inverse_square_root, only, same, unused
from models.huggingface.layers import FULL, SLIDING, dense_layers, one_of, positions
from models.huggingface.weights import Weight


@dataclass(frozen=True)
class Family:
    """`always`: knobs that every model of the family has; `optional`: a prefix that some files leave out; `buffers`: tensors that hold
    no parameter, as regular expressions."""

    architecture: str
    always: Knobs
    keys: tuple[Row, ...]
    weights: tuple[Weight, ...]
    optional: str = "model."
    buffers: tuple[str, ...] = field(default=(r".*rotary_emb\.inv_freq",))


SILU = {"silu": "silu", "swish": "silu"}
GELUS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu"}

RMS = {"norm.kind": "rms", "norm.scale": "w", "norm.scale_cast": "after"}
QK_RMS = {"attention.qk_norm.norm.kind": "rms", "attention.qk_norm.norm.scale_cast": "after"}
GATED = {"mlp.gated": True}

SIZES = (
    same("hidden_size", "width"),
    same("num_hidden_layers", "depth"),
    same("num_attention_heads", "attention.heads"),
    same("num_key_value_heads", "attention.kv_heads", default=None),
)
MLP_WIDTH, HEAD_WIDTH = same("intermediate_size", "mlp.width"), same("head_dim", "attention.head_width", default=None)
EPS, EPS_QK = same("rms_norm_eps", "norm.eps"), same("rms_norm_eps", "norm.eps", "attention.qk_norm.norm.eps")
ACTIVATION = choice("hidden_act", "mlp.kind", SILU, default="silu")
BIASES = {True: ("q", "k", "v", "out"), False: ()}
BIASED = choice("attention_bias", "attention.bias", BIASES, default=False)


def norm(name: str, path: str) -> tuple[Weight, ...]:
    return tuple(Weight(f"{name}.{theirs}", (f"{path}.{ours}",), "flat") for theirs, ours in (("weight", "scale"), ("bias", "bias")))


def linear(name: str, *paths: str, form: str = "linear") -> tuple[Weight, ...]:
    """A layer's weight and bias, of one projection or of several fused ones."""
    return (Weight(f"{name}.weight", tuple(f"{path}.weight" for path in paths), form),
            Weight(f"{name}.bias", tuple(f"{path}.bias" for path in paths), "flat"))


LAYER = "model.layers.{layer}."
FRAME = (Weight("model.embed_tokens.weight", ("embed",), "same"), *norm("model.norm", "norm"), Weight("lm_head.weight", ("head.weight",)))
ATTENTION = tuple(row for theirs, ours in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out"))
                  for row in linear(f"{LAYER}self_attn.{theirs}", f"attention.{ours}"))
QK_NORM = (*norm(f"{LAYER}self_attn.q_norm", "attention.q_norm"), *norm(f"{LAYER}self_attn.k_norm", "attention.k_norm"))
MLP = tuple(row for theirs, ours in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))
            for row in linear(f"{LAYER}mlp.{theirs}", f"mlp.{ours}"))
PRE_NORMS = (*norm(f"{LAYER}input_layernorm", "attention_residual.norm_in"),
             *norm(f"{LAYER}post_attention_layernorm", "mlp_residual.norm_in"))
SANDWICH_NORMS = (*norm(f"{LAYER}input_layernorm", "attention_residual.norm_in"),
                  *norm(f"{LAYER}post_attention_layernorm", "attention_residual.norm_branch"),
                  *norm(f"{LAYER}pre_feedforward_layernorm", "mlp_residual.norm_in"),
                  *norm(f"{LAYER}post_feedforward_layernorm", "mlp_residual.norm_branch"))
REORDERED_NORMS = (*norm(f"{LAYER}post_attention_layernorm", "attention_residual.norm_branch"),
                   *norm(f"{LAYER}post_feedforward_layernorm", "mlp_residual.norm_branch"))
LLAMA = (*FRAME, *ATTENTION, *MLP, *PRE_NORMS)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """A router and experts with a tensor each."""
    of = lambda theirs, ours: Weight(f"{LAYER}{block}.experts.{{expert}}.{theirs}.weight", (f"mlp.{ours}",))
    return Weight(f"{LAYER}{block}.gate.weight", ("mlp.router.weight",)), of(gate, "gate"), of(up, "up"), of(down, "down")


def mixture(width_key: str | None, *rows: Row) -> tuple[Row, ...]:
    return same("num_experts_per_tok", "moe.top_k"), *([] if width_key is None else [same(width_key, "moe.width")]), *rows


def alternating(first: str, second: str) -> Callable[[int], str]:
    return lambda layer: second if layer % 2 else first


def gpt2_positions(config: Config) -> Knobs:
    return {"context": config["n_positions"], "learned_positions": True, "rope.theta": None}


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"norm.kind": "layer", "norm.bias": True, "attention.bias": ("q", "k", "v", "out"), "mlp.bias": True},
        (*COMMON, same("n_embd", "width"), same("n_layer", "depth"), same("n_head", "attention.heads"),
         derived(lambda config: {"mlp.width": config.get("n_inner") or 4 * config["n_embd"]}, "n_inner",
                 write=lambda model: {"n_inner": model.mlp.width}),
         derived(gpt2_positions, "n_positions", "n_ctx", write=lambda model: {"n_positions": model.context}),
         same("layer_norm_epsilon", "norm.eps"), choice("activation_function", "mlp.kind", GELUS, default="gelu_new"),
         only("scale_attn_weights", True), only("scale_attn_by_inverse_layer_idx", False), only("add_cross_attention", False),
         unused("reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
                "summary_use_proj", "task_specific_params")),
        (Weight("transformer.wte.weight", ("embed",), "same"), Weight("transformer.wpe.weight", ("positions",), "same"),
         *norm("transformer.ln_f", "norm"), Weight("lm_head.weight", ("head.weight",)),
         *norm("transformer.h.{layer}.ln_1", "attention_residual.norm_in"), *norm("transformer.h.{layer}.ln_2", "mlp_residual.norm_in"),
         *linear("transformer.h.{layer}.attn.c_attn", "attention.q", "attention.k", "attention.v", form="conv1d"),
         *linear("transformer.h.{layer}.attn.c_proj", "attention.out", form="conv1d"),
         *linear("transformer.h.{layer}.mlp.c_fc", "mlp.up", form="conv1d"),
         *linear("transformer.h.{layer}.mlp.c_proj", "mlp.down", form="conv1d")),
        "transformer.", (r".*attn\.(bias|masked_bias)",)),
    "llama": Family("LlamaForCausalLM", RMS | GATED, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS, ACTIVATION, BIASED, same("mlp_bias", "mlp.bias", default=False), positions(),
        unused("pretraining_tp")), LLAMA),
    "mistral": Family("MistralForCausalLM", RMS | GATED, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS, ACTIVATION, positions(windows=True)), LLAMA),
    "mixtral": Family("MixtralForCausalLM", RMS | GATED, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS, ACTIVATION, positions(windows=True),
        *mixture(None, same("num_local_experts", "moe.experts")),
        unused("router_jitter_noise")),
        (*FRAME, *ATTENTION, *PRE_NORMS, *experts("block_sparse_moe", "w1", "w3", "w2"))),
    "qwen2": Family("Qwen2ForCausalLM", RMS | GATED | {"attention.bias": ("q", "k", "v")}, (
        *COMMON, *SIZES, MLP_WIDTH, EPS, ACTIVATION, positions(windows=True), unused("use_mrope")), LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", RMS | QK_RMS | GATED | {"attention.qk_norm.kind": "head"}, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS_QK, ACTIVATION, BIASED, positions(windows=True)), (*LLAMA, *QK_NORM)),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", RMS | QK_RMS | GATED | {"attention.qk_norm.kind": "head"}, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS_QK, ACTIVATION, BIASED, positions(windows=True),
        *mixture("moe_intermediate_size", dense_layers(), same("norm_topk_prob", "moe.normalise", default=False))),
        (*LLAMA, *QK_NORM, *experts("mlp", "gate_proj", "up_proj", "down_proj"))),
    "olmo": Family("OlmoForCausalLM", GATED | {"norm.kind": "layer", "norm.scale": None, "norm.eps": 1e-5}, (
        *COMMON, *SIZES, MLP_WIDTH, ACTIVATION, BIASED, same("clip_qkv", "attention.clip", default=None), positions()), LLAMA),
    "olmo2": Family("Olmo2ForCausalLM", RMS | QK_RMS | GATED | {
        "norm.placement": "reordered", "norm.scale_cast": "before", "attention.qk_norm.kind": "whole",
        "attention.qk_norm.norm.scale_cast": "before"}, (
        *COMMON, *SIZES, MLP_WIDTH, EPS_QK, ACTIVATION, BIASED, positions()),
        (*FRAME, *ATTENTION, *QK_NORM, *MLP, *REORDERED_NORMS)),
    "olmoe": Family("OlmoeForCausalLM", RMS | QK_RMS | GATED | {"attention.qk_norm.kind": "whole"}, (
        *COMMON, *SIZES, MLP_WIDTH, EPS_QK, ACTIVATION, BIASED, same("clip_qkv", "attention.clip", default=None), positions(),
        *mixture(None, same("num_experts", "moe.experts"), same("norm_topk_prob", "moe.normalise", default=False))),
        (*FRAME, *ATTENTION, *QK_NORM, *PRE_NORMS, *experts("mlp", "gate_proj", "up_proj", "down_proj"))),
    "gemma2": Family("Gemma2ForCausalLM", RMS | GATED | {
        "norm.placement": "sandwich", "norm.scale": "1+w", "norm.scale_cast": "before"}, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS, choice("hidden_activation", "mlp.kind", GELUS, default="gelu_pytorch_tanh"), BIASED,
        unused("hidden_act"), same("attn_logit_softcapping", "attention.softcap", default=None),
        same("final_logit_softcapping", "softcap", default=None), inverse_square_root("query_pre_attn_scalar", "attention.scale"),
        derived(lambda config: {"embedding_scale": config["hidden_size"] ** 0.5}), only("use_bidirectional_attention", None, False),
        positions(windows=True, default=alternating(SLIDING, FULL))), (*FRAME, *ATTENTION, *MLP, *SANDWICH_NORMS)),
    "gemma3_text": Family("Gemma3ForCausalLM", RMS | QK_RMS | GATED | {
        "norm.placement": "sandwich", "norm.scale": "1+w", "norm.scale_cast": "before", "attention.qk_norm.kind": "head",
        "attention.qk_norm.norm.scale": "1+w", "attention.qk_norm.norm.scale_cast": "before"}, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS_QK, choice("hidden_activation", "mlp.kind", GELUS, default="gelu_pytorch_tanh"), BIASED,
        unused("hidden_act"), same("attn_logit_softcapping", "attention.softcap", default=None),
        same("final_logit_softcapping", "softcap", default=None), inverse_square_root("query_pre_attn_scalar", "attention.scale"),
        derived(lambda config: {"embedding_scale": config["hidden_size"] ** 0.5}), only("use_bidirectional_attention", False, None),
        positions(windows=True, default=lambda layer: SLIDING if (layer + 1) % 6 else FULL, local_rope=True, theta=1e6)),
        (*FRAME, *ATTENTION, *QK_NORM, *MLP, *SANDWICH_NORMS)),
    "phi3": Family("Phi3ForCausalLM", RMS | GATED, (
        *COMMON, *SIZES, MLP_WIDTH, EPS, ACTIVATION, positions(windows=True, partly=True), only("attention_bias", False)), (
        *FRAME, *linear(f"{LAYER}self_attn.qkv_proj", "attention.q", "attention.k", "attention.v"),
        *linear(f"{LAYER}self_attn.o_proj", "attention.out"), *linear(f"{LAYER}mlp.gate_up_proj", "mlp.gate", "mlp.up"),
        *linear(f"{LAYER}mlp.down_proj", "mlp.down"), *PRE_NORMS)),
    "gpt_oss": Family("GptOssForCausalLM", RMS | GATED | {
        "norm.scale_cast": "before", "attention.sinks": True, "mlp.bias": True, "mlp.kind": "gelu_quick", "mlp.up_offset": 1.0,
        "moe.bias": True}, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS, BIASED, same("swiglu_limit", "mlp.limit", default=7.0), only("swiglu_alpha", 1.702),
        only("hidden_act", "silu"), positions(windows=True, default=alternating(SLIDING, FULL), theta=150_000.0),
        *mixture(None, one_of(("num_local_experts", "num_experts"), "moe.experts")), unused("experts_per_token", "initial_context_length")),
        (*FRAME, *ATTENTION, *PRE_NORMS, Weight(f"{LAYER}self_attn.sinks", ("attention.sinks",), "flat"),
         *linear(f"{LAYER}mlp.router", "mlp.router"),
         Weight(f"{LAYER}mlp.experts.gate_up_proj", ("mlp.gate", "mlp.up"), "same", interleaved=True),
         Weight(f"{LAYER}mlp.experts.gate_up_proj_bias", ("mlp.gate_bias", "mlp.up_bias"), "same", interleaved=True),
         Weight(f"{LAYER}mlp.experts.down_proj", ("mlp.down",), "same"),
         Weight(f"{LAYER}mlp.experts.down_proj_bias", ("mlp.down_bias",), "same"))),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", RMS | QK_RMS | GATED | {
        "attention.qk_norm.kind": "whole", "moe.router": "sigmoid", "moe.selection_bias": True}, (
        *COMMON, *SIZES, MLP_WIDTH, HEAD_WIDTH, EPS_QK, ACTIVATION, positions(partly=True),
        *mixture(None, same("num_local_experts", "moe.experts")),
        only("scoring_func", "sigmoid"), only("use_routing_bias", True), only("use_qk_norm", True), only("qk_norm_type", "per_layer"),
        only("shared_intermediate_size", 0), only("attn_type_list", None), only("use_mtp", False), unused("router_jitter_noise")),
        (*FRAME, *ATTENTION, *QK_NORM, *PRE_NORMS, *experts("block_sparse_moe", "w1", "w3", "w2"),
         Weight(f"{LAYER}block_sparse_moe.e_score_correction_bias", ("mlp.selection",), "flat"))),
}
"""By `model_type`."""
