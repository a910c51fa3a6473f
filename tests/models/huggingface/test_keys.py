"""config.json: both spellings mean the same, no key is passed over in silence, and what is not known is refused in one line."""

import pytest

from configs.load import UserError
from models.huggingface.checkpoint import CONFIG, family_of
from tests.models.huggingface.folders import ABSENT, FOLDERS, LEGACY, changed, keys_of, model_of

SWITCH = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": ABSENT}
MATTERS = {  # a key that another one overrules, and the changes with which it counts
    **{(family, key): SWITCH for family in ("qwen2", "qwen3") for key in ("max_window_layers", "sliding_window", "use_sliding_window")},
    ("qwen3_moe", "sliding_window"): {"use_sliding_window": True, "sliding_window": 8},
}
ELSEWHERE = {("phi3", "original_max_position_embeddings"): "longrope alone reads it, and phi3_longrope has it"}


def unused(name: str) -> set[str]:
    """The keys of the rows `unused` of a folder's family."""
    return {key for row in family_of(keys_of(name)["model_type"]).keys if row.unused for key in row.keys}


def others(value) -> list:
    """Values unlike a key's own, of its kind where it has one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value + 2]
    if isinstance(value, list):
        return [[*value[:-1], other] for other in others(value[-1])] if value else [[0]]
    return ["something else"] if isinstance(value, str) else [3]


def leaves(keys: dict, prefix: str = ""):
    """(dotted path, value) of each key, those inside other keys too."""
    for key, value in keys.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


CASES = [(name, CONFIG) for name in FOLDERS] + [(name, "config_legacy.json") for name in LEGACY]


@pytest.mark.parametrize(("name", "file"), CASES)
def test_no_key_is_passed_over(name, file):
    """Another value of any key that is not declared unused gives another model, or is refused (of the older form: keys of its own)."""
    keys, told = keys_of(name, file), set() if file == CONFIG else dict(leaves(keys_of(name))).keys()
    model_type = keys["model_type"]
    for path, value in leaves(keys):
        key = path.split(".")[0]
        if path in told or key in unused(name) or (name, key) in ELSEWHERE:
            continue
        start = changed(keys, MATTERS.get((model_type, key), {}))
        for other in others(dict(leaves(start)).get(path, value)):
            try:
                assert model_of(changed(start, {path: other})) != model_of(start), (path, other)
            except UserError as error:
                assert "\n" not in str(error), path


@pytest.mark.parametrize("name", LEGACY)
def test_the_older_keys_mean_the_same(name):
    """The form that most published checkpoints have describes the same model as the new one."""
    assert model_of(keys_of(name, "config_legacy.json")) == model_of(keys_of(name))


def test_most_folders_have_the_older_form():
    """All but GPT-2, whose keys never changed."""
    assert FOLDERS.keys() - set(LEGACY) == {"gpt2"}


YARN, LLAMA3 = "llama_rope_yarn", "llama_rope_llama3"
REFUSED = {  # folder, changes, what the message says
    "unknown model_type": ("llama", {"model_type": "lama"}, "model_type 'lama' is not known; perhaps you meant 'llama'"),
    "no model_type": ("llama", {"model_type": ABSENT}, "model_type None is not known"),
    "unknown key": ("llama", {"rope_thta": 1.0}, "rope_thta = 1.0 is not known for llama; perhaps you meant 'rope_theta'"),
    "activation": ("llama", {"hidden_act": "xielu"}, "hidden_act = 'xielu' is not supported; known are 'silu'"),
    "activation of Gemma": ("gemma2", {"hidden_activation": "mish"}, "hidden_activation = 'mish' is not supported"),
    "activation of GPT-2": ("gpt2", {"activation_function": "tanh"}, "activation_function = 'tanh' is not supported"),
    "rope type": ("llama", {"rope_parameters.rope_type": "proportional"}, "rope type 'proportional' is not supported"),
    "key of a rope type": (YARN, {"rope_parameters.short_factor": [1.0]}, "'short_factor' is not known for rope type 'yarn'"),
    "missing key of a rope type": (LLAMA3, {"rope_parameters.low_freq_factor": ABSENT}, "'llama3' has no 'low_freq_factor'"),
    "two rope bases": ("llama", {"rope_theta": 7.0}, "gives rope_theta twice, as 500.0 and as 7.0"),
    "both rope forms": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "both rope_parameters and rope_scaling"),
    "a share of a head": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported for llama"),
    "type of a layer": ("gemma2", {"layer_types": ["sliding_attention", "linear_attention", "full_attention"]}, "'linear_attention'"),
    "number of types": ("gemma2", {"layer_types": ["full_attention"]}, "3 of 'full_attention' and 'sliding_attention' are known"),
    "sliding without a window": ("gemma2", {"sliding_window": None}, "'sliding_attention', but there is no sliding_window"),
    "sliding, switched off": ("qwen2", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, "use_sliding_window is off"),
    "missing key": ("llama", {"hidden_size": ABSENT}, "has no 'hidden_size'"),
    "missing window": ("mistral", {"sliding_window": ABSENT}, "has no 'sliding_window', which mistral needs"),
    "missing width of a head": ("qwen3", {"head_dim": ABSENT}, "has no 'head_dim'"),
    "missing number of experts": ("qwen3_moe", {"num_local_experts": ABSENT}, "has no 'num_experts'"),
    "heads that do not divide": ("llama", {"num_key_value_heads": 3}, "kv_heads = 3: must divide"),
    "a text for a number": ("llama", {"num_hidden_layers": "three"}, "config.json: "),
    "quantized weights": ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantization_config \(mxfp4\)"),
    "linear attention": ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "only 1, full attention, is known"),
    "attention both ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
    "scale by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(case):
    """One line, which names the key, its value and what is known instead."""
    name, changes, said = REFUSED[case]
    keys = changed(keys_of(name), changes)
    with pytest.raises(UserError, match=said) as error:
        family_of(keys.get("model_type"))
        model_of(keys)
    assert "\n" not in str(error.value)
