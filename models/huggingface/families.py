"""The FAMILIES table: for each architecture of the reference library its config keys and weight names, read in both directions.

A family that is new is a new row: what holds in all of its models, its keys, its tensors. Nothing in the model knows of families.
"""

from dataclasses import dataclass, field
from typing import Any

from configs.knobs import require
from models.huggingface.keys import REQUIRED, Config, Knobs, Row, choice, common, derived, inverse_square_root, knobs_of, only, same, unused
from models.huggingface.layers import dense_layers, experts_of, positions, section
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


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
               "gelu": "gelu", "relu": "relu", "relu2": "relu2", "quick_gelu": "gelu_quick"}

RMS = {"norm.kind": "rms", "norm.scale": "w", "norm.scale_cast": "after"}
QK_RMS = {"attention.qk_norm.norm.kind": "rms", "attention.qk_norm.norm.scale_cast": "after"}
GATED = {"mlp.gated": True}


def sizes(kv_default: Any = REQUIRED) -> tuple[Row, ...]:
    """Width, depth and heads; `kv_default`: None where the reference library takes as many key heads as query heads if nothing is said."""
    groups = same("num_key_value_heads", "attention.kv_heads", default=kv_default)
    write = lambda model: {"num_key_value_heads": knobs_of(model)["attention.kv_heads"] or knobs_of(model)["attention.heads"]}
    return (same("hidden_size", "width"), same("num_hidden_layers", "depth"), same("num_attention_heads", "attention.heads"),
            derived(groups.read, *groups.keys, write=write))


def head_width(default: Any = None) -> Row:
    """The width of a head; `default`: REQUIRED where the reference library takes a constant if nothing is said."""
    row = same("head_dim", "attention.head_width", default=default)
    write = lambda model: {"head_dim": knobs_of(model)["attention.head_width"] or model.width // knobs_of(model)["attention.heads"]}
    return derived(row.read, *row.keys, write=write)


def whole_heads(config: Config) -> Knobs:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    require(width % heads == 0, f"num_attention_heads = {heads} must divide hidden_size = {width}: the reference library asks for it")
    return {}


def expert_width(key: str, knob: str) -> Row:
    """The width of an expert, whether the model gives it by moe.width or by mlp.width."""
    write = lambda model: {key: knobs_of(model)["moe.width"] or knobs_of(model)["mlp.width"]}
    return derived(lambda config: {knob: config[key]}, key, write=write)


def needed(key: str) -> Row:
    """A key that must be there: the reference library takes a constant if it is not."""

    def read(config: Config) -> Knobs:
        if key not in config:
            raise KeyError(key)
        return {}

    return derived(read, key)


MLP_WIDTH, WHOLE_HEADS = same("intermediate_size", "mlp.width"), derived(whole_heads)
EPS, EPS_QK = same("rms_norm_eps", "norm.eps"), same("rms_norm_eps", "norm.eps", "attention.qk_norm.norm.eps")
ACTIVATION = choice("hidden_act", "mlp.kind", ACTIVATIONS, default="silu")
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


def mixture(*rows: Row, width: Row = expert_width("intermediate_size", "mlp.width")) -> tuple[Row, ...]:
    return same("num_experts_per_tok", "moe.top_k"), width, *rows


def phi3_original(config: Config) -> Knobs:
    """The reference library takes 4096 if it does not stand beside rope_parameters, whatever stands in these."""
    long = any("long_factor" in (section(config, key) or {}) for key in ("rope_parameters", "rope_scaling"))
    if long and config.get("original_max_position_embeddings") is None:
        raise KeyError("original_max_position_embeddings")
    return {}


GEMMA = {"norm.placement": "sandwich", "norm.scale": "1+w", "norm.scale_cast": "before"}
GEMMA_KEYS = (choice("hidden_activation", "mlp.kind", ACTIVATIONS, default="gelu_pytorch_tanh"), unused("hidden_act"),
              inverse_square_root("query_pre_attn_scalar", "attention.scale"), only("use_bidirectional_attention", False, None),
              derived(lambda config: {"embedding_scale": config["hidden_size"] ** 0.5}))


def all_full_attention(config: Config) -> Knobs:
    """MiniMax: 1 is full attention, 0 the linear attention of its predecessor."""
    kinds = set(config.get("attn_type_list") or [1])
    require(kinds == {1}, f"attn_type_list has {sorted(kinds)}: only 1, full attention, is known")
    return {}


def gpt_oss_rope(config: Config) -> Knobs:
    """Something must be said: the reference library takes a stretch of 32 if nothing is."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise KeyError("rope_parameters")
    return {}


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"norm.kind": "layer", "norm.bias": True, "attention.bias": ("q", "k", "v", "out"), "mlp.bias": True},
        (*common(tied=True), same("n_embd", "width"), same("n_layer", "depth"), same("n_head", "attention.heads"),
         derived(lambda config: {"mlp.width": config.get("n_inner") or 4 * config["n_embd"]}, "n_inner",
                 write=lambda model: {"n_inner": knobs_of(model)["mlp.width"]}),
         derived(lambda config: {"context": config["n_positions"], "learned_positions": True, "rope.theta": None}, "n_positions",
                 write=lambda model: {"n_positions": model.context}),
         same("layer_norm_epsilon", "norm.eps"), choice("activation_function", "mlp.kind", ACTIVATIONS, default="gelu_new"),
         only("scale_attn_weights", True), only("scale_attn_by_inverse_layer_idx", False), only("add_cross_attention", False),
         unused("n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
                "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params")),
        (Weight("transformer.wte.weight", ("embed",), "same"), Weight("transformer.wpe.weight", ("positions",), "same"),
         *norm("transformer.ln_f", "norm"), Weight("lm_head.weight", ("head.weight",)),
         *norm("transformer.h.{layer}.ln_1", "attention_residual.norm_in"), *norm("transformer.h.{layer}.ln_2", "mlp_residual.norm_in"),
         *linear("transformer.h.{layer}.attn.c_attn", "attention.q", "attention.k", "attention.v", form="conv1d"),
         *linear("transformer.h.{layer}.attn.c_proj", "attention.out", form="conv1d"),
         *linear("transformer.h.{layer}.mlp.c_fc", "mlp.up", form="conv1d"),
         *linear("transformer.h.{layer}.mlp.c_proj", "mlp.down", form="conv1d")),
        "transformer.", (r".*attn\.(bias|masked_bias)",)),
    "llama": Family("LlamaForCausalLM", RMS | GATED, (
        *common(tied=False), *sizes(None), WHOLE_HEADS, MLP_WIDTH, head_width(), EPS, ACTIVATION, BIASED,
        same("mlp_bias", "mlp.bias", default=False), positions(), unused("pretraining_tp")), LLAMA),
    "mistral": Family("MistralForCausalLM", RMS | GATED, (
        *common(tied=False), *sizes(), MLP_WIDTH, head_width(), EPS, ACTIVATION, needed("sliding_window"), positions("every layer")),
        LLAMA),
    "mixtral": Family("MixtralForCausalLM", RMS | GATED, (
        *common(tied=False), *sizes(), head_width(), EPS, ACTIVATION, positions("every layer", theta=1e6),
        *mixture(same("num_local_experts", "moe.experts")), unused("router_jitter_noise")),
        (*FRAME, *ATTENTION, *PRE_NORMS, *experts("block_sparse_moe", "w1", "w3", "w2"))),
    "qwen2": Family("Qwen2ForCausalLM", RMS | GATED | {"attention.bias": ("q", "k", "v")}, (
        *common(tied=False), *sizes(), MLP_WIDTH, head_width(), EPS, ACTIVATION, positions("above"), only("use_mrope", False)), LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", RMS | QK_RMS | GATED | {"attention.qk_norm.kind": "head"}, (
        *common(tied=False), *sizes(), MLP_WIDTH, head_width(REQUIRED), EPS_QK, ACTIVATION, BIASED, positions("above")),
        (*LLAMA, *QK_NORM)),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", RMS | QK_RMS | GATED | {"attention.qk_norm.kind": "head"}, (
        *common(tied=False), *sizes(), MLP_WIDTH, head_width(), EPS_QK, ACTIVATION, BIASED, positions("switched"),
        *mixture(dense_layers(), same("norm_topk_prob", "moe.normalise", default=False), width=expert_width(
            "moe_intermediate_size", "moe.width")), unused("max_window_layers")),
        (*LLAMA, *QK_NORM, *experts("mlp", "gate_proj", "up_proj", "down_proj"))),
    "olmo": Family("OlmoForCausalLM", GATED | {"norm.kind": "layer", "norm.scale": None, "norm.eps": 1e-5}, (
        *common(tied=False), *sizes(None), MLP_WIDTH, head_width(), ACTIVATION, BIASED,
        same("clip_qkv", "attention.clip", default=None), positions()), LLAMA),
    "olmo2": Family("Olmo2ForCausalLM", RMS | QK_RMS | GATED | {
        "norm.placement": "reordered", "norm.scale_cast": "before", "attention.qk_norm.kind": "whole",
        "attention.qk_norm.norm.scale_cast": "before"}, (
        *common(tied=False), *sizes(None), MLP_WIDTH, head_width(), EPS_QK, ACTIVATION, BIASED, positions()),
        (*FRAME, *ATTENTION, *QK_NORM, *MLP, *REORDERED_NORMS)),
    "olmoe": Family("OlmoeForCausalLM", RMS | QK_RMS | GATED | {"attention.qk_norm.kind": "whole"}, (
        *common(tied=False), *sizes(None), head_width(), EPS_QK, ACTIVATION, BIASED, same("clip_qkv", "attention.clip", default=None),
        positions(), *mixture(same("num_experts", "moe.experts"), same("norm_topk_prob", "moe.normalise", default=False))),
        (*FRAME, *ATTENTION, *QK_NORM, *PRE_NORMS, *experts("mlp", "gate_proj", "up_proj", "down_proj"))),
    "gemma2": Family("Gemma2ForCausalLM", RMS | GATED | GEMMA, (
        *common(tied=True), *sizes(), WHOLE_HEADS, MLP_WIDTH, head_width(REQUIRED), EPS, BIASED, *GEMMA_KEYS,
        same("attn_logit_softcapping", "attention.softcap"), same("final_logit_softcapping", "softcap"), positions("alternating")),
        (*FRAME, *ATTENTION, *MLP, *SANDWICH_NORMS)),
    "gemma3_text": Family("Gemma3ForCausalLM", RMS | QK_RMS | GATED | GEMMA | {
        "attention.qk_norm.kind": "head", "attention.qk_norm.norm.scale": "1+w", "attention.qk_norm.norm.scale_cast": "before"}, (
        *common(tied=True), *sizes(), WHOLE_HEADS, MLP_WIDTH, head_width(REQUIRED), EPS_QK, BIASED, *GEMMA_KEYS,
        same("attn_logit_softcapping", "attention.softcap", default=None), same("final_logit_softcapping", "softcap", default=None),
        positions("five in six", theta=1e6, local_theta=1e4), unused("_sliding_window_pattern")),
        (*FRAME, *ATTENTION, *QK_NORM, *MLP, *SANDWICH_NORMS)),
    "phi3": Family("Phi3ForCausalLM", RMS | GATED, (
        *common(tied=False), *sizes(None), MLP_WIDTH, head_width(), EPS, ACTIVATION, derived(phi3_original),
        positions("every layer", partly=True), only("attention_bias", False), only("mlp_bias", False), only("lm_head_bias", False),
        only("full_attn_mod", 1), only("interpolate_factor", 1)), (
        *FRAME, *linear(f"{LAYER}self_attn.qkv_proj", "attention.q", "attention.k", "attention.v"),
        *linear(f"{LAYER}self_attn.o_proj", "attention.out"), *linear(f"{LAYER}mlp.gate_up_proj", "mlp.gate", "mlp.up"),
        *linear(f"{LAYER}mlp.down_proj", "mlp.down"), *PRE_NORMS)),
    "gpt_oss": Family("GptOssForCausalLM", RMS | GATED | {
        "norm.scale_cast": "before", "attention.sinks": True, "mlp.bias": True, "mlp.kind": "gelu_quick", "mlp.up_offset": 1.0,
        "moe.bias": True}, (
        *common(tied=False), *sizes(), head_width(REQUIRED), EPS, choice("attention_bias", "attention.bias", BIASES, default=True),
        derived(lambda config: {"mlp.limit": config.get("swiglu_limit", 7.0)}, "swiglu_limit",
                write=lambda model: {} if model.mlp.limit is None else {"swiglu_limit": model.mlp.limit}),
        only("swiglu_alpha", 1.702), only("hidden_act", "silu"), derived(gpt_oss_rope), positions("alternating", theta=150_000.0),
        *mixture(experts_of("num_local_experts", "num_experts")), unused("experts_per_token", "initial_context_length")),
        (*FRAME, *ATTENTION, *PRE_NORMS, Weight(f"{LAYER}self_attn.sinks", ("attention.sinks",), "flat"),
         *linear(f"{LAYER}mlp.router", "mlp.router"),
         Weight(f"{LAYER}mlp.experts.gate_up_proj", ("mlp.gate", "mlp.up"), "same", interleaved=True),
         Weight(f"{LAYER}mlp.experts.gate_up_proj_bias", ("mlp.gate_bias", "mlp.up_bias"), "same", interleaved=True),
         Weight(f"{LAYER}mlp.experts.down_proj", ("mlp.down",), "same"),
         Weight(f"{LAYER}mlp.experts.down_proj_bias", ("mlp.down_bias",), "same"))),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", RMS | QK_RMS | GATED | {
        "attention.qk_norm.kind": "whole", "moe.router": "sigmoid", "moe.selection_bias": True}, (
        *common(tied=False), *sizes(), head_width(REQUIRED), EPS_QK, ACTIVATION, positions(partly=True, theta=5e6),
        *mixture(same("num_local_experts", "moe.experts")), derived(all_full_attention, "attn_type_list"),
        only("scoring_func", "sigmoid"), only("use_routing_bias", True), only("use_qk_norm", True), only("qk_norm_type", "per_layer"),
        only("shared_intermediate_size", 0), only("attention_bias", False), only("sliding_window", None),
        *(only(f"layernorm_{branch}_beta", 1.0) for branch in ("full_attention", "linear_attention", "mlp")),
        unused("router_jitter_noise", "mlp_intermediate_size", "shared_moe_mode", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")),
        (*FRAME, *ATTENTION, *QK_NORM, *PRE_NORMS, *experts("block_sparse_moe", "w1", "w3", "w2"),
         Weight(f"{LAYER}block_sparse_moe.e_score_correction_bias", ("mlp.selection",), "flat"))),
}
"""By `model_type`."""
